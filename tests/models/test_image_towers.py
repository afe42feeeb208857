"""Image towers: shapes, weights from files and the hub, the BatchNorm policy, and errors that name the setting."""

from urllib.error import URLError

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from mmray.config import ImageTower
from mmray.errors import UsageError
from mmray.models.encoders.image import build_image_tower

PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spec", "width"),
    [
        (ImageTower(name="convnet", width=16, depth=4), 64),
        (ImageTower(name="vit", width=32, depth=2, heads=4, patch=16), 32),
        (ImageTower(name="resnet18"), 512),
        (ImageTower(name="resnet34"), 512),
        (ImageTower(name="resnet50"), 2048),
        (ImageTower(name="resnet101"), 2048),
    ],
)
def test_tower_output_has_its_width(spec, width):
    tower = build_image_tower(spec, 64, "local").eval()
    with torch.no_grad():
        assert tower(PIXELS).shape == (2, width)
    assert tower.width == width


def test_convnet_features_depend_on_position():
    """Without coordinate channels, global max pooling would give the same features for a moved shape."""
    torch.manual_seed(0)
    tower = build_image_tower(ImageTower(name="convnet", width=16, depth=2), 64, "local").double()
    here, there = torch.zeros(1, 3, 64, 64).double(), torch.zeros(1, 3, 64, 64).double()
    here[..., 8:24, 8:24] = 1
    there[..., 40:56, 40:56] = 1
    assert (tower(here) - tower(there)).abs().max() > 1e-2


def test_convnet_is_equal_in_train_and_eval_mode():
    tower = build_image_tower(ImageTower(name="convnet", width=16, depth=2), 64, "local")
    assert torch.equal(tower.train()(PIXELS), tower.eval()(PIXELS))
    assert not [layer for layer in tower.modules() if isinstance(layer, (nn.BatchNorm2d, nn.Dropout))]


@pytest.mark.parametrize("side", [33, 50, 64])
def test_convnet_takes_odd_image_sides(side):
    tower = build_image_tower(ImageTower(name="convnet", width=16, depth=4), side, "local")
    assert tower(torch.rand(2, 3, side, side)).shape == (2, 64)


@pytest.mark.parametrize("rows", [2, 64])
def test_convnet_gradient_strides_equal_weight_strides(rows):
    tower = build_image_tower(ImageTower(name="convnet", width=16, depth=2), 64, "local")
    tower(torch.rand(rows, 3, 64, 64)).sum().backward()
    assert [name for name, weight in tower.named_parameters() if weight.grad.stride() != weight.stride()] == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ImageTower(name="convnet", width=20), r"model\.image\.width: .*multiple of 8 \(got 20\)"),
        (
            ImageTower(name="convnet", width=16, depth=6),
            r"model\.image\.depth: 6 stages need images of at least 128 pixels",
        ),
        (ImageTower(name="vit", width=30, heads=4), r"model\.image\.heads: 4 heads do not divide the width of 30"),
        (ImageTower(name="vit", width=32, patch=12), r"model\.image\.patch: patches of 12 pixels .* 64"),
        (ImageTower(name="vit", weights="pretrained"), r"model\.image\.weights: .* `vit`"),
    ],
)
def test_invalid_shape_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        build_image_tower(spec, 64, "local")


def test_frozen_batch_norm_with_random_weights_raises():
    with pytest.raises(UsageError, match=r"model\.batch_norm: `frozen`.*model\.image\.weights is `none`"):
        build_image_tower(ImageTower(name="resnet18"), 64, "frozen")


@pytest.fixture
def resnet_file(tmp_path):
    """A saved torchvision ResNet-18 with its classifier, and the network."""
    net = torchvision.models.resnet18()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    torch.save(net.state_dict(), tmp_path / "net.pth")
    return tmp_path, net


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_weights_load_from_a_file_without_the_classifier(resnet_file, name):
    folder, net = resnet_file
    tower = build_image_tower(ImageTower(name="resnet18", weights=str(folder / name)), 64, "local").eval()
    net.eval().fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(tower(PIXELS), net(PIXELS))


def test_frozen_keeps_statistics_and_local_updates_them(resnet_file):
    folder, _ = resnet_file
    spec = ImageTower(name="resnet18", weights=str(folder / "net.pth"))
    for policy, moves in (("frozen", False), ("local", True)):
        tower = build_image_tower(spec, 64, policy).train()
        before = tower.net.bn1.running_mean.clone()
        tower(PIXELS).sum().backward()
        assert (not torch.equal(tower.net.bn1.running_mean, before)) is moves
        assert tower.net.bn1.weight.grad is not None


def test_rows_are_independent_with_frozen_batch_norm(resnet_file):
    folder, _ = resnet_file
    tower = build_image_tower(ImageTower(name="resnet18", weights=str(folder / "net.pth")), 64, "frozen").train()
    torch.testing.assert_close(tower(PIXELS)[:1], tower(PIXELS[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        (b"not weights", "cannot read weights from"),
        (b"", "cannot read weights from"),
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_bad_weights_file_is_named(tmp_path, content, message, suffix):
    file = tmp_path / f"weights.{suffix}"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=rf"model\.image\.weights: .*{message}"):
        build_image_tower(ImageTower(name="resnet18", weights=str(file)), 64, "local")


def test_wrong_state_dict_is_named(tmp_path):
    def build(tensors):
        torch.save(tensors, tmp_path / "w.pth")
        build_image_tower(ImageTower(name="resnet18", weights=str(tmp_path / "w.pth")), 64, "local")

    with pytest.raises(UsageError, match=r"is not a state_dict"):
        build([torch.zeros(1)])
    with pytest.raises(UsageError, match=r"does not fit a resnet18: Missing .*Unexpected .*\"other\""):
        build({"other": torch.zeros(1)})
    with pytest.raises(UsageError, match=r"does not fit a resnet18: .*size mismatch for conv1\.weight"):
        build({"conv1.weight": torch.zeros(1)})


def test_code_in_a_weights_file_is_not_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"conv1.weight": Payload()}, tmp_path / "w.pth")
    with pytest.raises(UsageError, match="cannot read weights from"):
        build_image_tower(ImageTower(name="resnet18", weights=str(tmp_path / "w.pth")), 64, "local")
    assert not (tmp_path / "ran").exists()


def test_offline_pretrained_error_suggests_a_fix(monkeypatch):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", offline)
    spec = ImageTower(name="resnet18", weights="pretrained")
    with pytest.raises(
        UsageError, match=r"cannot download the pretrained weights of resnet18.*https://.*\.pth.*`none`"
    ):
        build_image_tower(spec, 64, "frozen")
    assert build_image_tower(spec, 64, "frozen", architecture={}).width == 512
