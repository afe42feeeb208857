"""What the results of all benchmarks have: the machine, and ratios with their spread."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.machine import cores

if TYPE_CHECKING:
    import torch


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine of a measurement.

    Args:
        device: The device that is measured; None: the CPU.

    Returns:
        `cpu` (model), `cores` (available), `device` (name of the GPU, or `cpu`), `load_1min` (load
        average), `python` and `torch` (versions).
    """
    import torch  # Not above: processes that read rows import this module, and no torch.

    is_gpu = device is not None and device.type == "cuda"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0].strip() if names else platform.processor() or platform.machine(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def summarize_ratios(ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the median and the spread of ratios.

    Args:
        ratios: By name the ratio of two rates in each round, at least one.

    Returns:
        `ratios` (medians by name) and `spread` ({min, max, pairs} by name).
    """
    return {
        "ratios": {name: statistics.median(values) for name, values in ratios.items()},
        "spread": {
            name: {"min": min(values), "max": max(values), "pairs": len(values)}
            for name, values in ratios.items()
        },
    }
