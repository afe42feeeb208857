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

from mmray.engine import error_messages, optimizer, precision
from mmray.engine import optimizer as clip
from mmray.engine.batch import smaller
from mmray.engine.checkpoint.manager import CheckpointSchedule, steps_between_checkpoints
from mmray.engine.metrics.meters import Meter, Padding
from mmray.engine.metrics.system import profiled
from mmray.engine.metrics.writers import Metrics, Phases, Rates, over_ranks, rows_sha
from mmray.engine.oom import NoRoom, said
from mmray.engine.optimizer import MovingAverage, lr_at
from mmray.engine.parallel import fsdp
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import Share, feed, split_micro_batches
from mmray.engine.state import AVERAGE, Outcome, Progress, State, Stored, Task
from mmray.engine.step import StepResult, optimizer_step, suspects
from mmray.engine.train_state import Learner
from mmray.errors import OutOfMemoryError, TrainingError, is_out_of_memory
from mmray.objectives.protocol import Batch


@dataclass
class _Run:
    """The loop's own things while it runs."""

    task: Task
    learner: Learner
    layout: parallel.ParallelConfig
    progress: Progress
    meter: Meter
    rhythm: CheckpointSchedule
    average: MovingAverage | None = None


def run(task: Task, steps: Iterable[list[Batch]], stored: Stored | None = None) -> Outcome:
    """Train to the last step of the plan, or until told to stop.

    `steps` yields the CPU micro-batches of each step of this rank, the first being the first step not yet taken.
    `stored` reads what `save` was given. Raises TrainingError: wrong rows, too few of them, or gradients that stay
    non-finite.
    """
    run = _start(task, stored)
    plan, progress = task.plan, run.progress
    group, phases = task.group, run.learner.phases
    shares = feed(steps, plan, progress.step, group.rank, group.device, phases, task.by_length)
    metrics: Metrics = {}
    stopping = False
    with profiled(task.train.profile, task.profile_to, task.group.device) as profile_step:
        while progress.step < plan.steps and not stopping:
            stopping, told_now = _step(run, shares)
            metrics = told_now or metrics
            profile_step()
    finished = progress.step >= plan.steps
    rows_consumed = plan.rows_start(progress.step)
    return Outcome("finished" if finished else "stopped", progress.step, rows_consumed, progress.skipped, metrics)


@contextmanager
def _in_room(run: _Run) -> Iterator[None]:
    """Where memory runs out for the rows of a step, and between two, so that no vote helps: begin again with less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = smaller(run.progress.micro, run.task.plan.rank_rows)
        text = error_messages.no_room_between(
            run.progress.step, run.progress.micro, run.task.group.rank, said(error), less
        )
        raise OutOfMemoryError(text, less) from error


def _step(run: _Run, shares: Iterator[Share]) -> tuple[bool, Metrics | None]:
    """A step and all that follows it; whether the run stops here, and what was logged."""
    keys, result = _timed_step(run, shares)
    return result.stopping, _tell(run, keys, result)


def _timed_step(run: _Run, shares: Iterator[Share]) -> tuple[Tensor, StepResult]:
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


def _start(task: Task, stored: Stored | None) -> _Run:
    """The model on its device, wrapped, with optimizer and scaler, where what is stored left them."""
    device = task.group.device
    module = task.model.to(parallel.init_device(task.train.parallel, device))
    module.train()
    chosen = precision.choose(task.train.precision, device)
    phases = Phases(device)
    meter = Meter(Rates(phases), max(1, len(task.devices)))
    layout = parallel.ParallelConfig.of(task.train, chosen.dtype, task.devices, task.slower)
    model = parallel.wrap(module, task.group, layout)
    learner = Learner(
        model=model,
        objective=task.objective,
        group=task.group,
        precision=chosen,
        optimizer=optimizer.build(module, task.optimizer),
        scaler=chosen.scaler(),
        clip_groups=clip.groups_of(module, task.optimizer.clip),
        phases=phases,
        clip_norm=task.optimizer.clip_norm,
        may_vote=(task.votes or device.type == "cuda") and not parallel.has_inner_collectives(model),
    )
    average = MovingAverage(module, task.train.ema) if task.train.ema else None
    progress = _fitting(task, Progress() if stored is None else _load(stored, module, learner, average))
    rhythm = CheckpointSchedule(task.train.checkpoint_every, progress.step)
    return _Run(task, learner, layout, progress, meter, rhythm, average)


def _load(stored: Stored, module: nn.Module, learner: Learner, average: MovingAverage | None) -> Progress:
    """Put everything where it was, and let go of what was read; each rank reads what it holds of what is cut."""
    state = stored(fsdp.empty_like_sharded(module, learner.optimizer))
    fsdp.load_weights(module, state["model"])
    parallel.on_weights_loaded(learner.model)
    fsdp.load_optimizer(learner.optimizer, state["optimizer"])
    if state["scaler"]:  # empty where it was taken in a format that needs none
        learner.scaler.load_state_dict(state["scaler"])
    if average is not None:
        average.load_state_dict(state[AVERAGE])
    return Progress(**state["progress"])


def _fitting(task: Task, progress: Progress) -> Progress:
    """Rows of a micro-batch: those that fit before the first step, or the fewer to which the same number shrank."""
    planned = min(task.plan.micro, task.plan.rank_rows, task.micro or task.plan.rank_rows)
    found = progress.micro if progress.planned_micro == planned else planned
    progress.planned_micro, progress.micro = planned, found
    return progress


def _state(run: _Run) -> State:
    """References, not copies: to be written, or copied, before the next step. What is sharded is this rank's cut."""
    averaged = {} if run.average is None else {AVERAGE: run.average.state_dict()}
    return averaged | {
        "model": dict(run.task.model.state_dict()),
        "optimizer": run.learner.optimizer.state_dict(),
        "scaler": run.learner.scaler.state_dict(),
        "progress": vars(run.progress).copy(),
    }


def _next(shares: Iterator[Share], run: _Run) -> Share:
    share = next(shares, None)
    if share is None:
        raise TrainingError(
            f"the stream ended after step {run.progress.step} of {run.task.plan.steps}; "
            "the prepared set may have changed: `mmray prepare` says what it holds"
        )
    return share


def _take_step(run: _Run, share: Share) -> StepResult:
    """One optimizer step, counted."""
    task, learner, progress = run.task, run.learner, run.progress
    step = progress.step
    optimizer.set_lr(learner.optimizer, lr_at(step, task.optimizer, task.plan.steps))
    # The wish to stop goes through the step: ranks must leave the loop together, or the rest wait for them for ever.
    stop, result = task.stop(), None
    while result is None:
        result = _try_step(run, split_micro_batches(share, progress.micro), stop)
    progress.step += 1
    if run.average is not None and result.finite:
        run.average.update_parameters(task.model)
    progress.skipped += not result.finite
    progress.skipped_in_row = 0 if result.finite else progress.skipped_in_row + 1
    if progress.skipped_in_row >= task.train.max_nonfinite:
        raise TrainingError(_not_finite(run, split_micro_batches(share, progress.micro)))
    return result


def _try_step(run: _Run, share: Share, stop: bool) -> StepResult | None:
    """One optimizer step; None when there was no room for it, anywhere, and the micro-batches are smaller now.

    Raises OutOfMemoryError when smaller ones are not to be had, or the ranks have parted and must begin again.
    """
    task, step = run.task, run.progress.step
    try:
        run.meter.look_at(run.learner, share)
        return optimizer_step(
            run.learner, share, lambda micro: micro_seed(task.train.seed, step, task.group.rank, micro), stop
        )
    except NoRoom as error:
        met = str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = smaller(run.progress.micro, task.plan.rank_rows)
        mine = error_messages.rows_and_error(task.plan, step, task.group.rank, task.names, said(error))
        raise OutOfMemoryError(error_messages.no_room(step, run.progress.micro, [mine], less), less) from error
    _shrink(run, met)  # here, where the error and what its traceback keeps alive are gone
    return None


def _shrink(run: _Run, met: str) -> None:
    """Smaller micro-batches from here on, on all ranks; the gradients of the step that was given up are dropped."""
    task, progress = run.task, run.progress
    less = smaller(progress.micro, task.plan.rank_rows)
    mine = met and error_messages.rows_and_error(task.plan, progress.step, task.group.rank, task.names, met)
    text = error_messages.no_room(progress.step, progress.micro, task.group.gather_objects(mine), less)
    if less == 0:
        raise OutOfMemoryError(text)
    progress.micro = less
    run.learner.optimizer.zero_grad(set_to_none=True)
    run.learner = replace(run.learner, model=parallel.rewrap(run.learner.model, task.group, run.layout))
    if task.group.device.type == "cuda":
        torch.cuda.empty_cache()
    task.note(text, "memory")


def _not_finite(run: _Run, share: Share) -> str:
    """What a person is told: on which rows of the last step the model itself fails, on any rank."""
    task, progress = run.task, run.progress
    mine = [int(row) for row in task.plan.rows_at(suspects(run.learner, share).numpy())]
    named = [name for names in task.group.gather_objects(task.names(mine[: error_messages.NAMED])) for name in names]
    step, most = progress.step - 1, task.train.max_nonfinite
    return error_messages.not_finite(task.plan, step, progress.skipped_in_row, most, named)


def _tell(run: _Run, keys: Tensor, result: StepResult) -> Metrics | None:
    """All that follows a step: measure, evaluate, log, save, call back. Every rank comes to the same decisions."""
    task, step = run.task, run.progress.step
    last = step == task.plan.steps or result.stopping
    evaluating = task.evaluate is not None and (step == task.plan.steps or _due(step, task.evaluate_every))
    scored = evaluating and run.rhythm.every == "auto"  # what was scored is kept, or the best could not be
    saving = task.save is not None and (last or scored or run.rhythm.due(step))
    metrics = None
    if last or evaluating or saving or _due(step, task.train.log_every):
        metrics = _measure(run, keys, result)
        if task.evaluate is not None and evaluating:
            metrics |= _evaluate(run, task.evaluate)
        if task.log is not None:
            task.log.write(metrics)
    if saving:
        with run.learner.phases("checkpoint"):
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
        steps = steps_between_checkpoints(metrics.get("time/step_s"), cost_s, step - rhythm.begin)
        rhythm.written(step, task.group.broadcast_object(steps))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _measure(run: _Run, keys: Tensor, result: StepResult) -> Metrics:
    """The metrics of the step just taken; two small collectives, so only at steps that are logged."""
    task, learner, step = run.task, run.learner, run.progress.step - 1
    means = [(value / result.counts).sum() for value in result.sums.values()]
    counted = run.meter.padding.take(task.group.device)
    sums, own = over_ranks(task.group, [*means, *counted], run.meter.take(learner))
    metrics: Metrics = {
        "step": step + 1,
        "epoch": task.plan.epoch(step),
        "rows_start": task.plan.rows_start(step),
        "rows_stop": task.plan.rows_stop(step),
        "rows_sha": rows_sha(task.group.gather_plain(keys)),
    }
    metrics |= {f"train/{name}": mean for name, mean in zip(result.sums, sums[: len(means)], strict=True)}
    metrics |= {f"train/{name}": float(value) for name, value in result.shared.items()}
    metrics["train/lr"] = learner.optimizer.param_groups[0]["lr"]
    metrics["train/grad_norm"] = result.grad_norm
    metrics |= {f"train/grad_norm_{name}": norm for name, norm in result.grad_norms.items() if name != clip.WHOLE}
    metrics["train/skipped_steps"] = run.progress.skipped
    metrics["batch/micro"] = run.progress.micro
    metrics |= Padding.over(sums[len(means) :], task.by_length)
    metrics |= task.constants
    return metrics | own


def _evaluate(run: _Run, evaluate: Callable[[int, nn.Module], dict[str, float]]) -> Metrics:
    began_s = time.perf_counter()
    with parallel.summon_full_params(run.task.model):
        try:
            scores = evaluate(run.progress.step, run.task.model if run.average is None else run.average.module)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(error_messages.no_room_to_score(run.progress.step, said(error)), 0) from error
    run.task.model.train()
    metrics: Metrics = {f"evaluate/{name}": score for name, score in scores.items()}
    return metrics | {"time/evaluate_s": time.perf_counter() - began_s}
