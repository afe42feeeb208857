"""One run from config to weights on a Ray cluster: the room's composer, and the only file of it that touches Ray.

`train` runs on the driver: it prepares, checks, takes the run's folder, then starts attempts. An attempt is one fresh
`TorchTrainer`; Ray itself retries nothing, so that what happens after a failure is decided in one place (policy.py).
`_on_worker` runs on every training worker and hands over to train/worker.py, which knows nothing of Ray.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch

from mmray.cluster.join import joined
from mmray.config import Config
from mmray.data.order import Plan, Start
from mmray.data.reader import RowReader
from mmray.data.sets import ensure_prepared
from mmray.data.store import PreparedSet
from mmray.data.stream import Stream
from mmray.data.text import TextEncoder, load_tokenizer
from mmray.errors import MmrayError, TrainingError, UsageError
from mmray.train import checkpoint, rundir
from mmray.train.batch import BatchShape, shape_of, total_steps
from mmray.train.board import WASTED, Listener, StopWish, Watch, new_board, stopping
from mmray.train.lease import Lease
from mmray.train.policy import Failure, Raise, decide
from mmray.train.resources import data_actors, torch_config, worker_resources
from mmray.train.worker import Job, work

POLL_S = 0.25


@dataclass(frozen=True)
class Ready:
    """A run that is settled and checked, about to start."""

    config: Config
    train_set: PreparedSet
    eval_set: PreparedSet | None
    tokenizer_json: str
    shape: BatchShape
    steps: int
    data: dict[str, Any]


@dataclass
class Outcome:
    """How a run ended; `result` is what result.json says."""

    path: Path
    result: dict[str, Any]
    already_done: bool = False


def train(config: Config, listener: Listener) -> Outcome:
    """Train `config` to its end, or go on with it; raises MmrayError with its exit code."""
    shape_of(config.batch, config.cluster.workers)  # contradictions show before anything starts
    with joined(config.cluster):
        ready = settle(config, listener)
        decision = rundir.decide(ready.config, ready.data, ready.steps)
        if decision.action == "done":
            result = rundir.RunDir(decision.path).read_json("result.json") or {}
            return Outcome(decision.path, result, already_done=True)
        lease = Lease(decision.path)
        fence = lease.acquire()
        try:
            run = rundir.create(decision.path, ready.config, ready.data, ready.tokenizer_json)
            _announce(ready, run, listener)
            return Outcome(run.path, _attempts(ready, run, fence, listener))
        finally:
            lease.release()


def settle(config: Config, listener: Listener) -> Ready:
    """Sets opened, tokenizer found, arithmetic done; everything a user can get wrong is found here or above."""
    prepared = partial(
        ensure_prepared,
        cache=config.data.cache,
        settings=config.prepare,
        say=listener.note,
        progress=listener.preparing,
    )
    place = prepared(config.data.train)
    train_set = PreparedSet.open(str(place), config.data.train_split)
    eval_set = _eval_set(config, place, train_set, prepared)
    tokenizer_json = load_tokenizer(config.model.inputs.tokenizer, train_set.tokenizer_json)
    num_rows = min(train_set.num_rows, config.data.limit or train_set.num_rows)
    shape = shape_of(config.batch, config.cluster.workers)
    steps = total_steps(config.train, num_rows, shape.global_rows)
    vocab_size = config.model.text.vocab_size or TextEncoder(tokenizer_json, 8).vocab_size
    text = config.model.text.model_copy(update={"vocab_size": vocab_size})
    settled = config.model_copy(
        update={
            "model": config.model.model_copy(update={"text": text}),
            "batch": config.batch.model_copy(update={"global_": shape.global_rows, "micro": shape.micro}),
        }
    )
    data = {"train": str(place), "fingerprint": train_set.fingerprint, "num_rows": num_rows}
    return Ready(settled, train_set, eval_set, tokenizer_json, shape, steps, data)


def _eval_set(
    config: Config, place: Path, train_set: PreparedSet, prepared: Callable[[str], Path]
) -> PreparedSet | None:
    split = config.data.eval_split
    if config.data.eval is not None:
        return PreparedSet.open(str(prepared(config.data.eval)), split)
    return PreparedSet.open(str(place), split) if train_set.has_split(split) else None


def _announce(ready: Ready, run: rundir.RunDir, listener: Listener) -> None:
    held_out = f"{ready.eval_set.num_rows:,} held out" if ready.eval_set else "none held out, so no evaluation"
    epochs = ready.steps * ready.shape.global_rows / ready.data["num_rows"]
    listener.note(str(run.path), "run")
    listener.note(f"{ready.data['train']}: {ready.data['num_rows']:,} rows, {held_out}", "data")
    listener.note(str(ready.shape), "batch")
    listener.note(f"{ready.steps:,} steps, about {epochs:.1f} epochs", "length")


def _attempts(ready: Ready, run: rundir.RunDir, fence: int, listener: Listener) -> dict[str, Any]:
    """Attempts until one ends the run, the policy gives up, or the user stops it. Writes result.json either way."""
    began_s, before, attempt = time.monotonic(), None, 0
    last_step = wasted_steps = 0
    while True:
        attempt += 1
        newest = checkpoint.newest_good(run.checkpoints, partial(listener.note, label="checkpoint"))
        if newest is not None:
            listener.note(f"from {newest}", "going on")
        elif ready.config.run.resume == "must":
            raise UsageError(f"--run.resume must: {run.checkpoints} has no good checkpoint; `auto` would begin anew")
        listener.phase(f"starting {ready.config.cluster.workers} workers")
        board = new_board()
        watch = Watch(board, listener, ready.steps, last_step, wasted_steps)
        try:
            outcome = _attempt(ready, run, fence, attempt, board, watch)
            break
        except Exception as error:
            failure = _failure(error, watch.last_step)
            verdict = decide(failure, before, attempt, ready.config.cluster.max_failures)
            if isinstance(verdict, Raise):
                ended = {"status": "failed", "error": str(verdict.error), "restarts": attempt - 1}
                run.write_json("result.json", {**ended, "elapsed_s": time.monotonic() - began_s})
                raise verdict.error from error
            listener.note(f"{verdict.reason}; starting again from the newest checkpoint", "failure")
            before, last_step, wasted_steps = failure, watch.last_step, watch.wasted_steps
        finally:
            ray.kill(board)
    counts = {"restarts": attempt - 1, WASTED: watch.wasted_steps, "elapsed_s": time.monotonic() - began_s}
    result = {**outcome, **counts, "batch": str(ready.shape)}
    run.write_json("result.json", result)
    return result


def _attempt(ready: Ready, run: rundir.RunDir, fence: int, attempt: int, board: Any, watch: Watch) -> dict[str, Any]:
    """One TorchTrainer, in a thread, so that this one can print and hear Ctrl-C. The outcome of rank 0."""
    trainer = _trainer(ready, run, fence, attempt, board)
    ended: dict[str, Any] = {}

    def fit() -> None:
        try:
            ended["result"] = trainer.fit()
        except BaseException as error:  # noqa: BLE001 - carried over to the main thread, which raises it
            ended["error"] = error

    thread = threading.Thread(target=fit, name="mmray-fit", daemon=True)
    with stopping(watch):
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            watch.look()
    watch.look()
    if "error" in ended:
        raise ended["error"]
    return ended["result"].return_value


def _trainer(ready: Ready, run: rundir.RunDir, fence: int, attempt: int, board: Any) -> ray.train.torch.TorchTrainer:
    config = ready.config
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.cluster.start_timeout_s)
    reader = RowReader(ready.train_set, config.model.inputs, ready.tokenizer_json, config.prepare.max_pixels)
    stream = Stream(partial(_begin, ready, run.checkpoints), reader, data_actors(config), config.data.block_mb)
    job = Job(config, run.path, fence, reader, ready.eval_set, ready.tokenizer_json)
    return ray.train.torch.TorchTrainer(
        _on_worker,  # type: ignore[arg-type]  # its annotation forgets that the result comes back
        train_loop_config={"job": job, "board": board},
        datasets=stream.datasets(),  # type: ignore[arg-type]
        dataset_config=stream,
        torch_config=torch_config(config),
        scaling_config=worker_resources(config),
        run_config=ray.train.RunConfig(
            name=f"attempt-{fence}-{attempt}",
            storage_path=str(run.path / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )


def _begin(ready: Ready, checkpoints: Path, world: int) -> Start:
    """Where a group of `world` workers begins: pins one checkpoint for all its ranks. Runs beside the controller."""
    shape, config = ready.shape, ready.config
    plan = Plan(
        num_rows=ready.data["num_rows"],
        global_rows=shape.global_rows,
        world=world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=ready.steps,
        shuffle=config.data.shuffle,
    )
    newest = checkpoint.newest_good(checkpoints)
    if newest is None:
        return Start(plan, 0)
    rows_consumed = checkpoint.load_meta(newest)["rows_consumed"]
    return Start(plan, plan.step_at(rows_consumed), str(newest))


def _on_worker(given: dict[str, Any]) -> dict[str, Any]:
    """Runs on each training worker, in a process group that Ray has made."""
    board = given["board"]
    start: Start = ray.train.get_dataset_shard("start")
    blocks = ray.train.get_dataset_shard("train").iter_batches(
        batch_size=None, batch_format="numpy", prefetch_batches=1
    )
    first = ray.train.get_context().get_world_rank() == 0
    return work(
        given["job"],
        start,
        blocks,
        device=ray.train.torch.get_device(),
        report=board.push.remote if first else (lambda _: None),
        stop=StopWish(board) if first else (lambda: False),
    )


def _failure(error: BaseException, last_step: int) -> Failure:
    """What ended an attempt, from what Ray Train raises: the workers' own errors first, a lost worker else."""
    if isinstance(error, MmrayError):
        return Failure("raised", error, last_step)
    if isinstance(error, ray.train.WorkerGroupError):
        raised = [e for e in error.worker_failures.values() if not _is_loss(e)]
        own = [e for e in raised if isinstance(e, MmrayError)]
        cause = next(iter([*own, *raised, *error.worker_failures.values()]), error)
        return Failure("raised" if raised else "lost", cause, last_step)
    return Failure("lost", TrainingError(f"Ray Train gave up: {error}"), last_step)


def _is_loss(error: BaseException) -> bool:
    """A worker or its connection went away (a peer of a dead rank sees only its own broken collective)."""
    broken = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket Timeout")
    return isinstance(error, ray.exceptions.RayError) or any(text in str(error) for text in broken)
