"""Data of a training run: what is trained, the state that a step changes, its progress, and the
result.

The functions at the end turn weights and optimizer into the state that checkpoint/state_io.py
saves, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import HeartbeatState
from mmray.engine.metrics.timers import PeakMemory
from mmray.engine.metrics.writers import Metrics, MetricsLog
from mmray.engine.optimizer import build_optimizer
from mmray.engine.parallel.strategy import Strategy, strategy_class
from mmray.engine.precision import Precision, select_precision
from mmray.objectives.protocol import Objective, ObjectiveParts, split_objective

if TYPE_CHECKING:
    from mmray.config import Optimizer as OptimizerConfig
    from mmray.config import Train
    from mmray.data.stream.order import SamplePlan

CheckpointState = dict[str, Any]  # nested dicts of tensors and JSON values, as in a checkpoint
# Key and meta tensor of a saved tensor -> the tensor to read it into: full, or this rank's shard.
DestinationFn = Callable[[str, Tensor], Tensor]
LoadCheckpointFn = Callable[[DestinationFn], CheckpointState]
SeedFn = Callable[[int], int]  # index of a micro-batch -> seed of its forward
# Key of the EMA of the weights in a state; its names are `module.` and the names of the model.
EMA_KEY = "average"
# Options of a parameter group that a trial of a sweep may change when it resumes.
FROM_CONFIG = ("params", "weight_decay", "betas", "eps")


class Callback(Protocol):
    """User code that is called after each step; constructed without arguments on every rank.

    Name your class as `package.module:Class` in `train.callbacks`. It implements `on_step(step,
    metrics)`: the number of the step from 1, and its logged metrics by name, or None if it was not
    logged; and, if it has metrics of its own, `compute_metrics(step)` of HasMetrics.
    """

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """Process the end of a step.

        Args:
            step: Number of the step, counted from 1.
            metrics: The line of the step in metrics.jsonl, values by name such as `train/loss`
                (`mmray.engine.metrics.table` lists them); None if the step was not logged.
        """


@runtime_checkable
class HasMetrics(Protocol):
    """A callback with metrics of its own."""

    def compute_metrics(self, step: int) -> dict[str, float]:
        """Return further metrics for the line of a step that is logged.

        Args:
            step: Number of the step, counted from 1.

        Returns:
            Numbers by name, such as `teacher/kl`; every rank must return the same names. The line
            and the report show their mean over the ranks, or the reduction of METRICS. A name of
            another metric ends the run.
        """


@dataclass(frozen=True)
class TrainSpec:
    """Model, settings and functions with which the training loop runs, constant over the run.

    Attributes:
        model: The model, not wrapped; it may be sharded already.
        objective: The loss: `count` returns its denominator for a batch, and `compute_loss` the
            sum, with metrics.
        plan: Which rows each step takes.
        batch_shape: Global batch and micro-batch at the start. With a single rank, a step that runs
            out of memory is repeated with half the micro-batch.
        group: All ranks.
        train: The `train` section.
        optimizer: The `optimizer` section.
        save: Called on every rank with (step, state, metrics of the step, whether it is the last
            save), where the state is what `CheckpointManager.save` takes; returns the seconds from
            start to end of the newest finished save, None if none has ended. None: nothing is
            saved.
        evaluate: Called on every rank with (step, model), the model or its EMA if there is one;
            returns metrics by name, such as `recall_at_1/mean`, which are logged with the prefix
            `evaluate/`. It must make the same calls of a sharded model on every rank. None: no
            evaluation.
        evaluate_every: Steps between two evaluations; 0: only after the last step.
        log: Receives the metrics of logged steps; None on ranks that do not log.
        callbacks: Objects whose `on_step(step, metrics)` is called after each step.
        group_by_length: Whether micro-batches have rows with captions of similar length.
        profile_path: File for the trace of `train.profile`; None on ranks that write none.
        static_metrics: Metrics that are constant over the run and added to each logged line, values
            by name, such as `memory/parameters_gib`.
        heartbeat: Counts each forward and backward as progress, so that a long step is not taken
            for a hang.
        stop: Called without arguments in each step; True on any rank ends the run after this step,
            with a checkpoint.
        interrupt_stream: Called without arguments; ends the stream of rows, also for a thread that
            waits for its next rows.
        sources: Names of the sets of a mixture; empty for a single set.
    """

    model: nn.Module
    objective: Objective
    plan: SamplePlan
    batch_shape: BatchShape
    group: Group
    train: Train
    optimizer: OptimizerConfig
    save: Callable[[int, CheckpointState, Metrics, bool], float | None] | None = None
    evaluate: Callable[[int, nn.Module], dict[str, float]] | None = None
    evaluate_every: int = 0
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    group_by_length: bool = False
    profile_path: Path | None = None
    static_metrics: Metrics = field(default_factory=dict)
    heartbeat: HeartbeatState = field(default_factory=HeartbeatState)
    stop: Callable[[], bool] = lambda: False
    interrupt_stream: Callable[[], None] = lambda: None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopResult:
    """Result of the loop: all steps taken, or stopped early with a checkpoint.

    Attributes:
        status: `finished`, or `stopped` after a request.
        steps: Steps that were taken, over all starts of the run.
        rows_consumed: Rows of the sample order up to this step.
        skipped_steps: Steps without an update, because the gradient was not finite.
        metrics: The last line of metrics.jsonl, values by name such as `train/loss` (the README.md
            of mmray/engine lists them); empty if no step was left.
    """

    status: Literal["finished", "stopped"]
    steps: int
    rows_consumed: int
    skipped_steps: int
    metrics: Metrics


@dataclass
class LoopProgress:
    """Counters that the loop changes after each step; saved in the checkpoint.

    Attributes:
        step: Steps that were taken.
        skipped: How many of them skipped the update, because the gradient was not finite.
        skipped_in_a_row: Number of consecutive steps, up to the last one, that skipped it.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class TrainState:
    """Model, optimizer and objective of one rank, which a step reads or changes.

    It is built from TrainSpec at the start of the loop; the rows of a step are not part of it.

    `TrainState.build(train, optimizer, model, objective, group)` creates it.

    Attributes:
        module: The model, not wrapped.
        model: The model, wrapped for its ranks.
        strategy: How it is distributed over ranks and devices.
        objective: The loss.
        group: All ranks.
        precision: Settings of autocast.
        optimizer: Optimizer of the trainable weights.
        scaler: Loss scaler; disabled unless the precision is fp16.
        memory: Measures the peak memory.
        clip_norm: Maximum norm of the gradients; 0: no clipping.
        heartbeat: Counts each forward and backward as progress.
    """

    module: nn.Module
    model: nn.Module
    strategy: Strategy
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    memory: PeakMemory
    clip_norm: float = 0.0
    heartbeat: HeartbeatState = field(default_factory=HeartbeatState)

    @classmethod
    def build(
        cls,
        train: Train,
        optimizer: OptimizerConfig,
        model: nn.Module,
        objective: Objective,
        group: Group,
        heartbeat: HeartbeatState | None = None,
        wrap: bool = True,
    ) -> TrainState:
        """Build the state before the first step.

        Args:
            model: The model, not wrapped; it may be sharded already.
            group: All ranks; each calls this function.
            heartbeat: Counts each forward and backward as progress; None: it is not sent.
            wrap: Wrap the model for `train.parallel`; it is sharded in any case.

        Returns:
            The TrainState, with a new optimizer.
        """
        precision = select_precision(train.precision, group.device)
        strategy = strategy_class(train)(group, precision.dtype)
        wrapped = strategy.wrap(model) if wrap or strategy.is_sharded else model
        return cls(
            module=model,
            model=wrapped,
            strategy=strategy,
            objective=objective,
            group=group,
            precision=precision,
            optimizer=build_optimizer(model, optimizer),
            scaler=precision.scaler(),
            memory=PeakMemory(group.device),
            clip_norm=optimizer.clip_norm,
            heartbeat=heartbeat or HeartbeatState(),
        )

    @cached_property
    def parts(self) -> ObjectiveParts:
        """The objective as ObjectiveParts: `global_loss`, over rows of all ranks, and `local_loss`,
        a sum over rows; None for a missing one.
        """
        return split_objective(self.objective)


# --- state by parameter names, for every strategy


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """Return `optimizer.state_dict()` by the model's parameter names instead of numbers.

    `get_optimizer_state_dict` of torch.distributed.checkpoint is not used: it takes a step of an
    optimizer that has no state yet, and loads nothing into one whose gradients exist already, as
    DDP's do here.
    """
    names = _trainable_names(module, optimizer)
    state = optimizer.state_dict()
    return {
        "state": {names[index]: dict(values) for index, values in state["state"].items()},
        "param_groups": [
            {k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]
        ],
    }


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: CheckpointState) -> None:
    """Load the saved state of an optimizer, by the model's parameter names instead of numbers.

    Weight decay, betas and epsilon are taken from the optimizer, not from the state, because a
    trial of a sweep may resume with other values.
    """
    index_of = {name: index for index, name in enumerate(_trainable_names(module, optimizer))}
    pairs = zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    groups = [
        saved | {key: group[key] for key in FROM_CONFIG if key in group} for saved, group in pairs
    ]
    by_index = {index_of[name]: values for name, values in state["state"].items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def load_destinations(module: nn.Module) -> DestinationFn:
    """Return the function that gives the tensors into which a checkpoint is read.

    Args:
        module: The model, not wrapped; it may be sharded.

    Returns:
        A function from the key of a saved tensor, such as `model/log_scale`, and a meta tensor of
        its shape and dtype: weights are read into the module, optimizer state and averages into new
        tensors that are sharded like their parameter, others into tensors on the CPU.
    """
    weights = {
        tensor_key("model", name): weight.detach() for name, weight in module.state_dict().items()
    }
    parameters = {tensor_key(name): weight.detach() for name, weight in module.named_parameters()}

    def destination(key: str, saved: Tensor) -> Tensor:
        like = weights.get(key)
        if like is not None and (like.shape, like.dtype) == (saved.shape, saved.dtype):
            return like
        like = None
        for prefix in ("optimizer/state/", f"{EMA_KEY}/module."):
            if key.startswith(prefix):
                like = parameters.get(key.removeprefix(prefix).partition("/")[0])
        if like is not None and like.shape == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype)
        return torch.empty_like(saved, device="cpu")

    return destination


def separate_tensors(
    state: CheckpointState, *parents: str
) -> tuple[CheckpointState, dict[str, Tensor]]:
    """Separate the tensors of a state from its other values.

    Args:
        state: Nested dicts of tensors and JSON values.
        parents: Keys of a whole state under which `state` is, with which the paths start; none if
            it is a whole state.

    Returns:
        The state without its tensors, in the same nested dicts, and the tensors by their path, such
        as `model/log_scale`.
    """
    values: CheckpointState = {}
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[tensor_key(*parents, name)] = value
        elif isinstance(value, dict):
            values[name], inner = separate_tensors(value, *parents, name)
            tensors |= inner
        else:
            values[name] = value
    return values, tensors


def tensor_key(*path: str) -> str:
    """Return the key of a tensor in a checkpoint, such as `model/log_scale`."""
    return "/".join(quote(part, safe=" ") for part in path)


def _trainable_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in the order of its state dict."""
    names = {weight: name for name, weight in module.named_parameters()}
    return [names[weight] for group in optimizer.param_groups for weight in group["params"]]
