"""A torch profile of a few steps, in Chrome's trace format (ui.perfetto.dev opens it); for `--train.profile N`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

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
