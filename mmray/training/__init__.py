"""One run, on Ray or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import PrepareProgress


class RunReporter(Protocol):
    """Receives the progress of a run, such as `mmray.console`, or an object of a user.

    Called on the driver's main thread.
    """

    def log(self, text: str, label: str = "") -> None:
        """Receive a message; the label is a word such as `data`."""

    def status(self, title: str) -> None:
        """Receive the stage of a start; the last is `mmray.engine.worker_context.TRAINING`."""

    def phase(self, title: str) -> None:
        """Receive what follows or interrupts the steps, such as an evaluation."""

    def prepare_progress(self, progress: PrepareProgress) -> None:
        """Receive the rows that `prepare` or an evaluation has done."""

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Receive a line of metrics.jsonl, and the number of steps of the run."""
