"""The training loop: micro-batches of rows in; weights, metrics and checkpoints out. Runs without Ray.

prefetch.py yields a batch, step.py takes the step, metrics/ measures it. The loop runs in one process, under torchrun,
or in a Ray Train worker. Every rank makes the same calls; only rank 0 writes the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from mmray.engine import oom
from mmray.engine.batch import smaller_micro
from mmray.engine.checkpoint import state_io
from mmray.engine.checkpoint.manager import CheckpointSchedule, steps_between_checkpoints
from mmray.engine.metrics.meters import Meter, Padding, reduce_over_ranks, rows_sha
from mmray.engine.metrics.timers import PhaseTimers, Throughput
from mmray.engine.metrics.writers import Metrics, profiled
from mmray.engine.oom import RecoverableOom, error_text
from mmray.engine.optimizer import (
    WHOLE,
    ExponentialMovingAverage,
    build_optimizer,
    lr_at,
    make_clip_groups,
    set_lr,
)
from mmray.engine.parallel import fsdp
from mmray.engine.parallel import wrap as parallel
from mmray.engine.parallel.wrap import ParallelConfig
from mmray.engine.precision import micro_seed, select_precision
from mmray.engine.prefetch import LocalBatch, prefetch, split_micro_batches
from mmray.engine.run_state import EMA_KEY, LoopResult, Progress, State, StateLoader, TrainSpec, TrainState
from mmray.engine.step import StepResult, nonfinite_samples, optimizer_step
from mmray.errors import OutOfMemoryError, TrainingError, is_out_of_memory
from mmray.objectives.protocol import Batch


@dataclass
class _Run:
    spec: TrainSpec
    state: TrainState
    layout: ParallelConfig
    progress: Progress
    meter: Meter
    schedule: CheckpointSchedule
    average: ExponentialMovingAverage | None = None


def run(spec: TrainSpec, steps: Iterable[list[Batch]], stored: StateLoader | None = None) -> LoopResult:
    """Train until the last step of the plan, or until a stop is requested.

    `steps` yields this rank's CPU micro-batches of each step, starting at the first step not yet taken. `stored` loads
    the checkpoint to resume from. Raises TrainingError for wrong or missing rows, or after too many non-finite steps.
    """
    run = _start(spec, stored)
    plan, progress, group = spec.plan, run.progress, spec.group
    batches = prefetch(steps, plan, progress.step, group.rank, group.device, run.state.timers, spec.group_by_length)
    metrics: Metrics = {}
    stop = False
    with profiled(spec.train.profile, spec.profile_path, group.device) as profile_step:
        while progress.step < plan.steps and not stop:
            keys, result = _train_step(run, batches)
            metrics = _finish_step(run, keys, result) or metrics
            stop = result.stop
            profile_step()
    status: Literal["finished", "stopped"] = "finished" if progress.step >= plan.steps else "stopped"
    return LoopResult(status, progress.step, plan.rows_start(progress.step), progress.skipped, metrics)


def _train_step(run: _Run, batches: Iterator[LocalBatch]) -> tuple[Tensor, StepResult]:
    """Fetch the next batch and take its step; return the keys of its rows, so that the batch itself is freed."""
    start_s, spec, progress = time.perf_counter(), run.spec, run.progress
    batch = _next_batch(batches, run)
    set_lr(run.state.optimizer, lr_at(progress.step, spec.optimizer, spec.plan.steps))
    result = _step_or_shrink(run, batch)
    progress.step += 1
    if run.average is not None and result.finite:
        run.average.update_parameters(spec.model)
    progress.skipped += not result.finite
    progress.skipped_in_a_row = 0 if result.finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= spec.train.max_nonfinite_steps:
        raise TrainingError(_nonfinite_message(run, split_micro_batches(batch, progress.micro)))
    num_rows = spec.plan.rows_stop(progress.step - 1) - spec.plan.rows_start(progress.step - 1)
    run.meter.rates.add(time.perf_counter() - start_s, batch.wait_s, num_rows, batch.tokens)
    run.meter.padding.add(batch)
    return batch.keys, result


def _step_or_shrink(run: _Run, batch: LocalBatch) -> StepResult:
    """Take one optimizer step; after an OOM, retry it on all ranks with smaller micro-batches.

    Raises OutOfMemoryError if there are no smaller ones, or if the ranks are no longer in step and must restart.
    """
    spec, progress = run.spec, run.progress
    step, rank = progress.step, spec.group.rank
    # The stop request is reduced over ranks in the step: all ranks must leave the loop together.
    stop = spec.stop()
    while True:
        micro_batches = split_micro_batches(batch, progress.micro)
        try:
            run.meter.count_flops(run.state, micro_batches)
            return optimizer_step(
                run.state, micro_batches, lambda index: micro_seed(spec.train.seed, step, rank, index), stop
            )
        except RecoverableOom as error:
            message = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            smaller = smaller_micro(progress.micro)
            details = oom.describe_rank_error(spec.plan, step, rank, spec.names, error_text(error))
            text = oom.step_oom_message(step, progress.micro, [details], smaller)
            raise OutOfMemoryError(text, smaller) from error
        del micro_batches
        _shrink(run, message)  # outside `except`: the traceback would keep the step's tensors alive


def _shrink(run: _Run, error: str) -> None:
    """Reduce the micro-batches on all ranks from now on, and drop the gradients of the abandoned step."""
    spec, progress = run.spec, run.progress
    smaller = smaller_micro(progress.micro)
    own = error and oom.describe_rank_error(spec.plan, progress.step, spec.group.rank, spec.names, error)
    text = oom.step_oom_message(progress.step, progress.micro, spec.group.all_gather_objects(own), smaller)
    if smaller == 0:
        raise OutOfMemoryError(text)
    progress.micro = smaller
    run.state.optimizer.zero_grad(set_to_none=True)
    run.state = replace(run.state, model=parallel.rewrap(run.state.model, spec.group, run.layout))
    if spec.group.device.type == "cuda":
        torch.cuda.empty_cache()
    spec.note(text, "memory")


def _next_batch(batches: Iterator[LocalBatch], run: _Run) -> LocalBatch:
    """Return the next batch. An OOM outside the recoverable part of a step restarts with smaller micro-batches."""
    spec, progress = run.spec, run.progress
    try:
        batch = next(batches, None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = smaller_micro(progress.micro)
        text = oom.prefetch_oom_message(progress.step, progress.micro, spec.group.rank, error_text(error), smaller)
        raise OutOfMemoryError(text, smaller) from error
    if batch is None:
        raise TrainingError(
            f"the data stream ended after step {progress.step} of {spec.plan.steps}. The prepared set may have "
            "changed: run `mmray prepare` to check it"
        )
    return batch


def _start(spec: TrainSpec, stored: StateLoader | None) -> _Run:
    """Build the train state: wrapped model, optimizer and scaler, restored from the checkpoint if there is one."""
    device = spec.group.device
    module = spec.model.train()
    chosen = select_precision(spec.train.precision, device)
    timers = PhaseTimers(device)
    meter = Meter(Throughput(timers), max(1, len(spec.devices)))
    layout = ParallelConfig(spec.train.parallel, spec.train.grad_compression, chosen.dtype, spec.devices)
    model = parallel.wrap(module, spec.group, layout)
    state = TrainState(
        model=model,
        objective=spec.objective,
        group=spec.group,
        precision=chosen,
        optimizer=build_optimizer(module, spec.optimizer),
        scaler=chosen.scaler(),
        clip_groups=make_clip_groups(module, spec.optimizer.clip_per),
        timers=timers,
        clip_norm=spec.optimizer.clip_norm,
        can_recover_oom=(spec.recover_cpu_oom or device.type == "cuda") and not parallel.has_inner_collectives(model),
    )
    average = ExponentialMovingAverage(module, spec.train.ema) if spec.train.ema else None
    progress = _initial_progress(spec, Progress() if stored is None else _load(stored, module, state, average))
    schedule = CheckpointSchedule(spec.train.checkpoint_every, progress.step)
    return _Run(spec, state, layout, progress, meter, schedule, average)


def _load(
    stored: StateLoader, module: nn.Module, state: TrainState, average: ExponentialMovingAverage | None
) -> Progress:
    """Restore model, optimizer and scaler from the checkpoint; each rank reads only its own shards."""
    saved = stored(state_io.targets(module))
    module.load_state_dict(saved["model"])
    state_io.load_optimizer_state(module, state.optimizer, saved["optimizer"])
    if saved["scaler"]:  # empty if saved in a precision that needs no scaler
        state.scaler.load_state_dict(saved["scaler"])
    if average is not None:
        average.load_state_dict(saved[EMA_KEY])
    return Progress(**saved["progress"])


def _initial_progress(spec: TrainSpec, progress: Progress) -> Progress:
    """Set the rows of a micro-batch: the planned number, or what it was reduced to before the checkpoint."""
    planned = min(spec.plan.micro, spec.plan.rank_rows, spec.micro or spec.plan.rank_rows)
    if progress.planned_micro != planned:
        progress.planned_micro = progress.micro = planned
    return progress


def _state(run: _Run) -> State:
    """Return references, to be written or copied before the next step; of sharded tensors, this rank's shard."""
    averaged = {} if run.average is None else {EMA_KEY: run.average.state_dict()}
    return averaged | {
        "model": dict(run.spec.model.state_dict()),
        "optimizer": state_io.optimizer_state(run.spec.model, run.state.optimizer),
        "scaler": run.state.scaler.state_dict(),
        "progress": vars(run.progress).copy(),
    }


def _nonfinite_message(run: _Run, batch: LocalBatch) -> str:
    """Name the rows of the last step, on any rank, for which the model outputs are not finite."""
    spec, progress = run.spec, run.progress
    mine = [int(row) for row in spec.plan.rows_at(nonfinite_samples(run.state, batch).numpy())]
    named = [name for names in spec.group.all_gather_objects(spec.names(mine[: oom.MAX_NAMED])) for name in names]
    step, most = progress.step - 1, spec.train.max_nonfinite_steps
    return oom.nonfinite_message(spec.plan, step, progress.skipped_in_a_row, most, named)


def _finish_step(run: _Run, keys: Tensor, result: StepResult) -> Metrics | None:
    """Measure, evaluate, log, save, and call the callbacks. Every rank makes the same decisions."""
    spec, step = run.spec, run.progress.step
    last = step == spec.plan.steps or result.stop
    evaluating = spec.evaluate is not None and (step == spec.plan.steps or _due(step, spec.evaluate_every))
    scored = evaluating and run.schedule.every == "auto"  # keep what was scored, so that the best can be kept
    saving = spec.save is not None and (last or scored or run.schedule.is_due(step))
    metrics = None
    if last or evaluating or saving or _due(step, spec.train.log_every):
        metrics = _measure(run, keys, result)
        if spec.evaluate is not None and evaluating:
            metrics |= _evaluate(run, spec.evaluate)
        if spec.log is not None:
            spec.log.write(metrics)
    if saving:
        with run.state.timers("checkpoint"):
            _save(run, metrics or {}, last)
    for callback in spec.callbacks:
        callback.on_step(step, metrics)
    return metrics


def _save(run: _Run, metrics: Metrics, last: bool) -> None:
    """Save a checkpoint. With `auto`, the interval is derived from the save time measured on rank 0."""
    spec, step, schedule = run.spec, run.progress.step, run.schedule
    assert spec.save is not None
    cost_s = spec.save(step, _state(run), metrics, last)
    if schedule.every == "auto" and not last:
        steps = steps_between_checkpoints(metrics.get("time/step_s"), cost_s, step - schedule.first)
        schedule.saved(step, spec.group.broadcast_object(steps))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _measure(run: _Run, keys: Tensor, result: StepResult) -> Metrics:
    """Metrics of the step just taken. Takes two small collectives, so only for steps that are logged."""
    spec, state, step = run.spec, run.state, run.progress.step - 1
    means = [(value / result.counts).sum() for value in result.sums.values()]
    counted = run.meter.padding.compute(spec.group.device)
    sums, own = reduce_over_ranks(spec.group, [*means, *counted], run.meter.compute(state))
    metrics: Metrics = {
        "step": step + 1,
        "epoch": spec.plan.epoch(step),
        "rows_start": spec.plan.rows_start(step),
        "rows_stop": spec.plan.rows_stop(step),
        "rows_sha": rows_sha(spec.group.all_gather_variable(keys)),
    }
    metrics |= {f"train/{name}": mean for name, mean in zip(result.sums, sums[: len(means)], strict=True)}
    metrics |= {f"train/{name}": float(value) for name, value in result.scalars.items()}
    metrics["train/lr"] = state.optimizer.param_groups[0]["lr"]
    metrics["train/grad_norm"] = result.grad_norm
    metrics |= {f"train/grad_norm_{name}": norm for name, norm in result.grad_norms.items() if name != WHOLE}
    metrics["train/skipped_steps"] = run.progress.skipped
    metrics["batch/micro"] = run.progress.micro
    metrics |= Padding.over(sums[len(means) :], spec.group_by_length)
    metrics |= spec.static_metrics
    return metrics | own


def _evaluate(run: _Run, evaluate: Callable[[int, nn.Module], dict[str, float]]) -> Metrics:
    start_s = time.perf_counter()
    with fsdp.unsharded(run.spec.model):
        try:
            scores = evaluate(run.progress.step, run.spec.model if run.average is None else run.average.module)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(oom.evaluation_oom_message(run.progress.step, error_text(error)), 0) from error
    run.spec.model.train()
    metrics: Metrics = {f"evaluate/{name}": score for name, score in scores.items()}
    return metrics | {"time/evaluate_s": time.perf_counter() - start_s}
