"""The simple gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), in rows.

Gradients of global batches well below it are mostly noise; batches well above it save few steps. It is the trace of the
covariance of a row's gradient divided by the squared mean gradient. Both follow from the gradients of the two halves of
a global batch as batches of their own, whose noise is independent also if the loss compares rows, as contrastive ones
do. Micro-batches of one batch would not do: their parts of such a gradient are correlated.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mmray.engine.metrics.writers import Metrics
from mmray.engine.oom import OomGuard
from mmray.engine.optimizer import grad_norm
from mmray.engine.parallel import strategy
from mmray.engine.prefetch import LocalBatch, split_micro_batches
from mmray.engine.run_state import SeedFn, TrainState
from mmray.engine.step import accumulate_gradients, zero_gradients

DECAY = 0.95  # of the averages, per measured step


def measure_noise(state: TrainState, batch: LocalBatch, seed_of: SeedFn, global_rows: int) -> list[float]:
    """Return estimates of trace and squared mean gradient, equal on all ranks; weights and buffers are unchanged.

    Takes the time of one and a half steps, and the memory of a step. Empty if ranks have one row each, or if a gradient
    is not finite.
    """
    if len(batch.micro_batches) == 1:
        batch = split_micro_batches(batch, math.ceil(batch.rows / 2))
    if len(batch.micro_batches) == 1:
        return []
    halves = [_every_second(batch, first) for first in (0, 1)]
    squares: list[float] = []  # of the gradients of both halves, and of their sum
    with strategy.preserve_buffers(strategy.unwrap(state.model)):
        for half in (*halves, halves[0]):
            if len(squares) == 1:
                zero_gradients(state)
            guard = OomGuard(state.group, enabled=state.can_recover_oom and state.group.world_size > 1)
            accumulate_gradients(state, half, seed_of, guard=guard)
            norm = float(grad_norm(list(state.model.parameters()))) / state.scaler.get_scale()
            squares.append(norm**2)
            if not math.isfinite(norm):  # on all ranks
                break
    zero_gradients(state)
    if not all(map(math.isfinite, squares)):
        return []
    one, other, both = squares
    product = (both - one - other) / 2  # of two gradients with independent noise: the squared mean gradient
    per_row = sum(batch.rows / (global_rows * half.rows) for half in halves) / 2
    return [((one + other) / 2 - product) / per_row, product]


def _every_second(batch: LocalBatch, first: int) -> LocalBatch:
    part = slice(first, None, 2)
    micro_batches, is_dummy, sizes = batch.micro_batches[part], batch.is_dummy[part], batch.sizes[part]
    return replace(batch, micro_batches=micro_batches, is_dummy=is_dummy, sizes=sizes)


def average_noise(average: list[float], estimates: list[float]) -> Metrics:
    """Add the estimates of a step to the averages of both; return their ratio.

    They are averaged before they are divided, because those of one step are noisy and can be negative.
    """
    if not estimates:
        return {}
    average[:] = [DECAY * old + (1 - DECAY) * new for old, new in zip(average, estimates, strict=True)]
    trace, square = average
    return {"train/noise_scale": trace / square} if trace > 0 and square > 0 else {}
