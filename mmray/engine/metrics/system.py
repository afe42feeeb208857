"""How busy the machine is, looked at when a line is logged: CPU and memory of the host, and the GPU where NVML is."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, schedule


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


# Memory that a process on a CPU has freed stays with it: the kernel hands out pages anew far slower than it is used.
#
# glibc takes each large tensor from the kernel and gives it back at once. A step needs the same sizes as the one
# before,
# so that each of its pages is cleared and mapped again: a tenth to a fifth of a step in a virtual machine.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
MOST_BYTES = 2**31 - 1  # both are C's int


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed for what comes next; whether there was one that heard."""
    if not sys.platform.startswith("linux"):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, or one that does nothing
    return tell is not None and all(tell(what, MOST_BYTES) for what in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


# A torch profile of a few steps, in Chrome's trace format (ui.perfetto.dev opens it); for `--train.profile N`.
SKIPPED = 2  # steps before it: the first allocate and compile


@contextmanager
def profiled(steps: int, file: Path | None, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step; `steps` steps are written to `file`. 0 steps, or no file: nothing."""
    if steps == 0 or file is None:
        yield lambda: None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan = schedule(wait=SKIPPED - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(file))) as running:
        yield running.step
