"""One training worker, without Ray: build the model, take the dry run, load the checkpoint, and run the loop.

train/worker.py calls `work` in each Ray Train worker; under torchrun it can be called with any iterable of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
import torch
from torch import nn

from mmray import objectives, plugins
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import ResumePoint
from mmray.data.stream.reader import Block, RowReader
from mmray.data.text.chat import build_encoder
from mmray.engine import loop, precision
from mmray.engine.bad_samples import quarantine_bad_rows
from mmray.engine.checkpoint import files, state_io
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.memory_probe import dry_run_job, keep_freed_memory, make_probe_state
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.oom import row_numbers
from mmray.engine.parallel.branches import two_devices
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.precision import seed_everything
from mmray.engine.run_state import State, TrainSpec
from mmray.engine.worker_context import DriverHandle, InputBoundHint, ProgressReporter, WorkerContext, input_bound_hint
from mmray.errors import MmrayError
from mmray.evaluate.build import build_evaluator, check_evaluable
from mmray.models.build import build
from mmray.models.fusion import LabelTexts
from mmray.report.run import EXAMPLES
from mmray.storage.paths import to_path, write_atomic

WRITES_HANGS = 10  # limit of a wait for a checkpoint write, in multiples of hang_timeout_s


def work(
    job: WorkerContext, start: ResumePoint, blocks: Iterable[Block], device: torch.device, line: DriverHandle
) -> dict[str, Any]:
    """Train from `start` to the end of its plan; return the fields of result.json."""
    stacks = job.folder / "stacks" / f"step-{start.step}-rank-{line.about['rank']}.txt"
    pulse = Heartbeat(line.beat, line.about, stacks, WRITES_HANGS * job.config.cluster.hang_timeout_s)
    with pulse.running(start.step):
        return _train(job, start, blocks, device, line, pulse)


def _train(
    job: WorkerContext,
    start: ResumePoint,
    blocks: Iterable[Block],
    device: torch.device,
    line: DriverHandle,
    pulse: Heartbeat,
) -> dict[str, Any]:
    config = job.config
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))  # fixed: the order of sums changes rounding
    if device.type == "cpu":
        keep_freed_memory()
    seed_everything(config.train.seed, config.train.deterministic)
    group = Group.current(device, config.cluster.collective_timeout_s)
    agreed = precision.common_precision(config.train.precision, group)
    config = config.replace(train=config.train.replace(precision=agreed))
    checkpoint = None if start.checkpoint is None else to_path(start.checkpoint)
    architecture = None if checkpoint is None else files.load_meta(checkpoint)["architecture"]
    model = build(config.model, config.model.vocab_size, architecture)
    labels = getattr(model, "labels", None)
    if isinstance(labels, LabelTexts) and not labels.is_set:  # otherwise they come from a checkpoint
        labels.tokenize(build_encoder(job.tokenizer_json, config.model.inputs))
    model = apply_transforms(model, config.train, config.optimizer, device)
    if job.eval_set is not None:
        check_evaluable(config, model)
    objective = objectives.build(config.objective)
    probed = dry_run_job(job, make_probe_state(config, model, objective, group), start.plan)
    writer = _checkpoint_manager(job, group, model, line)
    main = writer if group.rank == 0 else None
    callbacks = [*(plugins.load_class(name, "train.callbacks")() for name in config.train.callbacks), pulse]

    def report_hint(wait_share: float) -> None:
        kind = "GPU" if device.type == "cuda" else "CPU"
        sides = config.prepare.image_side, config.model.inputs.image_side
        hint = input_bound_hint(wait_share, job.data_workers, *sides, kind)
        if hint is not None:
            line.note("throughput", hint)

    log = None
    if main is not None:
        log = main.log_from(start.step)
        line.report({"wasted_steps": log.wasted_steps})
        callbacks += [ProgressReporter(line.report, main), InputBoundHint(report_hint)]

    def save(step: int, state: State, metrics: dict[str, Any], last: bool) -> float | None:
        return None if writer is None else writer.save(step, start.plan.rows_start(step), state, metrics, last)

    spec = TrainSpec(
        model=model,
        objective=objective,
        plan=start.plan,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        save=save,
        evaluate=None if job.eval_set is None else _evaluator(job, group, objective, start, line, agreed),
        evaluate_every=config.evaluate.every,
        log=log,
        callbacks=tuple(callbacks),
        stop=line.stop,
        group_by_length=config.batch.group_by_length,
        profile_path=None if main is None else main.growing.here / "profile" / "rank-0.json",
        micro=probed.micro,
        static_metrics=probed.table,
        names=partial(_row_keys, job.reader),
        note=lambda text, label: line.note(label, text),
        devices=two_devices(device) if config.train.parallel == "branches" else (),
    )
    if config.batch.micro == "auto":
        line.note("memory", f"micro-batches of {probed.micro} rows fit")
    with _closing(log, writer):
        rows = quarantine_bad_rows(blocks, config, job.folder, job.reader, start.plan, line.bad_row)
        # Split here, so that group_by_length and the trimming of captions see the final micro-batches.
        plan = replace(start.plan, micro=probed.micro)
        stored = None if checkpoint is None else partial(state_io.load, checkpoint)
        outcome = loop.run(spec, iter_micro_batches(rows, plan, config.batch.group_by_length), stored)
    metrics = {name.removeprefix("evaluate/"): value for name, value in outcome.metrics.items()}
    scores = {name: value for name, value in metrics.items() if f"evaluate/{name}" in outcome.metrics}
    return vars(outcome) | {"metrics": metrics, "scores": scores}


@contextmanager
def _closing(log: MetricsLog | None, manager: CheckpointManager | None) -> Iterator[None]:
    """Close both at the end of the block, so the last checkpoint is complete, or its error raised, when a rank returns.

    An error of the block takes precedence over errors of closing, because the supervisor decides by it.
    """
    with ExitStack() as both:
        if manager is not None:
            both.callback(manager.close)
        if log is not None:
            both.callback(log.close)
        try:
            yield
        except BaseException:
            with suppress(MmrayError, OSError, RuntimeError):  # RuntimeError: a broken collective
                both.close()
            raise


def _checkpoint_manager(
    job: WorkerContext, group: Group, model: nn.Module, line: DriverHandle
) -> CheckpointManager | None:
    """Return the checkpoint manager: on rank 0, and under FSDP on every rank, because each writes its shard."""
    sharded = job.config.train.parallel == "fsdp" and group.world > 1
    cpu_group = group.new_cpu_group(WRITES_HANGS * job.config.cluster.hang_timeout_s) if group.world > 1 else None
    if group.rank != 0 and not sharded:
        return None
    # The architecture replaces the pretrained files on resume; a custom model may have none.
    architecture = model.architecture() if hasattr(model, "architecture") else None  # type: ignore[operator]
    about = {"world": group.world, "architecture": architecture}
    fence = job.fence if group.rank == 0 else None
    return CheckpointManager(job.folder, fence, job.config, about, line.note, cpu_group, sharded)


def _evaluator(
    job: WorkerContext, group: Group, objective: Any, start: ResumePoint, line: DriverHandle, number_format: str
) -> Callable[[int, nn.Module], dict[str, float]]:
    assert job.eval_set is not None
    scorer = build_evaluator(job.config, job.eval_set, job.tokenizer_json)
    chosen = precision.select_precision(number_format, group.device)

    def evaluate(step: int, model: nn.Module) -> dict[str, float]:
        def save_examples(examples: dict[str, Any]) -> None:
            try:
                write_atomic(job.folder / EXAMPLES, orjson.dumps({"step": step, **examples}).decode())
            except OSError as error:
                line.note("storage", f"cannot write the examples of step {step}: {error}")

        with chosen.autocast():
            return scorer.score(
                model, group, objective, start.plan.global_rows, save_examples if group.rank == 0 else None
            )

    return evaluate


def _row_keys(reader: RowReader, rows: list[int]) -> list[str]:
    """Keys of rows of the prepared set, for messages; numbers if they cannot be read."""
    try:
        records = reader.prepared.read(np.array(rows))
        return [f"{record.key} (row {row})" for row, record in zip(rows, records, strict=True)]
    except (OSError, ValueError):
        return row_numbers(rows)
