"""Why an attempt failed, and what follows. Values and pure functions."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import ray.exceptions
import ray.train

from mmray.cluster.ray_internals import START_TIMEOUT_VARIABLE, is_train_error
from mmray.errors import MmrayError, OutOfMemoryError, ResourceError, StorageError, TrainingError
from mmray.train.monitor import AttemptMonitor
from mmray.train.resolve import ResolvedRun

# Errors of collectives that broke or timed out: gloo's, NCCL's, and those of the store through which ranks connect.
COLLECTIVE_ERRORS = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|Connection timed out|No route to host|NCCL|Socket Timeout"
    "|(recv|send) operation to complete|wait timeout after"
)

EVENTS = {"lost": "worker lost", "hung": "worker hung", "preempted": "node preempted", "raised": "worker failed"}


@dataclass(frozen=True)
class Failure:
    """Cause of a failed attempt.

    Kinds: `lost`: a worker, node or connection was lost; `hung`: a rank made no progress and the group was killed;
    `preempted`: a node was drained; `raised`: code raised an error.
    """

    kind: str
    error: BaseException
    step: int  # last logged step, else the step the attempt resumed from
    logged: bool = True  # this attempt or an earlier one logged a step


@dataclass(frozen=True)
class Restart:
    """Restart from the latest valid checkpoint with as many workers as fit."""

    reason: str
    micro: int = 0  # rows of a micro-batch from now on; 0: unchanged


def count_failures(failures: int, kind: str, progressed: bool) -> int:
    """Consecutive failures without a new checkpoint, including this one unless it is a preemption."""
    return (0 if progressed else failures) + (kind != "preempted")


def decide_recovery(failure: Failure, before: Failure | None, failures: int, max_failures: int) -> Restart | MmrayError:
    """Return a restart, or the error that ends the run; `before` is the latest failure of earlier attempts."""
    error = failure.error
    if isinstance(error, OutOfMemoryError) and error.retry_micro:
        return Restart(str(error), error.retry_micro)
    if isinstance(error, MmrayError) and failure.kind == "raised":
        return error
    message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    repeated = (
        before is not None
        and failure.kind == before.kind == "raised"
        and (type(error), str(error), failure.step) == (type(before.error), str(before.error), before.step)
    )
    if repeated:
        return _final_error(f"the same error occurred again after step {failure.step}: {message}", error)
    if failure.kind == "raised" and not failure.logged:
        return _final_error(f"failed before the first logged step: {message}", error)
    if failures > max_failures:
        if isinstance(error, ResourceError):
            return error  # has its exit code and names the fix
        count = f"{failures} failures without a new checkpoint (cluster.max_failures {max_failures})"
        return _final_error(f"{count}; the last: {message}", error)
    return Restart(f"{EVENTS[failure.kind]} after step {failure.step}: {message.splitlines()[0]}")


def _final_error(message: str, cause: BaseException) -> TrainingError:
    """Return a TrainingError with the worker's traceback, which is in a note of `cause`."""
    traceback = "".join(f"{note.rstrip()}\n" for note in getattr(cause, "__notes__", ()))
    return TrainingError(f"{traceback}{message}")


def classify_failure(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> Failure:
    """Return the cause of a failed attempt: from the monitor, otherwise from Ray's error."""
    kind, cause = _find_cause(error, monitor, resolved)
    return Failure(kind, cause, monitor.progress.last_step, monitor.progress.logged)


def _find_cause(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> tuple[str, BaseException]:
    if monitor.hang is not None:
        return "hung", TrainingError(monitor.hang)
    if isinstance(error, MmrayError):
        return "raised", error
    if is_train_error(error, "PreemptionError"):  # if RAY_TRAIN_ENABLE_PREEMPTION_WATCHER is set
        return "preempted", TrainingError("a node was preempted")
    if (timeout_error := start_timeout_error(error)) is not None:
        # An elastic run retries with fewer workers: resources were taken, or a node was lost.
        return "lost" if monitor.world > monitor.config.cluster.min_workers else "raised", timeout_error
    if not isinstance(error, ray.train.WorkerGroupError):
        return "lost", TrainingError(f"Ray Train failed: {error}")
    failures = [getattr(each, "health_check_failure", each) for each in error.worker_failures.values()]
    raised = [each for each in failures if not _is_worker_lost(each)]
    oom_killed = next((each for each in failures if isinstance(each, ray.exceptions.OutOfMemoryError)), None)
    if oom_killed is not None and not raised:
        return "lost", _host_oom_error(oom_killed, monitor, resolved)
    # Errors of mmray first, and of these a lack of memory: the other ranks' errors only follow from it.
    mmray_errors = [each for each in raised if isinstance(each, MmrayError)]
    mmray_errors.sort(key=lambda each: not isinstance(each, OutOfMemoryError))
    cause = next(iter([*mmray_errors, *raised, *failures]), error)
    if isinstance(cause, StorageError) and monitor.stop_reason in ("resize", "preempted"):
        return "lost", cause  # only the checkpoint before the stop failed; this kind is restarted
    if raised:
        return "raised", cause
    return "preempted" if monitor.preempted else "lost", cause


def _is_worker_lost(error: BaseException) -> bool:
    """Return whether a worker was lost; peers of a dead or slow rank only report a broken collective."""
    if isinstance(error, MmrayError):
        return False  # it may quote NCCL running out of memory
    lost = isinstance(error, ray.exceptions.RayError) or is_train_error(error, "WorkerHealthCheckTimeoutError")
    return lost or COLLECTIVE_ERRORS.search(str(error)) is not None


def _host_oom_error(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> OutOfMemoryError:
    """Ray's memory monitor killed a worker: its node, not a device, was out of memory."""
    share = -(-resolved.shape.global_rows // monitor.world)
    micro = min(rows for rows in (monitor.progress.micro, resolved.micro, resolved.shape.micro, share) if rows)
    smaller = micro // 2
    what = f"a node ran out of memory with micro-batches of {micro} rows ({str(error).splitlines()[0]})"
    fix = f"Retrying with micro-batches of {smaller}" if smaller else "Check what else uses memory on that node"
    return OutOfMemoryError(f"{what}. {fix}", retry_micro=smaller)


def start_timeout_error(error: BaseException) -> ResourceError | None:
    """Return the error to raise if Ray Train's error is the start timeout; None for any other."""
    if not is_train_error(getattr(error, "controller_failure", None), "WorkerGroupStartupTimeoutError"):
        return None
    waited_s = float(os.environ[START_TIMEOUT_VARIABLE])
    return ResourceError(
        f"the training workers did not start within {waited_s:g} s (cluster.start_timeout_s): their nodes are in use "
        "or did not start. Check `ray status` on the head, and rerun the same command to resume"
    )
