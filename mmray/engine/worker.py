"""One training worker, without Ray: build the model, take the dry run, load the checkpoint, and run the loop.

train/worker.py calls `work` in each Ray Train worker; under torchrun it can be called with any iterable of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mmray import objectives, plugins
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import ResumePoint
from mmray.data.stream.reader import Block
from mmray.data.text.chat import build_encoder
from mmray.engine import loop, precision, worker_context
from mmray.engine.bad_samples import quarantine_bad_rows
from mmray.engine.checkpoint import files, state_io
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.memory_probe import dry_run_job, keep_freed_memory, make_probe_state
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.parallel.branches import two_devices
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.precision import seed_everything
from mmray.engine.run_state import Callback, State, TrainSpec
from mmray.engine.worker_context import DriverHandle, InputBoundHint, Report, WorkerContext
from mmray.errors import MmrayError
from mmray.evaluate.build import build_evaluator, check_evaluable
from mmray.models.build import build
from mmray.models.fusion import LabelTexts
from mmray.storage.paths import to_path

WRITES_HANGS = 10  # limit of a wait for a checkpoint write, in multiples of hang_timeout_s


def work(
    job: WorkerContext, start: ResumePoint, blocks: Iterable[Block], device: torch.device, line: DriverHandle
) -> dict[str, Any]:
    """Train from `start` to the end of its plan; return the fields of result.json."""
    stacks = job.folder / "stacks" / f"step-{start.step}-rank-{line.about['rank']}.txt"
    pulse = Heartbeat(line.beat, line.about, stacks, WRITES_HANGS * job.config.cluster.hang_timeout_s)
    with pulse.running(start.step):
        return _work(job, start, blocks, device, line, pulse)


def _work(
    job: WorkerContext,
    start: ResumePoint,
    blocks: Iterable[Block],
    device: torch.device,
    line: DriverHandle,
    pulse: Heartbeat,
) -> dict[str, Any]:
    config = job.config
    torch.set_num_threads(
        max(1, int(config.cluster.cpus_per_worker))
    )  # fixed, because the order of sums changes rounding
    if device.type == "cpu":
        keep_freed_memory()
    seed_everything(config.train.seed, config.train.deterministic)
    group = Group.current(device, config.cluster.collective_timeout_s)
    config = config.replace(
        train=config.train.replace(precision=precision.common_precision(config.train.precision, group))
    )
    found = None if start.checkpoint is None else to_path(start.checkpoint)
    model = _model(job, None if found is None else files.load_meta(found)["architecture"], device)
    if job.eval_set is not None:
        check_evaluable(config, model)
    objective = objectives.build(config.objective)
    rehearsed = dry_run_job(job, make_probe_state(config, model, objective, group), start.plan)
    stored = None if found is None else partial(state_io.load, found)
    writes = _checkpoints(job, group, model, line.report)
    keeper = writes if group.rank == 0 else None
    log = None if keeper is None else keeper.log_from(start.step)
    if log is not None:
        line.report({"wasted_steps": log.wasted_steps})
    task = TrainSpec(
        model=model,
        objective=objective,
        plan=start.plan,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        save=partial(_save, writes, start),
        evaluate=_evaluator(job, group, objective, start, line.report, config.train.precision),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=_callbacks(job, keeper, device, line, pulse),
        stop=line.stop,
        group_by_length=config.batch.group_by_length,
        profile_path=None if keeper is None else keeper.growing.here / "profile" / "rank-0.json",
        micro=rehearsed.micro,
        static_metrics=rehearsed.table,
        names=partial(worker_context.row_keys, job.reader),
        note=lambda text, label: worker_context.report_note(line.report, label, text),
        devices=two_devices(device) if config.train.parallel == "branches" else (),
    )
    if config.batch.micro == "auto":
        task.note(f"micro-batches of {rehearsed.micro} rows fit", "memory")
    with _closing(log, writes):
        rows = quarantine_bad_rows(blocks, config, job.folder, job.reader, start.plan, line.bad_row)
        # Split here, so that group_by_length and the trimming of captions see the final micro-batches.
        fitting = replace(start.plan, micro=rehearsed.micro)
        outcome = loop.run(task, iter_micro_batches(rows, fitting, config.batch.group_by_length), stored)
    metrics = {name.removeprefix("evaluate/"): value for name, value in outcome.metrics.items()}
    scores = {name: value for name, value in metrics.items() if f"evaluate/{name}" in outcome.metrics}
    return vars(outcome) | {"metrics": metrics, "scores": scores}


@contextmanager
def _closing(log: MetricsLog | None, keeper: CheckpointManager | None) -> Iterator[None]:
    """Close both at the end of the block, so the last checkpoint is complete, or its error raised, when a rank returns.

    An error of the block takes precedence over errors of closing, because the supervisor decides by it.
    """
    with ExitStack() as both:
        if keeper is not None:
            both.callback(keeper.close)
        if log is not None:
            both.callback(log.close)
        try:
            yield
        except BaseException:
            with suppress(MmrayError, OSError, RuntimeError):  # RuntimeError: a broken collective
                both.close()
            raise


def _model(job: WorkerContext, architecture: dict[str, Any] | None, device: torch.device) -> nn.Module:
    """Build the unwrapped model on its device; `architecture`: that of the checkpoint to load."""
    config = job.config
    model = build(config.model, config.model.vocab_size, architecture)
    _tell_labels(model, job)
    return apply_transforms(model, config.train, config.optimizer, device)


def _tell_labels(model: nn.Module, job: WorkerContext) -> None:
    """Tokenize the label names of a region head, unless they come from a checkpoint."""
    labels = getattr(model, "labels", None)
    if isinstance(labels, LabelTexts) and not labels.is_set:
        labels.tokenize(build_encoder(job.tokenizer_json, job.config.model.inputs))


def _callbacks(
    job: WorkerContext, keeper: CheckpointManager | None, device: torch.device, line: DriverHandle, pulse: Heartbeat
) -> tuple[Callback, ...]:
    """Return the user's callbacks and the heartbeat; on rank 0 also progress and hints."""
    own = [plugins.load_class(name, "train.callbacks")() for name in job.config.train.callbacks]
    if keeper is None:
        return (*own, pulse)
    advising = InputBoundHint(partial(worker_context.report_hint, job, line.report, device))
    return (*own, pulse, worker_context.ProgressReporter(line.report, keeper), advising)


def _architecture(model: nn.Module) -> dict[str, Any] | None:
    """Return the architecture that replaces the pretrained files on resume; None for a custom model without one."""
    return model.architecture() if hasattr(model, "architecture") else None  # type: ignore[operator]


def _checkpoints(job: WorkerContext, group: Group, model: nn.Module, report: Report) -> CheckpointManager | None:
    """Return the checkpoint manager: on rank 0, and under FSDP on every rank, because each writes its shard."""
    sharded = job.config.train.parallel == "fsdp" and group.world > 1
    cpu_group = group.new_cpu_group(WRITES_HANGS * job.config.cluster.hang_timeout_s) if group.world > 1 else None
    if group.rank != 0 and not sharded:
        return None
    about = {"world": group.world, "architecture": _architecture(model)}
    fence, log = job.fence if group.rank == 0 else None, partial(worker_context.report_note, report)
    return CheckpointManager(job.folder, fence, job.config, about, log, cpu_group, sharded)


def _save(
    keeper: CheckpointManager | None,
    start: ResumePoint,
    step: int,
    state: State,
    metrics: dict[str, Any],
    last: bool,
) -> float | None:
    """Start a checkpoint in the background, on ranks that write; return the seconds that the previous one took."""
    return None if keeper is None else keeper.save(step, start.plan.rows_start(step), state, metrics, last)


def _evaluator(
    job: WorkerContext, group: Group, objective: Any, start: ResumePoint, report: Report, number_format: str
) -> Callable[[int, nn.Module], dict[str, float]] | None:
    if job.eval_set is None:
        return None
    scorer = build_evaluator(job.config, job.eval_set, job.tokenizer_json)
    chosen = precision.select_precision(number_format, group.device)

    def evaluate(step: int, model: nn.Module) -> dict[str, float]:
        show = partial(worker_context.save_examples, job.folder, report, step) if group.rank == 0 else None
        with chosen.autocast():
            return scorer.score(model, group, objective, start.plan.global_rows, show)

    return evaluate
