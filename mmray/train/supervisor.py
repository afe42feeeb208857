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

from mmray.cluster.autoscaling import ScaleUp
from mmray.cluster.placement import Present, present
from mmray.config import Config
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.bad_samples import bad_rows
from mmray.engine.checkpoint import files
from mmray.errors import MmrayError, ResourceError, StorageError, TrainingError, UsageError
from mmray.evaluate.build import best_by
from mmray.storage.file_ops import gather
from mmray.storage.lease import Lease
from mmray.storage.remote_path import Folder
from mmray.train import run_dir
from mmray.train.coordinator import WASTED, Listener, Watch, new_board
from mmray.train.monitor import Guard
from mmray.train.policy import Failure, Raise, Shrink, decide, spent
from mmray.train.resources import ask_for_more, demand_of, fitting
from mmray.train.run_dir import safe
from mmray.train.worker_group import Ready, failure_of, run_attempt, trainer_of

SETTLE_S = 0.5  # between two looks at what is free, while the workers of the attempt before let go of their places
SAME_LOOKS, MOST_LOOKS = 4, 20
# What an attempt ends with: Ray Train's word, our own, or a cluster or storage that does not answer.
ENDED = (ray.train.TrainingFailedError, MmrayError, ray.exceptions.RayError, RuntimeError, OSError)
STORAGE_PAUSES_S = (1.0, 5.0, 30.0)  # until a storage that fails between two attempts is asked again


@dataclass
class Tally:
    """What a run has gone through so far."""

    began_s: float = field(default_factory=time.monotonic)
    attempts: int = 0
    failures: int = 0  # in a row, see policy.spent
    before: Failure | None = None
    newest: Folder | None = None
    place: tuple[Present, int] | None = None  # of the next attempt, where it was looked at already
    resized_from: list[int] = field(default_factory=list)  # numbers of workers that were given up for larger ones
    preemptions: int = 0
    watch: Watch | None = None  # of the last attempt

    def resizes_in_vain(self, workers: int) -> int:
        """How often a group of this size was given up before: others took the room, or Ray placed it otherwise."""
        return self.resized_from.count(workers)

    def counts(self) -> dict[str, Any]:
        """What result.json says of it."""
        return {
            "restarts": self.attempts - 1,
            "resizes": len(self.resized_from),
            "preemptions": self.preemptions,
            WASTED: self.watch.wasted_steps if self.watch else 0,
            "elapsed_s": time.monotonic() - self.began_s,
        }


def attempts(ready: Ready, run: run_dir.RunDir, lease: Lease, listener: Listener) -> dict[str, Any]:
    """Attempts until one ends the run, the policy gives up, or the user stops it. Writes result.json either way."""
    tally = Tally()
    # For all attempts: fewer nodes must not change it.
    device = "gpu" if "GPU" in demand_of(ready.config).per_worker else "cpu"
    wanted = ready.config.on_cluster(accelerator=device)
    scale_up = ScaleUp(f"mmray-{run.path.name}-{lease.fence}")
    while True:
        found, known_bad = _begin(run, lease, tally, listener)
        if found is not None:
            listener.note(f"from {found}", "going on")
        elif ready.config.run.resume == "must":
            raise UsageError(f"--run.resume must: {run.checkpoints} has no good checkpoint; `auto` would begin anew")
        tally.newest = found
        now, workers = tally.place or places(wanted, scale_up)
        ask_for_more(wanted, scale_up, workers)
        listener.phase(f"starting {workers} workers")
        board, first_step = new_board(known_bad), _step_of(found)
        watch = tally.watch = (tally.watch or Watch(board, listener, ready.steps)).over(board, first_step)
        guard = Guard(wanted, workers, watch, first_step, tally.resizes_in_vain(workers), scale_up)
        try:
            sized = wanted.on_cluster(workers=workers)
            trainer = trainer_of(ready, run, lease.fence, tally.attempts, sized, now, found, board)
            outcome = run_attempt(trainer, watch, guard)
            if outcome["status"] == "finished" or watch.wish == "user":
                break
            tally.place = None
            if _step_of(_last(run)) > first_step:  # given up at a checkpoint of its own, which begins a new row
                tally.failures = 0
            tally.preemptions += watch.wish == "preempted"
            if watch.wish == "resize":
                tally.resized_from.append(workers)
        except ENDED as error:  # anything else is a mistake of this code, and another attempt would meet it again
            ready = _after(error, ready, run, lease, tally, guard, wanted, listener)
        except Exception as error:
            _end(run, lease, _failed(error, ready), tally, listener)
            raise
        finally:
            scale_up.end()
            ray.kill(board)
    return _finished(run, lease, ready, outcome, tally)


def _finished(run: run_dir.RunDir, lease: Lease, ready: Ready, outcome: dict[str, Any], tally: Tally) -> dict[str, Any]:
    """Write result.json of a run that came to its end, or was stopped; returns what it says."""
    try:
        lease.check()
        best = _best(run, ready)
        result = {**outcome, **tally.counts(), "batch": str(ready.shape), "best": best}
        run.write_json("result.json", result)
    except OSError as error:
        raise ResourceError(
            f"the weights of step {outcome['steps']} are in {run.checkpoints}, but {run.path / 'result.json'} is not "
            f"written: {error.strerror or error}. Make room (or mend the storage) and give the same command again: it "
            "takes no step twice"
        ) from error
    return result


def _best(run: run_dir.RunDir, ready: Ready) -> dict[str, Any] | None:
    """The best checkpoint that is kept; None also where their notes cannot be read, which is no reason to fail."""
    try:
        return files.best_score(run.checkpoints, best_by(ready.config))
    except TrainingError:
        return None


def _begin(run: run_dir.RunDir, lease: Lease, tally: Tally, listener: Listener) -> tuple[Folder | None, set[int]]:
    """The checkpoint from which the next attempt goes on, and the bad rows that earlier ones have named.

    A storage that does not answer between two attempts is asked again before the run is given up for it.
    """
    tally.attempts += 1
    pauses_s = iter(STORAGE_PAUSES_S if tally.attempts > 1 else ())
    while True:
        try:
            if tally.attempts > 1:
                lease.advance()
            found = files.latest_valid(run.checkpoints, partial(listener.note, label="checkpoint"))
            gather(run.path / QUARANTINE)
            return found, bad_rows(run.path)
        except (StorageError, OSError) as error:
            pause_s = next(pauses_s, None)
            told = f"the storage of {run.path} fails: {error}"
            if pause_s is None:
                _end(run, lease, {"status": "failed", "error": safe(told)}, tally, listener)
                raise StorageError(f"{told}. Mend it, and the same command goes on") from error
        listener.note(f"{told}; asking it again in {pause_s:g} s", "storage")
        time.sleep(pause_s)


def _after(
    error: Exception,
    ready: Ready,
    run: run_dir.RunDir,
    lease: Lease,
    tally: Tally,
    guard: Guard,
    wanted: Config,
    listener: Listener,
) -> Ready:
    """Decide what follows a failure: returns what the run goes on with, and raises where it does not."""
    failure = failure_of(error, guard, ready)
    progressed = _step_of(_last(run)) > _step_of(tally.newest)
    tally.failures = spent(tally.failures, failure.kind, progressed)
    tally.preemptions += failure.kind == "preempted"
    verdict = decide(failure, tally.before, tally.failures, wanted.cluster.max_failures)
    if isinstance(verdict, Raise):
        _end(run, lease, _failed(verdict.error, ready), tally, listener)
        raise verdict.error from error
    if guard.watch.wish == "user":  # the group failed before it could stop; what it wrote stands
        stopped = {"status": "stopped", "steps": _step_of(_last(run)), "batch": str(ready.shape)}
        _end(run, lease, stopped, tally, listener)
        raise KeyboardInterrupt from error
    try:
        tally.place = places(wanted, guard.scale_up)
    except (ray.exceptions.RayError, RuntimeError, OSError) as gone:
        told = f"{verdict.reason}; then Ray did not answer any more: {gone}. The same command goes on from {run.path}"
        _end(run, lease, _failed(TrainingError(told), ready), tally, listener)
        raise TrainingError(told) from error
    fits = tally.place[1]
    with_workers = f", with room for {fits} workers" if fits != guard.world else ""
    listener.note(f"{verdict.reason}; starting again from the newest checkpoint{with_workers}", "failure")
    tally.before = failure
    return replace(ready, micro=verdict.micro) if isinstance(verdict, Shrink) else ready


def _failed(error: Exception, ready: Ready) -> dict[str, Any]:
    return {"status": "failed", "error": safe(str(error)), "batch": str(ready.shape)}


def _end(run: run_dir.RunDir, lease: Lease, ended: dict[str, Any], tally: Tally, listener: Listener) -> None:
    """Write result.json, unless another training has the run now.

    A storage that does not take it is told, and what ended the run is still what is raised.
    """
    try:
        lease.check()
        run.write_json("result.json", {**ended, **tally.counts()})
    except (OSError, TrainingError) as error:
        listener.note(f"result.json is not written: {error}", "storage")


def places(wanted: Config, scale_up: ScaleUp) -> tuple[Present, int]:
    """The nodes to start on, and the number of workers to start there.

    A fixed number is asked for whatever is free, and so is the smallest one: Ray waits for it, and an autoscaler adds
    nodes for it. In between, an autoscaler is asked for the most, and what fits is counted when nothing that ended a
    moment ago holds places any more.
    """
    now = present()
    if not wanted.cluster.elastic:
        return now, wanted.cluster.most_workers
    ask_for_more(wanted, scale_up, running=0)
    counts: list[int] = []
    for _ in range(MOST_LOOKS):
        counts.append(fitting(wanted, now.nodes))
        settled = len(counts) >= SAME_LOOKS and len(set(counts[-SAME_LOOKS:])) == 1
        if counts[-1] == wanted.cluster.most_workers or (settled and counts[-1]):
            break
        time.sleep(SETTLE_S)
        now = present()
    return now, max(counts[-1], wanted.cluster.least_workers)


def _last(run: run_dir.RunDir) -> Folder | None:
    """The newest checkpoint that was written to its end; whether it can be read and is sound shows when it is taken."""
    try:
        return files.latest_complete(run.checkpoints)
    except TrainingError:
        return None


def _step_of(path: Folder | None) -> int:
    return 0 if path is None else files.step_of(path)
