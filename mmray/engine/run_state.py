"""Data of a training run: what is trained, the state that a step changes, its progress, and the result.

`micro` is the number of rows of a micro-batch; where it is optional, 0 means as configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine.collectives import Group
from mmray.engine.metrics.noise_scale import NoiseMeter
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


class Callback(Protocol):
    """User code, constructed without arguments on every rank; `on_step` is called after each step."""

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """`step` counts from 1; `metrics` is the logged line, None if the step was not logged."""


@dataclass(frozen=True)
class TrainSpec:
    """Arguments of the loop, constant over the run. `save` and `evaluate` are called on every rank."""

    model: nn.Module  # not wrapped, but may be sharded already
    objective: Objective
    plan: SamplePlan
    group: Group
    train: Train
    optimizer: OptimizerConfig
    # (step, state, metrics, is this the last one) -> seconds from the start of the previous save to its end
    save: Callable[[int, CheckpointState, Metrics, bool], float | None] | None = None
    evaluate: Callable[[int, nn.Module], dict[str, float]] | None = None  # with the EMA model if there is one
    evaluate_every: int = 0  # steps; 0: only after the last
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    group_by_length: bool = False  # micro-batches are bucketed by length
    micro: int = 0  # at most the plan's; 0: the plan's
    notify: Callable[[str, str], None] = lambda label, text: None  # a console line, from rank 0
    profile_path: Path | None = None  # output of `train.profile`, on ranks that write one
    static_metrics: Metrics = field(default_factory=dict)  # constant over the run, such as the memory table
    recover_cpu_oom: bool = False  # the kernel usually kills the process
    stop: Callable[[], bool] = lambda: False  # True on any rank ends the run after this step


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
    world: int = 0  # ranks that `micro` was found with
    planned_micro: int = 0  # at the start of the attempt
    micro: int = 0  # now, after reductions for OOM; kept by later attempts with equal `world` and `planned_micro`
    gradient_noise: list[float] = field(default_factory=lambda: [0.0, 0.0])  # averages of trace and squared mean


@dataclass(frozen=True)
class TrainState:
    """Everything that one step reads or changes, except the rows; built from TrainSpec at the start."""

    model: nn.Module  # wrapped by parallel/strategy.py
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    timers: PhaseTimers
    noise: NoiseMeter = field(default_factory=NoiseMeter)
    clip_norm: float = 0.0
    can_recover_oom: bool = True  # False if a forward has collectives, or on a CPU by default

    @cached_property
    def parts(self) -> ObjectiveParts:
        """The global and the local loss of the objective."""
        return split_objective(self.objective)
