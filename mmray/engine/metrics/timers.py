"""Timers: seconds of work on its device, by phase; throughput; peak memory.

On a GPU time is measured with events, so the host does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

MAX_SCOPES = 1024  # then the older half is read, which has completed by then
RECENT_STEPS = 500  # window of the percentiles: the steps between two lines are too few for a 95th
PHASES = ("transfer", "forward", "backward", "sync", "optimizer", "checkpoint")


class DeviceTimer:
    """Adds up the time of work on one device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device
        self._took_s = 0.0
        self._scopes: list[tuple[Any, Any]] = []  # start and end: events on a GPU, seconds on a CPU

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scope whose work is timed."""
        start = self._now()
        try:
            yield
        finally:
            self._scopes.append((start, self._now()))
            if len(self._scopes) > MAX_SCOPES:
                self._read(MAX_SCOPES // 2)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def pop_s(self) -> float:
        """Seconds since the last call; waits for the timed work of a GPU."""
        self._read(len(self._scopes))
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def _read(self, count: int) -> None:
        """Add up the oldest `count` scopes; another thread may add newer ones."""
        for start, end in self._scopes[:count]:
            if self._cuda:
                end.synchronize()
            self._took_s += start.elapsed_time(end) / 1000 if self._cuda else end - start
        del self._scopes[:count]


@dataclass
class Throughput:
    """Step times since the last line; the first step (compilation, allocation, warm-up) is separate."""

    timers: PhaseTimers
    first_step_s: float = 0.0
    _steps: int = 0
    _busy_s: float = 0.0
    _rows: int = 0
    _tokens: int = 0
    _wait_s: float = 0.0
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def add(self, step_s: float, wait_s: float, rows: int, tokens: int) -> None:
        """Add a step: its time, its wait for rows, rows of the global batch, tokens of this rank."""
        if self.first_step_s == 0:
            self.first_step_s = step_s
            self.timers.pop_s()
            return
        self._steps += 1
        self._busy_s += step_s
        self._rows += rows
        self._tokens += tokens
        self._wait_s += wait_s
        self._recent_s.append(step_s)

    def compute(self, world: int) -> dict[str, Any]:
        """Means since the last call, percentiles of the last 500 steps; empty if there was only the first step."""
        steps, busy_s = self._steps, self._busy_s
        if steps == 0:
            return {}
        p50_s, p95_s = np.quantile(self._recent_s, (0.5, 0.95)).tolist()
        metrics = {
            "time/step_s": busy_s / steps,
            "time/step_p50_s": p50_s,
            "time/step_p95_s": p95_s,
            "time/first_step_s": self.first_step_s,
            "time/data_wait_s": self._wait_s / steps,
            "time/data_wait_share": self._wait_s / busy_s,
            "throughput/samples_per_s": self._rows / busy_s,
            "throughput/tokens_per_s": world * self._tokens / busy_s,
        }
        metrics |= {f"time/{name}_s": took_s / steps for name, took_s in self.timers.pop_s().items()}
        self._steps = self._rows = self._tokens = 0
        self._busy_s = self._wait_s = 0.0
        return metrics


class PhaseTimers:
    """Device time of a step by phase: `with timers("forward"): ...`.

    `sync` is the collectives and votes of the step; DDP's communication is part of the last backward.
    """

    def __init__(self, device: torch.device):
        self._timers = {name: DeviceTimer(device) for name in PHASES}
        self._device, self.memory = device, PeakMemory()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if name == "backward":
            self.memory.update(self._device)  # all activations are in memory now
        return self._timers[name].running()

    def pop_s(self) -> dict[str, float]:
        """Seconds of each since the last call."""
        return {name: timer.pop_s() for name, timer in self._timers.items()}


@dataclass
class PeakMemory:
    """Peak memory: what torch allocated on a GPU; on a CPU the largest sample of this process's private memory.

    Sampled at each backward and log line, in microseconds. The kernel's peak would include the object store's pages
    that blocks passed through.
    """

    _peak_bytes: int = 0
    _process: psutil.Process = field(default_factory=psutil.Process)

    def update(self, device: torch.device) -> None:
        """Sample the memory of a CPU process; torch tracks a GPU's peak."""
        if device.type != "cuda":
            memory = self._process.memory_info()
            self._peak_bytes = max(self._peak_bytes, memory.rss - getattr(memory, "shared", 0))

    def compute_gib(self, device: torch.device) -> float:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        self.update(device)
        return self._peak_bytes / 2**30
