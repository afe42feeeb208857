"""Two-tower model: pixels, temperature and precision. Properties of all models are in test_build.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmray.config import ImageTower, Inputs, TextTower, TwoTower
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch

VOCAB = 50
INPUTS = Inputs(image_side=32, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1), max_tokens=12)
IMAGES = {
    "convnet": ImageTower(name="convnet", width=8, depth=2),
    "vit": ImageTower(name="vit", width=16, depth=1, heads=2, patch=8),
    "resnet18": ImageTower(name="resnet18"),
}


def spec_of(image: str = "convnet", **changes: Any) -> TwoTower:
    text = TextTower(width=16, depth=1, heads=2)
    return TwoTower(inputs=INPUTS, image=IMAGES[image], text=text, embed_dim=8, **changes)


def test_pixels_are_normalised_in_the_model() -> None:
    model: Any = build(spec_of(), VOCAB)
    batch, seen = synthetic_batch(INPUTS, VOCAB, 2, "cpu"), []
    model.image.tower.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.embed_image(batch["image"])
    mean, std = torch.tensor(INPUTS.mean), torch.tensor(INPUTS.std)
    expected = (batch["image"].permute(0, 2, 3, 1) / 255 - mean) / std
    torch.testing.assert_close(seen[0], expected.permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5)
    assert not [name for name in model.state_dict() if "mean" in name or "std" in name]


def test_half_precision_gives_float32_embeddings() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = build(spec_of(), VOCAB)(synthetic_batch(INPUTS, VOCAB, 4, "cpu"))
    assert outputs["image_embed"].dtype == outputs["text_embed"].dtype == torch.float32
    torch.testing.assert_close(outputs["image_embed"].norm(dim=1), torch.ones(4))


def test_temperature_starts_as_set_and_is_clamped() -> None:
    model: Any = build(spec_of(temperature=0.2), VOCAB)
    model.constrain()
    assert model.scalar_outputs()["logit_scale"].item() == pytest.approx(5.0)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    model.constrain()
    assert model.log_scale.item() == pytest.approx(math.log(100))
    assert model.log_scale.requires_grad


def test_synthetic_batch_has_the_columns_of_a_collated_one() -> None:
    batch, again = (synthetic_batch(INPUTS, VOCAB, 3, "cpu") for _ in range(2))
    assert {name: (tuple(column.shape), column.dtype) for name, column in batch.items()} == {
        "image": ((3, 3, 32, 32), torch.uint8),
        "input_ids": ((3, 12), torch.int64),
        "attention_mask": ((3, 12), torch.int64),
        "key": ((3,), torch.int64),
        "label": ((3,), torch.int64),
        "valid": ((3,), torch.bool),
        "pos": ((3,), torch.int64),
    }
    assert int(batch["input_ids"].max()) < VOCAB
    torch.testing.assert_close(batch, again, rtol=0, atol=0)
    assert not torch.equal(synthetic_batch(INPUTS, VOCAB, 3, "cpu", seed=1)["image"], batch["image"])
