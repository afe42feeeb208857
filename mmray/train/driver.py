"""The course of one run on a cluster that is there: prepared, checked, its folder taken, trained, tidied up.

It runs on the driver, and leaves the training to attempts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mmray.cluster.connect import ray_session
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.data.store.prepared_set import PreparedMixture
from mmray.errors import AtOnce, TrainingError
from mmray.report.write import draw_at_end
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, merge_parts
from mmray.train import run_dir, trackers
from mmray.train.coordinator import ProgressReporter
from mmray.train.resolve import resolve_run
from mmray.train.resources import check_capacity, check_gpus, check_storage, format_workers
from mmray.train.supervisor import run_attempts
from mmray.train.worker_group import ResolvedRun

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.train.coordinator import ProgressReporter


MAX_LISTED_RUNS = 3


@dataclass
class RunOutcome:
    """How a run ended; `result` is what result.json says."""

    path: AnyPath
    result: dict[str, Any]
    already_done: bool = False


def run_training(config: Config, reporter: ProgressReporter) -> RunOutcome:
    """Train `config` to its end, or go on with it. Raises MmrayError."""
    check_gpus(config)
    check_capacity(config)
    check_storage(config)
    ready = resolve_run(config, reporter)
    decision = run_dir.select_run(ready.config, ready.data, ready.steps)
    _log_skipped_runs(decision, reporter)
    if decision.action == "done":
        result = run_dir.RunDir(decision.path).read_json("result.json") or {}
        return RunOutcome(decision.path, result, already_done=True)
    lease = Lease(decision.path)
    lease.acquire()
    try:
        run = run_dir.create_run_dir(decision.path, ready.config, ready.data, ready.tokenizer_json)
        _log_summary(ready, run, reporter)
        try:
            with trackers.track_run(ready.config, run.path, reporter) as told:
                result = run_attempts(ready, run, lease, told)
                told.run_status = result["status"]
        except AtOnce:
            raise
        except BaseException:
            _finalize_run_dir(run, lease, reporter)
            raise
        _finalize_run_dir(run, lease, reporter)
        return RunOutcome(run.path, result)
    finally:
        lease.release()


def _finalize_run_dir(run: run_dir.RunDir, lease: Lease, reporter: ProgressReporter) -> None:
    """What is left to do to the folder when a run has ended, well or not: the report, and what it needs.

    Nothing where another training has the run now.
    """
    try:
        lease.check()
        merge_parts(run.path / QUARANTINE)
    except TrainingError:
        return
    except OSError as error:
        reporter.log(f"{QUARANTINE} is still in parts: {error}", "storage")
    draw_at_end(run.path, reporter.log)


def _log_skipped_runs(decision: run_dir.RunSelection, reporter: ProgressReporter) -> None:
    """The newest of the runs that an unnamed one could have gone on with, why it does not, and what it does."""
    left_out = len(decision.passed) - MAX_LISTED_RUNS
    if left_out > 0:
        reporter.log(f"{left_out:,} earlier runs of other settings, or finished", "earlier")
    for line in decision.passed[-MAX_LISTED_RUNS:]:
        reporter.log(line, "earlier")
    if decision.passed and decision.action == "start":
        told = "a new run begins; an earlier one goes on with its own settings, a finished one with more --train.steps"
        reporter.log(told, "new")


def _log_summary(ready: ResolvedRun, run: run_dir.RunDir, reporter: ProgressReporter) -> None:
    held_out = f"{ready.eval_set.num_rows:,} held out" if ready.eval_set else "none held out, so no evaluation"
    epochs = ready.steps * ready.shape.global_rows / ready.data["num_rows"]
    reporter.log(str(run.path), "run")
    reporter.log(f"{ready.data['train']}: {ready.data['num_rows']:,} rows, {held_out}", "data")
    if isinstance(ready.train_set, PreparedMixture):
        for name, part in zip(ready.train_set.names, ready.train_set.parts, strict=True):
            reporter.log(f"{part.per_epoch:,} rows of {name} an epoch ({part.num_rows:,} in it)", "mixed")
    rows, blocks = ready.config.data.shuffle_shape
    if rows != 1:
        reporter.log(f"in blocks of {rows:,} rows, {blocks:,} blocks mixed", "shuffle")
    reporter.log(format_workers(ready.config), "workers")
    reporter.log(str(ready.shape), "batch")
    reporter.log(f"{ready.steps:,} steps, about {epochs:.1f} epochs", "length")


# One run from config to weights on a Ray cluster: the room's composer.
#
# What it needs of torch is imported while Ray starts, each four seconds of a laptop; what it needs of Ray after that.
def train(config: Config, reporter: ProgressReporter) -> RunOutcome:
    """Train `config` to its end, or go on with it; raises MmrayError with its exit code."""
    actors = 1 if config.data.workers == "auto" else config.data.workers
    with ray_session(config.cluster, actors, beside=partial(validate_settings, config)):
        return run_training(config, reporter)


def validate_settings(config: Config) -> None:
    """Raise UsageError for settings that contradict each other, before any data is looked at."""
    from mmray import objectives
    from mmray.engine.batch import resolve_batch_shape
    from mmray.train import trackers, validate

    resolve_batch_shape(config.batch, config.cluster.max_workers)
    validate.validate(config)
    trackers.check_trackers(config)
    objectives.build(config.objective)
