"""One training worker, without Ray: build the model, do the dry run, load the checkpoint, and run
the loop.

training/ray_trainer.py calls `train_worker` in each Ray Train worker; torchrun can call it with any
iterable of blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import torch
from torch import Tensor, nn

from mmray import objectives, plugins
from mmray.builtin import KINDS
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.stream.collate import PixelMemory, iter_micro_batches
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.reader import Block
from mmray.data.vlm.collate import iter_row_batches
from mmray.data.vlm.reader import ConversationReader, ReferenceLogProbs
from mmray.engine import loop, precision
from mmray.engine.bad_rows import quarantine_bad_rows
from mmray.engine.batch import BatchShape
from mmray.engine.checkpoint import files
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import HeartbeatState
from mmray.engine.memory_probe import dry_run
from mmray.engine.metrics.meters import model_flops_of_row, peak_flops
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.parallel.cuda_graphs import graph_branches
from mmray.engine.parallel.device_defaults import (
    capability_of,
    compile_pays,
    configure_torch,
    create_cuda_context,
    device_defaults,
    limit_compile_workers,
    resolve_auto,
)
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.support import unsupported_reasons
from mmray.engine.parallel.transforms import (
    TOKEN_MULTIPLE,
    apply_transforms,
    branches_of,
    force_eager,
)
from mmray.engine.precision import seed_everything
from mmray.engine.prefetch import register_pinned
from mmray.engine.run_state import CheckpointState, DestinationFn, LoadCheckpointFn, TrainSpec
from mmray.engine.worker_context import (
    DriverHandle,
    ProgressReporter,
    WorkerContext,
    result_fields,
)
from mmray.errors import MmrayError, UsageError
from mmray.evaluation import EXAMPLES
from mmray.evaluation.build import best_metric, build_evaluator, check_evaluable
from mmray.machine import keep_freed_memory
from mmray.models import lora
from mmray.models.build import build, build_on, import_libraries
from mmray.models.lora import FrozenBase
from mmray.models.protocol import PRETRAINED, Model, WeightSource, as_model, saved_layers
from mmray.models.synthetic import synthetic_rows
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
    config, built, base = _build_for_device(config, plan, checkpoint, group, driver)
    context = replace(context, config=config)
    model = _prepare_model(context, group, built, checkpoint is None, driver)
    objective = objectives.build(config.objective)
    batch_shape, memory_table = _dry_run(context, model, objective, group, plan.steps, driver)
    context = replace(context, batch_shape=batch_shape)
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
        save=_save_fn(checkpoints, plan, base, driver),
        evaluate=_evaluate_fn(context, group, objective, plan.global_batch_size, driver, log),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=_callbacks(context, rank0_checkpoints, driver),
        stop=driver.stop_requested,
        interrupt_stream=getattr(blocks, "interrupt", lambda: None),
        group_by_length=config.batch.group_by_length,
        profile_path=profile_path,
        static_metrics=memory_table,
        heartbeat=driver.heartbeat,
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
        outcome = loop.train_loop(spec, steps, _load_fn(checkpoint, model, base, driver))
    return result_fields(**vars(outcome))


def _dry_run(
    context: WorkerContext,
    model: nn.Module,
    objective: Objective,
    group: Group,
    steps: int,
    driver: DriverHandle,
) -> tuple[BatchShape, dict[str, float]]:
    """Return the batch shape that fits into memory, and the memory of a step by part.

    The blocks of the model are compiled, and recorded as CUDA graphs, if the settings request it.
    """
    config = context.config
    has_fixed_shapes = not isinstance(context.reader, ConversationReader)
    if group.device.type == "cpu":
        keep_freed_memory()  # after sharding, which frees most of rank 0's weights
    driver.stage("dry run" if config.train.compile == "none" else "compiling in a dry run")
    if not has_fixed_shapes:
        _check_packing(config.train.precision, model, group, driver)
    model.train()  # transformers reads weights into modules in evaluation mode
    batch_shape, memory_table = dry_run(config, model, objective, group, context.batch_shape, steps)
    driver.report({"batch_shape": batch_shape})
    if context.batch_shape.auto:
        driver.notify("memory", f"micro-batches of {batch_shape.micro_batch_size} rows fit")
    # Rows of conversations differ in length, so no shape would be repeated.
    branches = branches_of(model) if has_fixed_shapes else {}
    if text := graph_branches(branches, config.train, batch_shape, group.device, driver.notify):
        driver.notify("device", text)
    return batch_shape, memory_table


def _pinned_pixels(
    blocks: Iterable[Block], device: torch.device, driver: DriverHandle
) -> AbstractContextManager[None]:
    """Pin the memory with the pixels of the blocks while a GPU reads them there."""
    pixels = getattr(blocks, "pixels", None)
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


def _build_for_device(
    config: Config,
    plan: SamplePlan,
    checkpoint: AnyPath | None,
    group: Group,
    driver: DriverHandle,
) -> tuple[Config, Model, FrozenBase | None]:
    """Build the model; return it with the config in which no setting of `train` is `auto`, and the
    frozen weights that checkpoints leave out.
    """
    meta = {} if checkpoint is None else files.load_meta(checkpoint)
    saved_base = meta.get("base")
    reads_weights = checkpoint is None or saved_base is not None
    source = PRETRAINED if reads_weights else saved_layers(meta["architecture"])
    model = build_model(config, group, source)
    base = None
    if reads_weights and lora.leaves_out_base(config.model):
        settings: Any = config.model
        base = _frozen_base(model, settings.weights, group, saved_base)
    for note in model.build_notes:
        driver.notify("model", note)
    if config.train.compile == "auto" and config.model.lora.load_in_4bit:
        config = config.replace(train=config.train.replace(compile="none"))
    if config.train.compile == "auto":
        earns = _earns_compile(config, model, group.device, plan.rank_rows, plan.steps)
        if group.all_reduce_min(int(earns)) == 0:
            driver.notify("device", "compile none: the run is too short to earn it")
            config = config.replace(train=config.train.replace(compile="none"))
    # after this, so that a short run does not spend seconds to try the compiler
    config = config.replace(train=resolve_auto(config.train, group, driver.notify))
    if reasons := unsupported_reasons(config):
        raise UsageError("\n".join(reasons))
    if text := configure_torch(config.train, group.device):
        driver.notify("device", text)
    return config, model, base


def _frozen_base(
    model: nn.Module, weights: str, group: Group, saved: Mapping[str, str] | None
) -> FrozenBase:
    """Return the frozen weights of the model, which are equal to `saved` of a checkpoint, if given;
    only rank 0 hashes them. A collective call.

    Raises UsageError on every rank.
    """

    def checked_hash() -> str:
        base = lora.frozen_base(model, weights)
        if saved is not None:
            base.check(saved)
        return base.sha256

    return FrozenBase(weights, group.call_on_rank0(checked_hash), lora.frozen_names(model))


def _set_reference(model: Any, references: ReferenceLogProbs, is_start: bool, group: Group) -> None:
    """Set that a model trains on pairs of answers, and check that it starts as the reference model
    that wrote their log-probabilities. A collective call.

    Raises UsageError on every rank.
    """
    model.pairs = True
    model.has_reference = references.chosen is not None
    if model.has_reference and is_start:
        digest = group.call_on_rank0(lambda: lora.hash_weights(model))
        if digest != references.digest:
            raise UsageError(
                f"objective.reference: `{references.column}` of the set is of "
                f"{references.weights}, whose weights are not those of model.weights. Run `mmray "
                "score` with the weights of the run, with another --name and --objective.reference"
            )


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


def _check_packing(
    precision_name: str, model: nn.Module, group: Group, driver: DriverHandle
) -> None:
    """Pad the rows of a model whose loss or gradients depend on the other rows of a sequence; a
    collective call of all ranks.
    """
    vlm: Any = model.eval()  # dropout and scales of float8 depend on the other rows
    if not vlm.packed:
        driver.notify("packing", "rows are padded: those of this model cannot be packed")
        return
    with precision.select_precision(precision_name, group.device).autocast():
        differs = vlm.differs_if_packed()
    if group.all_reduce_min(int(not differs)) == 0:
        vlm.packed = False
        driver.notify(
            "packing", "rows are padded: a packed row has another loss or gradient than alone"
        )


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
        vlm: Any = model
        return iter_row_batches(
            rows, start.plan, start.step, group.rank, size, vlm.collator(vlm.pairs)
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


def _earns_compile(
    config: Config, model: nn.Module, device: torch.device, rank_rows: int, steps: int
) -> bool:
    """Return True if the run is long enough for torch.compile, by the FLOPs of the model.

    True if the blocks would not be compiled on the device, with `train.float8`, which needs it, for
    a model that will be sharded, which is large, and for a user's model whose FLOPs cannot be
    counted without running it.
    """
    default = device_defaults(capability_of(device)).compile
    must_compile = config.train.float8 != "none" or strategy_class(config.train).shards_weights
    if default == "none" or must_compile:
        return True
    without_autocast = precision.Precision("fp32", None, "meta")
    memo: dict[int, Tensor] = {
        id(weight): nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
        for weight in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    row = synthetic_rows(model, config.model, 1, "meta")
    try:
        flops = model_flops_of_row(copy.deepcopy(model, memo), row, without_autocast)
    except Exception:  # noqa: BLE001 - code of a user may fail in any way on the meta device
        return True
    mixed = precision.select_precision(config.train.precision, device)
    return compile_pays(flops, rank_rows, steps, peak_flops(device, mixed))


def _prepare_model(
    context: WorkerContext, group: Group, model: Model, is_start: bool, driver: DriverHandle
) -> nn.Module:
    """Apply the settings of `train` to a model; shard it if it will be, otherwise it is not wrapped
    yet. `is_start`: no checkpoint will be loaded.
    """
    references = getattr(context.reader, "references", None)
    if references is not None:
        _set_reference(model, references, is_start, group)
    config = context.config
    train = context.config.train
    transformed = apply_transforms(model, train, config.optimizer, group, driver.notify)
    if references is not None and references.chosen is None:
        lora.check_only_adapters(transformed)
    if context.eval_sets:
        check_evaluable(config, transformed)
    strategy = strategy_class(train)(group, precision.DTYPES[train.precision])
    return strategy.wrap(transformed) if strategy.is_sharded else transformed


def build_model(config: Config, group: Group, source: WeightSource) -> Model:
    """Build the model on this rank.

    A model that will be sharded has weights on rank 0 only, or on no rank if a checkpoint will be
    loaded; on the other ranks its parameters are on the meta device.

    Args:
        group: All ranks; each calls this function.
        source: Where weights come from; random ones will be loaded from a checkpoint.

    Returns:
        The model, not sharded yet.

    Raises:
        UsageError: The settings are not supported, or the weights cannot be read; on every rank.
    """
    spec = config.model
    sharded = strategy_class(config.train).shards_weights
    if not sharded or group.world_size == 1:
        may_read_weights = source.pretrained and getattr(spec, "weights", "") != "none"
        # A user's class may compute on the CPU with its weights.
        on_cpu = sharded or may_read_weights or spec.kind not in KINDS
        return build_on("cpu" if on_cpu else group.device, spec, spec.vocab_size, source)
    on_rank0: list[Model] = []

    def build_on_rank0() -> dict[str, Any]:
        on_rank0.append(build(spec, spec.vocab_size))
        return on_rank0[0].architecture()

    if source.pretrained:
        source = saved_layers(group.call_on_rank0(build_on_rank0))
    if on_rank0:
        return on_rank0[0]
    return build_on("meta", spec, spec.vocab_size, source)


def _load_fn(
    checkpoint: AnyPath | None, model: nn.Module, base: FrozenBase | None, driver: DriverHandle
) -> LoadCheckpointFn | None:
    """Return the function that reads the state of a checkpoint, with the frozen weights that it
    leaves out; None without a checkpoint.
    """
    if checkpoint is None:
        return None
    driver.stage("loading the checkpoint")

    def load(destination: DestinationFn) -> CheckpointState:
        from mmray.engine.checkpoint import state_io

        on_read = driver.heartbeat.count_progress
        state = state_io.load(checkpoint, destination, on_read=on_read)
        if base is not None:
            base.add_to(state, model)
        return state

    return load


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


def _save_fn(
    checkpoints: CheckpointManager | None,
    plan: SamplePlan,
    base: FrozenBase | None,
    driver: DriverHandle,
) -> Callable[[int, CheckpointState, dict[str, Any], bool], float | None]:
    """Return the function that saves a checkpoint; it saves nothing on ranks without a manager."""

    def save(
        step: int, state: CheckpointState, metrics: dict[str, Any], last: bool
    ) -> float | None:
        if last:
            driver.phase("saving the last checkpoint")
        if checkpoints is None:
            return None
        if base is not None:
            state = base.remove_from(state)
        return checkpoints.save(step, plan.rows_start(step), state, metrics, last)

    return save


def _evaluate_fn(
    context: WorkerContext,
    group: Group,
    objective: Objective,
    global_batch_size: int,
    driver: DriverHandle,
    log: MetricsLog | None,
) -> Callable[[int, nn.Module], dict[str, float]] | None:
    if not context.eval_sets:
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
