"""Context of a training worker, and its reports to the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.reader import RowReader
from mmray.data.vlm.reader import ConversationReader
from mmray.storage.paths import AnyPath

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.engine.batch import BatchShape
    from mmray.engine.checkpoint.manager import CheckpointManager
    from mmray.engine.heartbeat import Heartbeat


Report = Callable[[dict[str, Any]], Any]
TRAINING = "training"  # the stage that follows the first step


@dataclass(frozen=True)
class WorkerContext:
    """Config, folder and data of the run that a worker trains.

    Attributes:
        config: Settings of the run.
        folder: Folder of the run.
        fencing_token: Number of the claim on the folder with which the workers write; a higher one
            in the folder shows that another process has taken over.
        reader: Reads and encodes rows of the training set.
        eval_sets: The held-out rows by the name of their set, "" for the only set without a name;
            empty: no evaluation.
        tokenizer_json: Content of tokenizer.json.
        batch_shape: Global batch and micro-batch of this start of the workers.
    """

    config: Config
    folder: AnyPath
    fencing_token: int
    reader: RowReader | ConversationReader
    eval_sets: dict[str, PreparedSet]
    tokenizer_json: str
    batch_shape: BatchShape


@dataclass(frozen=True)
class DriverHandle:
    """A worker's connection to the driver; `report` is a no-op except on rank 0.

    `notify(label, text)`, `stage(title)` and `phase(title)` call `report` with a dict of these.

    Attributes:
        report: Called with one dict, one of the messages that `Coordinator.push` lists, such as
            {"stage": title}, which it sends to the driver; does nothing except on rank 0.
        stop_requested: Called without arguments; returns True if the workers must save a checkpoint
            after the next step and end.
        count_bad_row: Called with the number of an unreadable row; returns how many the run has so
            far, 0 if this one was counted before.
        heartbeat: Sends the heartbeats of this rank.
    """

    report: Report
    stop_requested: Callable[[], bool]
    count_bad_row: Callable[[int], int]
    heartbeat: Heartbeat

    def notify(self, label: str, text: str) -> None:
        """Report a line for the console."""
        self.report({"note": text, "label": label})

    def stage(self, title: str) -> None:
        """Report the next stage of the start; any text."""
        self.report({"stage": title})

    def phase(self, title: str) -> None:
        """Report work of all ranks between two steps that takes long."""
        self.report({"phase": title})


@dataclass
class ProgressReporter:
    """Callback of the training loop that reports metrics to the driver.

    After each step it sends up to two dicts: {"stage": "training"} after the first step; and if
    metrics of the step were logged, which is every few steps, these: `step` and values by name such
    as `train/loss`.

    Args:
        report: Called with one dict, which it sends to the driver.
        checkpoints: The checkpoint manager of rank 0, whose failed saves are raised.
    """

    report: Report
    checkpoints: CheckpointManager
    _is_training: bool = False

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Send a logged line to the driver, and raise the error of a save that has failed."""
        if not self._is_training:
            self._is_training = True
            self.report({"stage": TRAINING})
        self.checkpoints.poll()
        if metrics is not None:
            self.report(metrics)


def result_fields(metrics: dict[str, Any], **outcome: object) -> dict[str, Any]:
    """Return the fields of result.json."""
    prefix = "evaluate/"
    scores = {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
    return outcome | {
        "metrics": {name.removeprefix(prefix): value for name, value in metrics.items()},
        "scores": scores,
    }
