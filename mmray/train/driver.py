"""The course of one run on a cluster that is there: prepared, checked, its folder taken, trained, tidied up.

It runs on the driver, and leaves the training to attempts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mmray.cluster.connect import joined
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.data.store.prepared_set import MixedSet
from mmray.errors import AtOnce, TrainingError
from mmray.report.write import draw_at_end
from mmray.storage.file_ops import gather
from mmray.storage.lease import Lease
from mmray.storage.remote_path import Folder
from mmray.train import run_dir, trackers
from mmray.train.coordinator import Listener
from mmray.train.resolve import settle
from mmray.train.resources import check_gpus, check_room, check_storage, workers_told
from mmray.train.supervisor import attempts
from mmray.train.worker_group import Ready

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.train.coordinator import Listener


TOLD_RUNS = 3


@dataclass
class Outcome:
    """How a run ended; `result` is what result.json says."""

    path: Folder
    result: dict[str, Any]
    already_done: bool = False


def course(config: Config, listener: Listener) -> Outcome:
    """Train `config` to its end, or go on with it. Raises MmrayError."""
    check_gpus(config)
    check_room(config)
    check_storage(config)
    ready = settle(config, listener)
    decision = run_dir.decide(ready.config, ready.data, ready.steps)
    _say_passed(decision, listener)
    if decision.action == "done":
        result = run_dir.RunDir(decision.path).read_json("result.json") or {}
        return Outcome(decision.path, result, already_done=True)
    lease = Lease(decision.path)
    lease.acquire()
    try:
        run = run_dir.create(decision.path, ready.config, ready.data, ready.tokenizer_json)
        _announce(ready, run, listener)
        try:
            with trackers.tracked(ready.config, run.path, listener) as told:
                result = attempts(ready, run, lease, told)
                told.status = result["status"]
        except AtOnce:
            raise
        except BaseException:
            _tidy(run, lease, listener)
            raise
        _tidy(run, lease, listener)
        return Outcome(run.path, result)
    finally:
        lease.release()


def _tidy(run: run_dir.RunDir, lease: Lease, listener: Listener) -> None:
    """What is left to do to the folder when a run has ended, well or not: the report, and what it needs.

    Nothing where another training has the run now.
    """
    try:
        lease.check()
        gather(run.path / QUARANTINE)
    except TrainingError:
        return
    except OSError as error:
        listener.note(f"{QUARANTINE} is still in parts: {error}", "storage")
    draw_at_end(run.path, listener.note)


def _say_passed(decision: run_dir.Decision, listener: Listener) -> None:
    """The newest of the runs that an unnamed one could have gone on with, why it does not, and what it does."""
    left_out = len(decision.passed) - TOLD_RUNS
    if left_out > 0:
        listener.note(f"{left_out:,} earlier runs of other settings, or finished", "earlier")
    for line in decision.passed[-TOLD_RUNS:]:
        listener.note(line, "earlier")
    if decision.passed and decision.action == "start":
        told = "a new run begins; an earlier one goes on with its own settings, a finished one with more --train.steps"
        listener.note(told, "new")


def _announce(ready: Ready, run: run_dir.RunDir, listener: Listener) -> None:
    held_out = f"{ready.eval_set.num_rows:,} held out" if ready.eval_set else "none held out, so no evaluation"
    epochs = ready.steps * ready.shape.global_rows / ready.data["num_rows"]
    listener.note(str(run.path), "run")
    listener.note(f"{ready.data['train']}: {ready.data['num_rows']:,} rows, {held_out}", "data")
    if isinstance(ready.train_set, MixedSet):
        for name, part in zip(ready.train_set.names, ready.train_set.parts, strict=True):
            listener.note(f"{part.per_epoch:,} rows of {name} an epoch ({part.num_rows:,} in it)", "mixed")
    data = ready.config.data
    if data.chunk != 1:
        listener.note(f"in chunks of {data.chunk:,} rows that lie together, {data.window:,} of them mixed", "order")
    listener.note(workers_told(ready.config), "workers")
    listener.note(str(ready.shape), "batch")
    listener.note(f"{ready.steps:,} steps, about {epochs:.1f} epochs", "length")


# One run from config to weights on a Ray cluster: the room's composer.
#
# What it needs of torch is imported while Ray starts, each four seconds of a laptop; what it needs of Ray after that.
def train(config: Config, listener: Listener) -> Outcome:
    """Train `config` to its end, or go on with it; raises MmrayError with its exit code."""
    actors = 1 if config.data.workers == "auto" else config.data.workers
    with joined(config.cluster, actors, beside=partial(check, config)):
        return course(config, listener)


def check(config: Config) -> None:
    """Raise UsageError for settings that contradict each other, before any data is looked at."""
    from mmray import objectives
    from mmray.engine.batch import shape_of
    from mmray.train import trackers, validate

    shape_of(config.batch, config.cluster.most_workers)
    validate.check(config)
    trackers.check(config)
    objectives.build(config.objective)
