"""Timers: wall-clock time of the training thread, by activity; device time by phase of a step; idle
time of the device; peak memory.

On a GPU the phases are measured with events, so the host does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

MAX_SCOPES = 1024  # then the older half, which has completed by then, is added to the totals
RECENT_STEPS = 500  # window of the percentiles: the steps between two lines are too few for a 95th
PHASES = ("transfer", "forward", "backward", "sync", "optimizer")
# What IdleTimer measures.
IDLE = ("device_idle", "device_idle_data", "launch_bound", "rows_cpu")
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
        timers: Measure the phases of a step.
        first_step_s: Seconds of the first step of the run; 0 before its end.
    """

    timers: PhaseTimers
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
            self.timers.idle.pop_s()
            return
        self._steps.append((step_s, wait_s, rows, tokens))
        self._recent_s.append(step_s)

    def compute(self, world_size: int) -> dict[str, Any]:
        """Return times and rates since the last call.

        Returns:
            Values by name, empty if there was no step but the first of the run.

            - Seconds of a step: `time/step_s` (mean), `time/step_p50_s` and `time/step_p95_s`
              (percentiles of the last 500 steps), `time/first_step_s` (the first of the run).
            - Means of a step: `time/data_wait_s`, and the device's `time/transfer_s`,
              `time/forward_s`, `time/backward_s`, `time/sync_s` and `time/optimizer_s`.
            - Totals: `time/wall_s` (all), `time/checkpoint_s`, `time/log_s` and
              `time/callbacks_s` (between steps).
            - `time/data_wait_share`, of the time of steps, 0 to 1.
            - `throughput/samples_per_s` and `throughput/tokens_per_s` of all workers.
            - On a GPU, as shares of the time of steps and callbacks: `time/device_idle_share`,
              `time/device_idle_data_share`, `time/launch_bound_share` and `time/rows_cpu_share`
              (see `IdleTimer.pop_s`).
        """
        laps_s, phases_s = self._restart()
        idle_s = self.timers.idle.pop_s()
        if not self._steps:
            return {}
        steps = len(self._steps)
        total_s, wait_s, rows, tokens = np.sum(self._steps, axis=0).tolist()
        wall_s = total_s + sum(laps_s.values())
        with_callbacks_s = total_s + laps_s["callbacks"]
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
            "throughput/samples_per_s": rows / wall_s,
            "throughput/tokens_per_s": world_size * tokens / wall_s,
            **{f"time/{name}_s": lap_s for name, lap_s in laps_s.items() if name != "evaluate"},
            **{f"time/{name}_s": phase_s / steps for name, phase_s in phases_s.items()},
            **{f"time/{name}_share": each_s / with_callbacks_s for name, each_s in idle_s.items()},
        }

    def _restart(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of the laps and of the device's phases, and start again."""
        laps_s = self._laps_s
        self._laps_s = dict.fromkeys(BETWEEN_STEPS, 0.0)
        return laps_s, self.timers.pop_s()


def record_event(device: torch.device) -> torch.cuda.Event:
    """Return a new event, with the time at which a GPU reaches this point of its current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class IdleTimer:
    """Measures on a GPU how long it waits for the training process; on a CPU it measures nothing.

    It records events on the current stream, whose times are those at which the device reaches them.
    From the end of an update to the start of the next step the device is idle. (Kernels in between,
    such as those of `train.ema`, are short and count as idle.) Gaps within a step are too many to
    be measured. Instead a step is launch-bound if the device has finished the backward before the
    host has launched the norm and the update: then it waited for the launches of kernels.

    Each step calls `start_step`, `end_launches`, `end_update` and `resume`. No call waits for the
    device: times are read after the host has waited for the norm of the step.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._total_s = dict.fromkeys(IDLE, 0.0)
        self._update_end: torch.cuda.Event | None = None
        # end of the last update, start, wait_s
        self._step: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None
        self._launched: torch.cuda.Event | None = (
            None  # end of the backward, if the step is launch-bound
        )

    def start_step(self, wait_s: float, rows_cpu_s: float) -> None:
        """End the idle time, before the first kernel of a step is launched.

        Args:
            rows_cpu_s: Seconds of CPU time that another thread of this process spent on them.
        """
        if self._update_end is not None:
            self._add_step()
            self._total_s["rows_cpu"] += rows_cpu_s
            self._step = self._update_end, record_event(self._device), wait_s

    def end_launches(self, backward_end: torch.cuda.Event) -> None:
        """Record whether the step is launch-bound: whether the GPU has finished the backward
        although the host launches the norm and the update only now. Call it when the host is about
        to wait for the GPU.

        Args:
            backward_end: torch.cuda.Event that was recorded after the last kernel of the backward;
                on a CPU unused.
        """
        if self._device.type == "cuda":
            self._launched = backward_end if backward_end.query() else None

    def end_update(self) -> None:
        """Start the idle time, after the last kernel of the update has been launched."""
        if self._device.type == "cuda":
            self._update_end = record_event(self._device)

    def resume(self) -> None:
        """Start the idle time here if `pop_s` has been called since the update, so without the time
        of evaluating, logging and saving.
        """
        if self._update_end is None:
            self.end_update()

    def pop_s(self) -> dict[str, float]:
        """Return seconds since the last call; the time until `resume` is not measured.

        Returns:
            `device_idle`, between steps; `device_idle_data`, the part in which the training thread
            waited for rows; `launch_bound`, forward and backward of launch-bound steps; `rows_cpu`,
            CPU time of the thread that prefetches rows. Empty on a CPU.
        """
        self._add_step()
        total_s = self._total_s
        self._total_s = dict.fromkeys(IDLE, 0.0)
        self._update_end = None
        return total_s if self._device.type == "cuda" else {}

    def _add_step(self) -> None:
        """Add up the last step, whose norm the host has waited for."""
        if self._step is None:
            return
        update_end, start, wait_s = self._step
        idle_s = update_end.elapsed_time(start) / 1000
        self._total_s["device_idle"] += idle_s
        self._total_s["device_idle_data"] += min(idle_s, wait_s)
        if self._launched is not None:
            self._total_s["launch_bound"] += start.elapsed_time(self._launched) / 1000
        self._step = None


class PhaseTimers:
    """Device time of a step by phase: `with timers("forward"): ...`.

    The phases are `transfer`, `forward`, `backward`, `sync` and `optimizer`. `sync` has the
    collectives of mmray's step, such as the gathering of embeddings; DDP's communication is part of
    the last backward.

    `pop_s()` returns the seconds by phase since its last call, a dict.

    Attributes:
        idle: Measures how long the device waits for the training process.
    """

    def __init__(self, device: torch.device):
        self.idle = IdleTimer(device)
        self._device = device
        self._process = psutil.Process()
        self._peak_bytes = 0
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        # Start and end of each timed scope: events on a GPU, seconds on a CPU.
        self._scopes: dict[str, list[tuple[Any, Any]]] = {name: [] for name in PHASES}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Any]:
        if name == "backward":
            self._sample_memory()  # all activations are in memory now
        start = self._now()
        try:
            yield start
        finally:
            self._scopes[name].append((start, self._now()))
            if len(self._scopes[name]) > MAX_SCOPES:
                self._read(name, MAX_SCOPES // 2)

    def pop_s(self) -> dict[str, float]:
        """Return the seconds by phase (`transfer`, `forward`, `backward`, `sync` and `optimizer`)
        since the last call.

        It synchronizes with a GPU.
        """
        for name, scopes in self._scopes.items():
            self._read(name, len(scopes))
        phase_s = self._phase_s
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        return phase_s

    def peak_gib(self) -> float:
        """Return the peak memory in GiB: on a GPU what torch allocated, on a CPU this process's
        private memory.

        On a GPU it is the peak since `torch.cuda.reset_peak_memory_stats` was called, or since the
        start of the process. On a CPU it is the largest of the samples that these timers took: at
        the start of each `backward`, and at each call of this method. The peak that Linux reports
        would include pages of Ray's object store.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        self._sample_memory()
        return self._peak_bytes / 2**30

    def _sample_memory(self) -> None:
        if self._device.type != "cuda":
            memory = self._process.memory_info()
            self._peak_bytes = max(self._peak_bytes, memory.rss - getattr(memory, "shared", 0))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        return record_event(self._device)

    def _read(self, name: str, count: int) -> None:
        """Add up the oldest `count` scopes; another thread may add newer ones."""
        for start, end in self._scopes[name][:count]:
            if self._device.type == "cuda":
                end.synchronize()
                self._phase_s[name] += start.elapsed_time(end) / 1000
            else:
                self._phase_s[name] += end - start
        del self._scopes[name][:count]
