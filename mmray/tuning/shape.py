"""Which batch shape to time next. Pure functions.

The micro-batch doubles until steps get no faster, or up to the largest size
that fits into memory (engine/memory_probe.py). Every size is timed in several rounds, because other
programs slow some steps and a higher clock after a pause makes others faster than training is. All
decisions follow from the measurements so far, so that all ranks agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from mmray.sweep_files import TrialRow

START_ACCUMULATION = 64  # micro-batches in a step of the first size
PATIENCE = 2  # sizes in a row that are no faster, after which the micro-batch doubles no more
VISITS = 3  # measurements of each size
MAX_SLOWDOWN = 3.0  # sizes slower than this, relative to the fastest, are not measured again
TOLERANCE = 0.02  # relative; within it, a size is no faster


class Visit(NamedTuple):
    """One timing of a batch shape; a shape may be timed repeatedly.

    Attributes:
        micro_batch_size: Rows of a micro-batch.
        step_s: Median seconds of a step of the slowest rank.
        peak_gib: Largest peak memory of a rank.
    """

    micro_batch_size: int
    step_s: float
    peak_gib: float


@dataclass
class Measurements:
    """Measured batch shapes of a global batch, as workers return them.

    Attributes:
        global_batch_size: Rows of the global batch.
        workers: Number of ranks.
        largest: Rows of the largest micro-batch that fits into memory.
        visits: Batch shapes that were timed, in order of time; a shape may occur repeatedly.
    """

    global_batch_size: int
    workers: int
    largest: int
    visits: list[Visit] = field(default_factory=list)

    @property
    def rank_rows(self) -> int:
        """Rows of a step on a rank."""
        return ceil(self.global_batch_size / self.workers)

    def step_times(self) -> dict[int, list[float]]:
        """Return the measured seconds of a step, one for each time that it was measured, by rows of
        a micro-batch.
        """
        times: dict[int, list[float]] = {}
        for visit in self.visits:
            times.setdefault(visit.micro_batch_size, []).append(visit.step_s)
        return times


def micro_sizes(rows: int) -> list[int]:
    """Return sizes from 1 to `rows`, each about twice the one before: 1, 2, ..., 48, 96."""
    counts = {ceil(rows / 2**power) for power in range(rows.bit_length() + 1)}
    return sorted({ceil(rows / count) for count in counts})


def next_micro_batch_size(measurements: Measurements) -> int | None:
    """Return the micro-batch to time next.

    Returns:
        Rows of a micro-batch; None if enough is measured to choose the best one.
    """
    rows = measurements.rank_rows
    sizes = [size for size in micro_sizes(rows) if size <= measurements.largest]
    times = measurements.step_times()
    if not times:
        start = ceil(rows / START_ACCUMULATION)
        return next((size for size in sizes if size >= start), sizes[-1] if sizes else None)
    size = _next_untimed(sizes, times, rows)
    if size is not None:
        return size
    slow_s = MAX_SLOWDOWN * min(map(min, times.values()))
    unsure = [
        size for size, seconds in times.items() if len(seconds) < VISITS and min(seconds) < slow_s
    ]
    return min(unsure, key=lambda size: (len(times[size]), -size), default=None)


def _next_untimed(sizes: Sequence[int], times: dict[int, list[float]], rows: int) -> int | None:
    """Return the next micro-batch while steps get faster; None afterwards.

    Before the end, the sizes that were no faster are timed again: other programs may have slowed
    them. The last size has all rows of a rank: it needs no second forward for GradCache, so it can
    be faster although the sizes before it were not.
    """
    larger = [size for size in sizes if size > max(times)]
    smaller = [size for size in sizes if size < min(times)]
    fast_s = (1 + TOLERANCE) * min(map(min, times.values()))
    fast = min(size for size, seconds in times.items() if min(seconds) <= fast_s)
    no_faster = [size for size in times if size > fast]
    if larger and len(no_faster) < PATIENCE:
        return larger[0]
    if larger:
        for size in no_faster:
            if len(times[size]) == 1:
                return size
    if rows in larger:
        return rows
    return smaller[-1] if smaller and fast == min(times) else None


def build_rows(measurements: Measurements) -> list[TrialRow]:
    """Convert measurements to rows of trials.jsonl.

    Returns:
        A row per measured batch shape, and one of the smallest micro-batch that does not fit into
        memory, if any. They are named s001, s002, ...
    """
    times = measurements.step_times()
    step: dict[str, Any] = {
        "workers": measurements.workers,
        "global_batch_size": measurements.global_batch_size,
    }
    rows: list[TrialRow] = []
    for size in micro_sizes(measurements.rank_rows):
        name = f"s{len(rows) + 1:03}"
        shape = step | {"micro": size, "accumulation": ceil(measurements.rank_rows / size)}
        if size in times:
            # The lower median, because other programs only slow steps.
            step_s = statistics.median_low(times[size])
            peaks = [each.peak_gib for each in measurements.visits if each.micro_batch_size == size]
            row = TrialRow(
                name,
                "finished",
                samples_per_s=measurements.global_batch_size / step_s,
                step_p50_s=step_s,
                peak_gib=max(peaks),
                **shape,
            )
            rows.append(row)
        elif size > measurements.largest:
            error = f"micro-batches of {size} rows do not fit into memory"
            rows.append(TrialRow(name, "out_of_memory", error=error, **shape))
            break
    return rows
