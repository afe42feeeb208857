"""Which batch shape to time next, and which one to recommend. Pure functions.

For each global batch the micro-batch doubles until steps get no faster, or up to the largest size
that fits into memory (engine/memory_probe.py). Every
size is timed twice, and then the two best ones alternate in the order A B B A, because other
programs slow some steps and a higher clock after a pause makes others faster than training is.
All decisions follow from the measurements so far, so that all ranks agree.
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
VISITS = 2  # measurements of each size, before the best two are compared
MAX_SLOWDOWN = 3.0  # sizes slower than this, relative to the fastest, are not measured again
ROUNDS = 4  # measurements of each of the best two, to compare them
MAX_COMPARISON_S = 30.0  # timed steps; fewer rounds if these would take longer
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
    for size, seconds in sorted(times.items(), reverse=True):
        if len(seconds) < VISITS and seconds[0] < slow_s:
            return size
    return _next_of_pair(best_two(measurements, global_batch_size), times)


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
            if len(times[size]) < VISITS:
                return size
    if rows in larger:
        return rows
    return smaller[-1] if smaller and fast == min(times) else None


def best_two(measurements: Measurements, global_batch_size: int) -> list[int]:
    """Return the fastest micro-batch of a global batch, and one to compare it with.

    The second one is the one with the least memory, if it is within TOLERANCE (2%) of the fastest
    and needs less memory; otherwise the second fastest.

    Returns:
        Rows of one or two micro-batches.
    """
    times = measurements.step_times(global_batch_size)
    step_s = {size: min(seconds[:VISITS]) for size, seconds in times.items()}
    fastest, *others = sorted(step_s, key=lambda size: step_s[size])
    peak_gib = {size: measurements.peak_gib(global_batch_size, size) for size in times}
    near = [
        size
        for size in others
        if step_s[size] <= (1 + TOLERANCE) * step_s[fastest] and peak_gib[size] < peak_gib[fastest]
    ]
    return [fastest, *(sorted(near, key=lambda size: peak_gib[size])[:1] or others[:1])]


def _next_of_pair(pair: Sequence[int], times: dict[int, list[float]]) -> int | None:
    """Return the micro-batch to time next in rounds A B, B A, A B, ...; None after the last."""
    if len(pair) < 2:
        return None
    round_s = sum(min(times[size]) for size in pair)
    rounds = min(ROUNDS, int(MAX_COMPARISON_S / round_s))
    first, second = pair
    num_first = len(times[first]) - VISITS
    num_second = len(times[second]) - VISITS
    if num_first == num_second:
        return None if num_first >= rounds else pair[num_first % 2]
    return first if num_first < num_second else second


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


def recommend(
    rows: Sequence[TrialRow], measurements: Measurements, own_global: int | None = None
) -> Recommendation | None:
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
        by_micro = {
            row.micro: row
            for row in rows
            if row.global_batch_size == size and row.status == "finished"
        }
        if by_micro:
            pair = [by_micro[each] for each in best_two(measurements, size)]
            best[size] = pick_faster(pair, measurements)
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


def pick_faster(pair: Sequence[TrialRow], measurements: Measurements) -> tuple[TrialRow, str]:
    """Return the better of one or two measured micro-batches of a global batch, and the reason.

    If their speeds differ by at most TOLERANCE (2%), the one with less memory is better.

    Args:
        measurements: All measured step times, for their spread.
    """
    if len(pair) == 1:
        return pair[0], f"{_format_rate(pair[0])}; no other shape was measured."
    first, second = sorted(pair, key=lambda row: row.step_p50_s or 0.0)
    ratio = (second.step_p50_s or 0.0) / (first.step_p50_s or 1.0)
    if ratio <= 1 + TOLERANCE and (second.peak_gib or 0.0) < (first.peak_gib or 0.0):
        memory = f"{second.peak_gib:.2f} GiB instead of {first.peak_gib:.2f} GiB"
        return second, (
            f"{_format_rate(second)}, within {TOLERANCE:.0%} of {format_shape(first)}, and needs "
            f"{memory}."
        )
    times = measurements.step_times(first.global_batch_size or 0)
    rounds = zip(times[first.micro or 0], times[second.micro or 0], strict=False)
    ratios = [slow / fast for fast, slow in rounds]
    doubt = ", so they may be equally fast" if min(ratios) <= 1 else ""
    spread = f"{len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}{doubt}"
    return first, (
        f"{_format_rate(first)}, {ratio:.2f} x as many as {format_shape(second)} ({spread})."
    )


def format_shape(row: TrialRow) -> str:
    """Format the batch shape of a trial as `micro 32 x accumulation 4 x workers 2`."""
    return f"micro {row.micro} x accumulation {row.accumulation} x workers {row.workers}"


def _format_rate(row: TrialRow) -> str:
    return f"{format_shape(row)} trains {format_compact(row.samples_per_s or 0.0)} samples/s"
