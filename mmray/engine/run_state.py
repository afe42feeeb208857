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
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import HeartbeatState
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.metrics.writers import Metrics, MetricsLog
from mmray.engine.precision import Precision
from mmray.objectives.protocol import Objective, ObjectiveParts, split_objective

if TYPE_CHECKING:
    from mmray.config import Optimizer as OptimizerConfig
    from mmray.config import Train
    from mmray.data.stream.order import SamplePlan

CheckpointState = dict[str, Any]  # of a checkpoint: nested dicts of tensors and JSON values
# Key and meta tensor of a saved tensor -> the tensor to read it into: full, or this rank's shard.
DestinationFn = Callable[[str, Tensor], Tensor]
LoadCheckpointFn = Callable[[DestinationFn], CheckpointState]
SeedFn = Callable[[int], int]  # index of a micro-batch -> seed of its forward
EMA_KEY = "average"  # in a state: the EMA of the weights, under `module.` and the model's names
# of a group: a trial of a sweep may resume with other values
FROM_CONFIG = ("params", "weight_decay", "betas", "eps")


class Callback(Protocol):
    """User code that is called after each step; constructed without arguments on every rank."""

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """Process the end of a step.

        Args:
            step: Number of the step, counted from 1.
            metrics: The logged line, values by name such as `train/loss`; None if the step was not
                logged.
        """


@dataclass(frozen=True)
class TrainSpec:
    """Model, settings and functions with which the training loop runs, constant over the run.

    `save` and `evaluate` are called on every rank. `save` gets step, state, metrics and whether it
    is the last one, and returns how many seconds the previous save took.
    """

    model: nn.Module  # not wrapped, but may be sharded already
    objective: Objective
    plan: SamplePlan
    batch_shape: BatchShape  # at the start; one rank that runs out of memory halves it
    group: Group
    train: Train
    optimizer: OptimizerConfig
    # (step, state, metrics, is this the last one) -> seconds from the start of the previous save to
    # its end
    save: Callable[[int, CheckpointState, Metrics, bool], float | None] | None = None
    # with the EMA model if there is one
    evaluate: Callable[[int, nn.Module], dict[str, float]] | None = None
    evaluate_every: int = 0  # steps; 0: only after the last
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    group_by_length: bool = False  # micro-batches are bucketed by length
    notify: Callable[[str, str], None] = lambda label, text: None  # a console line, from rank 0
    profile_path: Path | None = None  # output of `train.profile`, on ranks that write one
    # constant over the run, such as the memory table
    static_metrics: Metrics = field(default_factory=dict)
    # Each forward and backward counts as progress, so a long step is no hang.
    heartbeat: HeartbeatState = field(default_factory=HeartbeatState)
    stop: Callable[[], bool] = lambda: False  # True on any rank ends the run after this step
    # ends the stream, also for a thread that waits for its next rows
    interrupt_stream: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class LoopResult:
    """Result of the loop: all steps taken, or stopped early with a checkpoint."""

    status: Literal["finished", "stopped"]
    steps: int
    rows_consumed: int
    skipped_steps: int
    metrics: Metrics  # as last logged; empty if no step was left


@dataclass
class LoopProgress:
    """Counters that the loop changes after each step; saved in the checkpoint."""

    step: int = 0  # steps taken
    skipped: int = 0  # how many of them skipped the update, because the gradient was not finite
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class TrainState:
    """Model, optimizer, objective and timers of one rank, which a step reads or changes.

    It is built from TrainSpec at the start of the loop; the rows of a step are not part of it.
    """

    model: nn.Module  # wrapped by parallel/strategy.py
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    timers: PhaseTimers
    clip_norm: float = 0.0
    heartbeat: HeartbeatState = field(default_factory=HeartbeatState)  # the one of TrainSpec

    @cached_property
    def parts(self) -> ObjectiveParts:
        """The loss over rows of all ranks and the loss that is a sum over rows, of the objective;
        None for a missing one.
        """
        return split_objective(self.objective)


# --- state by parameter names, for every strategy


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """Return `optimizer.state_dict()` by the model's parameter names instead of numbers.

    `get_optimizer_state_dict` of torch.distributed.checkpoint is not used: it takes a step of an
    optimizer that has no state yet, and loads nothing into one whose gradients exist already, as
    DDP's do here.

    Args:
        module: The model, not wrapped; it may be sharded.
        optimizer: Optimizer of its parameters.

    Returns:
        `state`, dicts of tensors by parameter name, and `param_groups`, dicts without `params`.
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

    Weight decay, betas and epsilon are those of the optimizer, not of the state, because a trial of
    a sweep may resume with other values.

    Args:
        module: The model, not wrapped; it may be sharded.
        optimizer: Optimizer of its parameters.
        state: `state`, dicts of tensors by parameter name, and `param_groups`.

    Raises:
        ValueError: The number of parameter groups differs.
        KeyError: The state has a parameter that the optimizer lacks.
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
        its shape and dtype: weights are read into the module, optimizer state into new tensors that
        are sharded like its parameter, others into tensors on the CPU.
    """
    weights = {
        tensor_key("model", name): weight.detach() for name, weight in module.state_dict().items()
    }
    parameters = {tensor_key(name): weight.detach() for name, weight in module.named_parameters()}

    def destination(key: str, saved: Tensor) -> Tensor:
        like = weights.get(key)
        if like is not None and (like.shape, like.dtype) == (saved.shape, saved.dtype):
            return like
        name = key.removeprefix("optimizer/state/").partition("/")[0]
        like = parameters.get(name) if key.startswith("optimizer/state/") else None
        if like is not None and like.shape == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype)
        return torch.empty_like(saved, device="cpu")

    return destination


def tensor_key(*path: str) -> str:
    """Return the key of a tensor in a checkpoint, such as `model/log_scale`.

    Args:
        path: Keys of the nested dicts from the state to the tensor; special characters are quoted.
    """
    return "/".join(quote(part, safe=" ") for part in path)


def _trainable_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in the order of its state dict."""
    names = {weight: name for name, weight in module.named_parameters()}
    return [names[weight] for group in optimizer.param_groups for weight in group["params"]]
