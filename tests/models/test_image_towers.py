"""Image towers: features, weights from files, directories and the hub, the BatchNorm policy, and
errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig

from mmray.config import ImageTower, Inputs, TextTower, TwoTower
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.encoders.image import build_image_tower
from mmray.models.protocol import RANDOM_WEIGHTS, saved_layers
from mmray.models.synthetic import synthetic_batch

pytestmark = pytest.mark.usefixtures("one_thread")
PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
CONVNET = ImageTower(name="convnet", width=16, depth=2)
SIDE = 32
SWIN = {"embed_dim": 16, "depths": (1, 1, 1), "num_heads": (1, 1, 1), "window_size": 2}
SIDES = {"img_size": SIDE}
TIMM: list[tuple[str, dict[str, Any]]] = [
    ("test_vit", SIDES),
    ("test_vit", {**SIDES, "class_token": False, "reg_tokens": 4, "global_pool": "avg"}),
    ("test_vit", {**SIDES, "global_pool": "avg", "fc_norm": True}),
    ("test_vit", {**SIDES, "global_pool": "map"}),
    ("swin_tiny_patch4_window7_224", {**SIDES, **SWIN}),
    ("test_convnext", {}),
    ("test_resnet", {}),
]
SMALL: dict[str, dict[str, Any]] = {
    "vit": {
        "image_size": SIDE,
        "patch_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "dinov2": {
        "image_size": 48,
        "patch_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    },
}


def saved(family: str, folder: Path) -> Any:
    """A small network saved by transformers, in evaluation mode."""
    torch.manual_seed(1)
    net = AutoModel.from_config(AutoConfig.for_model(family, **SMALL[family])).eval()
    net.save_pretrained(folder)
    return net


def spec_of(folder: Path) -> ImageTower:
    return ImageTower(name="transformers", weights=str(folder))


def test_convnet_features_depend_on_position() -> None:
    """Without coordinate channels, global max pooling would give the same features for a moved
    shape.
    """
    torch.manual_seed(0)
    tower = build_image_tower(CONVNET, 64, "local").double()
    here, there = torch.zeros(1, 3, 64, 64).double(), torch.zeros(1, 3, 64, 64).double()
    here[..., 8:24, 8:24] = 1
    there[..., 40:56, 40:56] = 1
    assert (tower(here) - tower(there)).abs().max() > 1e-2
    assert torch.equal(tower.train()(here), tower.eval()(here))


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_weights_load_from_a_file_without_the_classifier(tmp_path: Path, name: str) -> None:
    """Frozen BatchNorm keeps its statistics, so rows are independent."""
    net = torchvision.models.resnet18()
    (save_file if name.endswith("safetensors") else torch.save)(net.state_dict(), tmp_path / name)
    spec = ImageTower(name="resnet18", weights=str(tmp_path / name))
    net.eval().fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(build_image_tower(spec, 64, "local").eval()(PIXELS), net(PIXELS))
    for policy, moves in (("frozen", False), ("local", True)):
        tower: Any = build_image_tower(spec, 64, policy).train()
        before = tower.net.bn1.running_mean.clone()
        features = tower(PIXELS)
        features.sum().backward()
        assert (not torch.equal(tower.net.bn1.running_mean, before)) is moves
        assert tower.net.bn1.weight.grad is not None
        if policy == "frozen":
            torch.testing.assert_close(features[:1], tower(PIXELS[:1]), rtol=1e-4, atol=1e-4)


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (open, (str(self.file), "w"))


def test_wrong_state_dict_is_named_and_its_code_is_not_executed(tmp_path: Path) -> None:
    for state, message in (
        ([torch.zeros(1)], r"is not a state_dict"),
        ({"other": torch.zeros(1)}, r'does not fit a resnet18: Missing .*Unexpected .*"other"'),
        (
            {"conv1.weight": torch.zeros(1)},
            r"does not fit a resnet18: .*size mismatch for conv1\.weight",
        ),
        ({"conv1.weight": Payload(tmp_path / "ran")}, "cannot read weights from"),
    ):
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(UsageError, match=message):
            build_image_tower(
                ImageTower(name="resnet18", weights=str(tmp_path / "w.pth")), 64, "local"
            )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", SMALL)
def test_saved_encoder_has_equal_features_and_rebuilds(family: str, tmp_path: Path) -> None:
    net, pixels = saved(family, tmp_path), torch.randn(2, 3, SIDE, SIDE)
    spec = TwoTower(
        image=spec_of(tmp_path),
        text=TextTower(width=16, depth=1, heads=2),
        inputs=Inputs(image_side=SIDE, max_tokens=8),
        embed_dim=8,
    )
    model, batch = build(spec, 30), synthetic_batch(spec.inputs, 30, 3, "cpu")
    tower = model.eval().image.tower
    with torch.no_grad():
        theirs = net(pixel_values=pixels)
        expected = (
            theirs.pooler_output.flatten(1)
            if family == "resnet"
            else theirs.last_hidden_state[:, 0]
        )
        torch.testing.assert_close(tower(pixels), expected)

    outputs = model.train()(batch)
    (outputs["image_embed"].sum() + outputs["text_embed"].sum() * outputs["logit_scale"]).backward()
    assert not [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is None
    ]
    architecture = json.loads(json.dumps(model.architecture()))
    assert build(spec, 30, RANDOM_WEIGHTS).architecture() == model.architecture()
    for file in tmp_path.iterdir():
        file.unlink()
    again = build(spec, 30, saved_layers(architecture)).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            again(batch)["image_embed"], model.eval()(batch)["image_embed"], rtol=0, atol=0
        )


def test_frozen_batch_norm_of_a_saved_encoder_and_unsupported_type(tmp_path: Path) -> None:
    saved("resnet", tmp_path)
    for batch_norm in ("local", "frozen"):
        tower = build_image_tower(spec_of(tmp_path), SIDE, batch_norm).train()
        norms = [layer for layer in tower.modules() if isinstance(layer, nn.BatchNorm2d)]
        assert norms and all(layer.training == (batch_norm == "local") for layer in norms)
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"a model of type 'bert'; supported are vit, dinov2, resnet"
    ):
        build_image_tower(spec_of(tmp_path), SIDE, "local")


@pytest.mark.parametrize(("name", "args"), TIMM)
def test_timm_features_are_those_that_timm_pools(name: str, args: Any, tmp_path: Path) -> None:
    """ConvNeXt normalizes after pooling, SigLIP pools by attention, and all of it is trained."""
    pytest.importorskip("timm")
    config = AutoConfig.for_model("timm_wrapper", architecture=name, model_args=args)
    net, pixels = AutoModel.from_config(config).eval(), torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # a norm must not be the identity
        net.save_pretrained(tmp_path)
        expected = net(pixel_values=pixels).pooler_output
    tower: Any = build_image_tower(spec_of(tmp_path), SIDE, "local").eval()
    features = tower(pixels)
    torch.testing.assert_close(features, expected)
    features.sum().backward()
    assert all(weight.grad is not None for weight in tower.parameters())


def test_head_of_timm_is_frozen_and_wrong_side_is_named(tmp_path: Path) -> None:
    """MobileNet's features get another width after pooling; a weight without gradient would stop
    the dry run.
    """
    pytest.importorskip("timm")
    swin = "swin_tiny_patch4_window7_224"
    for name, args in (("mobilenetv3_small_050", {}), (swin, {**SIDES, **SWIN})):
        config = AutoConfig.for_model("timm_wrapper", architecture=name, model_args=args)
        AutoModel.from_config(config).save_pretrained(tmp_path / name)
    tower = build_image_tower(spec_of(tmp_path / "mobilenetv3_small_050"), 64, "local")
    tower(PIXELS).sum().backward()
    frozen = [name for name, weight in tower.named_parameters() if not weight.requires_grad]
    assert frozen == ["net.timm_model.conv_head.weight", "net.timm_model.conv_head.bias"]
    assert all(weight.grad is not None for weight in tower.parameters() if weight.requires_grad)
    with pytest.raises(
        UsageError, match=r"image_side: .* cannot encode images of 48 pixels: Input height"
    ):
        build_image_tower(spec_of(tmp_path / swin), 48, "local")


def test_folder_that_timm_saved_is_an_image_tower(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("test_resnet", num_classes=3).eval()
    timm.models.save_for_hf(net, tmp_path)
    tower, pixels = (
        build_image_tower(spec_of(tmp_path), 64, "local").eval(),
        torch.randn(2, 3, 64, 64),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            tower(pixels), net.forward_head(net.forward_features(pixels), pre_logits=True)
        )
