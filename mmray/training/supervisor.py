"""Attempts to train a run until one finishes it: what follows a failure, retries, elasticity and
preemption, on the driver (see README.md). What follows a failure is decided by pure functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmray.engine.bad_rows import load_bad_rows, merge_bad_rows
from mmray.engine.batch import BatchShape
from mmray.engine.checkpoint import files
from mmray.engine.worker_context import result_fields
from mmray.errors import (
    DeviceError,
    ForceExit,
    MmrayError,
    OutOfMemoryError,
    ResourceError,
    StorageError,
    TrainingError,
    UsageError,
)
from mmray.evaluation.build import best_metric
from mmray.machine import torchrun_world_size
from mmray.processes import ChildDied
from mmray.storage.lease import Lease
from mmray.storage.outage import Outage, retry_until_back
from mmray.storage.paths import AnyPath
from mmray.storage.requests import TransientStorageError
from mmray.training import RunReporter
from mmray.training.monitor import (
    WASTED_STEPS,
    AttemptMonitor,
    RunProgress,
    Workers,
    signal_handlers,
)
from mmray.training.resolve import ResolvedRun
from mmray.training.run_dir import RunDir, check_processor, redact_text
from mmray.training.workers.backend import Attempt, Backend

if TYPE_CHECKING:
    from mmray.training.evaluate_beside import BesideEvaluator

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

    README.md lists the kinds.

    Args:
        step: The last logged step, otherwise the step from which the workers resumed.
        logged: Whether the run has logged the metrics of any step.
    """

    kind: str
    error: BaseException
    step: int
    logged: bool = True


def count_failures(failures: int, failure: Failure, progressed: bool) -> int:
    """Return the number of consecutive failures without a new checkpoint.

    A preemption does not count, nor a restart with smaller micro-batches, which ends at one row.
    """
    return (0 if progressed else failures) + (
        failure.kind != "preempted" and retry_shape(failure.error) is None
    )


def retry_shape(error: BaseException) -> BatchShape | None:
    """Return the smaller batch shape to restart with after memory ran out, if there is one."""
    return error.retry_shape if isinstance(error, OutOfMemoryError) else None


def decide_recovery(
    failure: Failure, before: Failure | None, failures: int, max_failures: int
) -> str | MmrayError:
    """Decide whether workers that failed are restarted, or the run ends.

    Args:
        before: The failure before it; None: this is the first.
        failures: Number of consecutive failures without a new checkpoint, this one included.
        max_failures: `cluster.max_failures`, the number that is tolerated.

    Returns:
        The reason of a restart as a line for the log, or the error that ends the run.
    """
    error = failure.error
    if retry_shape(error) is not None:
        return str(error)
    if isinstance(error, MmrayError) and failure.kind == "raised":
        return error
    message = str(error).strip() or type(error).__name__
    if failure.kind == "raised" and not isinstance(error, ChildDied):
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
    return (
        f"{EVENTS[failure.kind]} after step {failure.step}: {message.splitlines()[0].rstrip('.')}"
    )


def _final_error(message: str, cause: BaseException) -> TrainingError:
    """Return a TrainingError with the worker's traceback, which is in a note of `cause`."""
    traceback = "".join(f"{note.rstrip()}\n" for note in vars(cause).get("__notes__", ()))
    return TrainingError(f"{traceback}{message}")


def classify_failure(error: BaseException, monitor: AttemptMonitor, backend: Backend) -> Failure:
    """Return why workers failed: as the monitor has detected, otherwise from their error."""
    kind = "raised"
    cause: BaseException = error
    if monitor.hang is not None:
        kind = "hung"
        cause = TrainingError(monitor.hang)
    elif not isinstance(error, MmrayError):
        failed = backend.find_cause(error, monitor)
        kind = failed.kind
        cause = failed.cause
    # Final if the last save failed: a restart would repeat the steps that no checkpoint has, on the
    # same storage.
    can_repeat = not monitor.trained or monitor.stop_reason in ("resize", "preempted")
    if isinstance(cause, TransientStorageError) or (isinstance(cause, StorageError) and can_repeat):
        kind = "storage"
    return Failure(kind, cause, monitor.progress.last_step, monitor.progress.logged)


class Supervisor:
    """Starts the workers of a run, restarts them after failures, and writes result.json.

    Args:
        lease: The exclusive right of this process to write into the folder.
        starts: The stages of each start for result.json, a list that grows meanwhile.
        should_stop: Called each second; True stops like Ctrl-C.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        run: RunDir,
        lease: Lease,
        reporter: RunReporter,
        backend: Backend,
        starts: list[Any] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read the result of earlier commands; no workers are started."""
        self.resolved = resolved
        self.run = run
        self.lease = lease
        self.reporter = reporter
        self.backend = backend
        self.starts = starts or []
        self.start_s = time.monotonic()
        # The result of the earlier commands for this run.
        self.earlier = run.read_json("result.json")
        self.attempts = self.failures = self.preemptions = self.resizes = 0
        # Checkpoints from this step on were verified, or written by this command.
        self.trusted_from = math.inf
        self.last_failure: Failure | None = None
        self.restart_reason = ""  # the failure of the last attempt, "" if it did not fail
        # Resizes that failed in a row, and the workers of the last group that stopped for one.
        self.failed_resizes = 0
        self.resized_from = 0
        self.progress = RunProgress()
        self.should_stop = should_stop
        self.evaluator: BesideEvaluator | None = None
        if resolved.config.evaluate.where == "beside" and resolved.eval_sets:
            from mmray.training.evaluate_beside import BesideEvaluator  # late: it imports Ray

            self.evaluator = BesideEvaluator(resolved, run, reporter, should_stop)
        meanwhile = "the run continues when it can be used. Mount it, or fix the permissions"
        self._outage = Outage(run.path, partial(reporter.log, label="storage"), meanwhile)

    def train(self) -> dict[str, Any]:
        """Train until the run is finished, cannot be restarted after a failure, or the user stops
        it.

        Returns:
            The content of result.json, which `mmray.Run.result` describes.

        Raises:
            MmrayError: The run failed and is not restarted; result.json has the status `failed`.
            KeyboardInterrupt: The user stopped the run before a group of workers could save a
                checkpoint.
        """
        try:
            while (outcome := self._run_attempt()) is None:
                pass
            if self.evaluator is not None and outcome["status"] == "finished":
                self.reporter.phase("evaluating")
                outcome = self.evaluator.finish(outcome)
        except ForceExit:  # exits at once, without access to the storage
            raise
        except KeyboardInterrupt:
            step = files.latest_complete_step(self.run.checkpoints)
            resume = f"run the same command to resume from step {step:,}, the latest checkpoint"
            self.reporter.log(resume if step else "before the first checkpoint", "stopped")
            raise
        except Exception as error:
            self._write_ended("failed", error=redact_text(str(error)))
            raise
        return self._write_result(outcome)

    def _run_attempt(self) -> dict[str, Any] | None:
        """Run an attempt, unless no step is left; return its outcome, None if another attempt
        follows.
        """
        checkpoint, meta, bad_rows = self._prepare_attempt()
        start_step = 0 if checkpoint is None else files.step_of(checkpoint)
        if checkpoint is not None:
            self.reporter.log(f"from {checkpoint}", "resume")
            if start_step >= self.resolved.steps:
                # workers would have no step to take, and the stream no rows
                return outcome_of(meta)
        elif self.resolved.config.run.resume == "must":
            raise UsageError(
                f"--run.resume must: no valid checkpoint in {self.run.checkpoints}; "
                "--run.resume auto starts from step 0"
            )
        batch_shape, workers = self._start_workers(checkpoint, bad_rows)
        world = batch_shape.world_size
        monitor = AttemptMonitor(
            config=self.resolved.config,
            batch_shape=batch_shape,
            workers=workers,
            reporter=self.reporter,
            total_steps=self.resolved.steps,
            start_step=start_step,
            progress=self.progress,
            retried_errors=self.backend.errors,
            failed_resizes=self.failed_resizes if world == self.resized_from else 0,
            should_stop=self.should_stop,
        )
        try:
            with signal_handlers(monitor.on_signal):
                outcome = workers.wait(partial(self._poll, monitor))
            if outcome["status"] == "finished" or monitor.stop_reason == "user":
                return outcome
            self.restart_reason = ""
            if files.latest_complete_step(self.run.checkpoints) > monitor.start_step:
                self.failures = 0
            self.preemptions += monitor.stop_reason == "preempted"
            if monitor.stop_reason == "resize":
                self.resizes += 1
                self.failed_resizes += 1
                self.resized_from = world
        except self.backend.errors as error:
            self._handle_failure(error, monitor)
        finally:
            if monitor.started and world > self.resized_from:
                self.failed_resizes = 0  # the larger group has started
            with suppress(*self.backend.errors):  # Ray may have ended
                workers.close()
        return None

    def _poll(self, monitor: AttemptMonitor) -> None:
        monitor.poll()
        if self.evaluator is not None:
            self.evaluator.poll()

    def _prepare_attempt(self) -> tuple[AnyPath | None, dict[str, Any], set[int]]:
        """The checkpoint for the next attempt, its meta.json, and the known bad rows.

        A storage that fails between two attempts is waited for.
        """
        self.attempts += 1
        try:
            if self.attempts == 1:
                return self._read_checkpoint()
            return retry_until_back(self._read_checkpoint, self._outage)
        except (StorageError, OSError) as error:
            raise StorageError(
                f"cannot access the storage of {self.run.path}: {error}. Fix it and rerun the same "
                "command to resume"
            ) from error

    def _read_checkpoint(self) -> tuple[AnyPath | None, dict[str, Any], set[int]]:
        """Claim the folder for the next attempt, and return what `_prepare_attempt` does."""
        if self.attempts > 1:
            self.lease.claim_next_token()
            check_processor(self.run.path, self.resolved.config.model)
        if self.trusted_from == math.inf and files.latest_complete_step(self.run.checkpoints):
            self.reporter.status("verifying the checkpoint")
        log = partial(self.reporter.log, label="checkpoint")
        checkpoint = files.latest_valid_checkpoint(
            self.run.checkpoints, log, trusted_from=self.trusted_from
        )
        self.trusted_from = min(
            self.trusted_from, 0 if checkpoint is None else files.step_of(checkpoint)
        )
        if checkpoint is None and self.attempts > 1:
            self.lease.check()  # the folder may have been empty because its storage has vanished
        meta = {} if checkpoint is None else files.load_meta(checkpoint)
        merge_bad_rows(self.run.path)
        return checkpoint, meta, set(load_bad_rows(self.run.path))

    def _handle_failure(self, error: Exception, monitor: AttemptMonitor) -> None:
        """Decide what follows a failure: set `restart_reason`, or raise."""
        failure = classify_failure(error, monitor, self.backend)
        latest_step = files.latest_complete_step(self.run.checkpoints)
        self.failures = count_failures(self.failures, failure, latest_step > monitor.start_step)
        self.preemptions += failure.kind == "preempted"
        decision = decide_recovery(
            failure, self.last_failure, self.failures, self.resolved.config.cluster.max_failures
        )
        if (smaller := retry_shape(failure.error)) is not None:
            self.run.save_smaller_batch(smaller)
        if isinstance(decision, str) and torchrun_world_size() > 1:  # restarts are torchrun's
            decision = TrainingError(f"{decision}; rerun the same command to resume")
        if isinstance(decision, MmrayError):
            raise decision from error
        if monitor.stop_reason == "user":  # the group failed before it could stop
            self._write_ended("stopped", steps=latest_step)
            raise KeyboardInterrupt from error
        self.last_failure = failure
        self.restart_reason = decision
        start = "step 0, as there is no checkpoint yet"
        if latest_step:
            start = f"the checkpoint of step {latest_step:,}"
        elif not self._can_use_storage():
            start = "the latest checkpoint, once the storage can be used"
        self.reporter.log(f"{decision}; restarting from {start}", "failure")
        cause = failure.error
        if isinstance(cause, DeviceError):
            text = "no other node has what the run needs, retrying on the same"
            if self.backend.exclude_node(self.resolved.config, cause.node):
                text = "the node of the device gets no more workers of this run"
            self.reporter.log(f"{text}: {cause}", "device")

    def _can_use_storage(self) -> bool:
        with suppress(TrainingError):  # another process has the folder: the next claim raises it
            try:
                self.lease.check()
            except OSError:
                return False
        return True

    def _start_workers(
        self, checkpoint: AnyPath | None, bad_rows: set[int]
    ) -> tuple[BatchShape, Workers]:
        """Start as many workers as the next attempt can have.

        Returns:
            The batch shape for their number, and the workers.
        """
        if self.resolved.config.cluster.elastic:
            self.reporter.status("counting the workers that fit")
        try:
            world = self.backend.choose_world_size(self.resolved.config)
            self.reporter.status(f"starting {world} worker{'s' * (world > 1)}")
            batch_shape = self.run.smaller_batch(self.resolved.batch_shape.with_world_size(world))
            attempt = Attempt(
                resolved=replace(self.resolved, batch_shape=batch_shape),
                folder=self.run.path,
                fencing_token=self.lease.fencing_token,
                checkpoint=checkpoint,
                bad_rows=bad_rows,
            )
            return batch_shape, self.backend.start(attempt)
        except self.backend.errors as error:
            if isinstance(error, MmrayError):
                raise
            before = f"{self.restart_reason}; then " if self.restart_reason else ""
            message = (
                f"{before}workers could not start: {error}. Rerun the same command to "
                f"resume {self.run.path}"
            )
            raise TrainingError(message) from error

    def _write_result(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Write and return result.json of a run that finished or was stopped."""
        best = None
        metric = best_metric(self.resolved.config)
        with suppress(TrainingError):  # the checkpoints' metadata cannot be read
            if path := files.best_checkpoint(self.run.checkpoints, metric):
                score = files.read_metrics(path)[metric]
                best = {
                    "step": files.step_of(path),
                    "metric": metric.removeprefix("evaluate/"),
                    "score": score,
                }
        try:
            return retry_until_back(
                partial(self._write_json, outcome | {"best": best}), self._outage
            )
        except OSError as error:
            raise ResourceError(
                f"cannot write {self.run.path / 'result.json'} (the weights of step "
                f"{outcome['steps']} are saved in {self.run.checkpoints}): "
                f"{error.strerror or error}. Free disk space (or fix the storage) and rerun the "
                "same command; completed steps are not repeated"
            ) from error

    def _write_ended(self, status: str, **fields: object) -> None:
        """Write result.json unless another process owns the run; a failing storage is logged, not
        raised.
        """
        try:
            self._write_json({"status": status, **fields})
        except (OSError, TrainingError) as failed:
            self.reporter.log(f"cannot write result.json: {failed}", "storage")

    def _write_json(self, outcome: dict[str, Any]) -> dict[str, Any]:
        self.lease.check()
        totals = {
            "restarts": self.attempts - 1,
            "resizes": self.resizes,
            "preemptions": self.preemptions,
            WASTED_STEPS: self.progress.wasted_steps,
            "elapsed_s": time.monotonic() - self.start_s,
        }
        totals = {name: value + self.earlier.get(name, 0) for name, value in totals.items()}
        result = outcome | totals | {"batch": str(self.resolved.batch_shape), "starts": self.starts}
        self.run.write_json("result.json", result)
        return result


def outcome_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run whose checkpoint of the last step exists, without starting
    workers.
    """
    return result_fields(
        meta["metrics"],
        status="finished",
        steps=meta["step"],
        rows_consumed=meta["rows_consumed"],
        skipped_steps=meta["metrics"].get("train/skipped_steps", 0),
    )
