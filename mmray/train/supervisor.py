"""Attempts to train a run until one finishes it: retries, elasticity and preemption, on the driver (see README.md)."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.train

from mmray.cluster.capacity import num_workers_that_fit
from mmray.cluster.placement import AutoscalerRequest, SchedulableNodes, schedulable_nodes
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.bad_samples import load_bad_rows
from mmray.engine.checkpoint import files
from mmray.errors import MmrayError, ResourceError, StorageError, TrainingError, UsageError
from mmray.evaluate.build import best_metric
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, merge_appended_lines
from mmray.train.coordinator import start_coordinator
from mmray.train.monitor import WASTED_STEPS, AttemptMonitor, RunProgress, RunReporter
from mmray.train.recovery import Failure, Restart, classify_failure, count_failures, decide_recovery
from mmray.train.resolve import ResolvedRun
from mmray.train.resources import request_nodes, resource_demand
from mmray.train.run_dir import RunDir, redact_text
from mmray.train.worker_group import build_trainer, run_attempt

POLL_INTERVAL_S = 0.5  # of the free resources, while workers of the last attempt release theirs
STABLE_POLLS, MAX_POLLS = 4, 20
# Failures of Ray Train, mmray, the cluster or the storage. Others are bugs, which a retry would repeat.
ATTEMPT_ERRORS = (ray.train.TrainingFailedError, MmrayError, ray.exceptions.RayError, RuntimeError, OSError)
STORAGE_RETRIES_S = (1.0, 5.0, 30.0)  # pauses while the storage fails between two attempts


class Supervisor:
    """Runs the attempts of one run; writes result.json. `config` has the range of workers that the user set."""

    def __init__(self, resolved: ResolvedRun, run: RunDir, lease: Lease, reporter: RunReporter) -> None:
        self.resolved, self.run, self.lease, self.reporter = resolved, run, lease, reporter
        self.config = resolved.config
        self.autoscaler = AutoscalerRequest(f"mmray-{run.path.name}-{lease.fencing_token}")
        self.start_s, self.earlier = time.monotonic(), run.read_json("result.json") or {}  # of earlier commands
        self.attempts = self.failures = self.preemptions = self.resizes = 0
        self.last_failure: Failure | None = None
        self.restart: Restart | None = None  # the decision after the last attempt, if it failed
        self.failed_resizes: list[int] = []  # one per resize: the workers of the group that stopped for a larger one
        self.progress = RunProgress()

    def train(self) -> dict[str, Any]:
        """Run attempts until one finishes, recovery fails or the user stops it. Writes and returns result.json."""
        # Fixed for all attempts: a lost node must not move the run from GPUs to CPUs.
        device = "gpu" if "GPU" in resource_demand(self.config).per_worker else "cpu"
        self.config = self.config.with_cluster(accelerator=device)
        while True:
            checkpoint, bad_rows = self._prepare_attempt()
            if checkpoint is not None:
                self.reporter.log(f"from {checkpoint}", "resume")
            elif self.config.run.resume == "must":
                raise UsageError(
                    f"--run.resume must: no valid checkpoint in {self.run.checkpoints}; "
                    "--run.resume auto starts from step 0"
                )
            nodes, world = self._choose_nodes()
            self.reporter.status(f"starting {world} workers")
            start_step = files.step_of(checkpoint) if checkpoint is not None else 0
            coordinator = start_coordinator(bad_rows)
            monitor = AttemptMonitor(
                config=self.config,
                world=world,
                coordinator=coordinator,
                reporter=self.reporter,
                total_steps=self.resolved.steps,
                start_step=start_step,
                progress=self.progress,
                autoscaler=self.autoscaler,
                failed_resizes=self.failed_resizes.count(world),
            )
            try:
                attempt_config = self.config.with_cluster(workers=world)
                trainer = build_trainer(
                    self.resolved, self.run, self.lease.fencing_token, attempt_config, nodes, checkpoint, coordinator
                )
                outcome = run_attempt(trainer, monitor)
                if outcome["status"] == "finished" or monitor.stop_reason == "user":
                    break
                self.restart = None
                if self._latest_step() > start_step:
                    self.failures = 0
                self.preemptions += monitor.stop_reason == "preempted"
                if monitor.stop_reason == "resize":
                    self.resizes += 1
                    self.failed_resizes.append(world)
            except ATTEMPT_ERRORS as error:
                self._handle_failure(error, monitor)
            except Exception as error:
                self._write_ended("failed", error)
                raise
            finally:
                if monitor.started:
                    # A group of `world` workers started, so resizes from fewer succeeded.
                    self.failed_resizes = [workers for workers in self.failed_resizes if workers >= world]
                self.autoscaler.cancel()
                ray.kill(coordinator)
        return self._write_result(outcome)

    def _prepare_attempt(self) -> tuple[AnyPath | None, set[int]]:
        """The checkpoint for the next attempt and the known bad rows; a storage that fails in between is retried."""
        self.attempts += 1
        pauses_s = iter(STORAGE_RETRIES_S if self.attempts > 1 else ())
        while True:
            try:
                if self.attempts > 1:
                    self.lease.claim_next_token()
                checkpoint = files.latest_valid(self.run.checkpoints, partial(self.reporter.log, label="checkpoint"))
                merge_appended_lines(self.run.path / QUARANTINE)
                return checkpoint, load_bad_rows(self.run.path)
            except (StorageError, OSError) as error:
                pause_s = next(pauses_s, None)
                message = f"cannot access the storage of {self.run.path}: {error}"
                if pause_s is None:
                    failed = StorageError(f"{message}. Fix it and rerun the same command to resume")
                    self._write_ended("failed", failed)
                    raise failed from error
            self.reporter.log(f"{message}; retrying in {pause_s:g} s", "storage")
            time.sleep(pause_s)

    def _handle_failure(self, error: Exception, monitor: AttemptMonitor) -> None:
        """Decide what follows a failure: set `restart`, or write result.json and raise."""
        failure, latest_step = classify_failure(error, monitor, self.resolved), self._latest_step()
        self.failures = count_failures(self.failures, failure.kind, latest_step > monitor.start_step)
        self.preemptions += failure.kind == "preempted"
        decision = decide_recovery(failure, self.last_failure, self.failures, self.config.cluster.max_failures)
        if isinstance(decision, MmrayError):
            self._write_ended("failed", decision)
            raise decision from error
        if monitor.stop_reason == "user":  # the group failed before it could stop
            self._write_ended("stopped", steps=latest_step)
            raise KeyboardInterrupt from error
        self.last_failure, self.restart = failure, decision
        if decision.micro:
            self.resolved = replace(self.resolved, micro=decision.micro)
        start = f"the checkpoint of step {latest_step:,}" if latest_step else "step 0, as there is no checkpoint yet"
        self.reporter.log(f"{decision.reason}; restarting from {start}", "failure")

    def _choose_nodes(self) -> tuple[SchedulableNodes, int]:
        """The nodes and the number of workers of the next attempt. Raises TrainingError if Ray ended."""
        try:
            return choose_world_size(self.config, self.autoscaler)
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            before = f"{self.restart.reason}; then " if self.restart is not None else ""
            message = f"{before}Ray did not respond: {error}. Rerun the same command to resume {self.run.path}"
            failed = TrainingError(message)
            self._write_ended("failed", failed)
            raise failed from error

    def _write_result(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Write and return result.json of a run that finished or was stopped."""
        best = None
        with suppress(TrainingError):  # the checkpoints' metadata cannot be read
            best = files.best_score(self.run.checkpoints, best_metric(self.resolved.config))
        try:
            return self._write_json(outcome | {"best": best})
        except OSError as error:
            raise ResourceError(
                f"the weights of step {outcome['steps']} are in {self.run.checkpoints}, but cannot write "
                f"{self.run.path / 'result.json'}: {error.strerror or error}. Free disk space (or fix the storage) "
                "and rerun the same command; completed steps are not repeated"
            ) from error

    def _write_ended(self, status: str, error: Exception | None = None, **fields: Any) -> None:
        """Write result.json unless another process owns the run; a failing storage is logged, not raised."""
        if error is not None:
            fields["error"] = redact_text(str(error))
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
        result = outcome | totals | {"batch": str(self.resolved.shape)}
        self.run.write_json("result.json", result)
        return result

    def _latest_step(self) -> int:
        """The step of the latest complete checkpoint, which is verified when it is loaded; 0 without one."""
        with suppress(TrainingError):
            if (path := files.latest_complete(self.run.checkpoints)) is not None:
                return files.step_of(path)
        return 0


def choose_world_size(config: Config, autoscaler: AutoscalerRequest) -> tuple[SchedulableNodes, int]:
    """The nodes and the number of workers of the next attempt: of a range, as many as fit and at least the minimum."""
    nodes = schedulable_nodes()
    if not config.cluster.elastic:
        return nodes, config.cluster.max_workers  # if they do not fit, Ray waits and an autoscaler adds nodes
    request_nodes(config, autoscaler, running=0)
    counts: list[int] = []
    for _ in range(MAX_POLLS):
        counts.append(num_workers_that_fit(resource_demand(config), nodes.nodes))
        stable = len(counts) >= STABLE_POLLS and len(set(counts[-STABLE_POLLS:])) == 1
        if counts[-1] == config.cluster.max_workers or (stable and counts[-1]):
            break
        time.sleep(POLL_INTERVAL_S)
        nodes = schedulable_nodes()
    return nodes, max(counts[-1], config.cluster.min_workers)
