"""Attempts to train a run, until one brings it to its end: the driver's part, from the run's folder to result.json.

An attempt is one fresh `TorchTrainer` with a fixed number of workers. Ray itself retries and resizes nothing: what
happens after a failure is decided in one place (policy.py), on what guard.py and the board saw.

Why not Ray's own elasticity, ScalingConfig(num_workers=(1, 4)): its coordinator counts the CPUs of a node that vanished
for another half minute, each try with a number that cannot start costs the whole start timeout, and it ignores label
selectors, so that it counts places where no worker may go (Ray 2.60, train/v2/_internal/execution/scaling_policy/
elastic.py). Here the driver counts the places of nodes that answer, and a group gives way to a larger one at a
checkpoint of its own, so that growing costs no step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.train

from mmray.cluster.autoscaling import AutoscalerRequest
from mmray.cluster.placement import LiveNodes, live_nodes
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.bad_samples import load_bad_rows
from mmray.engine.checkpoint import files
from mmray.errors import MmrayError, ResourceError, StorageError, TrainingError, UsageError
from mmray.evaluate.build import best_metric
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, merge_parts
from mmray.train import run_dir
from mmray.train.coordinator import WASTED, ProgressReporter, RunMonitor, start_coordinator
from mmray.train.monitor import AttemptMonitor
from mmray.train.policy import Fail, Failure, ReduceMicroBatch, count_failures, decide_recovery
from mmray.train.resources import num_fitting_workers, request_nodes, resource_demand
from mmray.train.run_dir import redact_text
from mmray.train.worker_group import ResolvedRun, build_trainer, classify_failure, run_attempt

SETTLE_S = 0.5  # between two looks at what is free, while the workers of the attempt before let go of their places
SAME_LOOKS, MOST_LOOKS = 4, 20
# What an attempt ends with: Ray Train's word, our own, or a cluster or storage that does not answer.
ATTEMPT_ERRORS = (ray.train.TrainingFailedError, MmrayError, ray.exceptions.RayError, RuntimeError, OSError)
STORAGE_PAUSES_S = (1.0, 5.0, 30.0)  # until a storage that fails between two attempts is asked again


@dataclass
class RunHistory:
    """What a run has gone through so far."""

    began_s: float = field(default_factory=time.monotonic)
    attempts: int = 0
    failures: int = 0  # in a row, see policy.spent
    before: Failure | None = None
    newest: AnyPath | None = None
    place: tuple[LiveNodes, int] | None = None  # of the next attempt, where it was looked at already
    resized_from: list[int] = field(default_factory=list)  # numbers of workers that were given up for larger ones
    preemptions: int = 0
    run_monitor: RunMonitor | None = None  # of the last attempt

    def failed_resizes(self, workers: int) -> int:
        """How often a group of this size was given up before: others took the room, or Ray placed it otherwise."""
        return self.resized_from.count(workers)

    def counts(self) -> dict[str, Any]:
        """What result.json says of it."""
        return {
            "restarts": self.attempts - 1,
            "resizes": len(self.resized_from),
            "preemptions": self.preemptions,
            WASTED: self.run_monitor.wasted_steps if self.run_monitor else 0,
            "elapsed_s": time.monotonic() - self.began_s,
        }


def run_attempts(ready: ResolvedRun, run: run_dir.RunDir, lease: Lease, reporter: ProgressReporter) -> dict[str, Any]:
    """Attempts until one ends the run, the policy gives up, or the user stops it. Writes result.json either way."""
    history = RunHistory()
    # For all attempts: fewer nodes must not change it.
    device = "gpu" if "GPU" in resource_demand(ready.config).per_worker else "cpu"
    wanted = ready.config.with_cluster(accelerator=device)
    autoscaler = AutoscalerRequest(f"mmray-{run.path.name}-{lease.fence}")
    while True:
        found, known_bad = _prepare_attempt(run, lease, history, reporter)
        if found is not None:
            reporter.log(f"from {found}", "going on")
        elif ready.config.run.resume == "must":
            raise UsageError(f"--run.resume must: {run.checkpoints} has no good checkpoint; `auto` would begin anew")
        history.newest = found
        now, workers = history.place or choose_world_size(wanted, autoscaler)
        request_nodes(wanted, autoscaler, workers)
        reporter.status(f"starting {workers} workers")
        coordinator, first_step = start_coordinator(known_bad), _step_of(found)
        run_monitor = history.run_monitor = (
            history.run_monitor or RunMonitor(coordinator, reporter, ready.steps)
        ).over(coordinator, first_step)
        monitor = AttemptMonitor(wanted, workers, run_monitor, first_step, history.failed_resizes(workers), autoscaler)
        try:
            sized = wanted.with_cluster(workers=workers)
            trainer = build_trainer(ready, run, lease.fence, history.attempts, sized, now, found, coordinator)
            outcome = run_attempt(trainer, run_monitor, monitor)
            if outcome["status"] == "finished" or run_monitor.stop_reason == "user":
                break
            history.place = None
            if (
                _step_of(_latest_checkpoint(run)) > first_step
            ):  # given up at a checkpoint of its own, which begins a new row
                history.failures = 0
            history.preemptions += run_monitor.stop_reason == "preempted"
            if run_monitor.stop_reason == "resize":
                history.resized_from.append(workers)
        except (
            ATTEMPT_ERRORS
        ) as error:  # anything else is a mistake of this code, and another attempt would meet it again
            ready = _handle_failure(error, ready, run, lease, history, monitor, wanted, reporter)
        except Exception as error:
            _write_failed_result(run, lease, _failed_result(error, ready), history, reporter)
            raise
        finally:
            autoscaler.end()
            ray.kill(coordinator)
    return _write_result(run, lease, ready, outcome, history)


def _write_result(
    run: run_dir.RunDir, lease: Lease, ready: ResolvedRun, outcome: dict[str, Any], history: RunHistory
) -> dict[str, Any]:
    """Write result.json of a run that came to its end, or was stopped; returns what it says."""
    try:
        lease.check()
        best = _best_checkpoint(run, ready)
        result = {**outcome, **history.counts(), "batch": str(ready.shape), "best": best}
        run.write_json("result.json", result)
    except OSError as error:
        raise ResourceError(
            f"the weights of step {outcome['steps']} are in {run.checkpoints}, but {run.path / 'result.json'} is not "
            f"written: {error.strerror or error}. Make room (or mend the storage) and give the same command again: it "
            "takes no step twice"
        ) from error
    return result


def _best_checkpoint(run: run_dir.RunDir, ready: ResolvedRun) -> dict[str, Any] | None:
    """The best checkpoint that is kept; None also where their notes cannot be read, which is no reason to fail."""
    try:
        return files.best_score(run.checkpoints, best_metric(ready.config))
    except TrainingError:
        return None


def _prepare_attempt(
    run: run_dir.RunDir, lease: Lease, history: RunHistory, reporter: ProgressReporter
) -> tuple[AnyPath | None, set[int]]:
    """The checkpoint from which the next attempt goes on, and the bad rows that earlier ones have named.

    A storage that does not answer between two attempts is asked again before the run is given up for it.
    """
    history.attempts += 1
    pauses_s = iter(STORAGE_PAUSES_S if history.attempts > 1 else ())
    while True:
        try:
            if history.attempts > 1:
                lease.advance()
            found = files.latest_valid(run.checkpoints, partial(reporter.log, label="checkpoint"))
            merge_parts(run.path / QUARANTINE)
            return found, load_bad_rows(run.path)
        except (StorageError, OSError) as error:
            pause_s = next(pauses_s, None)
            told = f"the storage of {run.path} fails: {error}"
            if pause_s is None:
                _write_failed_result(run, lease, {"status": "failed", "error": redact_text(told)}, history, reporter)
                raise StorageError(f"{told}. Mend it, and the same command goes on") from error
        reporter.log(f"{told}; asking it again in {pause_s:g} s", "storage")
        time.sleep(pause_s)


def _handle_failure(
    error: Exception,
    ready: ResolvedRun,
    run: run_dir.RunDir,
    lease: Lease,
    history: RunHistory,
    monitor: AttemptMonitor,
    wanted: Config,
    reporter: ProgressReporter,
) -> ResolvedRun:
    """Decide what follows a failure: returns what the run goes on with, and raises where it does not."""
    failure = classify_failure(error, monitor, ready)
    progressed = _step_of(_latest_checkpoint(run)) > _step_of(history.newest)
    history.failures = count_failures(history.failures, failure.kind, progressed)
    history.preemptions += failure.kind == "preempted"
    verdict = decide_recovery(failure, history.before, history.failures, wanted.cluster.max_failures)
    if isinstance(verdict, Fail):
        _write_failed_result(run, lease, _failed_result(verdict.error, ready), history, reporter)
        raise verdict.error from error
    if monitor.run_monitor.stop_reason == "user":  # the group failed before it could stop; what it wrote stands
        stopped = {"status": "stopped", "steps": _step_of(_latest_checkpoint(run)), "batch": str(ready.shape)}
        _write_failed_result(run, lease, stopped, history, reporter)
        raise KeyboardInterrupt from error
    try:
        history.place = choose_world_size(wanted, monitor.autoscaler)
    except (ray.exceptions.RayError, RuntimeError, OSError) as gone:
        told = f"{verdict.reason}; then Ray did not answer any more: {gone}. The same command goes on from {run.path}"
        _write_failed_result(run, lease, _failed_result(TrainingError(told), ready), history, reporter)
        raise TrainingError(told) from error
    fits = history.place[1]
    with_workers = f", with room for {fits} workers" if fits != monitor.world else ""
    reporter.log(f"{verdict.reason}; starting again from the newest checkpoint{with_workers}", "failure")
    history.before = failure
    return replace(ready, micro=verdict.micro) if isinstance(verdict, ReduceMicroBatch) else ready


def _failed_result(error: Exception, ready: ResolvedRun) -> dict[str, Any]:
    return {"status": "failed", "error": redact_text(str(error)), "batch": str(ready.shape)}


def _write_failed_result(
    run: run_dir.RunDir, lease: Lease, ended: dict[str, Any], history: RunHistory, reporter: ProgressReporter
) -> None:
    """Write result.json, unless another training has the run now.

    A storage that does not take it is told, and what ended the run is still what is raised.
    """
    try:
        lease.check()
        run.write_json("result.json", {**ended, **history.counts()})
    except (OSError, TrainingError) as error:
        reporter.log(f"result.json is not written: {error}", "storage")


def choose_world_size(wanted: Config, autoscaler: AutoscalerRequest) -> tuple[LiveNodes, int]:
    """The nodes to start on, and the number of workers to start there.

    A fixed number is asked for whatever is free, and so is the smallest one: Ray waits for it, and an autoscaler adds
    nodes for it. In between, an autoscaler is asked for the most, and what fits is counted when nothing that ended a
    moment ago holds places any more.
    """
    now = live_nodes()
    if not wanted.cluster.elastic:
        return now, wanted.cluster.max_workers
    request_nodes(wanted, autoscaler, running=0)
    counts: list[int] = []
    for _ in range(MOST_LOOKS):
        counts.append(num_fitting_workers(wanted, now.nodes))
        settled = len(counts) >= SAME_LOOKS and len(set(counts[-SAME_LOOKS:])) == 1
        if counts[-1] == wanted.cluster.max_workers or (settled and counts[-1]):
            break
        time.sleep(SETTLE_S)
        now = live_nodes()
    return now, max(counts[-1], wanted.cluster.min_workers)


def _latest_checkpoint(run: run_dir.RunDir) -> AnyPath | None:
    """The newest checkpoint that was written to its end; whether it can be read and is sound shows when it is taken."""
    try:
        return files.latest_complete(run.checkpoints)
    except TrainingError:
        return None


def _step_of(path: AnyPath | None) -> int:
    return 0 if path is None else files.step_of(path)
