"""One training worker, without Ray: build the model, do the dry run, load the checkpoint, and run
the loop.

training/workers/ray_trainer.py calls `train_worker` in each Ray Train worker; torchrun can call it
with any iterable of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import torch
from torch import nn

from mmray import objectives, plugins
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.stream.collate import PixelMemory, iter_micro_batches
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import Block
from mmray.data.stream.stream import RankBlocks
from mmray.data.vlm.collate import iter_row_batches
from mmray.data.vlm.reader import ConversationReader
from mmray.engine import loop, precision
from mmray.engine.bad_rows import quarantine_bad_rows
from mmray.engine.build import build_for_device, check_packing, prepare_model
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import HeartbeatState
from mmray.engine.memory_probe import dry_run
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.parallel.cuda_graphs import graph_branches
from mmray.engine.parallel.device_defaults import (
    create_cuda_context,
    limit_compile_workers,
)
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.transforms import (
    TOKEN_MULTIPLE,
    branches_of,
    force_eager,
)
from mmray.engine.precision import seed_everything
from mmray.engine.prefetch import register_pinned
from mmray.engine.run_state import CheckpointState, DestinationFn, TrainSpec
from mmray.engine.worker_context import (
    DriverHandle,
    ProgressReporter,
    WorkerContext,
    result_fields,
)
from mmray.errors import MmrayError
from mmray.evaluation import EXAMPLES
from mmray.evaluation.build import best_metric, build_evaluator
from mmray.machine import keep_freed_memory
from mmray.models.build import import_libraries
from mmray.models.lora import FrozenBase
from mmray.models.protocol import as_model
from mmray.objectives.protocol import Batch, Objective
from mmray.storage.paths import AnyPath, to_path

if TYPE_CHECKING:
    from mmray.config import Config


def train_worker(
    context: WorkerContext,
    resume_point: ResumePoint,
    blocks: Iterable[Block],
    device: torch.device,
    driver: DriverHandle,
) -> dict[str, Any]:
    """Train this rank from a resume point to the last step of the run, without Ray.

    Args:
        context: Settings, folder and data of the run.
        resume_point: The sample order, the first step, and the checkpoint to load, if any.
        blocks: The rows of this rank in sample order, some at a time: arrays [R, ...] by column, as
            `read_block` of `context.reader` returns them, used until the next is requested. Their
            method `interrupt`, if any, is called from another thread: it must end a `next` that
            waits for rows. If `pixels` contains the pixels of all blocks, a GPU reads them there.
        device: Device of this rank.
        driver: Receives progress and metrics, and requests a stop.

    Returns:
        The fields of result.json: `status` (`finished` or `stopped`), `steps`, `rows_consumed` and
        `skipped_steps` (int), `metrics` (the last line of metrics.jsonl, values by name) and
        `scores` (those of the last evaluation, if that line has some).

    Raises:
        UsageError: The settings cannot be trained.
        TrainingError: Training failed, ran out of memory, or lost its storage.
        DataError: Too many rows are unreadable, or a label has no class.
    """
    plan = resume_point.plan
    config = context.config
    driver.stage("building the model")
    _start_process(config, device)
    group = Group.current(device, config.cluster.collective_timeout_s)
    checkpoint = None if resume_point.checkpoint is None else to_path(resume_point.checkpoint)
    config, built, base = build_for_device(config, plan, checkpoint, group, driver)
    context = replace(context, config=config)
    model = prepare_model(context, group, built, checkpoint is None, driver)
    objective = objectives.build(config.objective)
    context, memory_table = _dry_run(context, model, objective, group, plan.steps, driver)
    checkpoints = _checkpoint_manager(context, group, model, base, driver)
    rank0_checkpoints = checkpoints if group.rank == 0 else None
    log = profile_path = None
    if rank0_checkpoints is not None:
        log = rank0_checkpoints.log_from(resume_point.step)
        profile_path = rank0_checkpoints.uploader.local_folder / "profile" / "rank-0.json"
        driver.report({"wasted_steps": log.wasted_steps})
    spec = TrainSpec(
        model=model,
        objective=objective,
        plan=plan,
        batch_shape=context.batch_shape,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        save=partial(_save, checkpoints, plan, base, driver),
        evaluate=_evaluate_fn(context, group, objective, plan.global_batch_size, driver, log),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=_callbacks(context, rank0_checkpoints, driver),
        stop=driver.stop_requested,
        interrupt_stream=blocks.interrupt if isinstance(blocks, RankBlocks) else lambda: None,
        group_by_length=config.batch.group_by_length,
        profile_path=profile_path,
        static_metrics=memory_table,
        heartbeat=driver.heartbeat,
        sources=tuple(context.reader.prepared.names),
    )
    with (
        _closing(log, checkpoints, driver.heartbeat),
        _pinned_pixels(blocks, device, driver),
        closing(SubprocessDecoder()) as decoder,
    ):
        readable = quarantine_bad_rows(
            blocks, config, context.folder, context.reader, decoder, plan, driver.count_bad_row
        )
        steps = _report_first(_micro_batches(readable, context, resume_point, model, group), driver)
        load = None if checkpoint is None else partial(_load, checkpoint, model, base, driver)
        outcome = loop.train_loop(spec, steps, load)
    return result_fields(**vars(outcome))


def _dry_run(
    context: WorkerContext,
    model: nn.Module,
    objective: Objective,
    group: Group,
    steps: int,
    driver: DriverHandle,
) -> tuple[WorkerContext, dict[str, float]]:
    """Return the context with the batch shape that fits into memory, and the memory of a step by
    part.

    The blocks of the model are compiled, and recorded as CUDA graphs, if the settings request it.
    """
    config = context.config
    has_fixed_shapes = not isinstance(context.reader, ConversationReader)
    if group.device.type == "cpu":
        keep_freed_memory()  # after sharding, which frees most of rank 0's weights
    driver.stage("dry run" if config.train.compile == "none" else "compiling in a dry run")
    if not has_fixed_shapes:
        from mmray.models.vlm.model import Vlm

        assert isinstance(model, Vlm)
        check_packing(config.train.precision, model, group, driver)
    model.train()  # transformers reads weights into modules in evaluation mode
    batch_shape, memory_table = dry_run(config, model, objective, group, context.batch_shape, steps)
    driver.report({"batch_shape": batch_shape})
    if context.batch_shape.auto:
        driver.notify("memory", f"micro-batches of {batch_shape.micro_batch_size} rows fit")
    # Rows of conversations differ in length, so no shape would be repeated.
    branches = branches_of(model) if has_fixed_shapes else {}
    if text := graph_branches(branches, config.train, batch_shape, group.device, driver.notify):
        driver.notify("device", text)
    return replace(context, batch_shape=batch_shape), memory_table


def _pinned_pixels(
    blocks: Iterable[Block], device: torch.device, driver: DriverHandle
) -> AbstractContextManager[None]:
    """Pin the memory with the pixels of the blocks while a GPU reads them there."""
    pixels = blocks.pixels if isinstance(blocks, RankBlocks) else None
    if device.type != "cuda" or pixels is None:
        return nullcontext()
    return register_pinned(pixels, driver.notify)


def _start_process(config: Config, device: torch.device) -> None:
    """Import libraries, and set the current GPU, the number of threads and the seeds of this
    process.
    """
    limit_compile_workers()  # inductor reads this when it is imported, which libraries do
    with create_cuda_context(device):
        import_libraries(config.model)
    if device.type == "cuda":
        # The current GPU of the process is otherwise the first, and code that names no device
        # would create a context there.
        torch.cuda.set_device(device)
    torch.set_num_threads(config.cluster.num_threads)  # fixed: the order of sums changes rounding
    seed_everything(config.train.seed, config.train.deterministic)


def _callbacks(
    context: WorkerContext,
    rank0_checkpoints: CheckpointManager | None,
    driver: DriverHandle,
) -> tuple[Any, ...]:
    """Return the callbacks of the loop: the user's, the heartbeat and, on rank 0, reports."""
    names = context.config.train.callbacks
    callbacks: list[Any] = [plugins.load_class(name, "train.callbacks")() for name in names]
    callbacks.append(driver.heartbeat)
    if rank0_checkpoints is not None:
        callbacks.append(ProgressReporter(driver.report, rank0_checkpoints))
    return tuple(callbacks)


def _micro_batches(
    rows: Iterable[Block],
    context: WorkerContext,
    start: ResumePoint,
    model: nn.Module,
    group: Group,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step.

    They are split here, so that `group_by_length` and the trimming of captions see the final ones.
    """
    config = context.config
    size = context.batch_shape.micro_batch_size
    if isinstance(context.reader, ConversationReader):
        from mmray.models.vlm.model import Vlm

        assert isinstance(model, Vlm)
        return iter_row_batches(
            rows, start.plan, start.step, group.rank, size, model.collator(model.pairs)
        )
    eager = config.train.compile == "none" and group.device.type == "cpu"
    return iter_micro_batches(
        rows,
        rank_rows=start.plan.rank_rows,
        micro_batch_size=size,
        group_by_length=config.batch.group_by_length,
        token_multiple=1 if eager else TOKEN_MULTIPLE,
        max_tokens=config.model.inputs.max_tokens,
        memory=PixelMemory(pin=group.device.type == "cuda"),
    )


def _load(
    checkpoint: AnyPath,
    model: nn.Module,
    base: FrozenBase | None,
    driver: DriverHandle,
    destination: DestinationFn,
) -> CheckpointState:
    """Read the state of a checkpoint, with the frozen weights that it leaves out."""
    from mmray.engine.checkpoint import state_io

    driver.stage("loading the checkpoint")
    state = state_io.load(checkpoint, destination, on_read=driver.heartbeat.count_progress)
    if base is not None:
        base.add_to(state, model)
    return state


def _report_first(steps: Iterable[list[Batch]], driver: DriverHandle) -> Iterator[list[Batch]]:
    """Yield the steps, and report when the rows of the first are awaited and when they arrive."""
    driver.stage("waiting for the first batch")
    remaining = iter(steps)
    for first in remaining:
        driver.stage("first step")
        yield first
        del first  # otherwise in memory until the last step
        yield from remaining


@contextmanager
def _closing(
    log: MetricsLog | None, manager: CheckpointManager | None, heartbeat: HeartbeatState
) -> Iterator[None]:
    """Close both at the end of the block, so the last checkpoint is complete, or its error raised,
    when a rank returns. The log is closed after it, as a storage that was away can be used then.

    An error of the block takes precedence over errors of closing: the driver restarts or fails
    depending on its type.
    """
    with ExitStack() as both:
        if manager is not None:
            both.callback(manager.close)
        if log is not None:
            both.callback(log.close)
        if manager is not None:
            both.callback(manager.wait_saved)
        try:
            yield
        except BaseException:
            if manager is not None:
                manager.abandon()
            # A broken collective raises RuntimeError.
            with suppress(MmrayError, OSError, RuntimeError), heartbeat.state("saving"):
                both.close()
            raise
        with heartbeat.state("saving"):
            both.close()


def _checkpoint_manager(
    context: WorkerContext,
    group: Group,
    model: nn.Module,
    base: FrozenBase | None,
    driver: DriverHandle,
) -> CheckpointManager | None:
    """Return the checkpoint manager: on rank 0, and under FSDP on every rank, because each writes
    its shard.
    """
    config = context.config
    sharded = strategy_class(config.train)(group).is_sharded
    cpu_group = group.new_cpu_group(config.cluster.state_limits_s["saving"]) if sharded else None
    if group.rank != 0 and not sharded:
        return None
    waits_for_others = group.world_size > 1 and not sharded
    return CheckpointManager(
        context.folder,
        context.fencing_token if group.rank == 0 else None,
        meta={
            "world": group.world_size,
            "architecture": as_model(model).architecture(),
            "config": config.to_json(),
            "base": None if base is None else base.identity,
        },
        notify=driver.notify,
        keep=config.train.keep_checkpoints,
        metric=best_metric(config),
        max_wait_s=config.cluster.group_timeout_s / 2 if waits_for_others else None,
        cpu_group=cpu_group,
        on_retry=driver.heartbeat.count_progress,
    )


def _save(
    checkpoints: CheckpointManager | None,
    plan: SamplePlan,
    base: FrozenBase | None,
    driver: DriverHandle,
    step: int,
    state: CheckpointState,
    metrics: dict[str, Any],
    last: bool,
) -> float | None:
    """Save a checkpoint, as `TrainSpec.save`; nothing on ranks without a manager."""
    if last:
        driver.phase("saving the last checkpoint")
    if checkpoints is None:
        return None
    if base is not None:
        state = base.remove_from(state)
    return checkpoints.save(step, plan.rows_start(step), state, metrics, last)


def _evaluate_fn(
    context: WorkerContext,
    group: Group,
    objective: Objective,
    global_batch_size: int,
    driver: DriverHandle,
    log: MetricsLog | None,
) -> Callable[[int, nn.Module], dict[str, float]] | None:
    if not context.eval_sets or context.config.evaluate.where == "beside":
        return None
    evaluator = build_evaluator(context.config, context.eval_sets, context.tokenizer_json)
    mixed_precision = precision.select_precision(context.config.train.precision, group.device)

    def evaluate(step: int, model: nn.Module) -> dict[str, float]:
        def save_examples(examples: dict[str, Any]) -> None:
            assert log is not None
            log.write_file(EXAMPLES, orjson.dumps({"step": step, **examples}).decode())

        driver.phase("evaluating")
        # Graphs of evaluation would take longer to compile than they save.
        with force_eager(), mixed_precision.autocast():
            return evaluator.score(
                model,
                group,
                objective,
                global_batch_size,
                save_examples if group.rank == 0 else None,
            )

    return evaluate
