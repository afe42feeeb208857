"""Which batch shape to time next, and which one to recommend. Pure functions.

For each global batch the micro-batch doubles until steps get no faster, or up to the largest size
that fits into memory (engine/memory_probe.py). Every size is timed in several rounds, because other
programs slow some steps and a higher clock after a pause makes others faster than training is. All
decisions follow from the measurements so far, so that all ranks agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

from mmray.report.run import format_compact
from mmray.sweep_files import Recommendation, TrialRow

START_ACCUMULATION = 64  # micro-batches in a step of the first size
PATIENCE = 2  # sizes in a row that are no faster, after which the micro-batch doubles no more
VISITS = 3  # measurements of each size
MAX_SLOWDOWN = 3.0  # sizes slower than this, relative to the fastest, are not measured again
TOLERANCE = 0.02  # relative; within it, less memory is better
# A larger global batch has no advantage over one with this share of the highest samples/s.
SUFFICIENT = 0.95


class Visit(NamedTuple):
    """One timing of a batch shape; a shape may be timed repeatedly.

    Attributes:
        global_batch_size: Rows of the global batch.
        micro_batch_size: Rows of a micro-batch.
        step_s: Median seconds of a step of the slowest rank.
        peak_gib: Largest peak memory of a rank.
    """

    global_batch_size: int
    micro_batch_size: int
    step_s: float
    peak_gib: float


@dataclass
class Measurements:
    """Measured batch shapes, as workers return them.

    Attributes:
        workers: Number of ranks.
        largest: Rows of the largest micro-batch that fits into memory, by global batch; no entry if
            not even one row fits.
        visits: Batch shapes that were timed, in order of time; a shape may occur repeatedly.
    """

    workers: int
    largest: dict[int, int] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)

    def step_times(self, global_batch_size: int) -> dict[int, list[float]]:
        """Return the measured seconds of a step of a global batch, one for each time that it was
        measured, by rows of a micro-batch.
        """
        times: dict[int, list[float]] = {}
        for visit in self.visits:
            if visit.global_batch_size == global_batch_size:
                times.setdefault(visit.micro_batch_size, []).append(visit.step_s)
        return times

    def peak_gib(self, global_batch_size: int, micro_batch_size: int) -> float:
        """Return the largest peak memory of a rank with a measured batch shape."""
        shape = (global_batch_size, micro_batch_size)
        return max(visit.peak_gib for visit in self.visits if visit[:2] == shape)


def micro_sizes(rows: int) -> list[int]:
    """Return the micro-batch sizes to try for a rank.

    Returns:
        Ascending sizes from 1 to `rows`, each about twice the one before. Each divides `rows` into
        micro-batches of nearly equal size. 96 gives 1, 2, 4, 8, 16, 32, 48, 96.
    """
    counts = {ceil(rows / 2**power) for power in range(rows.bit_length() + 1)}
    return sorted({ceil(rows / count) for count in counts})


def next_micro_batch_size(measurements: Measurements, global_batch_size: int) -> int | None:
    """Return the micro-batch to time next for a global batch.

    Returns:
        Rows of a micro-batch; None if enough is measured to choose the best one.
    """
    rows = ceil(global_batch_size / measurements.workers)
    largest = measurements.largest.get(global_batch_size, 0)
    sizes = [size for size in micro_sizes(rows) if size <= largest]
    times = measurements.step_times(global_batch_size)
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


def build_rows(global_batch_sizes: Sequence[int], measurements: Measurements) -> list[TrialRow]:
    """Convert measurements to rows of trials.jsonl.

    Returns:
        A row per measured batch shape, and for each global batch one of the smallest micro-batch
        that does not fit into memory, if any. They are named s001, s002, ...
    """
    rows: list[TrialRow] = []
    for size in global_batch_sizes:
        rows += _rows_of(size, measurements)
    return [replace(row, trial=f"s{number:03}") for number, row in enumerate(rows, 1)]


def _rows_of(global_batch_size: int, measurements: Measurements) -> list[TrialRow]:
    workers = measurements.workers
    step: dict[str, Any] = {"workers": workers, "global_batch_size": global_batch_size}
    if global_batch_size < workers:
        error = f"{global_batch_size} rows are fewer than {workers} workers"
        return [TrialRow("", "infeasible", error=error, **step)]
    rank_rows = ceil(global_batch_size / workers)
    times = measurements.step_times(global_batch_size)
    rows: list[TrialRow] = []
    for size in micro_sizes(rank_rows):
        shape = step | {"micro": size, "accumulation": ceil(rank_rows / size)}
        if size in times:
            # The lower median, because other programs only slow steps.
            step_s = statistics.median_low(times[size])
            row = TrialRow(
                "",
                "finished",
                samples_per_s=global_batch_size / step_s,
                step_p50_s=step_s,
                peak_gib=measurements.peak_gib(global_batch_size, size),
                **shape,
            )
            rows.append(row)
        elif size > measurements.largest.get(global_batch_size, 0):
            error = f"micro-batches of {size} rows do not fit into memory"
            rows.append(TrialRow("", "out_of_memory", error=error, **shape))
            break
    return rows


def recommend(rows: Sequence[TrialRow], own_global: int | None = None) -> Recommendation | None:
    """Return the best measured batch shape, and the reason.

    Its global batch is the smallest one with at least 95% of the highest samples/s.

    Args:
        own_global: Rows of the global batch for which the recipe's learning rate is set. If another
            one is best, `why` has a hint to search it again. None: no hint.

    Returns:
        None if no batch shape was measured.
    """
    best: dict[int, tuple[TrialRow, str]] = {}
    for size in sorted({row.global_batch_size or 0 for row in rows}):
        finished = [
            row for row in rows if row.global_batch_size == size and row.status == "finished"
        ]
        if finished:
            best[size] = pick_fastest(finished)
    if not best:
        return None
    rates = {size: row.samples_per_s or 0.0 for size, (row, _) in best.items()}
    smallest = min(size for size, rate in rates.items() if rate >= SUFFICIENT * max(rates.values()))
    row, why = best[smallest]
    if len(best) > 1:
        why += (
            f" {smallest} is the smallest global batch with at least {SUFFICIENT:.0%} of the "
            "highest samples/s."
        )
    if own_global not in (None, smallest):
        why += (
            f" The learning rate is still that for {own_global} rows: search it with --goal loss."
        )
    return Recommendation(
        best=row.trial,
        per_global={str(size): row.trial for size, (row, _) in best.items()},
        why=why,
    )


def pick_fastest(rows: Sequence[TrialRow]) -> tuple[TrialRow, str]:
    """Return the fastest measured micro-batch of a global batch, or of those within TOLERANCE (2%)
    of it the one with the least memory, and the reason.
    """
    fastest, *others = sorted(rows, key=lambda row: row.step_p50_s or 0.0)
    if not others:
        return fastest, f"{_format_rate(fastest)}; no other shape was measured."
    limit_s = (1 + TOLERANCE) * (fastest.step_p50_s or 0.0)
    near = [row for row in rows if (row.step_p50_s or 0.0) <= limit_s]
    best = min(near, key=lambda row: row.peak_gib or 0.0)
    if best is not fastest:
        memory = f"{best.peak_gib:.2f} GiB instead of {fastest.peak_gib:.2f} GiB"
        return best, (
            f"{_format_rate(best)}, within {TOLERANCE:.0%} of {format_shape(fastest)}, and needs "
            f"{memory}."
        )
    ratio = (others[0].step_p50_s or 0.0) / (fastest.step_p50_s or 1.0)
    return fastest, (
        f"{_format_rate(fastest)}, {ratio:.2f} x as many as {format_shape(others[0])}."
    )


def format_shape(row: TrialRow) -> str:
    """Format the batch shape of a trial as `micro 32 x accumulation 4 x workers 2`."""
    return f"micro {row.micro} x accumulation {row.accumulation} x workers {row.workers}"


def _format_rate(row: TrialRow) -> str:
    return f"{format_shape(row)} trains {format_compact(row.samples_per_s or 0.0)} samples/s"
