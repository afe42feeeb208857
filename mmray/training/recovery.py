"""Classify the failure of an attempt and decide the recovery. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from mmray.engine.batch import BatchShape
from mmray.errors import MmrayError, OutOfMemoryError, ResourceError, StorageError, TrainingError
from mmray.storage.requests import TransientStorageError
from mmray.training.backend import Backend
from mmray.training.monitor import AttemptMonitor

EVENTS = {
    "lost": "worker lost",
    "hung": "worker hung",
    "preempted": "node preempted",
    "device": "device failed",
    "storage": "storage failed",
    "raised": "worker failed",
}


@dataclass(frozen=True)
class Failure:
    """Cause of a failure of the workers, after which they are restarted or the run ends.

    Kinds: `lost`: a worker, node or connection was lost; `hung`: a rank made no progress and the
    group was killed; `preempted`: a node was drained; `device`: a GPU or its link failed;
    `storage`: data, a checkpoint or the log could not be read; `raised`: code raised an error.

    Args:
        kind: One of these kinds.
        error: The error.
        step: The last logged step, otherwise the step from which the workers resumed.
        logged: Whether the run has logged a step.
    """

    kind: str
    error: BaseException
    step: int  # last logged step, else the step the attempt resumed from
    logged: bool = True  # this attempt or an earlier one logged a step


@dataclass(frozen=True)
class Restart:
    """Decision to restart from the latest valid checkpoint with as many workers as fit.

    Args:
        reason: A line for the log.
        batch_shape: Batch shape from now on; None: unchanged.
    """

    reason: str
    batch_shape: BatchShape | None = None  # from now on; None: unchanged


def count_failures(failures: int, failure: Failure, progressed: bool) -> int:
    """Return the number of consecutive failures without a new checkpoint, including a new one if it
    counts.

    Preemptions do not count, nor do restarts with smaller micro-batches, whose number is limited
    because a micro-batch has at least one row.

    Args:
        failures: The number before.
        failure: The new failure, with its kind such as `preempted`.
        progressed: Whether a checkpoint was saved since the failure before, which resets the
            number.
    """
    return (0 if progressed else failures) + (
        failure.kind != "preempted" and retry_shape(failure.error) is None
    )


def retry_shape(error: BaseException) -> BatchShape | None:
    """Return the batch shape (with smaller micro-batches) to restart with after memory ran out.

    Args:
        error: The error of the workers.

    Returns:
        The smaller shape of an OutOfMemoryError; None for another error, or if it cannot be
        smaller.
    """
    return error.retry_shape if isinstance(error, OutOfMemoryError) else None


def decide_recovery(
    failure: Failure, before: Failure | None, failures: int, max_failures: int
) -> Restart | MmrayError:
    """Decide whether workers that failed are restarted, or the run ends.

    Args:
        failure: The failure: its kind (such as `lost` or `raised`), its error and the last step.
        before: The failure before it; None: this is the first.
        failures: Number of consecutive failures without a new checkpoint, this one included.
        max_failures: `cluster.max_failures`, the number that is tolerated.

    Returns:
        A restart, or the error that ends the run. Running out of memory leads to a restart with
        smaller micro-batches, if they can be smaller. The run ends for an error of mmray that a
        worker raised (wrong data, for example), an error that is repeated after the same step, an
        error before the first logged step, and too many failures.
    """
    error = failure.error
    if (batch_shape := retry_shape(error)) is not None:
        return Restart(str(error), batch_shape)
    if isinstance(error, MmrayError) and failure.kind == "raised":
        return error
    message = str(error).strip() or type(error).__name__
    if failure.kind == "raised":
        message = f"{type(error).__name__}: {message}"
    repeated = (
        before is not None
        and failure.kind == before.kind == "raised"
        and (type(error), str(error), failure.step)
        == (type(before.error), str(before.error), before.step)
    )
    if repeated:
        return _final_error(
            f"the same error occurred again after step {failure.step}: {message}", error
        )
    if failure.kind == "raised" and not failure.logged:
        return _final_error(f"failed before the first logged step: {message}", error)
    if failures > max_failures:
        if isinstance(error, ResourceError | StorageError):
            return error  # has its exit code and names the fix
        count = (
            f"{failures} failures without a new checkpoint (cluster.max_failures {max_failures})"
        )
        return _final_error(f"{count}; the last: {message}", error)
    return Restart(
        f"{EVENTS[failure.kind]} after step {failure.step}: {message.splitlines()[0].rstrip('.')}"
    )


def _final_error(message: str, cause: BaseException) -> TrainingError:
    """Return a TrainingError with the worker's traceback, which is in a note of `cause`."""
    traceback = "".join(f"{note.rstrip()}\n" for note in getattr(cause, "__notes__", ()))
    return TrainingError(f"{traceback}{message}")


def classify_failure(error: BaseException, monitor: AttemptMonitor, backend: Backend) -> Failure:
    """Return why workers failed: as the monitor has detected, otherwise from their error.

    Args:
        error: The error that the workers raised.
        monitor: The monitor of the workers, which detects hangs and preemptions.
        backend: Finds the cause of errors of Ray or a process.

    Returns:
        Kind of the failure (such as `lost`, `hung` or `raised`), its error, and the last step.
    """
    kind = "raised"
    cause = error
    if monitor.hang is not None:
        kind = "hung"
        cause = TrainingError(monitor.hang)
    elif not isinstance(error, MmrayError):
        kind, cause = backend.find_cause(error, monitor)
    # Final if the last save failed: a restart would repeat the steps that no checkpoint has, on the
    # same storage.
    can_repeat = not monitor.trained or monitor.stop_reason in ("resize", "preempted")
    if isinstance(cause, TransientStorageError) or (isinstance(cause, StorageError) and can_repeat):
        kind = "storage"
    return Failure(kind, cause, monitor.progress.last_step, monitor.progress.logged)
