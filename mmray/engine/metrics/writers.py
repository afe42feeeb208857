"""What a run tells while it trains: lines of metrics.jsonl, TensorBoard events, rates, and the mark of a step's rows.

loop.py measures on every rank; the log itself is kept by rank 0 alone. Keys are `area/name_unit`.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import Stopwatch
from mmray.errors import StorageError

Metrics = dict[str, Any]
METRICS = "metrics.jsonl"
NEWLINE = b"\n"
CHECK_EVERY_S = 10.0  # between two looks at whether this is still the run's training
RECENT_STEPS = 500  # whose times the percentiles are of: a window between two lines is too few for a 95th


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run that begins, or goes on, after `start_step` steps.

    Lines of later steps, left by an attempt that failed, are dropped: those steps are taken again.
    `wasted_steps` is how many steps they prove. What the disk does not take is told (`tell`, once for each time that it
    fails) and written when it takes lines again. `check` raises where the folder is another training's now: at a line
    every ten seconds at most, and at the end. Raises StorageError where the log cannot even be opened.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int = 0,
        tell: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ):
        self._folder, self._purge_step = folder, start_step + 1
        self._tell, self._check = tell, check
        self._path = folder / METRICS
        self._pending = b""  # lines that the disk has not taken yet
        self._refused = False
        self._checked_s = time.time()  # of day: it goes on while the machine sleeps
        self._events: Any = None
        try:
            self.wasted_steps = _drop_after(self._path, start_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror or error}. Make room (or mend the permissions) and start "
                "the same command again"
            ) from error

    def write(self, metrics: Metrics) -> None:
        """One line, at once on disk; numbers that JSON lacks (NaN, infinity) become null."""
        line = json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False) + "\n"
        self._own(CHECK_EVERY_S)
        self._pending += line.encode()
        try:
            self._write_out()
            self._plot(metrics)
            self._refused = False
        except OSError as error:
            if not self._refused:
                self._tell(f"{self._refusal(error)}. Its lines are kept, and written as soon as it takes them again")
            self._refused = True

    def close(self) -> None:
        """Write out what is pending; a log that is not closed loses TensorBoard's last two minutes at most."""
        try:
            self._own(0.0)
            self._write_out()
            if self._events is not None:
                self._events.close()
        except OSError as error:
            self._tell(f"{self._refusal(error)}: its last {self._pending.count(NEWLINE)} lines are lost")
        finally:
            self._file.close()

    def _own(self, every_s: float) -> None:
        """Raise TrainingError where this is not the run's training any more; where nobody can say, the write will."""
        if abs(time.time() - self._checked_s) < every_s:
            return
        try:
            self._check()
            self._checked_s = time.time()
        except OSError:
            return

    def _write_out(self) -> None:
        """Write what is pending, and go on where a write was cut short. Raises OSError."""
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def _plot(self, metrics: Metrics) -> None:
        """The line for TensorBoard. Raises OSError; what was on its way is then missing there, and only there."""
        try:
            for key, value in metrics.items():
                if "/" in key:
                    self._writer().add_scalar(key, value, metrics["step"])
        except OSError:  # the writer's thread has ended; another file goes on from here
            self._events, self._purge_step = None, metrics["step"]
            raise

    def _writer(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds of import: after training began, on one rank

            self._events = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._events

    def _refusal(self, error: OSError) -> str:
        return f"the storage does not take {self._path}: {error.strerror or error}"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, start_step: int) -> int:
    """Keep the lines up to `start_step`, whole ones only; returns how many steps the dropped lines went beyond it."""
    if not path.exists():
        return 0
    kept, last_step = [], start_step
    for line in path.read_text(encoding="utf-8").splitlines():
        step = _step_of(line)
        last_step = max(last_step, step or 0)
        if step is not None and step <= start_step:
            kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return last_step - start_step


def _step_of(line: str) -> int | None:
    """Step of a line; None for one that a kill cut off in the middle."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


@dataclass
class Rates:
    """Step times since the last look; the very first step (compilation, allocation, warm-up) is kept apart."""

    phases: Phases
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
            self.phases.take_s()
            return
        self._steps += 1
        self._busy_s += step_s
        self._rows += rows
        self._tokens += tokens
        self._wait_s += wait_s
        self._recent_s.append(step_s)

    def take(self, world: int) -> Metrics:
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
        metrics |= {f"time/{name}_s": took_s / steps for name, took_s in self.phases.take_s().items()}
        self._steps = self._rows = self._tokens = 0
        self._busy_s = self._wait_s = 0.0
        return metrics


PHASES = ("transfer", "forward", "backward", "sync", "optimizer", "checkpoint")


class Phases:
    """Where a step's time goes, on its device: `with phases("forward"): ...`.

    `sync` is the step's own collectives and votes; what DDP sends meanwhile is part of the last backward.
    """

    def __init__(self, device: torch.device):
        self._watches = {name: Stopwatch(device) for name in PHASES}
        self._device, self.memory = device, PeakMemory()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if name == "backward":
            self.memory.look(self._device)  # when it begins, the activations are all there
        return self._watches[name].running()

    def take_s(self) -> dict[str, float]:
        """Seconds of each since the last call."""
        return {name: watch.take_s() for name, watch in self._watches.items()}


# How a figure that each rank has of its own becomes the run's; what is not named is the mean.
REDUCTIONS = {"time/step_p95_s": "max", "time/first_step_s": "max", "memory/": "max", "host/memory_gib": "max"}


def over_ranks(group: Group, sums: list[Tensor], own: Metrics) -> tuple[list[float], Metrics]:
    """Sums over ranks, and every rank's own figures reduced to the run's, in one collective.

    Throughput is of the whole run on each rank already: its mean is the run's.
    """
    figures = torch.tensor([float(value) for value in own.values()], dtype=torch.float64, device=group.device)
    local = torch.cat([*(value.to(torch.float64).reshape(1) for value in sums), figures])
    everyone = group.read(group.gather(local[None]))
    found = everyone[:, len(sums) :]
    reduced = {
        name: (found[:, index].max() if _reduction(name) == "max" else found[:, index].mean()).item()
        for index, name in enumerate(own)
    }
    return everyone[:, : len(sums)].sum(0).tolist(), reduced


def _reduction(name: str) -> str:
    return next((how for prefix, how in REDUCTIONS.items() if name.startswith(prefix)), "mean")


def rows_sha(keys: Tensor) -> str:
    """16 hex digits that name a set of rows: sha256 of the sorted int64 little-endian key ids, whatever their order."""
    return sha256(keys.cpu().sort().values.numpy().astype("<i8").tobytes()).hexdigest()[:16]


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

    def look_gib(self, device: torch.device) -> float:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        self.look(device)
        return self._most_bytes / 2**30
