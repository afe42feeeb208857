"""Work of the model, counted once by torch, and what a device can do at most: for model FLOP/s and utilisation."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmray.objectives.protocol import Batch
from mmray.train.parallel import buffers_kept
from mmray.train.precision import Precision

# Dense tensor-core peaks of the makers' data sheets, in TFLOP/s: (bf16 and fp16, fp32 as torch computes it by default).
PEAKS = {
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "GH200": (989, 67),
    "B200": (2250, 75),
    "A100": (312, 19.5),
    "A10G": (70, 35),
    "A10": (125, 31),
    "A30": (165, 10.3),
    "A40": (150, 37),
    "L40S": (362, 92),
    "L4": (121, 30),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}


@torch.no_grad()
def model_flops(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Floating point operations of a forward and a backward of `batch`, without what accumulation computes again.

    A backward is counted as two forwards (Narayanan et al. 2021, section 5.1) for what learns, as none for the rest.
    NaN where torch cannot follow the model: a figure that is missing must not cost a run.
    """
    counter = FlopCounterMode(display=False)
    try:
        with buffers_kept(model), precision.autocast(), counter:
            model(batch)
    except AssertionError:  # its module tracker, on outputs without a history
        return float("nan")
    total = counter.get_total_flops()
    branches: dict[str, nn.Module] = model.branches() if hasattr(model, "branches") else {}  # type: ignore[operator]
    counts, root = counter.get_flop_counts(), type(model).__name__
    frozen = sum(sum(counts.get(f"{root}.{name}", {}).values()) for name, part in branches.items() if not _learns(part))
    return float(3 * total - 2 * frozen)


def peak_flops(device: torch.device, precision: Precision) -> float:
    """What a GPU does at most in a second at this precision; NaN for one that is not in the table."""
    name = torch.cuda.get_device_name(device)
    known = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    return float("nan") if known is None else known[0 if precision.dtype is not None else 1] * 1e12


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
