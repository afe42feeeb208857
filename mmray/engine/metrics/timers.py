"""Seconds that work took where it ran: the clock on a CPU, events on a GPU, which the host does not wait for."""

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

MOST_EVENTS = 1024  # kept before the older half is read, which by then is long done


class DeviceTimer:
    """Adds up stretches of work of one device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device
        self._took_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A stretch of work, queued inside."""
        if not self._cuda:
            began_s = time.perf_counter()
            try:
                yield
            finally:
                self._took_s += time.perf_counter() - began_s
            return
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        try:
            yield
        finally:
            ended.record(stream)
            self._events.append((began, ended))
            if len(self._events) > MOST_EVENTS:
                self._read(MOST_EVENTS // 2)

    def pop_s(self) -> float:
        """Seconds since the last call; waits until a GPU has done what was queued inside the stretches."""
        self._read(len(self._events))
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def _read(self, count: int) -> None:
        """Add up the oldest `count` stretches; another thread may be adding newer ones."""
        for began, ended in self._events[:count]:
            ended.synchronize()
            self._took_s += began.elapsed_time(ended) / 1000
        del self._events[:count]


RECENT_STEPS = 500  # whose times the percentiles are of: a window between two lines is too few for a 95th


@dataclass
class Throughput:
    """Step times since the last look; the very first step (compilation, allocation, warm-up) is kept apart."""

    timers: PhaseTimers
    first_step_s: float = 0.0
    total_s: float = 0.0
    _steps: int = 0
    _busy_s: float = 0.0
    _rows: int = 0
    _tokens: int = 0
    _wait_s: float = 0.0
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def add(self, step_s: float, wait_s: float, rows: int, tokens: int) -> None:
        """A step: its time, the part of it spent waiting for rows, rows of the global batch, tokens of this rank."""
        self.total_s += step_s
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
        """Means since the last call, percentiles of the last 500 steps; empty when there was no step but the first."""
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


PHASES = ("transfer", "forward", "backward", "sync", "optimizer", "checkpoint")


class PhaseTimers:
    """Where a step's time goes, on its device: `with phases("forward"): ...`.

    `sync` is the step's own collectives and votes; what DDP sends meanwhile is part of the last backward.
    """

    def __init__(self, device: torch.device):
        self._watches = {name: DeviceTimer(device) for name in PHASES}
        self._device, self.memory = device, PeakMemory()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if name == "backward":
            self.memory.look(self._device)  # when it begins, the activations are all there
        return self._watches[name].running()

    def pop_s(self) -> dict[str, float]:
        """Seconds of each since the last call."""
        return {name: watch.pop_s() for name, watch in self._watches.items()}


@dataclass
class PeakMemory:
    """Most memory so far, in GiB: of a GPU what torch allocated; on a CPU what this process alone held when looked at.

    Looked at as each backward begins and as a line is due, which costs some microseconds.
    The kernel's own peak would count the pages of the object store that blocks passed through: it grows to the size of
    the store whatever the run needs.
    """

    _most_bytes: int = 0

    _process: psutil.Process = field(default_factory=psutil.Process)

    def look(self, device: torch.device) -> None:
        """See what is held now; torch sees to it for a GPU."""
        if device.type != "cuda":
            memory = self._process.memory_info()
            self._most_bytes = max(self._most_bytes, memory.rss - getattr(memory, "shared", 0))

    def compute_gib(self, device: torch.device) -> float:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        self.look(device)
        return self._most_bytes / 2**30
