"""One attempt to train: a fresh `TorchTrainer`, and what ended it where it failed.

attempts.py starts it and decides what follows; entry.py is what the workers run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch
from ray.train.v2._internal.exceptions import WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import PreemptionError

from mmray.cluster.placement import LiveNodes
from mmray.config import Config
from mmray.data.store.prepared_set import PreparedMixture, PreparedSet
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import KEEP_MB, RowReader
from mmray.data.stream.stream import StreamDataConfig
from mmray.engine.batch import BatchShape, smaller_micro
from mmray.engine.checkpoint import files
from mmray.engine.worker_context import WorkerContext
from mmray.errors import MmrayError, OutOfMemoryError, StorageError, TrainingError
from mmray.storage.paths import AnyPath
from mmray.train import run_dir
from mmray.train.background import run_in_thread
from mmray.train.coordinator import RunMonitor, stop_on_signal
from mmray.train.monitor import AttemptMonitor
from mmray.train.policy import Failure, FailureKind
from mmray.train.resources import (
    failure_config,
    num_data_actors,
    ray_storage_args,
    resource_demand,
    scaling_config,
    set_start_timeout,
    start_timeout_error,
    torch_config,
)
from mmray.train.worker import train_loop_per_worker

# What collectives say that broke, or waited in vain: gloo's, NCCL's, and those of the store through which ranks meet.
COLLECTIVE_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection timed out",
    "No route to host",
    "NCCL",
    "Socket Timeout",
    "recv operation to complete",
    "send operation to complete",
    "wait timeout after",
)


@dataclass(frozen=True)
class ResolvedRun:
    """A run that is settled and checked, about to start."""

    config: Config
    train_set: PreparedSet | PreparedMixture
    eval_set: PreparedSet | None
    tokenizer_json: str
    shape: BatchShape
    steps: int
    data: dict[str, Any]
    micro: int = 0  # rows of a micro-batch that an attempt without memory left; 0: as the shape says


def run_attempt(
    trainer: ray.train.torch.TorchTrainer, run_monitor: RunMonitor, monitor: AttemptMonitor
) -> dict[str, Any]:
    """One TorchTrainer, in a thread, so that this one can print and hear Ctrl-C. The outcome of rank 0."""

    def look() -> None:
        run_monitor.look()
        monitor.look()

    with stop_on_signal(run_monitor):
        result: Any = run_in_thread(trainer.fit, look)
    outcome: dict[str, Any] = result.return_value
    return outcome


def build_trainer(
    ready: ResolvedRun,
    run: run_dir.RunDir,
    fence: int,
    attempt: int,
    sized: Config,
    now: LiveNodes,
    newest: AnyPath | None,
    coordinator: Any,
) -> ray.train.torch.TorchTrainer:
    """The attempt's trainer: workers and data on the nodes that are there, all ranks from the checkpoint `newest`."""
    config = ready.config
    set_start_timeout(config)
    demand = resource_demand(sized)
    reader = RowReader(
        ready.train_set,
        config.model.inputs,
        ready.tokenizer_json,
        config.prepare.max_pixels,
        config.augment,
        KEEP_MB,
    )
    # Beside the largest group: CPUs of workers that may come stay free.
    actors = num_data_actors(config.with_cluster(accelerator=sized.cluster.accelerator))
    start = resume_point(ready, newest, sized.cluster.max_workers)
    stream = StreamDataConfig(
        start, reader, actors, config.data.block_mb, now.excluding_unavailable(demand.data_labels), coordinator
    )
    return ray.train.torch.TorchTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # its annotation forgets that the result comes back
        train_loop_config={
            "job": WorkerContext(
                config=config,
                folder=run.path,
                fence=fence,
                reader=reader,
                eval_set=ready.eval_set,
                tokenizer_json=ready.tokenizer_json,
                data_workers=actors,
                micro=ready.micro,
            ),
            "start": start,
            "coordinator": coordinator,
        },
        datasets=stream.datasets(),  # type: ignore[arg-type]
        dataset_config=stream,
        torch_config=torch_config(config),
        scaling_config=scaling_config(sized, now.excluding_unavailable(demand.worker_labels)),
        run_config=ray.train.RunConfig(
            name=f"attempt-{fence}-{attempt}",
            **ray_storage_args(run.path),
            failure_config=failure_config(),
        ),
    )


def resume_point(ready: ResolvedRun, newest: AnyPath | None, world: int) -> ResumePoint:
    """Where a group of `world` workers begins: at the checkpoint that was verified, the same for every rank."""
    shape, config = ready.shape, ready.config
    chunk, window = config.data.shuffle_shape
    assert chunk and window, "resolved"
    plan = SamplePlan(
        num_rows=ready.data["num_rows"],
        global_rows=shape.global_rows,
        world=world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=ready.steps,
        shuffle=config.data.shuffle,
        parts=ready.train_set.parts if isinstance(ready.train_set, PreparedMixture) else (),
        chunk=chunk,
        window=window,
    )
    if newest is None:
        return ResumePoint(plan, 0)
    rows_consumed = files.load_meta(newest)["rows_consumed"]
    return ResumePoint(plan, plan.step_at(rows_consumed), str(newest))


def classify_failure(error: BaseException, monitor: AttemptMonitor, ready: ResolvedRun) -> Failure:
    """What ended an attempt: a hang or a node taken away, where the guard saw one; else what Ray Train raises."""
    kind, cause = _find_cause(error, monitor, ready)
    return Failure(kind, cause, monitor.run_monitor.last_step, monitor.run_monitor.logged)


def _find_cause(error: BaseException, monitor: AttemptMonitor, ready: ResolvedRun) -> tuple[FailureKind, BaseException]:
    if monitor.hang is not None:
        return "hung", TrainingError(monitor.hang.told)
    if isinstance(error, MmrayError):
        return "raised", error
    if isinstance(error, PreemptionError):  # where the user has turned Ray's own watcher on
        return "preempted", TrainingError("a node was taken away")
    if isinstance(error, ray.train.WorkerGroupError):
        failures = [getattr(e, "health_check_failure", e) for e in error.worker_failures.values()]  # as Ray has it
        raised = [e for e in failures if not _is_worker_lost(e)]
        own = [e for e in raised if isinstance(e, MmrayError)]
        own.sort(key=lambda e: not isinstance(e, OutOfMemoryError))  # the others lost the one without memory
        cause = next(iter([*own, *raised, *failures]), error)
        killed = next((e for e in failures if isinstance(e, ray.exceptions.OutOfMemoryError)), None)
        if killed is not None and not raised:
            return "lost", _host_oom_error(killed, monitor, ready)
        if isinstance(cause, StorageError) and monitor.run_monitor.stop_reason in ("resize", "preempted"):
            return "lost", cause  # nobody wanted an end: from the checkpoint before, elsewhere
        if raised:
            return "raised", cause
        return "preempted" if monitor.leaving else "lost", cause
    if (late := start_timeout_error(error)) is not None:
        # More workers than need be: others took the places, or a node went, and fewer may start.
        return "lost" if monitor.world > monitor.config.cluster.min_workers else "raised", late
    return "lost", TrainingError(f"Ray Train gave up: {error}")


def _host_oom_error(error: BaseException, monitor: AttemptMonitor, ready: ResolvedRun) -> OutOfMemoryError:
    """A worker that Ray's memory monitor has ended: not a device, its node had no room."""
    share = -(-ready.shape.global_rows // monitor.world)
    before = min(rows for rows in (monitor.run_monitor.micro, ready.micro, ready.shape.micro, share) if rows)
    less = smaller_micro(before, share)
    told = f"a node had no room for its worker with micro-batches of {before} rows ({str(error).splitlines()[0]})"
    next_move = f"Now the same rows again, {less} at a time" if less else "What else runs on it?"
    return OutOfMemoryError(f"{told}. {next_move}", less)


def _is_worker_lost(error: BaseException) -> bool:
    """A worker or its connection went away (a peer of a dead or slow rank sees only its own broken collective)."""
    if isinstance(error, MmrayError):
        return False  # it may quote NCCL, that had no memory: the rank knows better
    gone = isinstance(error, ray.exceptions.RayError | WorkerHealthCheckTimeoutError)
    return gone or any(text in str(error) for text in COLLECTIVE_ERRORS)
