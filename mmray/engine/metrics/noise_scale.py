"""The simple gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), in rows.

Gradients of global batches well below it are mostly noise; batches well above it save few steps. It is the trace of the
covariance of a row's gradient divided by the squared mean gradient. Both follow from the norms of two gradients that an
accumulated step has anyway: of its first micro-batch, and of the global batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from mmray.engine.metrics.writers import Metrics
from mmray.engine.parallel import strategy
from mmray.objectives.protocol import Objective, split_objective

DECAY = 0.95  # of the averages, per measured step


def is_additive(objective: Objective) -> bool:
    """Return whether the loss is a sum over rows, so that a micro-batch has an independent part of the gradient.

    In a contrastive loss the parts are correlated through the embeddings of the other rows.
    """
    parts = split_objective(objective)
    return parts.global_loss is None and parts.mining_loss is None


@dataclass
class NoiseMeter:
    """Measures steps that are logged and have several micro-batches. Averages of the loop are in `LoopProgress`."""

    due: bool = False  # whether the next step is measured
    rows: int = 0  # of the first micro-batch of this rank
    is_sharded: bool = False  # FSDP has reduced it over ranks, and this rank has a shard of the gradient
    squared_norm: Tensor | None = None  # float64 on the device

    def measure(self, model: nn.Module, rows: int, scaler: torch.amp.GradScaler) -> None:
        """Keep the norm of the gradients, which are those of the first `rows` rows of this rank so far."""
        self.rows, self.is_sharded = rows, strategy.is_sharded(model)
        # FSDP replicates scalars, so ranks would count them several times.
        weights = [weight for weight in model.parameters() if weight.ndim or not self.is_sharded]
        gradients = [strategy.to_local(weight.grad) for weight in weights if weight.grad is not None]
        norm = get_total_norm(gradients).double()
        self.squared_norm = (norm / scaler.scale(torch.ones_like(norm))) ** 2

    def estimate(self, norm: float, global_rows: int, world_size: int) -> list[Tensor]:
        """Return estimates of trace and squared mean gradient whose sums over ranks are unbiased.

        norm: of the gradient of the global batch. Empty if the step was not measured.
        """
        if self.squared_norm is None:
            return []
        share = self.rows * world_size / global_rows  # the loss of a rank is weighted by the number of ranks
        small, big, rows = self.squared_norm / share**2 / world_size, norm**2 / world_size, self.rows
        if self.is_sharded:
            small, rows = small * world_size, rows * world_size
        self.squared_norm = None
        trace = (small - big) / (1 / rows - 1 / global_rows)
        return [trace, (global_rows * big - rows * small) / (global_rows - rows)]


def average_noise(average: list[float], estimates: list[float]) -> Metrics:
    """Add the estimates of a step to the averages of both; return their ratio.

    They are averaged before they are divided, because those of one step are noisy and can be negative.
    """
    if not estimates or not all(map(math.isfinite, estimates)):
        return {}
    average[:] = [DECAY * old + (1 - DECAY) * new for old, new in zip(average, estimates, strict=True)]
    trace, square = average
    return {"train/noise_scale": trace / square} if trace > 0 and square > 0 else {}
