"""When checkpoints are saved, and the save that runs in the background while training continues."""

from __future__ import annotations

import math
import threading
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
from mmray.storage import lease
from mmray.storage.outage import Outage, is_outage, retry_until_back
from mmray.storage.paths import AnyPath

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mmray.engine.checkpoint.staging import HostStager

MAX_WAIT_S = 10.0  # wait for the save in progress, while other ranks wait in a collective
RETRY = "Training continues; the next checkpoint is saved as scheduled"
KEPT = (
    "its steps are kept in memory, and the newest checkpoint is written when the storage can be "
    "used. Mount it, free space or fix the permissions"
)


class CheckpointManager:
    """Saves the checkpoints of a run; at most one save is in progress.

    Under DDP only rank 0 has a manager. Under FSDP every rank has one and writes its own file.

    A save that the storage refuses is repeated every 10 s while training continues, until a newer
    one replaces it; only the last save has to succeed, within an hour. Ranks that save together
    repeat only the last one. Any error that is not of the storage is raised by the next call, for
    example that another process has taken over the run's folder (its lease).

    `save(step, rows_consumed, state, metrics, last)` returns once the state is copied to the host;
    a thread writes it.

    Args:
        folder: folder of the run.
        fencing_token: number of this process's claim on the folder, which is checked before each
            write; None on ranks other than 0.
        meta: values that meta.json of each checkpoint has besides `step`, `rows_consumed`,
            `metrics` and `versions`, JSON values by name; a run gives `config`, `architecture`,
            `world` and `base`.
        notify: called with (label, line), where the label, such as `checkpoint`, is the word that
            the console prints before the line.
        keep: number of newest checkpoints to keep, in addition to the best one by `metric`.
        metric: name of the metric that selects the best checkpoint, such as
            `evaluate/recall_at_1/mean`; lower is better if a part of the name is `loss` or
            `median_rank`.
        max_wait_s: longest wait in seconds of a save for the previous one (10 s for a step that was
            not evaluated, if that is shorter); None: no limit.
        cpu_group: gloo group of all ranks for sharded saves, which nothing else uses; None if this
            process saves alone.
        on_retry: called without arguments before the last save is repeated.

    Attributes:
        save_duration_s: seconds from start to end of the newest finished save; None: none yet.
        uploader: LogUploader of the run's growing files; only on rank 0.
    """

    def __init__(
        self,
        folder: AnyPath,
        fencing_token: int | None,
        meta: dict[str, Any],
        notify: Callable[[str, str], None],
        keep: int,
        metric: str,
        max_wait_s: float | None = None,
        cpu_group: ProcessGroup | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ):
        self._folder = folder
        self._fencing_token = fencing_token
        self._meta = meta
        self._notify = notify
        self._keep = keep
        self._metric = metric
        self._max_wait_s = max_wait_s
        self._cpu_group = cpu_group
        self._on_retry = on_retry
        log = partial(notify, "storage") if fencing_token is not None else lambda _: None
        self._outage = Outage(folder, log, KEPT)
        # Set to end the repetitions of the save in progress.
        self._replaced = threading.Event()
        if fencing_token is not None:
            self.uploader = LogUploader(folder, notify, self._check_lease)
        self._log: MetricsLog | None = None
        self._stager: HostStager | None = None
        self._thread = ThreadPoolExecutor(1, "mmray-checkpoint")
        self._pending: Future[None] | None = None
        # Error of the last save.
        self._error: StorageError | None = None
        # Duration of the last save: wait for the previous one, copy to the host, write.
        self.save_duration_s: float | None = None

    def log_from(self, step: int) -> MetricsLog:
        """Open the metrics log of a run, whose pending lines are written before each checkpoint."""
        self._log = MetricsLog(self.uploader.local_folder, step, self._notify, self._check_lease)
        return self._log

    def save(
        self, step: int, rows_consumed: int, state: CheckpointState, metrics: Metrics, last: bool
    ) -> float | None:
        """Copy the state to the host and write it in the background.

        If the previous save is still in progress after `max_wait_s` of the manager (10 s if the
        step was not evaluated), as on a stalled storage, this save is skipped unless it is the
        `last`: other ranks would otherwise wait in their next collective. Without a limit (None) it
        always waits.

        Args:
            step: The step after which the state was taken.
            rows_consumed: Rows of the sample order up to this step.
            state: Nested dicts of tensors and JSON values: `model` (its state_dict), `optimizer`
                (as `optimizer_state` returns it), `scaler` (state_dict of the loss scaler),
                `progress` (fields of LoopProgress) and, with an EMA of the weights, `average` (its
                state_dict).
            metrics: The line of this step in metrics.jsonl, values by name, for meta.json; empty if
                it was not logged.
            last: Whether no save follows.

        Returns:
            Seconds from start to end of the newest finished save; None if no save has ended.

        Raises:
            TrainingError: Another process has taken over the run.
        """
        from mmray.engine.checkpoint import state_io  # late: it imports DCP

        start_s = time.perf_counter()
        max_wait_s = self._max_wait_s
        is_evaluated = any(name.startswith("evaluate/") for name in metrics)
        # An evaluated step may be the best, so its save waits longer.
        if max_wait_s is not None and not is_evaluated:
            max_wait_s = min(MAX_WAIT_S, max_wait_s)
        self._replaced.set()
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
            **self._meta,
            "metrics": metrics,
        }
        path = self._folder / "checkpoints" / f"step-{step}"
        self._stager = self._stager or state_io.HostStager()
        write = state_io.stage_save(
            path,
            state,
            meta,
            cpu_group=self._cpu_group,
            stager=self._stager,
            before_write=self._before_write,
            on_complete=self._prune,
        )
        self._write_in_background(path, write, last, time.perf_counter() - start_s)
        return self.save_duration_s

    def _write_in_background(
        self, path: AnyPath, write: Callable[[], None], last: bool, staged_s: float
    ) -> None:
        """Write a staged checkpoint in the thread, again while the storage refuses it.

        Args:
            staged_s: Seconds since the start of the save.
        """
        replaced = threading.Event()
        if self._cpu_group is not None and not last:
            replaced.set()
        # The rank waits for the last save only: during others it may hang elsewhere.
        on_retry = self._on_retry if last else lambda: None

        def write_once() -> None:
            start_s = time.perf_counter()
            from mmray.engine.checkpoint import state_io

            with state_io.as_storage_error(path, discards=self._fencing_token is not None):
                write()
            self.save_duration_s = staged_s + time.perf_counter() - start_s

        self._replaced = replaced
        self._pending = self._thread.submit(
            retry_until_back, write_once, self._outage, replaced, on_retry
        )

    def poll(self) -> None:
        """Check whether a save has ended: log its StorageError, raise any other error of it."""
        if self._pending and self._pending.done():
            self._finish_pending()

    def abandon(self) -> None:
        """End the repetitions of a save that the storage refuses, after an error of training."""
        self._replaced.set()

    def wait_saved(self) -> None:
        """Wait for the last save. Raises its StorageError, or TrainingError if the run was taken
        over.
        """
        self._wait_pending()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the last save, and upload the rest of the logs.

        Raises:
            StorageError: The last save failed.
            TrainingError: Another process has taken over the run.
        """
        try:
            self.wait_saved()
        finally:
            self._thread.shutdown(wait=False)
            if self._stager is not None:
                self._stager.close()
            if self._fencing_token is not None:
                self.uploader.close()

    def _finish_pending(self) -> None:
        if self._pending is not None:
            self._wait_pending()
            if self._error is not None and not is_outage(self._error):
                self._notify("checkpoint", f"{self._error}. {RETRY}")

    def _wait_pending(self) -> None:
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        try:
            pending.result()
            self._error = None
        except StorageError as error:
            self._error = error

    def _check_lease(self) -> None:
        assert self._fencing_token is not None
        lease.check_fencing_token(self._folder, self._fencing_token)

    def _before_write(self) -> None:
        """Check that this run still has the folder, and upload what was logged up to this step.

        Raises OSError.
        """
        self._check_lease()
        if self._log is not None:
            self._log.flush()
        self.uploader.upload_changed()

    def _prune(self) -> None:
        try:
            files.prune(self._folder / "checkpoints", self._keep, self._metric)
        except TrainingError as error:
            # The new checkpoint is complete, which is what counts.
            self._notify("checkpoint", str(error))


# When to save: after a fixed number of steps, or so rarely that training stalls for a small share
# of the time. Every rank must decide the same, so loop.py broadcasts what rank 0 measured.

# Largest share of the training time for checkpoints.
COST_FRACTION = 0.02
# Until a save is measured: after so many steps, then after twice as many, and so on.
FIRST_STEPS = 10


def steps_between_checkpoints(
    step_s: float | None, stall_s: float, save_duration_s: float | None, steps_taken: int
) -> int:
    """Return the steps to the next checkpoint: saves stall training for at most 2 % of the time.

    Args:
        step_s: Seconds of a step; None: not measured yet.
        save_duration_s: Seconds of a whole save, which ends before the next one; None: as above.
        steps_taken: Steps since the start; without measurements the interval doubles.
    """
    if not step_s or save_duration_s is None:
        return max(FIRST_STEPS, steps_taken)
    affordable = math.ceil(stall_s / (COST_FRACTION * step_s))
    return max(1, affordable, math.ceil(save_duration_s / step_s))


@dataclass
class CheckpointSchedule:
    """Decides at which steps a run saves checkpoints.

    `is_due(step)` returns whether to save after this step, and `saved(step, steps)` records a
    save.

    Args:
        every: Steps between two checkpoints; 0: none; "auto": at the steps that `saved` sets, at
            first after 10 steps.
        first: Step after which the run starts or resumes.
    """

    every: int | Literal["auto"]
    first: int
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.first + FIRST_STEPS

    def is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after this step (counted from 1)."""
        if self.every == "auto":
            return step >= self._next
        return self.every > 0 and step % self.every == 0

    def saved(self, step: int, steps: int) -> None:
        """Record a save; if `every` is "auto", the next one is due after `steps` further steps."""
        self._next = step + steps
