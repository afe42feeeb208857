"""Work of the model, counted once by torch, and what a device can do at most: for model FLOP/s and utilisation."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from mmray.engine.parallel.wrap import preserve_buffers
from mmray.engine.precision import Precision
from mmray.objectives.protocol import Batch

# Dense tensor-core peaks of the makers' data sheets, in TFLOP/s: (bf16 and fp16, fp32 as torch computes it by default).
# By words of a device's name, the longer ones first.
PEAKS = {
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "GH200": (989, 67),
    "B200": (2250, 75),
    "GB200": (2500, 80),
    "A100": (312, 19.5),
    "A10G": (70, 35),
    "A10": (125, 31),
    "A30": (165, 10.3),
    "A40": (150, 37),
    "L40S": (362, 92),
    "L40": (181, 90.5),
    "L4": (121, 30),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}


WITH_BIAS = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)  # whose first argument is added


@torch.no_grad()
def model_flops(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Floating point operations of a forward and a backward of `batch`, without what accumulation computes again.

    A backward is two forwards (Narayanan et al. 2021, section 5.1) where everything learns. Where weights are frozen,
    their own gradients are left out, and what no weight that learns comes before, altogether.
    """
    work = _Work()
    with preserve_buffers(model), precision.autocast(), work:
        model(batch)
    return work.total


def peak_flops(device: torch.device, precision: Precision) -> float:
    """What a GPU does at most in a second at this precision; NaN for one that is not in the table."""
    name = torch.cuda.get_device_name(device)
    # Whole words: an RTX A4000 is no A40, nor an L40 an L4.
    known = next((peaks for key, peaks in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
    return float("nan") if known is None else known[0 if precision.dtype is not None else 1] * 1e12


class _Work(TorchDispatchMode):
    """Adds up the products of matrices (and convolutions) of a forward, and what their backward will take.

    A product's backward is another of the same size for each of its two operands that a gradient is asked for: a weight
    that learns, or what comes after one. It is followed here and not by autograd, so that no graph is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.supports_higher_order_operators = True  # such as flex_attention
        self._followed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what comes after a weight that learns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        out = func(*args, **kwargs)
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.total += flops * (1 + self._backward(packet, args))
        if packet is not torch.ops.aten.detach and any(self._learns(value) for value in tree_leaves((args, kwargs))):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._followed[tensor] = True
        return out

    def _backward(self, packet: Any, args: Any) -> float:
        """The backward's work as a multiple of the forward's."""
        if "attention" in str(packet):  # two products: queries with keys, what comes of them with values
            query, key, value = (self._learns(tensor) for tensor in args[:3])
            return (query + key + value + (query or key)) / 2
        first = 1 if packet in WITH_BIAS else 0
        return sum(self._learns(tensor) for tensor in args[first : first + 2])

    def _learns(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value in self._followed or (value.is_leaf and value.requires_grad))
