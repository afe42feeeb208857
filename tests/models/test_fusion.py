"""Towers of text and images: text attends only to its own image, and padding has no
effect.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mmray
from mmray import objectives
from mmray.config import ClipInputs, CrossAttention, ImageTower, Objective, TextTower, Towers
from mmray.data.text.tokenizer import TextEncoder
from mmray.engine import optimizer
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy
from tests.models.test_clip import TEXTS, TOKENIZER, VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODER = TextEncoder(TOKENIZER, 8)
INPUTS = ClipInputs(image_side=32, max_tokens=8, clip_s=0)
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
