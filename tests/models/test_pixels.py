"""Products of the towers that replace slower ones of transformers, and the dtype of their input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig

from mmray.config import ImageTower, Lora
from mmray.models import build as models_build
from mmray.models.attention import FusedAttention, fuse_projections
from mmray.models.build import build
from mmray.models.pixels import PatchConv2d, residual_stream, use_patch_products
from tests.engine.recipe_models import MODELS, VOCAB
from tests.models.test_clip import SPECS, batch_of, model_of


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(24, 40), (27, 43)])
def test_patch_product_equals_convolution_with_its_gradients(
    size: tuple[int, int], memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 16, 8, stride=8).double().to(memory_format=memory_format)
    pixels = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    results = []
    for _ in range(2):
        output = layer(pixels)
        inputs = [pixels, layer.weight, layer.bias]
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
        use_patch_products(layer)
    assert type(layer) is PatchConv2d and layer.weight.shape == (16, 3, 8, 8)
    for product, convolution in zip(*results[::-1], strict=True):
        torch.testing.assert_close(product, convolution, rtol=1e-12, atol=1e-12)


def test_only_convolutions_of_images_into_separate_patches_become_products() -> None:
    other = [nn.Conv2d(3, 8, 7, stride=2), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 2, stride=2)]
    layers = nn.Sequential(*other, nn.Conv2d(3, 8, 4, stride=4, padding="valid"))
    use_patch_products(layers)
    assert [type(layer) for layer in layers] == [nn.Conv2d, nn.Conv2d, nn.Conv2d, PatchConv2d]


@pytest.mark.parametrize("kind", MODELS)
def test_built_models_have_no_convolution_of_patches(kind: str) -> None:
    spec = MODELS[kind][0]
    if kind == "fusion":
        tower = ImageTower(name="vit", width=16, depth=1, heads=2, patch=8)
        spec = spec.model_copy(update={"image": tower})
    layers = [layer for layer in build(spec, VOCAB).modules() if isinstance(layer, nn.Conv2d)]
    assert [type(layer) for layer in layers] == ([] if kind == "naflex" else [PatchConv2d])


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    "precision", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_blocks_pass_bf16_under_autocast_to_bf16_only(kind: str, precision: torch.dtype) -> None:
    model = model_of(SPECS[kind])
    streams: list[torch.dtype] = []
    for branch in model.branches().values():
        for layer in branch.tower.encoder.layers:
            layer.register_forward_hook(lambda _, inputs, hidden: streams.append(hidden.dtype))
    exact = model(batch_of())
    streams.clear()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        outputs = model(batch_of())
    expected = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
    assert len(streams) == 4 and set(streams) == {expected}
    for name in ("image_embed", "text_embed"):
        assert outputs[name].dtype == torch.float32
        torch.testing.assert_close(outputs[name], exact[name], rtol=0, atol=0.02)


def test_float64_hidden_states_keep_their_dtype() -> None:
    hidden = torch.ones(2, dtype=torch.float64)
    assert residual_stream(hidden) is hidden


@pytest.mark.parametrize("kind", SPECS)
def test_fused_attention_equals_transformers_attention_with_its_gradients(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for fuse in (fuse_projections, lambda model: None):
        monkeypatch.setattr(models_build, "fuse_projections", fuse)
        model = model_of(SPECS[kind]).double()
        layers = [layer for layer in model.modules() if isinstance(layer, FusedAttention)]
        assert len(layers) == (4 if fuse is fuse_projections else 0)
        outputs = model(batch_of())
        loss = (outputs["image_embed"] @ outputs["text_embed"].T).square().sum()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        results.append([outputs["image_embed"], outputs["text_embed"], *gradients])
    for fused, separate in zip(*results, strict=True):
        torch.testing.assert_close(fused, separate, rtol=1e-9, atol=1e-12)


def test_projections_with_adapters_stay_separate() -> None:
    pytest.importorskip("peft")
    spec = SPECS["clip"].model_copy(update={"lora": Lora(rank=2, targets=("text.*.q_proj",))})
    model = model_of(spec)
    fused = [name for name, part in model.named_modules() if isinstance(part, FusedAttention)]
    assert len(fused) == 2 and all(name.startswith("image.") for name in fused)


class CLIPMLP(nn.Module):
    """A user's copy of transformers' class, which computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CLIPVisionConfig()


def test_classes_of_users_with_the_names_of_transformers_are_unchanged() -> None:
    layer = CLIPMLP()
    fuse_projections(layer)
    assert type(layer) is CLIPMLP
