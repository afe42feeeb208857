"""One attempt to train: a new `TorchTrainer` with a fixed number of workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ray.train.torch import TorchTrainer

from mmray.cluster.placement import SchedulableNodes
from mmray.config import Config
from mmray.data.store.prepared_set import PreparedMixture
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import IMAGE_CACHE_MB, RowReader
from mmray.data.stream.stream import StreamDataConfig
from mmray.engine.checkpoint import files
from mmray.engine.worker_context import WorkerContext
from mmray.errors import UsageError
from mmray.storage.paths import AnyPath
from mmray.train.monitor import AttemptMonitor, signal_handlers
from mmray.train.resolve import ResolvedRun
from mmray.train.resources import num_decode_actors, resource_demand, torch_trainer
from mmray.train.run_dir import RunDir
from mmray.train.worker import train_loop_per_worker

POLL_INTERVAL_S = 0.25
T = TypeVar("T")


def run_attempt(trainer: TorchTrainer, monitor: AttemptMonitor) -> dict[str, Any]:
    """Run the trainer while the monitor polls and handles signals; return the outcome of rank 0."""
    with signal_handlers(monitor.on_signal):
        result: Any = run_in_thread(trainer.fit, monitor.poll)
    return dict(result.return_value)


def run_in_thread(call: Callable[[], T], poll: Callable[[], None]) -> T:
    """Return or raise what `call` does in a daemon thread; polls meanwhile and once after its end."""
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
        poll()  # an exception leaves at once; the daemon thread then ends with the process
    return done.result()


def build_trainer(
    resolved: ResolvedRun,
    run: RunDir,
    fencing_token: int,
    attempt_config: Config,  # with the workers and device of the attempt, for Ray; the workers get the run's config
    nodes: SchedulableNodes,
    checkpoint: AnyPath | None,
    coordinator: Any,
) -> TorchTrainer:
    """Return the trainer of an attempt; all ranks load `checkpoint`."""
    config, demand = resolved.config, resource_demand(attempt_config)
    reader = RowReader(
        resolved.train_set,
        config.model.inputs,
        resolved.tokenizer_json,
        config.prepare.max_pixels,
        config.augment,
        IMAGE_CACHE_MB,
    )
    # Counted for the largest group, so that CPUs for the workers of a later, larger group stay free.
    actors = num_decode_actors(config.with_cluster(accelerator=attempt_config.cluster.accelerator))
    start = resume_point(resolved, checkpoint, attempt_config.cluster.max_workers)
    data_label_selector = nodes.excluding_unavailable(demand.data_label_selector)
    stream = StreamDataConfig(start, reader, actors, config.data.block_mb, data_label_selector, coordinator)
    context = WorkerContext(
        config=config,
        folder=run.path,
        fencing_token=fencing_token,
        reader=reader,
        eval_set=resolved.eval_set,
        tokenizer_json=resolved.tokenizer_json,
        decode_actors=actors,
        micro=resolved.micro,
    )
    return torch_trainer(
        train_loop_per_worker,
        attempt_config,
        run.path,
        name=f"attempt-{fencing_token}",
        label_selector=nodes.excluding_unavailable(demand.worker_label_selector),
        train_loop_config={"context": context, "resume_point": start, "coordinator": coordinator},
        datasets=stream.datasets(),
        dataset_config=stream,
    )


def resume_point(resolved: ResolvedRun, checkpoint: AnyPath | None, world: int) -> ResumePoint:
    """Return the resume point of a group of `world` workers, the same for every rank. Raises UsageError."""
    shape, config = resolved.shape, resolved.config
    rows_per_block, blocks_per_window = config.data.shuffle_shape
    assert rows_per_block and blocks_per_window, "resolve_run leaves no `auto`"
    plan = SamplePlan(
        num_rows=resolved.data_identity["num_rows"],
        global_rows=shape.global_rows,
        world=world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=resolved.steps,
        shuffle=config.data.shuffle,
        components=resolved.train_set.components if isinstance(resolved.train_set, PreparedMixture) else (),
        shuffle_block=rows_per_block,
        window=blocks_per_window,
    )
    if checkpoint is None:
        return ResumePoint(plan, 0)
    meta = files.load_meta(checkpoint)
    step, rows_consumed = meta["step"], meta["rows_consumed"]
    if rows_consumed != plan.rows_start(step):
        raise UsageError(
            f"cannot resume from {checkpoint}: its {step:,} steps took {rows_consumed:,} rows, but {step:,} steps of "
            f"{plan.global_rows:,} rows take {plan.rows_start(step):,}. An older mmray wrote it, whose last step of an "
            "epoch was smaller: start a new run with another --run.name, or without a name and --run.resume never"
        )
    return ResumePoint(plan, step, str(checkpoint))
