"""Towers of text and images: text attends only to its own image, padding has no effect, boxes are
scored against label texts.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import mmray
from mmray import objectives
from mmray.config import ClipInputs, CrossAttention, ImageTower, Objective, TextTower, Towers
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine import optimizer
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import DataError, UsageError
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.protocol import RANDOM_WEIGHTS
from mmray.models.regions import SAMPLES_PER_SIDE, LabelTexts, region_features
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy
from tests.models.test_clip import TEXTS, TOKENIZER, VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODER = TextEncoder(TOKENIZER, 8)
INPUTS = ClipInputs(image_side=32, max_tokens=8, clip_s=0)
BOXED = INPUTS.model_copy(update={"max_boxes": 3})
LABELS = ("", "red circle", "blue square", "triangle")
IMAGES = {
    "convnet": ImageTower(name="convnet", width=8, depth=2),
    "vit": ImageTower(name="vit", width=16, depth=1, heads=2, patch=8),
    "resnet18": ImageTower(name="resnet18"),
}


def spec_of(image: str = "convnet", **changes: object) -> Towers:
    text, cross = TextTower(width=16, depth=1, heads=2), CrossAttention(width=16, depth=2, heads=2)
    given = {
        "inputs": INPUTS,
        "image": IMAGES[image],
        "text": text,
        "cross": cross,
        "embed_dim": 8,
        "matching": True,
        "classes": 3,
    }
    return Towers(**given | changes)


def region_model(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    spec = spec_of(**{"inputs": BOXED, "region_labels": LABELS, "classes": 0} | changes)
    model = build(spec, VOCAB)
    model.label_texts.tokenize(ENCODER)
    return model.eval()


def boxed_batch(rows: int = 4) -> dict[str, Tensor]:
    batch, draw = synthetic_batch(BOXED, VOCAB, rows, "cpu"), torch.Generator().manual_seed(5)
    corners = torch.rand(rows, 3, 2, 2, generator=draw).sort(dim=2).values
    return batch | {
        "boxes": corners.flatten(2),
        "box_labels": torch.randint(1, 4, (rows, 3), generator=draw),
    }


def train(model: nn.Module, kind: str, batch: dict[str, Tensor]) -> dict[str, float]:
    """Mean losses and metrics after 80 steps."""
    state = toy.train_state(model, objective=objectives.build(Objective(kind=kind)))
    optimizer.set_lr(state.optimizer, 0.003)
    for step in range(80):
        result = optimizer_step(
            state, make_local_batch([batch | {"pos": batch["pos"] + 12 * step}]), lambda _: 0
        )
    return {name: float(value) for name, value in result.means.items()}


def test_matching_loss_decreases() -> None:
    """Each image has one bright quarter and each caption one word for it; the heads learn to
    distinguish them.
    """
    torch.manual_seed(1)
    model = build(spec_of(classes=4), VOCAB).train()
    quarter = torch.arange(12) % 4
    image = torch.zeros(12, 3, 2, 16, 2, 16, dtype=torch.uint8)
    image[torch.arange(12), :, quarter // 2, :, quarter % 2] = 255
    batch = synthetic_batch(INPUTS, VOCAB, 12, "cpu")
    batch |= {"image": image.view(12, 3, 32, 32), "label": quarter}
    batch |= {"input_ids": (quarter + 5)[:, None].expand(-1, 8).contiguous()}
    means = train(model, "contrastive + matching + 0.5 * classification", batch)
    assert means["match_accuracy"] > 0.95
    assert means["class_accuracy"] == 1


def test_exported_heads_equal_trained(tmp_path: Path) -> None:
    spec = spec_of().model_copy(update={"vocab_size": VOCAB})
    torch.manual_seed(1)
    model = build(spec, VOCAB).eval()
    loaded = mmray.load(export(model, spec.model_dump(mode="json"), TOKENIZER, tmp_path / "model"))
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels) for pixels in noise]
    ids, num_tokens = TextEncoder(TOKENIZER, 8).encode(TEXTS)
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long()
    with torch.no_grad():
        pixels = torch.from_numpy(noise).permute(0, 3, 1, 2)
        batch = {"image": pixels, "input_ids": torch.from_numpy(ids).long()}
        pair = model.embed_pair(batch | {"attention_mask": mask})
        match, classes = (
            model.match_head(pair).sigmoid().squeeze(1),
            model.class_head(pair).softmax(dim=1),
        )
    torch.testing.assert_close(loaded.match(images, TEXTS, batch=2), match, rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded.classify(images, TEXTS), classes, rtol=0, atol=1e-6)
    assert loaded.embed_texts(TEXTS).shape == (3, 8)
    # An export of the former kind `fusion` has the same weights, and fewer settings.
    config_file = tmp_path / "model" / "config.json"
    config = json.loads(config_file.read_text())
    for section in ("audio", "video"):
        del config["model"][section]
    for setting in ("clip_s", "frames", "frame_rate", "audio_rate"):
        del config["model"]["inputs"][setting]
    config["model"]["kind"] = "fusion"
    config_file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"fusion` is now `towers` with model\.inputs\.clip_s 0"):
        mmray.load(tmp_path / "model")
    config["model"]["kind"] = "towers"
    config["model"]["inputs"]["clip_s"] = 0
    config_file.write_text(json.dumps(config))
    again = mmray.load(tmp_path / "model")
    assert torch.equal(again.match(images, TEXTS, batch=2), loaded.match(images, TEXTS, batch=2))
    with pytest.raises(UsageError, match="3 images and 1 texts: pass as many of each"):
        loaded.match(images, TEXTS[:1])


def test_region_features_are_the_mean_inside_the_box() -> None:
    """Against torch's own bilinear sampling at the same points."""
    draw = torch.Generator().manual_seed(0)
    grid = torch.randn(3, 5, 6, 6, dtype=torch.float64, generator=draw)
    boxes = torch.tensor(
        [[[0.1, 0.2, 0.7, 0.9], [0.0, 0.0, 1.0, 1.0]]], dtype=torch.float64
    ).expand(3, -1, -1)
    steps = (torch.arange(SAMPLES_PER_SIDE, dtype=torch.float64) + 0.5) / SAMPLES_PER_SIDE
    for row in range(3):
        for number, (left, top, right, bottom) in enumerate(boxes[row].tolist()):
            x, y = left + steps * (right - left), top + steps * (bottom - top)
            points = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=2)[None] * 2 - 1
            sampled = F.grid_sample(
                grid[row : row + 1], points, padding_mode="border", align_corners=False
            )
            expected = sampled.mean(dim=(0, 2, 3))
            found = region_features(grid, boxes).view(3, 2, 5)[row, number]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_region_logits_are_scaled_cosines_with_label_texts() -> None:
    model, batch = region_model(matching=False), boxed_batch(2)
    with torch.no_grad():
        grid = model.image.tower.grid(model.image(batch["image"]).features)
        regions = model.region_head(grid, batch["boxes"])
        for number, name in enumerate(LABELS[1:], 1):
            ids, _ = ENCODER.encode([name])
            ids = torch.from_numpy(ids).long()
            expected = (
                model.log_scale.exp() * regions @ model.embed_text(ids, torch.ones_like(ids))[0]
            )
            torch.testing.assert_close(
                model(batch)["region_logits"][..., number], expected, rtol=0, atol=1e-5
            )


def test_micro_batch_without_boxes_trains_and_label_ids_are_saved() -> None:
    model, batch = region_model(matching=False).train(), boxed_batch(2)
    outputs = model(batch | {"boxes": torch.zeros(2, 0, 4)})
    assert outputs["region_logits"].shape == (2, 0, 4)
    sum(value.sum() for value in outputs.values()).backward()
    assert not model.region_head.project.weight.grad.any()
    again = LabelTexts(LABELS, model.architecture()["labels"])
    torch.testing.assert_close(again.tokens(), model.label_texts.tokens())
    spec = spec_of(inputs=BOXED, region_labels=LABELS)
    with pytest.raises(UsageError, match="names are not tokenized"):
        build(spec, VOCAB)(batch)
    assert build(spec, VOCAB, RANDOM_WEIGHTS)(batch)["region_logits"].shape == (2, 3, 4)


def test_exported_region_head_equals_trained(tmp_path: Path) -> None:
    spec = spec_of(inputs=BOXED.model_copy(update={"fit": "squash"}), region_labels=LABELS)
    torch.manual_seed(1)
    model = build(spec.model_copy(update={"vocab_size": VOCAB}), VOCAB).eval()
    model.label_texts.tokenize(ENCODER)
    values = spec.model_copy(update={"vocab_size": VOCAB}).model_dump(mode="json")
    loaded = mmray.load(export(model, values, TOKENIZER, tmp_path / "model"))
    noise = torch.randint(
        0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    photo = Image.fromarray(noise[0].permute(1, 2, 0).numpy())
    fractions = torch.tensor([[[0.25, 0.0, 0.75, 0.5], [0.5, 0.5, 1.0, 1.0]]])
    with torch.no_grad():
        expected = model.classify_regions(model.image(noise).features, fractions)[0].softmax(1)
    boxes = [(8, 0, 16, 16), (16, 16, 16, 16)]
    named = loaded.classify_boxes(photo, boxes)
    torch.testing.assert_close(named, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        loaded.classify_boxes(photo, boxes, LABELS[1:]), named[:, 1:], rtol=0, atol=1e-5
    )
    assert loaded.classify_boxes(photo, []).shape == (0, len(LABELS))
    with pytest.raises(DataError, match=r"box 1 \(40, 0, 4, 4\) is outside"):
        loaded.classify_boxes(photo, [boxes[0], (40, 0, 4, 4)])
