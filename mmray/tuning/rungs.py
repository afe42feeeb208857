"""Successive halving: after how many samples trials are compared, and which of them continue.

Jamieson & Talwalkar 2016. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmray.sweep_files import TrialRow

# A quarter of the trials continues, with four times the samples.
REDUCTION = 4
MIN_PROMOTED = 2
MAX_RUNGS = 3


def rungs_up_to(samples: int, min_samples: int) -> tuple[int, ...]:
    """Return the rungs in samples: `samples` divided by powers of REDUCTION, none below
    `min_samples`.

    Args:
        samples: Samples of a full trial, the last rung.
        min_samples: Smallest first rung.
    """
    rungs = [samples]
    while len(rungs) < MAX_RUNGS and rungs[0] // REDUCTION >= min_samples:
        rungs.insert(0, rungs[0] // REDUCTION)
    return tuple(rungs)


def num_promoted(count: int) -> int:
    """Return how many of `count` trials continue after a rung: a quarter, but at least two."""
    return min(count, max(MIN_PROMOTED, count // REDUCTION))


def select_promoted(rows: Sequence[TrialRow], rung: int, maximize: bool) -> list[str]:
    """Return the names of the trials that continue after the rung (from 0), the best first.

    Args:
        rows: The rows of all trials.
        rung: Number of the rung, from 0.
        maximize: Whether larger values of the goal are better.
    """
    reached = [row for row in rows if len(row.rungs) > rung]
    reached.sort(key=lambda row: row.rungs[rung].value, reverse=maximize)
    return [row.trial for row in reached[: num_promoted(len(reached))]]


def planned_samples(count: int, rungs: Sequence[int]) -> int:
    """Return the samples that `count` trials train in total; ASHA trains about as many.

    Args:
        count: Number of trials.
        rungs: Samples of each rung, ascending.
    """
    total = 0
    before = 0
    for samples in rungs:
        total += count * (samples - before)
        before = samples
        count = num_promoted(count)
    return total
