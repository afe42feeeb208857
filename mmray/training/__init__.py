"""One run, on Ray or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import PrepareProgress


class RunReporter(Protocol):
    """Receives the progress of a run: the console, or your object that you pass as `reporter=`.

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
            title: A text for people, such as `starting Ray`; the last one is `training`, when the
                first step has been taken.
        """

    def phase(self, title: str) -> None:
        """Receive the name of work that interrupts or follows the training steps.

        Args:
            title: `evaluating`, `saving the last checkpoint`, `writing the report` or `stopping
                Ray`.
        """

    def prepare_progress(self, progress: PrepareProgress) -> None:
        """Receive how many rows have been processed before or without training.

        Args:
            progress: `done_rows`, `total_rows` (0: unknown), `bad_rows` and `stage`: `scan`,
                `pack`, `deduplicate`, `hash` or `tokenize` (rows of a source that is prepared),
                `select` (by a condition), `compare` or `copy` (by `mmray.select`), `count tokens
                of`, `evaluate` or `score`.
        """

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Receive a line of metrics.jsonl.

        Args:
            metrics: `step` (number of the step) and values by name, such as `train/loss`.
            total_steps: Number of steps of the run.
        """
