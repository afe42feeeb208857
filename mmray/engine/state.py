"""What a run is given and what comes of it: the task, where it stands, how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mmray.engine import error_messages
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import Metrics, MetricsLog
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.config import Optimizer, Train
    from mmray.data.stream.order import SamplePlan

State = dict[str, Any]
Stored = Callable[[Callable[[tuple[Any, ...], Tensor], Tensor]], State]  # reads a state; what is cut, into that room
AVERAGE = "average"  # in a state: the averaged weights, under `module.` and the model's names


class Callback(Protocol):
    """A user's own code, called on every rank after each step."""

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        """`step` counts from 1; `metrics` is what was logged, None where nothing was."""


@dataclass(frozen=True)
class Task:
    """What to train, on which rows, and whom to tell. `save` and `evaluate` are called on every rank alike."""

    model: nn.Module  # not wrapped
    objective: Objective
    plan: SamplePlan
    group: Group
    train: Train
    optimizer: Optimizer
    # Given the step, the state, its metrics, and whether no other follows; answers what the one before cost, in s.
    save: Callable[[int, State, Metrics, bool], float | None] | None = None
    evaluate: Callable[[int, nn.Module], dict[str, float]] | None = None  # given the averaged model where there is one
    evaluate_every: int = 0  # steps; 0: only after the last
    log: MetricsLog | None = None
    callbacks: tuple[Callback, ...] = ()
    by_length: bool = False  # the steps' micro-batches are arranged by length
    micro: int = 0  # rows of a micro-batch, fewer than the plan's; 0: the plan's
    names: error_messages.Names = error_messages.by_number
    note: Callable[[str, str], None] = lambda text, label: None  # a line for people, from rank 0
    devices: tuple[torch.device, ...] = ()  # of this worker, where the strategy takes several
    profile_to: Path | None = None  # file of the profile that `train.profile` asks for, on ranks that write one
    slower: str = "image"  # the branch that takes longer, where the strategy divides them
    constants: Metrics = field(default_factory=dict)  # metrics of the whole run, such as the memory table
    votes: bool = (
        False  # on memory, on a CPU too: there its end raises nothing, and each vote costs 4 % of a small step
    )
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
    planned_micro: int = 0  # rows of a micro-batch that a run began with
    micro: int = 0  # to which they shrank
