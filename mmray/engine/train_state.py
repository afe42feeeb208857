"""What a step works with: the learner, one forward of it, and the sums it adds up.

Under step.py (the two ways through a step) and coupling.py (where rows of several ranks come together).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine import optimizer as clip
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import Phases
from mmray.engine.parallel import wrap
from mmray.engine.precision import Precision, seeded
from mmray.engine.prefetch import Share
from mmray.objectives.protocol import Batch, Objective, ObjectiveParts, Outputs

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
    kept = wrap.preserve_buffers(wrap.unwrap(model)) if share.filler[index] else nullcontext()
    seed = seeded(seed_of(index), learner.group.device)
    with learner.phases("forward"), kept, seed, learner.precision.autocast():
        outputs: Outputs = model(micro)
        return outputs


def loss_factors(learner: Learner, parts: ObjectiveParts, share: Share, totals: Tensor) -> tuple[Tensor, Tensor]:
    """From a rank's loss sums to its part of the mean over all ranks; times the world, for DDP averages.

    Of the cross-row part, and of the row-wise one, each with the loss scale.
    """
    factors = learner.group.world / totals[:-1].clamp(min=1)
    num_cross_row = 0 if parts.global_loss is None else parts.global_loss.count(share.micros[0]).numel()
    scaled = learner.scaler.scale(factors)
    return scaled[:num_cross_row], scaled[num_cross_row:]


class Sums:
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


def row_wise_loss(local_loss: Objective, outputs: Outputs, micro: Batch, factor: Tensor, sums: Sums) -> Tensor:
    """The row-wise part in one micro-batch, as a scalar to go backward from."""
    loss_sum, _, further = local_loss.compute_loss(outputs, micro)
    sums.add({"loss": loss_sum, **further}, local_loss=True)
    return (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
