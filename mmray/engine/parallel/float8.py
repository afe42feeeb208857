"""float8 training with torchao: matrix products of wide linear layers in 8 bits, in training only.

Weights stay in float32 under the same names, so checkpoints, EMA, export and evaluation are those
of a run without it. Source: Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.protocol import find_blocks
from mmray.plugins import check_installed

if TYPE_CHECKING:
    from mmray.config import Train

Capability = tuple[int, int]  # compute capability of a GPU, such as (9, 0) of an H100
MIN_WIDTH = 1024  # inputs and outputs of a layer; narrower products gain less than the casts cost
# Oldest GPUs with kernels of a recipe.
MIN_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def check_device(train: Train, capability: Capability | None) -> None:
    """Check that a device has kernels for `train.float8`."""
    needed = MIN_CAPABILITY.get(train.float8)
    if needed is not None and (capability is None or capability < needed):
        device = "a CPU" if capability is None else f"one of {_version(capability)}"
        raise UsageError(
            f"train.float8 {train.float8} needs GPUs of compute capability {_version(needed)} or "
            f"higher, not {device}; set --train.float8 none"
        )


def convert_branches(branches: Mapping[str, nn.Module], recipe: str) -> str:
    """Let wide linear layers in the blocks of the branches compute in float8 in training mode.

    A layer is wide if torchao measured its products to be faster with the recipe, and it has at
    least 1,024 inputs and outputs. Frozen layers, among them those with LoRA adapters, stay as they
    are. In evaluation mode the layers compute as before. Call this after freezing, before compile
    and sharding.

    Args:
        branches: Parts of the model by name, such as {"image": module}; changed in place.
        recipe: Name of a recipe of torchao: `tensorwise` (a scale per tensor) or `rowwise` (one per
            row or column).

    Returns:
        A line for the console with the numbers of these layers.

    Raises:
        UsageError: torchao is not installed, or no layer is wide enough.
    """
    check_installed("torchao", "train.float8", "float8")
    # Late: it is optional, and importing it takes 1.5 s.
    from torchao.float8 import (
        Float8LinearConfig,
        _auto_filter_for_recipe,
        convert_to_float8_training,
    )
    from torchao.float8.float8_linear import Float8Linear

    # A class, not a `forward` of each layer, for which torch 2.11 compiles a graph for each block.
    class TrainingFloat8Linear(Float8Linear):
        """Computes in float8 in training mode, otherwise as nn.Linear."""

        def forward(self, hidden: Tensor) -> Tensor:
            layer_class = Float8Linear if self.training else nn.Linear
            return layer_class.forward(self, hidden)

    # The gradient of a weight sums over tokens, whose number need not be a multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    is_faster = _auto_filter_for_recipe(recipe, filter_fqns=[])
    counts = []
    for name, branch in branches.items():
        layers = [layer for block in find_blocks(branch) for layer in block.modules()]
        linear = {layer for layer in layers if type(layer) is nn.Linear}
        wide = {
            path: layer
            for path, layer in branch.named_modules()
            if layer in linear and layer.weight.requires_grad and is_faster(layer, path)
            if min(layer.in_features, layer.out_features) >= MIN_WIDTH
        }
        convert_to_float8_training(
            branch, config=config, module_filter_fn=lambda _, path, wide=wide: path in wide
        )
        for path, layer in wide.items():
            converted = branch.get_submodule(path).train(layer.training)
            converted.__class__ = TrainingFloat8Linear
        if wide:
            counts.append(f"{len(wide)} of {len(linear)} linear layers of {name}")
    if not counts:
        raise UsageError(
            f"train.float8 {recipe}: no trainable linear layer in the blocks of "
            f"{', '.join(branches) or 'the model'} is so wide that float8 makes it "
            "faster; set --train.float8 none"
        )
    return f"float8 {recipe}: {', '.join(counts)}"


def _version(capability: Capability) -> str:
    return ".".join(map(str, capability))
