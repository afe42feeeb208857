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
    """Return at most MAX_RUNGS rungs, each REDUCTION times the one before.

    The last is `samples`; the others are at least `min_samples`.
    """
    rungs = [samples]
    while len(rungs) < MAX_RUNGS and rungs[0] // REDUCTION >= min_samples:
        rungs.insert(0, rungs[0] // REDUCTION)
    return tuple(rungs)


def num_promoted(count: int) -> int:
    """Return how many of the trials at a rung continue: a quarter, rounded down, but at least two,
    or all if there are fewer.
    """
    return min(count, max(MIN_PROMOTED, count // REDUCTION))


def select_promoted(rows: Sequence[TrialRow], rung: int, maximize: bool) -> list[str]:
    """Return the names of the best quarter, and at least two, of the trials that reached a rung."""
    reached = [row for row in rows if len(row.rungs) > rung]
    reached.sort(key=lambda row: row.rungs[rung].value, reverse=maximize)
    return [row.trial for row in reached[: num_promoted(len(reached))]]


def planned_samples(count: int, rungs: Sequence[int]) -> int:
    """Return the samples that all trials of a sweep train in total with successive halving.

    Args:
        count: Number of trials.
    """
    total = 0
    before = 0
    for samples in rungs:
        total += count * (samples - before)
        before = samples
        count = num_promoted(count)
    return total
