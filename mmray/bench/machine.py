"""The machine that a measurement was taken on: a figure without it says nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from mmray.machine import cores


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, cores, accelerator, versions, and how busy the machine was with other things."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
