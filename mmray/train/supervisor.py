"""Attempts to train a run until one finishes it: retries, elasticity and preemption, on the driver.

An attempt is a new `TorchTrainer` with a fixed number of workers. Ray retries and resizes nothing; `decide_recovery`
decides what follows a failure, from what the AttemptMonitor observed.

Ray Train's own elasticity, ScalingConfig(num_workers=(1, 4)), is not used: it counts the CPUs of a lost node for 30 s,
each start with too many workers costs the full start timeout, and it ignores label selectors (Ray 2.60). Here the
driver counts the resources of nodes that answer, and a group is replaced by a larger one at a checkpoint, so growing
repeats no step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.train

from mmray.cluster.placement import AutoscalerRequest, LiveNodes, live_nodes
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.bad_samples import load_bad_rows
from mmray.engine.checkpoint import files
from mmray.errors import MmrayError, OutOfMemoryError, ResourceError, StorageError, TrainingError, UsageError
from mmray.evaluate.build import best_metric
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, merge_parts
from mmray.train import run_dir
from mmray.train.coordinator import start_coordinator
from mmray.train.monitor import WASTED_STEPS, AttemptMonitor, ProgressReporter, RunProgress
from mmray.train.resolve import ResolvedRun
from mmray.train.resources import num_fitting_workers, request_nodes, resource_demand
from mmray.train.run_dir import redact_text
from mmray.train.worker_group import build_trainer, find_cause, run_attempt

POLL_INTERVAL_S = 0.5  # of the free resources, while workers of the last attempt release theirs
STABLE_POLLS, MAX_POLLS = 4, 20
# Failures of Ray Train, mmray, the cluster or the storage. Others are bugs, which a retry would repeat.
ATTEMPT_ERRORS = (ray.train.TrainingFailedError, MmrayError, ray.exceptions.RayError, RuntimeError, OSError)
STORAGE_RETRIES_S = (1.0, 5.0, 30.0)  # pauses while the storage fails between two attempts


@dataclass(frozen=True)
class Failure:
    """Cause of a failed attempt.

    Kinds: `lost`: a worker, node or connection was lost; `hung`: a rank made no progress and the group was killed;
    `preempted`: a node was drained; `raised`: code raised an error.
    """

    kind: str
    error: BaseException
    step: int  # last logged step; the first step of an attempt that has logged none
    logged: bool = True  # this attempt or an earlier one logged a step

    def same_as(self, other: Failure | None) -> bool:
        """Return True for the same error at the same step, which a retry would repeat."""
        return (
            other is not None
            and self.kind == other.kind == "raised"
            and (type(self.error), str(self.error), self.step) == (type(other.error), str(other.error), other.step)
        )


@dataclass(frozen=True)
class Restart:
    """Restart from the latest valid checkpoint, with as many workers as fit."""

    reason: str


@dataclass(frozen=True)
class ReduceMicroBatch:
    """Restart from the latest valid checkpoint, with micro-batches of `micro` rows."""

    micro: int
    reason: str


@dataclass(frozen=True)
class Fail:
    """Raise this error."""

    error: MmrayError


def count_failures(failures: int, kind: str, progressed: bool) -> int:
    """Consecutive failures without a new checkpoint, including this one; `failures` before it.

    A preemption is no failure. Occasional failures between checkpoints do not add up, so a long run survives them.
    """
    if kind == "preempted":
        return 0 if progressed else failures
    return 1 if progressed else failures + 1


def decide_recovery(
    failure: Failure, before: Failure | None, failures: int, max_failures: int
) -> Restart | ReduceMicroBatch | Fail:
    """Decide what follows a failure; `before` is that of the previous attempt, `failures` from `count_failures`."""
    error = failure.error
    if isinstance(error, OutOfMemoryError) and error.micro:
        return ReduceMicroBatch(error.micro, str(error))
    if isinstance(error, MmrayError) and failure.kind == "raised":
        return Fail(error)
    message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if failure.same_as(before):
        return Fail(_final_error(f"the same error occurred again after step {failure.step}: {message}", error))
    if failure.kind == "raised" and not failure.logged:
        return Fail(_final_error(f"failed before the first logged step: {message}", error))
    if failures > max_failures and isinstance(error, ResourceError):
        return Fail(error)  # has its exit code and names the fix
    if failures > max_failures:
        count = f"{failures} failures without a new checkpoint (cluster.max_failures {max_failures})"
        return Fail(_final_error(f"{count}; the last: {message}", error))
    return Restart(f"{failure.kind} after step {failure.step}: {message.splitlines()[0]}")


def _final_error(message: str, cause: BaseException) -> TrainingError:
    """Return a TrainingError with the worker's traceback, which is in a note of `cause`."""
    traceback = "".join(f"{note.rstrip()}\n" for note in getattr(cause, "__notes__", ()))
    error = TrainingError(f"{traceback}{message}")
    error.__cause__ = cause
    return error


@dataclass
class RunHistory:
    """Counts and state of a run over its attempts."""

    start_s: float = field(default_factory=time.monotonic)
    attempts: int = 0
    failures: int = 0  # consecutive, see count_failures
    last_failure: Failure | None = None
    checkpoint: AnyPath | None = None  # from which the current attempt started
    placement: tuple[LiveNodes, int] | None = None  # of the next attempt, if known
    resized_from: list[int] = field(default_factory=list)  # sizes of groups that were stopped for a larger one
    preemptions: int = 0
    progress: RunProgress = field(default_factory=RunProgress)

    def failed_resizes(self, world: int) -> int:
        """Return how often a group of this size was stopped for a larger one that did not start."""
        return self.resized_from.count(world)

    def counts(self) -> dict[str, Any]:
        """Fields of result.json."""
        return {
            "restarts": self.attempts - 1,
            "resizes": len(self.resized_from),
            "preemptions": self.preemptions,
            WASTED_STEPS: self.progress.wasted_steps,
            "elapsed_s": time.monotonic() - self.start_s,
        }


def run_attempts(
    resolved: ResolvedRun, run: run_dir.RunDir, lease: Lease, reporter: ProgressReporter
) -> dict[str, Any]:
    """Run attempts until one finishes, recovery fails or the user stops it. Writes and returns result.json."""
    history = RunHistory()
    # Fixed for all attempts: a lost node must not move the run from GPUs to CPUs.
    device = "gpu" if "GPU" in resource_demand(resolved.config).per_worker else "cpu"
    config = resolved.config.with_cluster(accelerator=device)
    autoscaler = AutoscalerRequest(f"mmray-{run.path.name}-{lease.fence}")
    while True:
        checkpoint, known_bad = _prepare_attempt(run, lease, history, reporter)
        if checkpoint is not None:
            reporter.log(f"from {checkpoint}", "resume")
        elif resolved.config.run.resume == "must":
            raise UsageError(
                f"--run.resume must: no valid checkpoint in {run.checkpoints}; --run.resume auto starts from step 0"
            )
        history.checkpoint = checkpoint
        nodes, world = history.placement or choose_world_size(config, autoscaler)
        reporter.status(f"starting {world} workers")
        coordinator, first_step = start_coordinator(known_bad), _step_of(checkpoint)
        monitor = AttemptMonitor(
            config,
            world,
            coordinator,
            reporter,
            resolved.steps,
            first_step,
            history.progress,
            autoscaler,
            history.failed_resizes(world),
        )
        try:
            sized = config.with_cluster(workers=world)
            trainer = build_trainer(resolved, run, lease.fence, history.attempts, sized, nodes, checkpoint, coordinator)
            outcome = run_attempt(trainer, monitor)
            if outcome["status"] == "finished" or monitor.stop_reason == "user":
                break
            history.placement = None
            if _step_of(_latest_checkpoint(run)) > first_step:
                history.failures = 0
            history.preemptions += monitor.stop_reason == "preempted"
            if monitor.stop_reason == "resize":
                history.resized_from.append(world)
        except ATTEMPT_ERRORS as error:
            resolved = _handle_failure(error, resolved, run, lease, history, monitor, config, reporter)
        except Exception as error:
            _write_failed_result(run, lease, _failed_result(error, resolved), history, reporter)
            raise
        finally:
            autoscaler.cancel()
            ray.kill(coordinator)
    return _write_result(run, lease, resolved, outcome, history)


def _prepare_attempt(
    run: run_dir.RunDir, lease: Lease, history: RunHistory, reporter: ProgressReporter
) -> tuple[AnyPath | None, set[int]]:
    """The checkpoint for the next attempt and the known bad rows; a storage that fails in between is retried."""
    history.attempts += 1
    pauses_s = iter(STORAGE_RETRIES_S if history.attempts > 1 else ())
    while True:
        try:
            if history.attempts > 1:
                lease.advance()
            checkpoint = files.latest_valid(run.checkpoints, partial(reporter.log, label="checkpoint"))
            merge_parts(run.path / QUARANTINE)
            return checkpoint, load_bad_rows(run.path)
        except (StorageError, OSError) as error:
            pause_s = next(pauses_s, None)
            message = f"cannot access the storage of {run.path}: {error}"
            if pause_s is None:
                failed = {"status": "failed", "error": redact_text(message)}
                _write_failed_result(run, lease, failed, history, reporter)
                raise StorageError(f"{message}. Fix it and rerun the same command to resume") from error
        reporter.log(f"{message}; retrying in {pause_s:g} s", "storage")
        time.sleep(pause_s)


def classify_failure(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> Failure:
    """Return the cause of a failed attempt."""
    kind, cause = find_cause(error, monitor, resolved)
    return Failure(kind, cause, monitor.progress.last_step, monitor.progress.logged)


def _handle_failure(
    error: Exception,
    resolved: ResolvedRun,
    run: run_dir.RunDir,
    lease: Lease,
    history: RunHistory,
    monitor: AttemptMonitor,
    config: Config,
    reporter: ProgressReporter,
) -> ResolvedRun:
    """Decide what follows a failure: return the run to restart, or write result.json and raise."""
    failure = classify_failure(error, monitor, resolved)
    progressed = _step_of(_latest_checkpoint(run)) > _step_of(history.checkpoint)
    history.failures = count_failures(history.failures, failure.kind, progressed)
    history.preemptions += failure.kind == "preempted"
    decision = decide_recovery(failure, history.last_failure, history.failures, config.cluster.max_failures)
    if isinstance(decision, Fail):
        _write_failed_result(run, lease, _failed_result(decision.error, resolved), history, reporter)
        raise decision.error from error
    if monitor.stop_reason == "user":  # the group failed before it could stop
        stopped = {"status": "stopped", "steps": _step_of(_latest_checkpoint(run)), "batch": str(resolved.shape)}
        _write_failed_result(run, lease, stopped, history, reporter)
        raise KeyboardInterrupt from error
    try:
        history.placement = choose_world_size(config, monitor.autoscaler)
    except (ray.exceptions.RayError, RuntimeError, OSError) as lost:
        message = f"{decision.reason}; then Ray did not respond: {lost}. Rerun the same command to resume {run.path}"
        _write_failed_result(run, lease, _failed_result(TrainingError(message), resolved), history, reporter)
        raise TrainingError(message) from error
    world = history.placement[1]
    with_workers = f" with {world} workers" if world != monitor.world else ""
    reporter.log(f"{decision.reason}; restarting from the latest checkpoint{with_workers}", "failure")
    history.last_failure = failure
    return replace(resolved, micro=decision.micro) if isinstance(decision, ReduceMicroBatch) else resolved


def choose_world_size(config: Config, autoscaler: AutoscalerRequest) -> tuple[LiveNodes, int]:
    """The nodes and the number of workers of the next attempt.

    A fixed number, like the minimum of a range, is requested even if it does not fit: Ray waits, and an autoscaler adds
    nodes. For a range, the maximum is requested, and the workers that fit are counted once the count is stable.
    """
    nodes = live_nodes()
    if not config.cluster.elastic:
        return nodes, config.cluster.max_workers
    request_nodes(config, autoscaler, running=0)
    counts: list[int] = []
    for _ in range(MAX_POLLS):
        counts.append(num_fitting_workers(config, nodes.nodes))
        stable = len(counts) >= STABLE_POLLS and len(set(counts[-STABLE_POLLS:])) == 1
        if counts[-1] == config.cluster.max_workers or (stable and counts[-1]):
            break
        time.sleep(POLL_INTERVAL_S)
        nodes = live_nodes()
    return nodes, max(counts[-1], config.cluster.min_workers)


def _write_result(
    run: run_dir.RunDir, lease: Lease, resolved: ResolvedRun, outcome: dict[str, Any], history: RunHistory
) -> dict[str, Any]:
    """Write and return result.json of a run that finished or was stopped."""
    try:
        lease.check()
        result = {**outcome, **history.counts(), "batch": str(resolved.shape), "best": _best_checkpoint(run, resolved)}
        run.write_json("result.json", result)
    except OSError as error:
        raise ResourceError(
            f"the weights of step {outcome['steps']} are in {run.checkpoints}, but cannot write "
            f"{run.path / 'result.json'}: {error.strerror or error}. Free disk space (or fix the storage) and rerun "
            "the same command; completed steps are not repeated"
        ) from error
    return result


def _write_failed_result(
    run: run_dir.RunDir, lease: Lease, result: dict[str, Any], history: RunHistory, reporter: ProgressReporter
) -> None:
    """Write result.json unless another process owns the run; a failing storage is logged, not raised."""
    try:
        lease.check()
        run.write_json("result.json", {**result, **history.counts()})
    except (OSError, TrainingError) as error:
        reporter.log(f"cannot write result.json: {error}", "storage")


def _failed_result(error: Exception, resolved: ResolvedRun) -> dict[str, Any]:
    return {"status": "failed", "error": redact_text(str(error)), "batch": str(resolved.shape)}


def _best_checkpoint(run: run_dir.RunDir, resolved: ResolvedRun) -> dict[str, Any] | None:
    """The best kept checkpoint; None also if the checkpoints' metadata cannot be read."""
    try:
        return files.best_score(run.checkpoints, best_metric(resolved.config))
    except TrainingError:
        return None


def _latest_checkpoint(run: run_dir.RunDir) -> AnyPath | None:
    """The latest complete checkpoint; it is verified when it is loaded."""
    try:
        return files.latest_complete(run.checkpoints)
    except TrainingError:
        return None


def _step_of(path: AnyPath | None) -> int:
    return 0 if path is None else files.step_of(path)
