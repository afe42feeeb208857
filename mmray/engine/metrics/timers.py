"""Wall-clock time of the training thread, by activity, and peak memory."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

RECENT_STEPS = 500  # window of the percentiles: the steps between two lines are too few for a 95th
# what the training thread does apart from steps
BETWEEN_STEPS = ("evaluate", "checkpoint", "log", "callbacks")


@dataclass
class Throughput:
    """Wall-clock time of the training thread since the last logged line, divided into activities.

    Each moment is part of a step, or of one of BETWEEN_STEPS (evaluate, checkpoint, log,
    callbacks). `add` ends a step, `lap` another activity. The first step of the run is measured
    separately, because it includes compilation, allocation and warm-up.

    `compute(world_size)` returns the times and rates by name; its docstring lists them.

    Attributes:
        first_step_s: Seconds of the first step of the run; 0 before its end.
    """

    first_step_s: float = 0.0
    _steps: list[tuple[float, float, int, int]] = field(default_factory=list)
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _laps_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BETWEEN_STEPS, 0.0))
    _lap_start_s: float = field(default_factory=lambda: time.perf_counter())

    def lap(self, name: str = "") -> float:
        """End an activity, and return its seconds: the time since the last call of `lap` or `add`.

        Args:
            name: Activity whose total gets these seconds: `evaluate`, `checkpoint`, `log` or
                `callbacks`; empty: none.
        """
        now_s = time.perf_counter()
        lap_s = now_s - self._lap_start_s
        self._lap_start_s = now_s
        if name:
            self._laps_s[name] += lap_s
        return lap_s

    def add(self, wait_s: float, rows: int, tokens: int) -> None:
        """Record a step at its end; its time starts at the last call of `lap` or `add`.

        Args:
            wait_s: Seconds that the step waited for its rows.
            tokens: Tokens of the captions or conversations of this rank's rows, without padding.
        """
        step_s = self.lap()
        if self.first_step_s == 0:
            self.first_step_s = step_s
            self._restart()
            return
        self._steps.append((step_s, wait_s, rows, tokens))
        self._recent_s.append(step_s)

    def compute(self, world_size: int) -> dict[str, Any]:
        """Return the times and rates of METRICS since the last call; {} without a second step."""
        laps_s = self._restart()
        if not self._steps:
            return {}
        steps = len(self._steps)
        total_s, wait_s, rows, tokens = np.sum(self._steps, axis=0).tolist()
        wall_s = total_s + sum(laps_s.values())
        training_s = wall_s - laps_s["evaluate"]
        self._steps.clear()
        p50_s, p95_s = np.quantile(self._recent_s, (0.5, 0.95)).tolist()
        return {
            "time/wall_s": wall_s,
            "time/step_s": total_s / steps,
            "time/step_p50_s": p50_s,
            "time/step_p95_s": p95_s,
            "time/first_step_s": self.first_step_s,
            "time/data_wait_s": wait_s / steps,
            "time/data_wait_share": wait_s / total_s,
            "throughput/samples_per_s": rows / training_s,
            "throughput/tokens_per_s": world_size * tokens / training_s,
            **{f"time/{name}_s": lap_s for name, lap_s in laps_s.items() if name != "evaluate"},
        }

    def _restart(self) -> dict[str, float]:
        """Return the seconds of the laps, and start again."""
        laps_s = self._laps_s
        self._laps_s = dict.fromkeys(BETWEEN_STEPS, 0.0)
        return laps_s


class PeakMemory:
    """Peak memory of this rank: on a GPU what torch allocated, on a CPU of this process, sampled
    when all activations of a micro-batch are in memory.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._process = psutil.Process()
        self._peak_bytes = 0

    def sample(self) -> None:
        """Measure the memory of this process; without effect on a GPU."""
        if self._device.type != "cuda":
            memory = self._process.memory_info()
            self._peak_bytes = max(self._peak_bytes, memory.rss - memory._asdict().get("shared", 0))

    def peak_gib(self) -> float:
        """Return the peak in GiB, on a CPU without memory shared with other processes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        self.sample()
        return self._peak_bytes / 2**30
