"""The training loop: steps of rows in, weights, metrics and checkpoints out. Knows nothing of Ray.

The composer of small functions: feed.py brings a share, step.py takes the step, telemetry.py measures it. Runs in one
process, under torchrun, or in a Ray Train worker; every rank makes the same calls, only the log is rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from mmray.errors import TrainingError
from mmray.objectives.protocol import Batch, Objective
from mmray.train import optimizer, parallel, precision
from mmray.train.feed import Share, feed
from mmray.train.group import Group
from mmray.train.schedule import lr_at
from mmray.train.seeding import micro_seed
from mmray.train.step import Learner, StepResult, optimizer_step
from mmray.train.telemetry import Metrics, MetricsLog, PeakMemory, Rates, rows_sha

if TYPE_CHECKING:
    from mmray.config import Optimizer, Train
    from mmray.data.order import Plan

State = dict[str, Any]


class Callback(Protocol):
    """A user's own code, called on every rank after each step."""

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """`step` counts from 1; `metrics` is what was logged, None where nothing was."""


@dataclass(frozen=True)
class Task:
    """What to train, on which rows, and whom to tell. `save` and `evaluate` are called on every rank alike."""

    model: nn.Module  # not wrapped
    objective: Objective
    plan: Plan
    group: Group
    train: Train
    optimizer: Optimizer
    save: Callable[[int, State, Metrics], None] | None = None
    evaluate: Callable[[int], dict[str, float]] | None = None
    evaluate_every: int = 0  # steps; 0: only after the last
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    stop: Callable[[], bool] = lambda: False  # True on any rank ends the run after this step


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: all steps taken, or stopped before, with a checkpoint."""

    status: Literal["finished", "stopped"]
    steps: int
    rows_consumed: int
    skipped_steps: int
    metrics: Metrics  # as last logged; empty when no step was left to take


@dataclass
class Progress:
    """Where the run stands; a checkpoint holds it whole."""

    step: int = 0  # steps taken
    skipped: int = 0  # of these, not applied because the gradient was not finite
    skipped_in_row: int = 0


@dataclass
class _Run:
    """The loop's own things while it runs."""

    task: Task
    learner: Learner
    progress: Progress
    rates: Rates = field(default_factory=Rates)
    memory: PeakMemory = field(default_factory=PeakMemory)


def run(task: Task, steps: Iterable[list[Batch]], state: State | None = None) -> Outcome:
    """Train to the last step of the plan, or until told to stop.

    `steps` yields the CPU micro-batches of each step of this rank, the first being the first step not yet taken.
    `state` is what `save` was given. Raises TrainingError: wrong rows, too few of them, or gradients that stay
    non-finite.
    """
    run = _start(task, state)
    plan, progress = task.plan, run.progress
    shares = feed(steps, plan, progress.step, task.group.rank, task.group.device)
    metrics: Metrics = {}
    stopping = False
    while progress.step < plan.steps and not stopping:
        began_s = time.perf_counter()
        share = _next(shares, run)
        result = _take_step(run, share)
        stopping = bool(result.totals[1] > 0)
        rows = plan.rows_stop(progress.step - 1) - plan.rows_start(progress.step - 1)
        run.rates.add(time.perf_counter() - began_s, share.wait_s, rows)
        metrics = _tell(run, share, result, stopping) or metrics
    finished = progress.step >= plan.steps
    rows_consumed = plan.rows_start(progress.step)
    return Outcome("finished" if finished else "stopped", progress.step, rows_consumed, progress.skipped, metrics)


def _start(task: Task, state: State | None) -> _Run:
    """The model on its device, wrapped, with optimizer and scaler, where `state` left them."""
    device = task.group.device
    module = task.model.to(device)
    if state is not None:
        module.load_state_dict(state["model"])
    module.train()
    chosen = precision.choose(task.train.precision, device)
    learner = Learner(
        model=parallel.wrap(module, task.group),
        objective=task.objective,
        group=task.group,
        precision=chosen,
        optimizer=optimizer.build(module, task.optimizer),
        scaler=chosen.scaler(),
        clip_norm=task.optimizer.clip_norm,
    )
    if state is None:
        return _Run(task, learner, Progress())
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scaler.load_state_dict(state["scaler"])
    return _Run(task, learner, Progress(**state["progress"]))


def _state(run: _Run) -> State:
    """References, not copies: to be written before the next step."""
    return {
        "model": run.task.model.state_dict(),
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
    step, group = progress.step, task.group
    optimizer.set_lr(learner.optimizer, lr_at(step, task.optimizer, task.plan.steps))
    # The wish to stop goes through the step: ranks must leave the loop together, or the rest wait for them for ever.
    result = optimizer_step(
        learner, share, lambda micro: micro_seed(task.train.seed, step, group.rank, micro), task.stop()
    )
    progress.step += 1
    _count_skipped(progress, result, task.train.max_nonfinite)
    return result


def _count_skipped(progress: Progress, result: StepResult, max_nonfinite: int) -> None:
    progress.skipped += not result.finite
    progress.skipped_in_row = 0 if result.finite else progress.skipped_in_row + 1
    if progress.skipped_in_row >= max_nonfinite:
        raise TrainingError(
            f"the gradient was not finite in {progress.skipped_in_row} steps in a row, the last being step "
            f"{progress.step} (train.max_nonfinite {max_nonfinite}). Lower --optimizer.lr, or try "
            "--train.precision fp32 to see whether the number format is the cause"
        )


def _tell(run: _Run, share: Share, result: StepResult, stopping: bool) -> Metrics | None:
    """All that follows a step: measure, evaluate, log, save, call back. Every rank comes to the same decisions."""
    task, step = run.task, run.progress.step
    last = step == task.plan.steps or stopping
    evaluating = task.evaluate is not None and (step == task.plan.steps or _due(step, task.evaluate_every))
    saving = task.save is not None and (last or _due(step, task.train.checkpoint_every))
    metrics = None
    if last or evaluating or saving or _due(step, task.train.log_every):
        metrics = _measure(run, share, result)
        if task.evaluate is not None and evaluating:
            metrics |= _evaluate(run, task.evaluate)
        if task.log is not None:
            task.log.write(metrics)
    if task.save is not None and saving:
        task.save(step, _state(run), metrics or {})
    for callback in task.callbacks:
        callback.on_step(step, metrics)
    return metrics


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _measure(run: _Run, share: Share, result: StepResult) -> Metrics:
    """The metrics of the step just taken; two small collectives, so only at steps that are logged."""
    task, learner, step = run.task, run.learner, run.progress.step - 1
    sums = torch.stack([value.to(torch.float64) for value in result.sums.values()])
    means = (task.group.all_reduce_sum(sums) / result.totals[0]).tolist()
    metrics: Metrics = {
        "step": step + 1,
        "epoch": task.plan.epoch(step),
        "rows_start": task.plan.rows_start(step),
        "rows_stop": task.plan.rows_stop(step),
        "rows_sha": rows_sha(task.group.gather_plain(share.keys)),
    }
    metrics |= {f"train/{name}": mean for name, mean in zip(result.sums, means, strict=True)}
    metrics |= {f"train/{name}": float(value) for name, value in result.shared.items()}
    metrics["train/lr"] = learner.optimizer.param_groups[0]["lr"]
    metrics["train/grad_norm"] = result.grad_norm
    metrics["train/skipped_steps"] = run.progress.skipped
    metrics["memory/peak_gib"] = run.memory.look_gib(task.group.device)
    return metrics | run.rates.take()


def _evaluate(run: _Run, evaluate: Callable[[int], dict[str, float]]) -> Metrics:
    began_s = time.perf_counter()
    scores = evaluate(run.progress.step)
    run.task.model.train()
    metrics: Metrics = {f"evaluate/{name}": score for name, score in scores.items()}
    return metrics | {"time/evaluate_s": time.perf_counter() - began_s}
