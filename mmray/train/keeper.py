"""What rank 0 keeps of a run while it trains: its checkpoints and the files that grow. For worker.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mmray.data.remote import Folder
from mmray.errors import StorageError, TrainingError
from mmray.evaluate.choose import best_by
from mmray.train import checkpoint, lease
from mmray.train.growing import Growing
from mmray.train.telemetry import MetricsLog
from mmray.train.writer import Writer

if TYPE_CHECKING:
    from mmray.config import Config


class Keeper:
    """Writes checkpoints beside the training into `folder`, as the holder of the lease `fence`.

    `about` goes into each meta.json. `tell` hears, with a label, what the storage did not take while the run goes on.
    """

    def __init__(
        self, folder: Folder, fence: int, config: Config, about: dict[str, Any], tell: Callable[[str, str], None]
    ):
        self._folder, self._config, self._about = folder, config, about
        self._check = partial(lease.check, folder, fence)
        self._tell_storage, self._tell = partial(tell, "storage"), partial(tell, "checkpoint")
        self.growing = Growing(folder, self._tell_storage, self._check)
        self.writer = Writer(self._tell)

    def log_from(self, step: int) -> MetricsLog:
        """The log of the steps after `step`."""
        return MetricsLog(self.growing.here, step, self._tell_storage, self._check)

    def save(self, step: int, rows_consumed: int, state: dict[str, Any], metrics: dict[str, Any]) -> float | None:
        """Have a checkpoint written; answers what the one before cost, in seconds."""
        meta = {
            "step": step,
            "rows_consumed": rows_consumed,
            **self._about,
            "config": self._config.model_dump(mode="json", by_alias=True),
            "metrics": metrics,
        }
        self.writer.submit(state, partial(self._write, step, meta))
        return self.writer.cost_s

    def close(self) -> None:
        """The last checkpoint is there, or its error is raised, and all that was logged."""
        try:
            self.writer.close()
        finally:
            self.growing.close()

    def _write(self, step: int, meta: dict[str, Any], state: dict[str, Any]) -> None:
        """Write a checkpoint, unless another run has taken the folder over; first what was logged up to it."""
        try:
            self._check()
            self.growing.push()
        except OSError as error:
            raise StorageError(f"the storage does not answer, so step {step} has no checkpoint: {error}") from error
        model_state = state.pop("model")
        checkpoint.save(self._folder / "checkpoints", step, model_state, state, meta)
        try:
            checkpoint.prune(self._folder / "checkpoints", self._config.train.keep_checkpoints, best_by(self._config))
        except TrainingError as error:  # the new one is there, which is what counts
            self._tell(str(error))
