"""The training loop: micro-batches of rows in; weights, metrics and checkpoints out. Runs without
Ray.

prefetch.py yields a batch, step.py takes the step, metrics/ measures it. The loop runs in one
process, under torchrun, or in a Ray Train worker. Every rank makes the same calls; only rank 0
writes the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mmray.engine import oom, run_state
from mmray.engine.batch import halve
from mmray.engine.checkpoint.manager import CheckpointSchedule, steps_between_checkpoints
from mmray.engine.metrics.meters import Meter, padding_fractions, reduce_over_ranks, rows_sha
from mmray.engine.metrics.noise_scale import average_noise, measure_noise
from mmray.engine.metrics.timers import PhaseTimers, Throughput
from mmray.engine.metrics.writers import Metrics, profile_steps
from mmray.engine.oom import RecoverableOom
from mmray.engine.optimizer import ExponentialMovingAverage, build_optimizer, lr_at, set_lr
from mmray.engine.parallel import strategy
from mmray.engine.precision import micro_seed, select_precision
from mmray.engine.prefetch import LocalBatch, Prefetcher, split_micro_batches
from mmray.engine.run_state import (
    EMA_KEY,
    LoadCheckpointFn,
    LoopProgress,
    LoopResult,
    TrainSpec,
    TrainState,
)
from mmray.engine.step import StepResult, optimizer_step, zero_gradients
from mmray.errors import OutOfMemoryError, TrainingError, first_line, is_out_of_memory
from mmray.objectives.protocol import Batch

MAX_NONFINITE_STEPS = 10  # in a row


@dataclass
class _Run:
    """A started run: its spec, the state that steps change, and what the loop measures and
    schedules.
    """

    spec: TrainSpec
    state: TrainState
    progress: LoopProgress
    meter: Meter
    schedule: CheckpointSchedule
    ema: ExponentialMovingAverage | None
    noise_scale: Metrics = field(default_factory=dict)  # measured since the last line


def train_loop(
    spec: TrainSpec, steps: Iterable[list[Batch]], load_checkpoint: LoadCheckpointFn | None = None
) -> LoopResult:
    """Train until the last step of the plan, or until a stop is requested.

    `steps` yields this rank's CPU micro-batches of each step, starting at the first step not yet
    taken. `load_checkpoint` loads the checkpoint to resume from. Raises OutOfMemoryError, on which
    the driver restarts with smaller micro-batches, and TrainingError for wrong or missing rows, or
    after too many non-finite steps.
    """
    run = _start(spec, load_checkpoint)
    plan, progress, group = spec.plan, run.progress, spec.group
    batches = Prefetcher(
        steps,
        plan,
        progress.step,
        group.rank,
        group.device,
        run.state.timers,
        spec.group_by_length,
        spec.interrupt_stream,
    )
    metrics: Metrics = {}
    stop = False
    with (
        closing(batches),
        profile_steps(spec.train.profile, spec.profile_path, group.device) as profile_step,
    ):
        while progress.step < plan.steps and not stop:
            batch = _next_batch(run, batches)
            set_lr(run.state.optimizer, lr_at(progress.step, spec.optimizer, plan.steps))
            result = _take_step(run, batch)
            progress.step += 1
            if run.ema is not None and result.is_finite:
                run.ema.update_parameters(spec.model)
            _check_finite(run, result)
            run.meter.rates.add(batch.wait_s, plan.global_rows, batch.token_counts.real)
            run.meter.token_counts += torch.tensor(batch.token_counts)
            keys = batch.keys
            del batch  # a GPU holds two batches: this one and the next
            metrics = _finish_step(run, keys, result) or metrics
            stop = result.stop
            profile_step()
            run.meter.rates.lap("callbacks")
    return LoopResult(
        status="finished" if progress.step >= plan.steps else "stopped",
        steps=progress.step,
        rows_consumed=plan.rows_start(progress.step),
        skipped_steps=progress.skipped,
        metrics=metrics,
    )


def _start(spec: TrainSpec, load_checkpoint: LoadCheckpointFn | None) -> _Run:
    """Build the train state: wrapped model, optimizer and scaler, restored from the checkpoint if
    there is one.
    """
    device, module, train = spec.group.device, spec.model.train(), spec.train
    precision = select_precision(train.precision, device)
    timers = PhaseTimers(device)
    shard_options = precision.dtype, train.fsdp_sync == "step"
    model = strategy.wrap_model(
        module, spec.group, train.parallel, train.grad_compression, *shard_options
    )
    state = TrainState(
        model=model,
        objective=spec.objective,
        group=spec.group,
        precision=precision,
        optimizer=build_optimizer(module, spec.optimizer),
        scaler=precision.scaler(),
        timers=timers,
        clip_norm=spec.optimizer.clip_norm,
        can_recover_oom=(spec.recover_cpu_oom or device.type == "cuda")
        and not strategy.has_inner_collectives(model),
    )
    ema = ExponentialMovingAverage(module, train.ema) if train.ema else None
    progress = (
        LoopProgress() if load_checkpoint is None else _load(load_checkpoint, module, state, ema)
    )
    planned = min(spec.plan.micro, spec.plan.rank_rows, spec.micro or spec.plan.rank_rows)
    if (progress.world, progress.planned_micro) != (spec.group.world_size, planned):
        progress.world, progress.planned_micro, progress.micro = (
            spec.group.world_size,
            planned,
            planned,
        )
    meter = Meter(
        Throughput(timers), 2 if train.parallel == "branches" else 1, train.compile != "none"
    )
    schedule = CheckpointSchedule(train.checkpoint_every, progress.step)
    return _Run(spec, state, progress, meter, schedule, ema)


def _load(
    load_checkpoint: LoadCheckpointFn,
    module: nn.Module,
    state: TrainState,
    ema: ExponentialMovingAverage | None,
) -> LoopProgress:
    """Restore model, optimizer and scaler from the checkpoint; each rank reads only its own
    shards.
    """
    saved = load_checkpoint(run_state.load_destinations(module))
    module.load_state_dict(saved["model"])
    run_state.load_optimizer_state(module, state.optimizer, saved["optimizer"])
    if saved["scaler"]:  # empty if saved in a precision that needs no scaler
        state.scaler.load_state_dict(saved["scaler"])
    if ema is not None:
        ema.load_state_dict(saved[EMA_KEY])
    return LoopProgress(**saved["progress"])


def _next_batch(run: _Run, batches: Iterator[LocalBatch]) -> LocalBatch:
    """Return the next batch.

    Raises OutOfMemoryError, on which the driver restarts with smaller micro-batches.
    """
    step, micro = run.progress.step, run.progress.micro
    try:
        batch = next(batches, None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text = oom.format_oom(
            f"after step {step}", micro, {run.spec.group.rank: first_line(error)}, "restarting"
        )
        raise OutOfMemoryError(text, retry_micro=halve(micro)) from error
    if batch is None:
        raise TrainingError(
            f"the data stream ended after step {step} of {run.spec.plan.steps}. The prepared set "
            "may have changed: "
            "rerun its `mmray prepare` command, or compare its fingerprint with the run's data.json"
        )
    return batch


def _take_step(run: _Run, batch: LocalBatch) -> StepResult:
    """Take one optimizer step; after an OOM, retry it on all ranks with smaller micro-batches.

    Raises OutOfMemoryError if there are no smaller ones, or if a rank left a collective that the
    others wait in.
    """
    spec, progress = run.spec, run.progress
    step, group = progress.step, spec.group
    # The stop request is reduced over ranks in the step: all ranks must leave the loop together.
    stop = spec.stop()
    while True:
        micro_batches = split_micro_batches(batch, progress.micro)
        try:
            run.meter.count_flops(run.state, micro_batches)
            seed_of = partial(micro_seed, spec.train.seed, step, group.rank)
            if _is_due(step + 1, spec.train.noise_scale_every):
                noise = measure_noise(run.state, micro_batches, seed_of, spec.plan.global_rows)
                run.noise_scale = average_noise(progress.gradient_noise, noise)
            return optimizer_step(run.state, micro_batches, seed_of, stop)
        except RecoverableOom as error:
            local_error = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            errors = {group.rank: first_line(error)}
            text = oom.format_oom(f"at step {step + 1}", progress.micro, errors, "restarting")
            raise OutOfMemoryError(text, retry_micro=halve(progress.micro)) from error
        # Outside `except`: the traceback would keep the step's tensors alive.
        del micro_batches
        errors = dict(enumerate(group.all_gather_objects(local_error)))
        text = oom.format_oom(
            f"at step {step + 1}", progress.micro, errors, "retrying the same rows"
        )
        progress.micro = halve(progress.micro)
        if progress.micro == 0:
            raise OutOfMemoryError(text)
        zero_gradients(run.state)
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        spec.notify("memory", text)


def _check_finite(run: _Run, result: StepResult) -> None:
    """Count skipped steps; raise TrainingError after too many in a row."""
    progress, plan = run.progress, run.spec.plan
    progress.skipped += not result.is_finite
    progress.skipped_in_a_row = 0 if result.is_finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= MAX_NONFINITE_STEPS:
        rows = f"{plan.rows_start(progress.step - 1):,} to {plan.rows_start(progress.step) - 1:,}"
        raise TrainingError(
            f"the gradient was not finite in {progress.skipped_in_a_row} steps in a row, up to "
            f"step {progress.step} "
            f"(rows {rows} of the sample order). Lower --optimizer.lr, or try "
            "--train.precision fp32 to see whether the precision is the cause"
        )


def _finish_step(run: _Run, keys: Tensor, result: StepResult) -> Metrics | None:
    """Measure, evaluate, log, save, and call the callbacks. Every rank makes the same decisions."""
    spec, step, rates = run.spec, run.progress.step, run.meter.rates
    last = step == spec.plan.steps or result.stop
    evaluating = spec.evaluate is not None and (
        step == spec.plan.steps or _is_due(step, spec.evaluate_every)
    )
    # With `auto`, save every evaluated step, so that the best one has a checkpoint.
    scored = evaluating and run.schedule.every == "auto"
    saving = spec.save is not None and (last or scored or run.schedule.is_due(step))
    metrics = None
    if last or evaluating or saving or _is_due(step, spec.train.log_every):
        scores = _evaluate(run) if evaluating else {}
        metrics = _measure(run, keys, result) | scores
        if spec.log is not None:
            spec.log.write(metrics)
        rates.lap("log")
    if saving:
        _save(run, metrics or {}, last)
    for callback in spec.callbacks:
        callback.on_step(step, metrics)
    return metrics


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _measure(run: _Run, keys: Tensor, result: StepResult) -> Metrics:
    """Metrics of the step just taken.

    Takes three small collectives, so only for steps that are logged.
    """
    spec, state, step = run.spec, run.state, run.progress.step - 1
    means = [(value / result.counts).sum() for value in result.sums.values()]
    local_sums = [*means, *run.meter.token_counts]
    sums, reduced = reduce_over_ranks(spec.group, local_sums, run.meter.compute(state))
    noise_scale, run.noise_scale = run.noise_scale, {}
    run.meter.token_counts.zero_()
    return (
        {
            "step": step + 1,
            "epoch": spec.plan.rows_start(step) // spec.plan.num_rows,
            "rows_start": spec.plan.rows_start(step),
            "rows_stop": spec.plan.rows_start(step + 1),
            "rows_sha": rows_sha(spec.group.all_gather_variable(keys)),
        }
        | {
            f"train/{name}": mean
            for name, mean in zip(result.sums, sums[: len(means)], strict=True)
        }
        | {f"train/{name}": float(value) for name, value in result.scalars.items()}
        | {
            "train/lr": lr_at(step, spec.optimizer, spec.plan.steps),
            "train/grad_norm": result.grad_norm,
        }
        | {"train/skipped_steps": run.progress.skipped, "batch/micro": run.progress.micro}
        | padding_fractions(sums[len(means) :], spec.group_by_length)
        | noise_scale
        | spec.static_metrics
        | reduced
    )


def _evaluate(run: _Run) -> Metrics:
    step, model = run.progress.step, run.spec.model
    assert run.spec.evaluate is not None
    with strategy.gather_full_weights(model):
        try:
            scores = run.spec.evaluate(step, model if run.ema is None else run.ema.module)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory in the evaluation after step {step} ({first_line(error)}): lower "
                "--evaluate.batch and rerun the same command to resume"
            ) from error
    model.train()
    metrics = {f"evaluate/{name}": score for name, score in scores.items()}
    return metrics | {"time/evaluate_s": run.meter.rates.lap("evaluate")}


def _save(run: _Run, metrics: Metrics, last: bool) -> None:
    """Save a checkpoint. With `auto`, the interval is derived from the stall of training measured
    on rank 0.

    The state refers to live weights (of sharded ones, this rank's shard), which `spec.save` must
    write or copy before the next update, and to copies of the running statistics, which the next
    forward changes.
    """
    spec, step, schedule, rates = run.spec, run.progress.step, run.schedule, run.meter.rates
    assert spec.save is not None
    model_state = dict(spec.model.state_dict())
    buffers = spec.model.named_buffers(remove_duplicate=False)
    model_state |= {name: buffer.clone() for name, buffer in buffers if name in model_state}
    state = {} if run.ema is None else {EMA_KEY: run.ema.state_dict()}
    state |= {
        "model": model_state,
        "optimizer": run_state.optimizer_state(spec.model, run.state.optimizer),
        "scaler": run.state.scaler.state_dict(),
        "progress": asdict(run.progress),  # also copies its lists, which later steps change
    }
    save_duration_s = spec.save(step, state, metrics, last)
    stall_s = rates.lap("checkpoint")
    if schedule.every == "auto" and not last:
        taken = step - schedule.first
        steps = steps_between_checkpoints(
            metrics.get("time/step_s"), stall_s, save_duration_s, taken
        )
        schedule.saved(step, spec.group.broadcast_object(steps))
        rates.lap("checkpoint")
