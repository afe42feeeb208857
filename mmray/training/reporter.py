"""Progress of a run as its driver reports it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from mmray.engine.worker_context import TRAINING

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import PrepareProgress


class RunReporter(Protocol):
    """Receives the progress of a run, such as `mmray.console`, or an object of a user.

    Called on the driver's main thread.
    """

    def log(self, text: str, label: str = "") -> None:
        """Receive a message; the label is a word such as `data`."""

    def status(self, title: str) -> None:
        """Receive the stage of a start; the last is TRAINING."""

    def phase(self, title: str) -> None:
        """Receive what follows or interrupts the steps, such as an evaluation."""

    def prepare_progress(self, progress: PrepareProgress) -> None:
        """Receive the rows that `prepare` or an evaluation has done."""

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Receive a line of metrics.jsonl, and the number of steps of the run."""


class StartTimeline:
    """Passes progress to another reporter; keeps the stages of each start, from the command or a
    restart to step 1.

    start_s: time.monotonic() at the command.
    """

    def __init__(self, reporter: RunReporter, start_s: float) -> None:
        self.log, self.phase, self.step = reporter.log, reporter.phase, reporter.step
        self.prepare_progress = reporter.prepare_progress
        self.starts: list[list[dict[str, Any]]] = [[{"stage": "importing", "at_s": 0.0}]]
        self._reporter, self._start_s = reporter, start_s

    def status(self, title: str) -> None:
        if self.starts[-1][-1]["stage"] == TRAINING:
            self.starts.append([])
        self.starts[-1].append({"stage": title, "at_s": round(time.monotonic() - self._start_s, 2)})
        self._reporter.status(title)
