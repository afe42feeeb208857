"""What a run tells while it trains: lines of metrics.jsonl, TensorBoard events, rates, and the mark of a step's rows.

loop.py measures on every rank; the log itself is kept by rank 0 alone. Keys are `area/name_unit`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

Metrics = dict[str, Any]


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run that begins, or goes on, after `start_step` steps.

    Lines of later steps, left by an attempt that failed, are dropped: those steps are taken again.
    `wasted_steps` is how many steps they prove.
    """

    def __init__(self, folder: Path, start_step: int = 0):
        self._folder, self._start_step = folder, start_step
        self._path = folder / "metrics.jsonl"
        self.wasted_steps = _drop_after(self._path, start_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._events: Any = None

    def write(self, metrics: Metrics) -> None:
        """One line, at once on disk; numbers that JSON lacks (NaN, infinity) become null."""
        self._file.write(json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False) + "\n")
        self._file.flush()
        for key, value in metrics.items():
            if "/" in key:
                self._writer().add_scalar(key, value, metrics["step"])

    def close(self) -> None:
        """Write out what is pending; a log that is not closed loses TensorBoard's last two minutes at most."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _writer(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds of import: after training began, on one rank

            self._events = SummaryWriter(str(self._folder), purge_step=self._start_step + 1)
        return self._events


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
    """Step times since the last look; the very first step (compilation, allocation, warm-up) is left out."""

    _first: bool = True
    _steps: int = 0
    _rows: int = 0
    _busy_s: float = 0.0
    _wait_s: float = 0.0
    total_s: float = field(default=0.0)

    def add(self, step_s: float, wait_s: float, rows: int) -> None:
        """One step: its whole time, the part of it spent waiting for rows, and the rows of the global batch."""
        self.total_s += step_s
        if self._first:
            self._first = False
            return
        self._steps += 1
        self._rows += rows
        self._busy_s += step_s
        self._wait_s += wait_s

    def take(self) -> Metrics:
        """Means since the last call; empty when there was no step but the first."""
        if self._steps == 0:
            return {}
        metrics = {
            "time/step_s": self._busy_s / self._steps,
            "time/data_wait_s": self._wait_s / self._steps,
            "time/data_wait_share": self._wait_s / self._busy_s,
            "throughput/samples_per_s": self._rows / self._busy_s,
        }
        self._steps = self._rows = 0
        self._busy_s = self._wait_s = 0.0
        return metrics


def rows_sha(keys: Tensor) -> str:
    """16 hex digits that name a set of rows: sha256 of the sorted int64 little-endian key ids, whatever their order."""
    return sha256(keys.cpu().sort().values.numpy().astype("<i8").tobytes()).hexdigest()[:16]


@dataclass
class PeakMemory:
    """Most memory so far, in GiB: of a GPU what torch allocated; on a CPU what this process alone held when looked at.

    The kernel's own peak would count the pages of the object store that blocks passed through: it grows to the size of
    the store whatever the run needs.
    """

    _most_bytes: int = 0

    def look_gib(self, device: torch.device) -> float:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        memory = psutil.Process().memory_info()
        self._most_bytes = max(self._most_bytes, memory.rss - getattr(memory, "shared", 0))
        return self._most_bytes / 2**30
