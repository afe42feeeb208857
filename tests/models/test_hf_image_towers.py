"""Image towers of transformers: same features, loading from a directory, and errors that name the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig

from mmray.config import ImageTower, Inputs, TextTower, TwoTower
from mmray.errors import UsageError
from mmray.models.build import build, random_init_architecture
from mmray.models.encoders.image import build_image_tower
from mmray.models.synthetic import synthetic_batch

SIDE = 32
SMALL: dict[str, dict[str, Any]] = {
    "vit": {"image_size": SIDE, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "dinov2": {"image_size": 48, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}


def saved(family: str, folder: Path) -> Any:
    """A small network saved by transformers, in evaluation mode."""
    torch.manual_seed(1)
    net = AutoModel.from_config(AutoConfig.for_model(family, **SMALL[family])).eval()
    net.save_pretrained(folder)
    return net


def spec_of(folder: Path) -> ImageTower:
    return ImageTower(name="transformers", weights=str(folder))


@pytest.mark.parametrize("family", SMALL)
@torch.no_grad()
def test_features_equal_transformers(family: str, tmp_path: Path) -> None:
    net, pixels = saved(family, tmp_path), torch.randn(2, 3, SIDE, SIDE)
    tower: Any = build_image_tower(spec_of(tmp_path), SIDE, "local").eval()
    theirs = net(pixel_values=pixels)
    expected = theirs.pooler_output.flatten(1) if family == "resnet" else theirs.last_hidden_state[:, 0]
    torch.testing.assert_close(tower(pixels), expected)
    grid = tower.grid(tower.features(pixels))
    assert grid.shape == (2, tower.width, 4, 4)
    hidden = theirs.last_hidden_state
    last = hidden[:, :, -1, -1] if family == "resnet" else hidden[:, -1]
    torch.testing.assert_close(grid[:, :, -1, -1], last)


@pytest.mark.parametrize("family", SMALL)
def test_model_rebuilds_from_architecture_and_every_parameter_gets_a_gradient(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    spec = TwoTower(
        image=spec_of(tmp_path),
        text=TextTower(width=16, depth=1, heads=2),
        inputs=Inputs(image_side=SIDE, max_tokens=8),
        embed_dim=8,
    )
    model, batch = build(spec, 30), synthetic_batch(spec.inputs, 30, 3, "cpu")
    outputs = model.train()(batch)
    (outputs["image_embed"].sum() + outputs["text_embed"].sum() * outputs["logit_scale"]).backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    architecture = json.loads(json.dumps(model.architecture()))
    assert random_init_architecture(spec, 30)["image"]["model_type"] == family
    for file in tmp_path.iterdir():
        file.unlink()
    again = build(spec, 30, architecture).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(batch)["image_embed"], model.eval()(batch)["image_embed"], rtol=0, atol=0)


def test_frozen_batch_norm_stays_in_eval_mode(tmp_path: Path) -> None:
    saved("resnet", tmp_path)
    for batch_norm in ("local", "frozen"):
        tower = build_image_tower(spec_of(tmp_path), SIDE, batch_norm).train()
        norms = [layer for layer in tower.modules() if isinstance(layer, nn.BatchNorm2d)]
        assert norms and all(layer.training == (batch_norm == "local") for layer in norms)


@pytest.mark.parametrize(
    ("family", "side", "message"),
    [
        ("vit", 64, "needs images of 32 pixels, not 64; set it to 32"),
        ("dinov2", 36, "patches of 8 pixels .* do not tile an image of 36"),
    ],
)
def test_incompatible_image_side_raises(family: str, side: int, message: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    with pytest.raises(UsageError, match=rf"model\.inputs\.image_side: .*{message}"):
        build_image_tower(spec_of(tmp_path), side, "local")


def test_unsupported_model_type_raises(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"a model of type 'bert'; supported are vit, dinov2, resnet"):
        build_image_tower(spec_of(tmp_path), SIDE, "local")
    with pytest.raises(UsageError, match=r"takes its shape from the weights; .* \(got `none`\)"):
        build_image_tower(ImageTower(name="transformers"), SIDE, "local")


@torch.no_grad()
def test_timm_features_are_those_of_the_wrapped_model(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    config = AutoConfig.for_model("timm_wrapper", architecture="test_vit", model_args={"img_size": SIDE})
    net = AutoModel.from_config(config).eval()
    net.save_pretrained(tmp_path)
    tower: Any = build_image_tower(spec_of(tmp_path), SIDE, "local").eval()
    pixels = torch.randn(2, 3, SIDE, SIDE)
    hidden = net(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(tower.features(pixels), hidden)
    torch.testing.assert_close(tower(pixels), hidden[:, 0])
    assert tower.grid(hidden).shape == (2, tower.width, 2, 2)
