"""Fusion: text attends only to its own image; padding has no effect; heads follow the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mmray
from mmray import objectives
from mmray.config import CrossAttention, Fusion, ImageTower, Inputs, Objective, TextTower
from mmray.data.text.tokenizer import TextEncoder, train_tokenizer
from mmray.engine import optimizer
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.encoders.image import build_image_tower
from mmray.models.export.export import export
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy

TEXTS = ["a red circle", "a blue square on a green ground", "Two TRIANGLES,  left of a circle"]
TOKENIZER = train_tokenizer(TEXTS, 80)
VOCAB = TextEncoder(TOKENIZER, 8).vocab_size
INPUTS = Inputs(image_side=32, max_tokens=8)
IMAGES = {
    "convnet": ImageTower(name="convnet", width=8, depth=2),
    "vit": ImageTower(name="vit", width=16, depth=1, heads=2, patch=8),
    "resnet18": ImageTower(name="resnet18"),
}


def spec_of(image: str = "convnet", **changes: object) -> Fusion:
    text, cross = TextTower(width=16, depth=1, heads=2), CrossAttention(width=16, depth=2, heads=2)
    given = {"inputs": INPUTS, "image": IMAGES[image], "text": text, "cross": cross, "embed_dim": 8, "classes": 3}
    return Fusion(**given | changes)


def model_of(spec: Fusion | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(spec or spec_of(), VOCAB).eval().double()


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    batch, other = synthetic_batch(INPUTS, VOCAB, rows, "cpu"), synthetic_batch(INPUTS, VOCAB, rows, "cpu", seed=1)
    mask = (torch.arange(INPUTS.max_tokens) < (torch.arange(rows) % 4 + 3)[:, None]).long()
    negatives = {"negative_ids": other["input_ids"], "negative_mask": mask.flip(0)}
    return batch | negatives | {"attention_mask": mask, "has_negative": torch.ones(rows, dtype=torch.bool)}


def rows_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if value.ndim}


@pytest.mark.parametrize("image", IMAGES)
def test_rows_are_independent(image: str) -> None:
    """A wrong implementation that takes (B, D) for a sequence attends across the batch."""
    model, batch = model_of(spec_of(image)), batch_of()
    before = rows_of(model(batch))
    assert set(before) == {"image_embed", "text_embed", "class_logits", "match", "match_negative"}
    changed = {name: value.clone() for name, value in batch.items()}
    changed["input_ids"][1] = changed["input_ids"][1].flip(0)
    changed["negative_ids"][1] = 5
    changed["image"][1] = 255 - changed["image"][1]
    others = torch.tensor([0, 2, 3])
    for name, value in rows_of(model(changed)).items():
        torch.testing.assert_close(value[others], before[name][others], rtol=0, atol=1e-12, msg=name)
        assert (value[1] - before[name][1]).abs().max() > 1e-6, name


def test_padding_changes_nothing() -> None:
    model, batch = model_of(), batch_of()
    before = rows_of(model(batch))
    for ids, mask in (("input_ids", "attention_mask"), ("negative_ids", "negative_mask")):
        batch[ids] = torch.where(batch[mask] == 0, 7, batch[ids])
    for name, value in rows_of(model(batch)).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-12, msg=name)
    short = {
        name: value[:1, :3] if name.endswith(("ids", "attention_mask")) else value[:1] for name, value in batch.items()
    }
    del short["negative_ids"]
    for name, value in rows_of(model(short)).items():
        torch.testing.assert_close(value, before[name][:1], rtol=0, atol=1e-12, msg=name)


def test_cross_attention_uses_image_positions() -> None:
    model, batch = model_of(), batch_of(1)
    places, _ = model.image(batch["image"])
    words, _ = model.text(batch["input_ids"], batch["attention_mask"])
    pair = model.cross(places, words, batch["attention_mask"])
    for other in (places.flip(1), places * 0):
        assert (model.cross(other, words, batch["attention_mask"]) - pair).abs().max() > 1e-6


@pytest.mark.parametrize("image", IMAGES)
def test_pooled_features_equal_forward(image: str) -> None:
    torch.manual_seed(0)
    tower = build_image_tower(IMAGES[image], 32, "local").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(tower.pool(tower.features(pixels)), tower(pixels), rtol=1e-5, atol=1e-5)


def test_empty_caption_stays_finite() -> None:
    model, batch = model_of().train(), batch_of()
    batch["attention_mask"][2:] = 0
    batch["negative_mask"][:] = 0
    sum(value.sum() for value in model(batch).values()).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_heads_follow_the_settings() -> None:
    bare = model_of(spec_of(matching=False, classes=0))
    assert rows_of(bare(batch_of())).keys() == {"image_embed", "text_embed"}
    assert not [name for name, _ in bare.named_parameters() if name.startswith(("match_head", "class_head"))]
    with pytest.raises(UsageError, match=r"model\.cross\.heads: 3 heads do not divide the width of 16"):
        model_of(spec_of(cross=CrossAttention(width=16, heads=3)))


def test_matching_loss_decreases() -> None:
    """Each image has one bright quarter and each caption one word for it; the heads learn to distinguish them."""
    torch.manual_seed(0)
    model = build(spec_of(classes=4), VOCAB).train()
    settings = Objective(kind="contrastive + matching + 0.5 * classification")
    state = toy.train_state(model, objective=objectives.build(settings))
    quarter = torch.arange(12) % 4
    image = torch.zeros(12, 3, 2, 16, 2, 16, dtype=torch.uint8)
    image[torch.arange(12), :, quarter // 2, :, quarter % 2] = 255
    batch = synthetic_batch(INPUTS, VOCAB, 12, "cpu")
    batch |= {"image": image.view(12, 3, 32, 32), "label": quarter}
    batch |= {"input_ids": (quarter + 5)[:, None].expand(-1, 8).contiguous()}
    optimizer.set_lr(state.optimizer, 0.003)
    for step in range(80):
        found = optimizer_step(state, make_local_batch([batch | {"pos": batch["pos"] + 12 * step}]), lambda _: 0)
    means = {name: float((value / found.counts).sum()) for name, value in found.sums.items()}
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
        pair = model.embed_pair(torch.from_numpy(noise).permute(0, 3, 1, 2), torch.from_numpy(ids).long(), mask)
        match, classes = model.match_head(pair).sigmoid().squeeze(1), model.class_head(pair).softmax(dim=1)
    torch.testing.assert_close(loaded.match(images, TEXTS, batch=2), match, rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded.classify(images, TEXTS), classes, rtol=0, atol=1e-6)
    assert loaded.embed_texts(TEXTS).shape == (3, 8)
    assert loaded.match([], []).shape == (0,)
    with pytest.raises(UsageError, match="3 images and 1 texts: pass as many of each"):
        loaded.match(images, TEXTS[:1])
