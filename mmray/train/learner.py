"""What a step works with: the learner, one forward of it, and the sums it adds up.

Under step.py (the two ways through a step) and meet.py (where rows of several ranks come together).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.objectives.protocol import Batch, Objective, Outputs, Sorts
from mmray.train import clip, parallel
from mmray.train.feed import Share
from mmray.train.group import Group
from mmray.train.precision import Precision
from mmray.train.seeding import seeded
from mmray.train.telemetry import Phases

SeedOf = Callable[[int], int]  # micro index -> seed of its forward


@dataclass(frozen=True)
class Learner:
    """Everything a step changes or consults, apart from the rows."""

    model: nn.Module  # as train/parallel.py wrapped it
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    clip_groups: clip.Groups  # what is clipped together, by name
    phases: Phases
    clip_norm: float = 0.0
    may_vote: bool = True  # on going on without memory; not where a forward holds collectives, nor where none votes


def forward_of(learner: Learner, model: nn.Module, micro: Batch, share: Share, index: int, seed_of: SeedOf) -> Outputs:
    """Outputs of one micro-batch; a stand-in row leaves no trace in running statistics."""
    kept = parallel.buffers_kept(parallel.unwrapped(model)) if share.hollow[index] else nullcontext()
    seed = seeded(seed_of(index), learner.group.device)
    with learner.phases("forward"), kept, seed, learner.precision.autocast():
        outputs: Outputs = model(micro)
        return outputs


def factors_of(learner: Learner, parts: Sorts, share: Share, totals: Tensor) -> tuple[Tensor, Tensor]:
    """From a rank's loss sums to its part of the mean over all ranks; times the world, for DDP averages.

    Of what meets, and of what stands alone, each with the loss scale.
    """
    factors = learner.group.world / totals[:-1].clamp(min=1)
    num_meeting = 0 if parts.meeting is None else parts.meeting.count(share.micros[0]).numel()
    scaled = learner.scaler.scale(factors)
    return scaled[:num_meeting], scaled[num_meeting:]


class Sums:
    """Sums over micro-batches, each a vector [K]: places of what meets first, then of what stands alone."""

    def __init__(self, num_meeting: int, num_standing: int) -> None:
        self._sizes = num_meeting, num_standing
        self.found: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], standing: bool) -> None:
        padding = (self._sizes[0], 0) if standing else (0, self._sizes[1])
        for name, value in sums.items():
            placed = value.detach().reshape(-1)
            if any(padding):
                placed = F.pad(placed, padding)
            self.found[name] = self.found[name] + placed if name in self.found else placed


def standing_loss(standing: Objective, outputs: Outputs, micro: Batch, factor: Tensor, sums: Sums) -> Tensor:
    """What stands alone in one micro-batch, as a scalar to go backward from."""
    loss_sum, _, further = standing.measure(outputs, micro)
    sums.add({"loss": loss_sum, **further}, standing=True)
    return (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
