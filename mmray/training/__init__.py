"""One run, on Ray or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import PrepareProgress


class RunReporter(Protocol):
    """Receives the progress of a run, such as `mmray.console`, or an object of a user.

    A class implements `log(text, label)` for messages, `status(title)` and `phase(title)` for the
    present activity, `prepare_progress(progress)` for numbers of rows, and `step(metrics,
    total_steps)` for a line of metrics. They are called on the driver's main thread.
    """

    def log(self, text: str, label: str = "") -> None:
        """Receive a message for the user.

        Args:
            text: One or more lines.
            label: What it is about, a word such as `data`; "" for none.
        """

    def status(self, title: str) -> None:
        """Receive the name of the next stage of a start.

        Args:
            title: Such as `starting Ray`; the last one is `training`, when the first step has been
                taken.
        """

    def phase(self, title: str) -> None:
        """Receive the name of work that interrupts or follows the training steps.

        Args:
            title: Such as `evaluating` or `writing the report`.
        """

    def prepare_progress(self, progress: PrepareProgress) -> None:
        """Receive how many rows `prepare` or an evaluation has processed.

        Args:
            progress: `stage` (such as `pack`), `done_rows`, `total_rows` (0: unknown) and
                `bad_rows`.
        """

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Receive a line of metrics.jsonl.

        Args:
            metrics: `step` (number of the step) and values by name, such as `train/loss`.
            total_steps: Number of steps of the run.
        """
