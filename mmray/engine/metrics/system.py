"""How busy the machine is, looked at when a line is logged: CPU and memory of the host, and the GPU where NVML is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import psutil
import torch


def machine_load(device: torch.device) -> dict[str, float]:
    """CPU in percent since the last look, memory in use in GiB; of a GPU its busy share in percent and memory.

    What NVML does not tell is NaN: every rank must bring the same figures.
    """
    load = {"host/cpu_percent": psutil.cpu_percent(), "host/memory_gib": psutil.virtual_memory().used / 2**30}
    return load | _gpu_load(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else load


def _gpu_load(uuid: str) -> dict[str, float]:
    nothing = {"gpu/busy_percent": float("nan"), "gpu/memory_gib": float("nan")}
    nvml, handle = _handle(uuid)
    if handle is None:
        return nothing
    try:
        busy, used = nvml.nvmlDeviceGetUtilizationRates(handle).gpu, nvml.nvmlDeviceGetMemoryInfo(handle).used
    except nvml.NVMLError:  # a slice of a GPU does not tell
        return nothing
    return {"gpu/busy_percent": float(busy), "gpu/memory_gib": used / 2**30}


@lru_cache
def _handle(uuid: str) -> tuple[Any, Any]:
    """NVML, and its handle of a GPU by UUID, for the numbers of torch and NVML differ; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml, None
