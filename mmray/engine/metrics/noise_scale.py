"""The simple gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), in
rows.

Gradients of global batches well below it are mostly noise; batches well above it save few steps. It
is the trace of the covariance of a row's gradient divided by the squared mean gradient. Both follow
from the gradients of the two halves of a global batch as batches of their own, whose noise is
independent also if the loss compares rows, as contrastive ones do. Micro-batches of one batch would
not do: their parts of such a gradient are correlated.

A gradient of n rows has a squared norm of mean^2 + trace / n, of which mean^2 is a fraction f:
trace / mean^2 is n (1 / f - 1). f is averaged over steps, not the two terms: both fall by orders of
magnitude in a run.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mmray.engine.metrics.writers import Metrics
from mmray.engine.optimizer import grad_norm
from mmray.engine.parallel import strategy
from mmray.engine.prefetch import LocalBatch, split_micro_batches
from mmray.engine.run_state import SeedFn, TrainState
from mmray.engine.step import accumulate_gradients, oom_guard, zero_gradients

DECAY = 0.95  # of the average, per measured step


def measure_noise(
    state: TrainState, batch: LocalBatch, seed_of: SeedFn, global_rows: int
) -> tuple[float, float] | None:
    """Return f and n, equal on all ranks; f of one step is noisy and can be negative.

    Takes the time of one and a half steps, and the memory of a step; weights and buffers do not
    change. None if ranks have one row each, or if the gradients are zero or not finite.
    """
    if len(batch.micro_batches) == 1:
        batch = split_micro_batches(batch, math.ceil(batch.rows / 2))
    if len(batch.micro_batches) == 1:
        return None
    halves = [_every_second(batch, first) for first in (0, 1)]
    squares: list[float] = []  # of the gradients of both halves, and of their sum
    with strategy.preserve_buffers(strategy.unwrap(state.model)):
        for half in (*halves, halves[0]):
            if len(squares) == 1:
                zero_gradients(state)
            accumulate_gradients(state, half, seed_of, guard=oom_guard(state))
            norm = float(grad_norm(list(state.model.parameters()))) / state.scaler.get_scale()
            squares.append(norm**2)
            if not math.isfinite(norm):  # on all ranks
                break
    zero_gradients(state)
    if not all(map(math.isfinite, squares)) or not any(squares):
        return None
    one, other, both = squares
    # of gradients with independent noise: its mean is the squared mean gradient
    product = (both - one - other) / 2
    # harmonic mean of the halves
    rows = 2 / sum(batch.rows / (global_rows * half.rows) for half in halves)
    return product / ((one + other) / 2), rows


def _every_second(batch: LocalBatch, first: int) -> LocalBatch:
    part = slice(first, None, 2)
    micro_batches, is_dummy, sizes = (
        batch.micro_batches[part],
        batch.is_dummy[part],
        batch.sizes[part],
    )
    return replace(batch, micro_batches=micro_batches, is_dummy=is_dummy, sizes=sizes)


def average_noise(average: list[float], measured: tuple[float, float] | None) -> Metrics:
    """Add f of a step to the average [weighted sum, sum of weights]; return the noise scale if its
    f is positive.
    """
    if measured is None:
        return {}
    fraction, rows = measured
    average[:] = [
        DECAY * old + (1 - DECAY) * new for old, new in zip(average, (fraction, 1.0), strict=True)
    ]
    fraction = average[0] / average[1]
    return {"train/noise_scale": rows * (1 / fraction - 1)} if 0 < fraction < 1 else {}
