"""The training loop: steps of rows in, weights, metrics and checkpoints out. Knows nothing of Ray.

The composer of small functions: feed.py brings a share, step.py takes the step, telemetry.py measures it. Runs in one
process, under torchrun, or in a Ray Train worker; every rank makes the same calls, only the log is rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmray.engine import oom as error_messages
from mmray.engine import optimizer, precision
from mmray.engine import optimizer as clip
from mmray.engine.batch import smaller_micro
from mmray.engine.checkpoint import state_io
from mmray.engine.checkpoint.manager import CheckpointSchedule, steps_between_checkpoints
from mmray.engine.metrics.meters import Meter, Padding, reduce_over_ranks, rows_sha
from mmray.engine.metrics.timers import PhaseTimers, Throughput
from mmray.engine.metrics.writers import Metrics, profiled
from mmray.engine.oom import RecoverableOom, error_text
from mmray.engine.optimizer import ExponentialMovingAverage, lr_at
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import LocalBatch, prefetch, split_micro_batches
from mmray.engine.run_state import EMA_KEY, LoopResult, Progress, State, StateLoader, TrainSpec, TrainState
from mmray.engine.step import StepResult, nonfinite_samples, optimizer_step
from mmray.errors import OutOfMemoryError, TrainingError, is_out_of_memory
from mmray.objectives.protocol import Batch


@dataclass
class _Run:
    """The loop's own things while it runs."""

    task: TrainSpec
    state: TrainState
    layout: parallel.ParallelConfig
    progress: Progress
    meter: Meter
    rhythm: CheckpointSchedule
    average: ExponentialMovingAverage | None = None


def run(task: TrainSpec, steps: Iterable[list[Batch]], stored: StateLoader | None = None) -> LoopResult:
    """Train to the last step of the plan, or until told to stop.

    `steps` yields the CPU micro-batches of each step of this rank, the first being the first step not yet taken.
    `stored` reads what `save` was given. Raises TrainingError: wrong rows, too few of them, or gradients that stay
    non-finite.
    """
    run = _start(task, stored)
    plan, progress = task.plan, run.progress
    group, timers = task.group, run.state.timers
    shares = prefetch(steps, plan, progress.step, group.rank, group.device, timers, task.group_by_length)
    metrics: Metrics = {}
    stopping = False
    with profiled(task.train.profile, task.profile_path, task.group.device) as profile_step:
        while progress.step < plan.steps and not stopping:
            stopping, told_now = _step(run, shares)
            metrics = told_now or metrics
            profile_step()
    finished = progress.step >= plan.steps
    rows_consumed = plan.rows_start(progress.step)
    return LoopResult("finished" if finished else "stopped", progress.step, rows_consumed, progress.skipped, metrics)


@contextmanager
def _in_room(run: _Run) -> Iterator[None]:
    """Where memory runs out for the rows of a step, and between two, so that no vote helps: begin again with less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = smaller_micro(run.progress.micro, run.task.plan.rank_rows)
        text = error_messages.prefetch_oom_message(
            run.progress.step, run.progress.micro, run.task.group.rank, error_text(error), less
        )
        raise OutOfMemoryError(text, less) from error


def _step(run: _Run, shares: Iterator[LocalBatch]) -> tuple[bool, Metrics | None]:
    """A step and all that follows it; whether the run stops here, and what was logged."""
    keys, result = _timed_step(run, shares)
    return result.stopping, _tell(run, keys, result)


def _timed_step(run: _Run, shares: Iterator[LocalBatch]) -> tuple[Tensor, StepResult]:
    """The next share's step; the keys of its rows, all that is left of it, and what came of the step."""
    began_s, plan = time.perf_counter(), run.task.plan
    with _in_room(run):
        share = _next(shares, run)
    result = _take_step(run, share)
    step = run.progress.step - 1
    took_s = time.perf_counter() - began_s
    run.meter.rates.add(took_s, share.wait_s, plan.rows_stop(step) - plan.rows_start(step), share.tokens)
    run.meter.padding.add(share)
    return share.keys, result


def _start(task: TrainSpec, stored: StateLoader | None) -> _Run:
    """The model on its device, wrapped, with optimizer and scaler, where what is stored left them."""
    device = task.group.device
    module = task.model.to(parallel.init_device(task.train.parallel, device))
    module.train()
    chosen = precision.select_precision(task.train.precision, device)
    timers = PhaseTimers(device)
    meter = Meter(Throughput(timers), max(1, len(task.devices)))
    layout = parallel.ParallelConfig.of(task.train, chosen.dtype, task.devices, task.slower)
    model = parallel.wrap(module, task.group, layout)
    state = TrainState(
        model=model,
        objective=task.objective,
        group=task.group,
        precision=chosen,
        optimizer=optimizer.build_optimizer(module, task.optimizer),
        scaler=chosen.scaler(),
        clip_groups=clip.make_clip_groups(module, task.optimizer.clip_per),
        timers=timers,
        clip_norm=task.optimizer.clip_norm,
        can_recover_oom=(task.recover_cpu_oom or device.type == "cuda") and not parallel.has_inner_collectives(model),
    )
    average = ExponentialMovingAverage(module, task.train.ema) if task.train.ema else None
    progress = _fitting(task, Progress() if stored is None else _load(stored, module, state, average))
    rhythm = CheckpointSchedule(task.train.checkpoint_every, progress.step)
    return _Run(task, state, layout, progress, meter, rhythm, average)


def _load(
    stored: StateLoader, module: nn.Module, state: TrainState, average: ExponentialMovingAverage | None
) -> Progress:
    """Put everything where it was, and let go of what was read; each rank reads what it holds of what is cut."""
    saved = stored(state_io.targets(module))
    module.load_state_dict(saved["model"])
    parallel.on_weights_loaded(state.model)
    state_io.load_optimizer_state(module, state.optimizer, saved["optimizer"])
    if saved["scaler"]:  # empty where it was taken in a format that needs none
        state.scaler.load_state_dict(saved["scaler"])
    if average is not None:
        average.load_state_dict(saved[EMA_KEY])
    return Progress(**saved["progress"])


def _fitting(task: TrainSpec, progress: Progress) -> Progress:
    """Rows of a micro-batch: those that fit before the first step, or the fewer to which the same number shrank."""
    planned = min(task.plan.micro, task.plan.rank_rows, task.micro or task.plan.rank_rows)
    found = progress.micro if progress.planned_micro == planned else planned
    progress.planned_micro, progress.micro = planned, found
    return progress


def _state(run: _Run) -> State:
    """References, not copies: to be written, or copied, before the next step. What is sharded is this rank's cut."""
    averaged = {} if run.average is None else {EMA_KEY: run.average.state_dict()}
    return averaged | {
        "model": dict(run.task.model.state_dict()),
        "optimizer": state_io.optimizer_state(run.task.model, run.state.optimizer),
        "scaler": run.state.scaler.state_dict(),
        "progress": vars(run.progress).copy(),
    }


def _next(shares: Iterator[LocalBatch], run: _Run) -> LocalBatch:
    share = next(shares, None)
    if share is None:
        raise TrainingError(
            f"the stream ended after step {run.progress.step} of {run.task.plan.steps}; "
            "the prepared set may have changed: `mmray prepare` says what it holds"
        )
    return share


def _take_step(run: _Run, share: LocalBatch) -> StepResult:
    """One optimizer step, counted."""
    task, state, progress = run.task, run.state, run.progress
    step = progress.step
    optimizer.set_lr(state.optimizer, lr_at(step, task.optimizer, task.plan.steps))
    # The wish to stop goes through the step: ranks must leave the loop together, or the rest wait for them for ever.
    stop, result = task.stop(), None
    while result is None:
        result = _try_step(run, split_micro_batches(share, progress.micro), stop)
    progress.step += 1
    if run.average is not None and result.finite:
        run.average.update_parameters(task.model)
    progress.skipped += not result.finite
    progress.skipped_in_a_row = 0 if result.finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= task.train.max_nonfinite_steps:
        raise TrainingError(_not_finite(run, split_micro_batches(share, progress.micro)))
    return result


def _try_step(run: _Run, share: LocalBatch, stop: bool) -> StepResult | None:
    """One optimizer step; None when there was no room for it, anywhere, and the micro-batches are smaller now.

    Raises OutOfMemoryError when smaller ones are not to be had, or the ranks have parted and must begin again.
    """
    task, step = run.task, run.progress.step
    try:
        run.meter.look_at(run.state, share)
        return optimizer_step(
            run.state, share, lambda micro: micro_seed(task.train.seed, step, task.group.rank, micro), stop
        )
    except RecoverableOom as error:
        met = str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = smaller_micro(run.progress.micro, task.plan.rank_rows)
        mine = error_messages.describe_rank_error(task.plan, step, task.group.rank, task.names, error_text(error))
        raise OutOfMemoryError(error_messages.step_oom_message(step, run.progress.micro, [mine], less), less) from error
    _shrink(run, met)  # here, where the error and what its traceback keeps alive are gone
    return None


def _shrink(run: _Run, met: str) -> None:
    """Smaller micro-batches from here on, on all ranks; the gradients of the step that was given up are dropped."""
    task, progress = run.task, run.progress
    less = smaller_micro(progress.micro, task.plan.rank_rows)
    mine = met and error_messages.describe_rank_error(task.plan, progress.step, task.group.rank, task.names, met)
    text = error_messages.step_oom_message(progress.step, progress.micro, task.group.all_gather_objects(mine), less)
    if less == 0:
        raise OutOfMemoryError(text)
    progress.micro = less
    run.state.optimizer.zero_grad(set_to_none=True)
    run.state = replace(run.state, model=parallel.rewrap(run.state.model, task.group, run.layout))
    if task.group.device.type == "cuda":
        torch.cuda.empty_cache()
    task.note(text, "memory")


def _not_finite(run: _Run, share: LocalBatch) -> str:
    """What a person is told: on which rows of the last step the model itself fails, on any rank."""
    task, progress = run.task, run.progress
    mine = [int(row) for row in task.plan.rows_at(nonfinite_samples(run.state, share).numpy())]
    named = [
        name for names in task.group.all_gather_objects(task.names(mine[: error_messages.MAX_NAMED])) for name in names
    ]
    step, most = progress.step - 1, task.train.max_nonfinite_steps
    return error_messages.nonfinite_message(task.plan, step, progress.skipped_in_a_row, most, named)


def _tell(run: _Run, keys: Tensor, result: StepResult) -> Metrics | None:
    """All that follows a step: measure, evaluate, log, save, call back. Every rank comes to the same decisions."""
    task, step = run.task, run.progress.step
    last = step == task.plan.steps or result.stopping
    evaluating = task.evaluate is not None and (step == task.plan.steps or _due(step, task.evaluate_every))
    scored = evaluating and run.rhythm.every == "auto"  # what was scored is kept, or the best could not be
    saving = task.save is not None and (last or scored or run.rhythm.is_due(step))
    metrics = None
    if last or evaluating or saving or _due(step, task.train.log_every):
        metrics = _measure(run, keys, result)
        if task.evaluate is not None and evaluating:
            metrics |= _evaluate(run, task.evaluate)
        if task.log is not None:
            task.log.write(metrics)
    if saving:
        with run.state.timers("checkpoint"):
            _save(run, metrics or {}, last)
    for callback in task.callbacks:
        callback.on_step(step, metrics)
    return metrics


def _save(run: _Run, metrics: Metrics, last: bool) -> None:
    """Hand the state over; where no rhythm is set, rank 0's measure of what that costs sets it for all ranks."""
    task, step, rhythm = run.task, run.progress.step, run.rhythm
    assert task.save is not None
    cost_s = task.save(step, _state(run), metrics, last)
    if rhythm.every == "auto" and not last:
        steps = steps_between_checkpoints(metrics.get("time/step_s"), cost_s, step - rhythm.first)
        rhythm.saved(step, task.group.broadcast_object(steps))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _measure(run: _Run, keys: Tensor, result: StepResult) -> Metrics:
    """The metrics of the step just taken; two small collectives, so only at steps that are logged."""
    task, state, step = run.task, run.state, run.progress.step - 1
    means = [(value / result.counts).sum() for value in result.sums.values()]
    counted = run.meter.padding.take(task.group.device)
    sums, own = reduce_over_ranks(task.group, [*means, *counted], run.meter.take(state))
    metrics: Metrics = {
        "step": step + 1,
        "epoch": task.plan.epoch(step),
        "rows_start": task.plan.rows_start(step),
        "rows_stop": task.plan.rows_stop(step),
        "rows_sha": rows_sha(task.group.all_gather_variable(keys)),
    }
    metrics |= {f"train/{name}": mean for name, mean in zip(result.sums, sums[: len(means)], strict=True)}
    metrics |= {f"train/{name}": float(value) for name, value in result.shared.items()}
    metrics["train/lr"] = state.optimizer.param_groups[0]["lr"]
    metrics["train/grad_norm"] = result.grad_norm
    metrics |= {f"train/grad_norm_{name}": norm for name, norm in result.grad_norms.items() if name != clip.WHOLE}
    metrics["train/skipped_steps"] = run.progress.skipped
    metrics["batch/micro"] = run.progress.micro
    metrics |= Padding.over(sums[len(means) :], task.group_by_length)
    metrics |= task.static_metrics
    return metrics | own


def _evaluate(run: _Run, evaluate: Callable[[int, nn.Module], dict[str, float]]) -> Metrics:
    began_s = time.perf_counter()
    with parallel.summon_full_params(run.task.model):
        try:
            scores = evaluate(run.progress.step, run.task.model if run.average is None else run.average.module)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                error_messages.evaluation_oom_message(run.progress.step, error_text(error)), 0
            ) from error
    run.task.model.train()
    metrics: Metrics = {f"evaluate/{name}": score for name, score in scores.items()}
    return metrics | {"time/evaluate_s": time.perf_counter() - began_s}
