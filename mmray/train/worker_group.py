"""One attempt to train: a new `TorchTrainer` with a fixed number of workers, and the cause if it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.train
import ray.train.torch

from mmray.cluster import ray_internals
from mmray.cluster.placement import LiveNodes
from mmray.config import Config
from mmray.data.store.prepared_set import PreparedMixture
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import KEEP_MB, RowReader
from mmray.data.stream.stream import StreamDataConfig
from mmray.engine.batch import smaller_micro
from mmray.engine.checkpoint import files
from mmray.engine.worker_context import WorkerContext
from mmray.errors import MmrayError, OutOfMemoryError, StorageError, TrainingError
from mmray.storage.paths import AnyPath
from mmray.train import run_dir
from mmray.train.monitor import AttemptMonitor, stop_on_signal
from mmray.train.resolve import ResolvedRun
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

POLL_INTERVAL_S = 0.25
# Errors of collectives that broke or timed out: gloo's, NCCL's, and those of the store through which ranks connect.
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
T = TypeVar("T")


def run_attempt(trainer: ray.train.torch.TorchTrainer, monitor: AttemptMonitor) -> dict[str, Any]:
    """Run the trainer while the monitor polls and handles signals; return the outcome of rank 0."""
    with stop_on_signal(monitor):
        result: Any = run_in_thread(trainer.fit, monitor.poll)
    outcome: dict[str, Any] = result.return_value
    return outcome


def run_in_thread(call: Callable[[], T], poll: Callable[[], None]) -> T:
    """Return or raise what `call` does in another thread, polling each POLL_INTERVAL_S and once after its end.

    An exception of `poll` or of a signal handler leaves at once; the daemon thread then ends with the process.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.set_exception(error)

    thread = threading.Thread(target=run, name="mmray-trainer", daemon=True)
    thread.start()
    running = True
    while running:
        thread.join(POLL_INTERVAL_S)
        running = thread.is_alive()  # before the poll, so that the last poll comes after the end
        poll()
    return done.result()


def build_trainer(
    resolved: ResolvedRun,
    run: run_dir.RunDir,
    fence: int,
    attempt: int,
    sized: Config,
    nodes: LiveNodes,
    checkpoint: AnyPath | None,
    coordinator: Any,
) -> ray.train.torch.TorchTrainer:
    """The trainer of an attempt: `sized` has its number of workers; all ranks start from `checkpoint`."""
    config = resolved.config
    set_start_timeout(config)
    demand = resource_demand(sized)
    reader = RowReader(
        resolved.train_set,
        config.model.inputs,
        resolved.tokenizer_json,
        config.prepare.max_pixels,
        config.augment,
        KEEP_MB,
    )
    # Counted for the largest group, so that CPUs of workers that join later stay free.
    actors = num_data_actors(config.with_cluster(accelerator=sized.cluster.accelerator))
    start = resume_point(resolved, checkpoint, sized.cluster.max_workers)
    stream = StreamDataConfig(
        start, reader, actors, config.data.block_mb, nodes.excluding_unavailable(demand.data_labels), coordinator
    )
    return ray.train.torch.TorchTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # Ray's annotation has no return value
        train_loop_config={
            "job": WorkerContext(
                config=config,
                folder=run.path,
                fence=fence,
                reader=reader,
                eval_set=resolved.eval_set,
                tokenizer_json=resolved.tokenizer_json,
                data_workers=actors,
                micro=resolved.micro,
            ),
            "start": start,
            "coordinator": coordinator,
        },
        datasets=stream.datasets(),  # type: ignore[arg-type]
        dataset_config=stream,
        torch_config=torch_config(config),
        scaling_config=scaling_config(sized, nodes.excluding_unavailable(demand.worker_labels)),
        run_config=ray.train.RunConfig(
            name=f"attempt-{fence}-{attempt}",
            **ray_storage_args(run.path),
            failure_config=failure_config(),
        ),
    )


def resume_point(resolved: ResolvedRun, checkpoint: AnyPath | None, world: int) -> ResumePoint:
    """Return the resume point of a group of `world` workers, the same for every rank."""
    shape, config = resolved.shape, resolved.config
    chunk, window = config.data.shuffle_shape
    assert chunk and window, "resolve_run leaves no `auto`"
    plan = SamplePlan(
        num_rows=resolved.data["num_rows"],
        global_rows=shape.global_rows,
        world=world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=resolved.steps,
        shuffle=config.data.shuffle,
        parts=resolved.train_set.parts if isinstance(resolved.train_set, PreparedMixture) else (),
        chunk=chunk,
        window=window,
    )
    if checkpoint is None:
        return ResumePoint(plan, 0)
    rows_consumed = files.load_meta(checkpoint)["rows_consumed"]
    return ResumePoint(plan, plan.step_at(rows_consumed), str(checkpoint))


def find_cause(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> tuple[str, BaseException]:
    """The kind of failure (see supervisor.Failure) and its cause: from the monitor, otherwise from Ray's error."""
    if monitor.hang is not None:
        return "hung", TrainingError(monitor.hang.message)
    if isinstance(error, MmrayError):
        return "raised", error
    if ray_internals.is_preemption(error):
        return "preempted", TrainingError("a node was preempted")
    if isinstance(error, ray.train.WorkerGroupError):
        failures = [getattr(e, "health_check_failure", e) for e in error.worker_failures.values()]
        raised = [e for e in failures if not _is_worker_lost(e)]
        own = [e for e in raised if isinstance(e, MmrayError)]
        own.sort(key=lambda e: not isinstance(e, OutOfMemoryError))  # the other ranks' errors only follow from it
        cause = next(iter([*own, *raised, *failures]), error)
        killed = next((e for e in failures if isinstance(e, ray.exceptions.OutOfMemoryError)), None)
        if killed is not None and not raised:
            return "lost", _host_oom_error(killed, monitor, resolved)
        if isinstance(cause, StorageError) and monitor.stop_reason in ("resize", "preempted"):
            return (
                "lost",
                cause,
            )  # only the last checkpoint failed and the user requested no stop: restart from the previous one
        if raised:
            return "raised", cause
        return "preempted" if monitor.preempted else "lost", cause
    if (late := start_timeout_error(error)) is not None:
        # An elastic run retries with fewer workers: resources were taken, or a node was lost.
        return "lost" if monitor.world > monitor.config.cluster.min_workers else "raised", late
    return "lost", TrainingError(f"Ray Train failed: {error}")


def _host_oom_error(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> OutOfMemoryError:
    """Ray's memory monitor killed a worker: its node, not a device, was out of memory."""
    share = -(-resolved.shape.global_rows // monitor.world)
    micro = min(rows for rows in (monitor.progress.micro, resolved.micro, resolved.shape.micro, share) if rows)
    less = smaller_micro(micro)
    what = f"a node ran out of memory with micro-batches of {micro} rows ({str(error).splitlines()[0]})"
    fix = f"Retrying with micro-batches of {less}" if less else "Check what else uses memory on that node"
    return OutOfMemoryError(f"{what}. {fix}", less)


def _is_worker_lost(error: BaseException) -> bool:
    """Return whether a worker was lost; peers of a dead or slow rank only report a broken collective."""
    if isinstance(error, MmrayError):
        return False  # it may quote NCCL running out of memory
    lost = isinstance(error, ray.exceptions.RayError) or ray_internals.is_health_check_timeout(error)
    return lost or any(text in str(error) for text in COLLECTIVE_ERRORS)
