"""What a run is given and what comes of it: the task, where it stands, how it ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine import oom
from mmray.engine import optimizer as clip
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.metrics.writers import Metrics, MetricsLog
from mmray.engine.parallel import wrap
from mmray.engine.precision import Precision, seeded
from mmray.engine.prefetch import LocalBatch
from mmray.objectives.protocol import Batch, Objective, ObjectiveParts, Outputs

if TYPE_CHECKING:
    from mmray.config import Optimizer as OptimizerConfig
    from mmray.config import Train
    from mmray.data.stream.order import SamplePlan


State = dict[str, Any]


StateLoader = Callable[[Callable[[str, Tensor], Tensor]], State]  # loads a checkpoint into the tensors of a `Target`


EMA_KEY = "average"  # in a state: the averaged weights, under `module.` and the model's names


class Callback(Protocol):
    """A user's own code, called on every rank after each step."""

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """`step` counts from 1; `metrics` is what was logged, None where nothing was."""


@dataclass(frozen=True)
class TrainSpec:
    """What to train, on which rows, and whom to tell. `save` and `evaluate` are called on every rank alike."""

    model: nn.Module  # not wrapped
    objective: Objective
    plan: SamplePlan
    group: Group
    train: Train
    optimizer: OptimizerConfig
    # Given the step, the state, its metrics, and whether no other follows; answers what the one before cost, in s.
    save: Callable[[int, State, Metrics, bool], float | None] | None = None
    evaluate: Callable[[int, nn.Module], dict[str, float]] | None = None  # given the averaged model where there is one
    evaluate_every: int = 0  # steps; 0: only after the last
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    group_by_length: bool = False  # the steps' micro-batches are arranged by length
    micro: int = 0  # rows of a micro-batch, fewer than the plan's; 0: the plan's
    names: oom.RowNames = oom.row_numbers
    note: Callable[[str, str], None] = lambda text, label: None  # a line for people, from rank 0
    devices: tuple[torch.device, ...] = ()  # of this worker, where the strategy takes several
    profile_path: Path | None = None  # file of the profile that `train.profile` asks for, on ranks that write one
    slower: str = "image"  # the branch that takes longer, where the strategy divides them
    static_metrics: Metrics = field(default_factory=dict)  # metrics of the whole run, such as the memory table
    recover_cpu_oom: bool = (
        False  # on memory, on a CPU too: there its end raises nothing, and each vote costs 4 % of a small step
    )
    stop: Callable[[], bool] = lambda: False  # True on any rank ends the run after this step


@dataclass(frozen=True)
class LoopResult:
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
    skipped_in_a_row: int = 0
    planned_micro: int = 0  # rows of a micro-batch that a run began with
    micro: int = 0  # to which they shrank


SeedFn = Callable[[int], int]  # micro index -> seed of its forward


@dataclass(frozen=True)
class TrainState:
    """Everything a step changes or consults, apart from the rows."""

    model: nn.Module  # as train/parallel.py wrapped it
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    clip_groups: clip.ClipGroups  # what is clipped together, by name
    timers: PhaseTimers
    clip_norm: float = 0.0
    can_recover_oom: bool = (
        True  # on going on without memory; not where a forward holds collectives, nor where none votes
    )


def forward_micro_batch(
    state: TrainState, model: nn.Module, micro: Batch, share: LocalBatch, index: int, seed_of: SeedFn
) -> Outputs:
    """Outputs of one micro-batch; a stand-in row leaves no trace in running statistics."""
    kept = wrap.preserve_buffers(wrap.unwrap(model)) if share.is_filler[index] else nullcontext()
    seed = seeded(seed_of(index), state.group.device)
    with state.timers("forward"), kept, seed, state.precision.autocast():
        outputs: Outputs = model(micro)
        return outputs


def loss_factors(state: TrainState, parts: ObjectiveParts, share: LocalBatch, totals: Tensor) -> tuple[Tensor, Tensor]:
    """From a rank's loss sums to its part of the mean over all ranks; times the world, for DDP averages.

    Of the cross-row part, and of the row-wise one, each with the loss scale.
    """
    factors = state.group.world / totals[:-1].clamp(min=1)
    num_cross_row = 0 if parts.global_loss is None else parts.global_loss.count(share.micro_batches[0]).numel()
    scaled = state.scaler.scale(factors)
    return scaled[:num_cross_row], scaled[num_cross_row:]


class LossMeter:
    """Sums over micro-batches, each a vector [K]: places of the cross-row part first, then of the row-wise one."""

    def __init__(self, num_cross_row: int, num_row_wise: int) -> None:
        self._sizes = num_cross_row, num_row_wise
        self.found: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], local_loss: bool) -> None:
        padding = (self._sizes[0], 0) if local_loss else (0, self._sizes[1])
        for name, value in sums.items():
            placed = value.detach().reshape(-1)
            if any(padding):
                placed = F.pad(placed, padding)
            self.found[name] = self.found[name] + placed if name in self.found else placed


def weighted_local_loss(
    local_loss: Objective, outputs: Outputs, micro: Batch, factor: Tensor, sums: LossMeter
) -> Tensor:
    """The row-wise part in one micro-batch, as a scalar to go backward from."""
    loss_sum, _, further = local_loss.compute_loss(outputs, micro)
    sums.add({"loss": loss_sum, **further}, local_loss=True)
    return (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
