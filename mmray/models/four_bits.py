"""Linear layers with weights in 4 bits, by bitsandbytes: NF4 with quantized scales (Dettmers et al.
2023, arXiv:2305.14314).
"""

from __future__ import annotations

from collections.abc import Set

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


class FourBitLinear(bnb.nn.Linear4bit):
    """A frozen linear layer that quantizes its weight when it is moved to a device.

    Until then its weight, whose name in the state dict does not change, is the original one.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = bnb.nn.Params4bit(
            layer.weight.detach(), requires_grad=False, quant_type="nf4", module=self
        )
        self.bias = layer.bias
        self.compute_type_is_set = True
        # The kernel for AVX-512 replaces the weight by one without a gradient of the input.
        self.support_avx512bf16_for_cpu = False

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [..., W_out] of inputs [..., W_in], under autocast in its precision."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        self.compute_dtype = x.dtype
        output: Tensor = super().forward(x)
        return output

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        # Without the scales, because checkpoints have no frozen weights.
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)


def quantize_linear_layers(model: nn.Module, kept: Set[int]) -> None:
    """Replace the linear layers of a model, but those that are kept.

    Args:
        model: Changed in place.
        kept: `id` of layers, or of their weights.
    """
    for name, layer in list(model.named_modules()):
        # nn.MultiheadAttention does not call its output layer.
        if isinstance(layer, NonDynamicallyQuantizableLinear):
            continue
        if isinstance(layer, nn.Linear) and not {id(layer), id(layer.weight)} & kept:
            layer.requires_grad_(False)
            model.set_submodule(name, FourBitLinear(layer))
