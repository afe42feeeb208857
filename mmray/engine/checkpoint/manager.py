"""When checkpoints are saved, and the save that runs in the background while training continues."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mmray.engine.checkpoint import files
from mmray.engine.metrics.writers import LogUploader, Metrics, MetricsLog
from mmray.engine.run_state import CheckpointState
from mmray.errors import StorageError, TrainingError
from mmray.evaluation.build import best_metric
from mmray.storage import lease
from mmray.storage.paths import AnyPath

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.engine.checkpoint.state_io import HostStager

MAX_WAIT_S = 10.0  # for the save in progress, while other ranks wait in a collective
RETRY = "Training continues; the next checkpoint is saved as scheduled"


class CheckpointManager:
    """Saves the checkpoints of a run; at most one save is in progress.

    Under DDP only rank 0 has a manager; under FSDP (`sharded`) every rank has one and writes its
    own shard. `fencing_token` is that of rank 0's lease, None on other ranks. `extra` is added to
    each meta.json and must have `world`, the number of ranks. `notify` takes a label and a message.
    Nothing else uses `cpu_group`, a gloo group of all ranks for sharded saves.

    A storage error is logged, and training continues with the previous checkpoint; only the last
    save has to succeed. Any other error, such as a lost lease, is raised by the next call.
    """

    def __init__(
        self,
        folder: AnyPath,
        fencing_token: int | None,
        config: Config,
        extra: dict[str, Any],
        notify: Callable[[str, str], None],
        cpu_group: Any = None,
        sharded: bool = False,
    ):
        self._folder, self._fencing_token, self._config, self._extra = (
            folder,
            fencing_token,
            config,
            extra,
        )
        self._cpu_group, self._sharded = cpu_group, sharded
        self._save_wait_limit_s = (
            None if sharded or extra["world"] == 1 else config.cluster.group_timeout_s / 2
        )
        self._notify = notify
        if fencing_token is not None:
            self.uploader = LogUploader(folder, notify, self._check_lease)
        self._log: MetricsLog | None = None
        self._stager: HostStager | None = None
        self._thread = ThreadPoolExecutor(1, "mmray-checkpoint")
        self._pending: Future[None] | None = None
        self._error: StorageError | None = None  # of the last save
        # last save: wait for the previous one, copy to the host, write
        self.save_duration_s: float | None = None

    def log_from(self, step: int) -> MetricsLog:
        """The log of the steps after `step`."""
        self._log = MetricsLog(self.uploader.local_folder, step, self._notify, self._check_lease)
        return self._log

    def save(
        self, step: int, rows_consumed: int, state: CheckpointState, metrics: Metrics, last: bool
    ) -> float | None:
        """Copy the state to the host and write it in the background; return the seconds that the
        previous save took.

        If that one is still in progress after a while, as on a stalled storage, this save is
        skipped unless it is the `last`: other ranks wait in their next collective. Ranks that write
        shards wait for each other anyway.
        """
        from mmray.engine.checkpoint import state_io  # late: it imports DCP

        start_s = time.perf_counter()
        max_wait_s = self._save_wait_limit_s
        if max_wait_s is not None and not any(name.startswith("evaluate/") for name in metrics):
            # longer for an evaluated step, which may be the best
            max_wait_s = min(MAX_WAIT_S, max_wait_s)
        if self._pending and not wait([self._pending], None if last else max_wait_s).done:
            text = (
                f"skipped the checkpoint of step {step}: the one before is still being "
                f"written. {RETRY}"
            )
            self._notify("checkpoint", text)
            return self.save_duration_s
        self._finish_pending()
        meta = {
            "step": step,
            "rows_consumed": rows_consumed,
            **self._extra,
            "config": self._config.model_dump(mode="json", by_alias=True),
            "metrics": metrics,
        }
        path, before_write = (
            self._folder / "checkpoints" / f"step-{step}",
            partial(self._before_write, step),
        )
        self._stager = self._stager or state_io.HostStager()
        io = (self._cpu_group, self._sharded, self._stager)
        saved = state_io.save_async(path, state, meta, *io, before_write, on_complete=self._prune)

        def finish() -> None:
            with state_io.as_storage_error(path, discards=self._fencing_token is not None):
                saved.result()
            self.save_duration_s = time.perf_counter() - start_s

        self._pending = self._thread.submit(finish)
        return self.save_duration_s

    def poll(self) -> None:
        """Log or raise the error of a save that has ended."""
        if self._pending and self._pending.done():
            self._finish_pending()

    def close(self) -> None:
        """Wait for the last save; raise its error, logged or not. Upload the rest of the logs."""
        try:
            self._wait_pending()
            if self._error is not None:
                raise self._error
        finally:
            self._thread.shutdown(wait=False)
            if self._stager is not None:
                self._stager.close()
            if self._fencing_token is not None:
                self.uploader.close()

    def _finish_pending(self) -> None:
        if self._pending is not None:
            self._wait_pending()
            if self._error is not None:
                self._notify("checkpoint", f"{self._error}. {RETRY}")

    def _wait_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
            self._error = None
        except StorageError as error:
            self._error = error

    def _check_lease(self) -> None:
        assert self._fencing_token is not None
        lease.check_fencing_token(self._folder, self._fencing_token)

    def _before_write(self, step: int) -> None:
        """Check that this run still has the folder, and upload what was logged up to this step."""
        try:
            self._check_lease()
            if self._log is not None:
                self._log.flush()
            self.uploader.upload_changed()
        except OSError as error:
            raise StorageError(
                f"the storage does not answer, so step {step} has no checkpoint: {error}"
            ) from error

    def _prune(self) -> None:
        try:
            files.prune(
                self._folder / "checkpoints",
                self._config.train.keep_checkpoints,
                best_metric(self._config),
            )
        except TrainingError as error:  # the new checkpoint is complete, which is what counts
            self._notify("checkpoint", str(error))


# When to save: after a fixed number of steps, or so rarely that training stalls for a small share
# of the time. Every rank must decide the same, so loop.py broadcasts what rank 0 measured.
COST_FRACTION = 0.02  # of the training time, at most, for checkpoints
# until a save is measured: after so many steps, then after twice as many, and so on
FIRST_STEPS = 10


def steps_between_checkpoints(
    step_s: float | None, stall_s: float, save_duration_s: float | None, steps_taken: int
) -> int:
    """Steps to the next checkpoint from the seconds of a step, of the stall of training for the
    last save, and of a whole save, which the next one must not wait for; None: not measured yet.
    """
    if not step_s or save_duration_s is None:
        return max(FIRST_STEPS, steps_taken)
    return max(
        1, math.ceil(stall_s / (COST_FRACTION * step_s)), math.ceil(save_duration_s / step_s)
    )


@dataclass
class CheckpointSchedule:
    """Decides at which steps a run that resumes after step `first` saves checkpoints."""

    every: int | Literal["auto"]
    first: int
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.first + FIRST_STEPS

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        if self.every == "auto":
            return step >= self._next
        return self.every > 0 and step % self.every == 0

    def saved(self, step: int, steps: int) -> None:
        """Record a save at `step`; with `auto` the next one is `steps` later."""
        self._next = step + steps
