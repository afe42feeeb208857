"""Time and memory of every batch shape, from a few measured steps, and the shape to recommend. Pure
functions.

A step of a rank with micro-batches of m_1, m_2, ... rows takes

    t = optimizer + first(m_1) + further(m_2) + further(m_3) + ... + communication(workers)

`further` includes the second forward of GradCache (engine/README.md, section "One step"). Times are
medians of several
visits: other programs slow some of them, and a higher clock after a pause makes others faster than
training is. Peak memory is linear in the rows of a micro-batch; the input of the other rows of a
step is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmray.engine.batch import BatchShape
from mmray.report.run import format_compact

if TYPE_CHECKING:
    from mmray.config import Config

ROUNDS = 4  # in which the two best shapes are measured, in the order A B B A
ACCUMULATION = 3  # of the accumulated steps
MAX_ACCUMULATED = 4  # sizes, the largest, of which an accumulated step is measured
DISAGREEMENT, MAX_REVISITS = 1.1, 3  # if no two visits of a shape differ less, it is visited again
MAX_DUELS = 3
MAX_STEP_S = 4.0  # larger micro-batches than those of such a step are not measured
TOLERANCE = 0.02  # relative; within it, less memory is better
# of the highest samples/s: a larger global batch than one that reaches it has no advantage
SUFFICIENT = 0.95
Row = dict[str, Any]


class Sample(NamedTuple):
    """A measured step without communication: the slowest rank's time, the largest peak memory of a
    rank.
    """

    micro: int
    accumulation: int
    step_s: float
    optimizer_s: float
    peak_gib: float


class FailedShape(NamedTuple):
    """Rows of a micro-batch and of a step of a rank in which a worker group ran out of memory."""

    micro: int
    rows: int
    reason: str

    def __str__(self) -> str:
        steps = f"a step of {self.rows} rows in micro-batches of {self.micro}"
        return steps if self.rows > self.micro else f"a micro-batch of {self.micro} rows"

    def implies(self, micro: int, rows: int) -> bool:
        """Return True if another shape needs at least as much memory.

        Only a step with accumulation keeps gradients.
        """
        return micro >= self.micro and (
            self.rows <= self.micro or (rows > micro and rows >= self.rows)
        )


@dataclass(frozen=True)
class ShapeTask:
    """What a worker group measures.

    `workers`: candidates; `failed_shapes`: did not fit in an earlier group.
    """

    config: Config
    global_rows: tuple[int, ...]
    workers: tuple[int, ...]
    failed_shapes: tuple[FailedShape, ...] = ()


@dataclass
class Measurements:
    """The measured steps of a worker group, and of the shapes that were measured with
    communication.
    """

    workers: int
    limit_gib: float  # memory of a worker
    input_gib: float = 0.0  # per row of a step
    samples: list[Sample] = field(default_factory=list)
    too_large: int | None = None  # rows of the smallest micro-batch that does not fit
    reason: str = ""
    # communication of a step by number of workers
    sync_s: dict[int, float] = field(default_factory=dict)
    # by global batch: as too_large and reason
    failed: dict[int, tuple[int, str]] = field(default_factory=dict)
    # Of each global batch: {micro: seconds} of each round, and {micro: GiB}.
    pairs: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    peak_gib: dict[int, dict[int, float]] = field(default_factory=dict)
    failed_shapes: list[FailedShape] = field(default_factory=list)  # of the task

    def find_failure(self, micro: int, rows: int) -> FailedShape | None:
        """Return the failed shape because of which this one does not fit either, if any."""
        return next((failed for failed in self.failed_shapes if failed.implies(micro, rows)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with each sample and failed shape as a dictionary."""
        values = asdict(self) | {"samples": [sample._asdict() for sample in self.samples]}
        return values | {"failed_shapes": [failed._asdict() for failed in self.failed_shapes]}


# (micro, accumulation) -> a sample, or why it does not fit
Measure = Callable[[int, int], Sample | str]


def micro_sizes(global_rows: Sequence[int], workers: Sequence[int]) -> list[int]:
    """Return the sizes to measure: 1, 2, 4, ... and all rows of a rank, which need no
    accumulation.
    """
    all_rows = {ceil(rows / world) for rows in global_rows for world in workers if rows >= world}
    return sorted({1 << shift for shift in range(max(all_rows, default=1).bit_length())} | all_rows)


def explore(measure: Measure, sizes: Sequence[int], found: Measurements) -> None:
    """Measure single steps in ascending order until memory is used up, accumulated steps, and all
    once more.

    The second visits are in reverse order. Where two disagree, because other programs ran, there
    are more.
    """
    single: list[Sample] = []
    for size in sizes:
        result: Sample | str = ""
        if len(single) > 1:
            (low, *_, low_gib), (high, *_, high_gib) = single[-2:]
            expected_gib = high_gib + (high_gib - low_gib) * (size - high) / (high - low)
            if expected_gib > found.limit_gib:
                result = f"would need about {expected_gib:.1f} GiB of {found.limit_gib:.1f} GiB"
        result = result or measure(size, 1)
        if isinstance(result, Sample) and result.peak_gib > found.limit_gib:
            result = f"needs {result.peak_gib:.1f} GiB of {found.limit_gib:.1f} GiB"
        if isinstance(result, str):
            found.too_large, found.reason = size, result
            break
        single.append(result)
        if result.step_s > MAX_STEP_S:
            break
    if not single:
        return
    found.samples += single
    measured = [sample.micro for sample in reversed(single)]
    short = [
        sample.micro for sample in reversed(single) if ACCUMULATION * sample.step_s < MAX_STEP_S
    ] or measured[-1:]
    accumulated = [(size, ACCUMULATION) for size in short[:MAX_ACCUMULATED]]
    visits = [*reversed(accumulated), *accumulated, *((size, 1) for size in measured)]
    for _ in range(MAX_REVISITS):
        found.samples += [
            sample for shape in visits if isinstance(sample := measure(*shape), Sample)
        ]
        times = _times(found.samples)
        visits = [shape for shape in times if _is_doubtful(shape, times)]


def _is_doubtful(shape: tuple[int, int], times: dict[tuple[int, int], list[float]]) -> bool:
    """Return True if no two visits agree, or a step of more rows took less time."""
    seconds = times[shape]
    if len(seconds) > 1 and min(slow / fast for fast, slow in pairwise(seconds)) > DISAGREEMENT:
        return True
    larger = [other for other in times if other[1] == shape[1] and other[0] > shape[0]]
    return any(statistics.median(seconds) > statistics.median(times[other]) for other in larger)


def _times(samples: Sequence[Sample]) -> dict[tuple[int, int], list[float]]:
    """Return the sorted seconds of all visits by (micro, accumulation)."""
    visits: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        visits.setdefault((sample.micro, sample.accumulation), []).append(sample.step_s)
    return {shape: sorted(seconds) for shape, seconds in visits.items()}


@dataclass(frozen=True)
class CostModel:
    """Predicts seconds and GiB of a batch shape; between measured sizes it interpolates."""

    micros: tuple[int, ...]
    first_s: tuple[float, ...]  # the first micro-batch of a step
    further: float  # time of a further micro-batch relative to the first
    optimizer_s: float
    sync_s: dict[int, float]
    base_gib: float
    row_gib: float  # of a row of a micro-batch
    input_gib: float  # of a row of a step

    def step_s(self, shape: BatchShape) -> float:
        """Predict the seconds of a step."""
        rows = ceil(shape.global_batch_size / shape.world_size)
        sizes = [
            min(shape.micro_batch_size, rows - start)
            for start in range(0, rows, shape.micro_batch_size)
        ]
        first, *others = [self._first_s(size) for size in sizes]
        return (
            self.optimizer_s
            + first
            + self.further * sum(others)
            + self.sync_s.get(shape.world_size, 0.0)
        )

    def _first_s(self, rows: int) -> float:
        if rows > self.micros[-1]:
            return self.first_s[-1] * rows / self.micros[-1]
        return float(np.interp(rows, self.micros, self.first_s))

    def peak_gib(self, shape: BatchShape) -> float:
        """Predict the peak memory of a worker."""
        rows = ceil(shape.global_batch_size / shape.world_size)
        return (
            self.base_gib
            + self.row_gib * shape.micro_batch_size
            + self.input_gib * max(0, rows - shape.micro_batch_size)
        )

    def format(self) -> str:
        """Format the fit as a sentence."""
        text = (
            f"a further micro-batch takes {self.further:.2f} x the time of the first; memory "
            f"{self.base_gib:.2f} GiB + "
            f"{1024 * self.row_gib:.1f} MiB per row of a micro-batch"
        )
        sync = ", ".join(
            f"{1000 * seconds:.0f} ms with {world} workers"
            for world, seconds in self.sync_s.items()
        )
        return text + (f"; communication per step {sync}" if sync else "")


def fit(found: Measurements) -> CostModel:
    """Fit the cost model to the medians of the visits."""
    times = {
        shape: statistics.median(seconds)
        for shape, seconds in sorted(_times(found.samples).items())
    }
    single = {
        micro: seconds for (micro, accumulation), seconds in times.items() if accumulation == 1
    }
    optimizer_s = statistics.median(sample.optimizer_s for sample in found.samples)
    optimizer_s = min(optimizer_s, 0.9 * min(single.values()))
    first_s = {micro: seconds - optimizer_s for micro, seconds in single.items()}
    further = [
        (seconds - single[micro]) / (accumulation - 1) / first_s[micro]
        for (micro, accumulation), seconds in times.items()
        if accumulation > 1
    ]
    peaks: dict[int, float] = {}
    for sample in found.samples:
        if sample.accumulation == 1:
            peaks[sample.micro] = min(sample.peak_gib, peaks.get(sample.micro, sample.peak_gib))
    row_gib, base_gib = 0.0, max(peaks.values())
    if len(peaks) > 1:
        row_gib, base_gib = map(float, np.polyfit(list(peaks), list(peaks.values()), deg=1))
    return CostModel(
        tuple(single),
        tuple(first_s.values()),
        max(0.0, statistics.median(further)) if further else 1.0,
        optimizer_s,
        dict(found.sync_s),
        base_gib,
        max(0.0, row_gib),
        found.input_gib,
    )


def candidates(global_rows: int, workers: int, sizes: Sequence[int]) -> list[BatchShape]:
    """Return a shape per size, with the rows of a rank in as few micro-batches, but divided
    evenly.
    """
    rows = ceil(global_rows / workers)
    micros = sorted({ceil(rows / ceil(rows / size)) for size in sizes})
    return [BatchShape(global_rows, micro, workers) for micro in micros]


def predict_rows(task: ShapeTask, found: Measurements, model: CostModel) -> list[Row]:
    """Return a row of trials.jsonl for every shape: predicted, or with the reason why it is
    infeasible.
    """
    rows: list[Row] = []
    for size in task.global_rows:
        for world in task.workers:
            error = ""
            if size < world:
                error = f"{size} rows are fewer than {world} workers"
            elif world > found.workers:
                error = f"{found.workers} of {world} workers could start"
            shapes = candidates(size, world, micro_sizes(task.global_rows, task.workers))
            rows += [
                _row(shape, found, model, error) for shape in (shapes[-1:] if error else shapes)
            ]
    return [row | {"trial": f"s{number:03}"} for number, row in enumerate(rows, 1)]


def unmeasured_rows(task: ShapeTask, status: str, error: str) -> list[Row]:
    """Return a row per global batch of a task that could not be measured."""
    shapes = [candidates(size, max(task.workers), [1])[0] for size in task.global_rows]
    rows = [_empty_row(shape) | {"status": status, "error": error} for shape in shapes]
    return [row | {"trial": f"s{number:03}"} for number, row in enumerate(rows, 1)]


def _empty_row(shape: BatchShape) -> Row:
    row: Row = {"trial": "", "status": "predicted", "settings": {}, "micro": shape.micro_batch_size}
    row |= {
        "accumulation": shape.accumulation,
        "workers": shape.world_size,
        "global": shape.global_batch_size,
    }
    names = (
        "steps",
        "samples",
        "samples_per_s",
        "samples_per_s_min",
        "samples_per_s_max",
        "predicted_samples_per_s",
    )
    row |= dict.fromkeys((*names, "step_p50_s", "step_p95_s", "peak_gib", "loss", "recall_at_1"))
    return row | {"error": None, "elapsed_s": None, "run": None}


def _row(shape: BatchShape, found: Measurements, model: CostModel, error: str) -> Row:
    row = _empty_row(shape)
    if error:
        return row | {"status": "infeasible", "error": error}
    peak_gib = model.peak_gib(shape)
    too_large, reason = found.failed.get(shape.global_batch_size, (found.too_large, found.reason))
    if too_large is not None and shape.micro_batch_size >= too_large:
        reason = f"a micro-batch of {too_large} rows does not fit: {reason}"
        return row | {"status": "out_of_memory", "peak_gib": peak_gib, "error": reason}
    failed = found.find_failure(
        shape.micro_batch_size, ceil(shape.global_batch_size / shape.world_size)
    )
    if failed or peak_gib > found.limit_gib:
        reason = f"needs about {peak_gib:.1f} GiB of {found.limit_gib:.1f} GiB"
        reason = f"{failed} does not fit: {failed.reason}" if failed else reason
        return row | {"status": "out_of_memory", "peak_gib": peak_gib, "error": reason}
    step_s = model.step_s(shape)
    rate = shape.global_batch_size / step_s
    return row | {
        "samples_per_s": rate,
        "predicted_samples_per_s": rate,
        "step_p50_s": step_s,
        "peak_gib": peak_gib,
    }


def next_duel(rows: Sequence[Row], found: Measurements, global_rows: int) -> list[Row]:
    """Return the shapes to measure next, in pairs: the two best, then the winner and a shape
    predicted to be faster.

    The two best are the fastest, and one that needs less memory within TOLERANCE, or the second.
    Empty: none is left.
    """
    rows = [row for row in rows if row["global"] == global_rows and row["workers"] == found.workers]
    ranked = sorted(
        (row for row in rows if row["status"] == "predicted"),
        key=lambda row: row["samples_per_s"],
        reverse=True,
    )
    duels = _duels(found.pairs.get(global_rows, ()))
    if duels:
        best, _ = _better(rows, duels[-1])
        faster = [
            row for row in ranked if row["samples_per_s"] > (1 + TOLERANCE) * best["samples_per_s"]
        ]
        return [best, faster[0]] if faster and len(duels) < MAX_DUELS else []
    near = [
        row
        for row in ranked[1:]
        if row["samples_per_s"] >= (1 - TOLERANCE) * ranked[0]["samples_per_s"]
    ]
    smaller = [row for row in near if row["peak_gib"] < ranked[0]["peak_gib"]]
    return [*ranked[:1], *sorted(smaller, key=lambda row: row["peak_gib"])[:1], *ranked[1:2]][:2]


def _duels(pairs: Sequence[dict[int, float]]) -> list[list[dict[int, float]]]:
    """Return the rounds of each comparison, in order."""
    return [list(rounds) for _, rounds in groupby(pairs, key=frozenset)]


def with_measured(rows: Sequence[Row], found: Measurements) -> list[Row]:
    """Return the rows with the results of the measured shapes: the median round, as in `fit`, and
    the range.
    """
    result = []
    for row in rows:
        seconds = [
            pair[row["micro"]]
            for pair in found.pairs.get(row["global"], ())
            if row["micro"] in pair
        ]
        if seconds and row["workers"] == found.workers and row["status"] == "predicted":
            step_s = statistics.median(seconds)
            rates = {"": step_s, "_min": max(seconds), "_max": min(seconds)}
            row = row | {
                f"samples_per_s{name}": row["global"] / value for name, value in rates.items()
            }
            row |= {"status": "finished", "step_p50_s": step_s, "step_p95_s": max(seconds)}
            row |= {"peak_gib": found.peak_gib[row["global"]][row["micro"]]}
        result.append(row)
    return result


def recommend(
    rows: Sequence[Row], found: Measurements, own_global: int | None = None
) -> Row | None:
    """Return {best, per_global, why} of the measured shapes;

    None without any. own_global: that of the recipe.
    """
    best: dict[int, tuple[Row, str]] = {}
    for size in sorted({row["global"] for row in rows}):
        measured = [row for row in rows if row["global"] == size and row["status"] == "finished"]
        if measured:
            best[size] = _better(measured, _duels(found.pairs[size])[-1])
    if not best:
        return None
    fastest = max(row["samples_per_s"] for row, _ in best.values())
    chosen = next(
        size for size, (row, _) in best.items() if row["samples_per_s"] >= SUFFICIENT * fastest
    )
    row, why = best[chosen]
    if len(best) > 1:
        why += (
            f" {chosen} is the smallest global batch with at least {SUFFICIENT:.0%} of the "
            "highest samples/s."
        )
    others = [
        other for other in rows if other["global"] == chosen and other["status"] == "predicted"
    ]
    faster = max(others, key=lambda other: other["samples_per_s"], default=row)
    if faster["samples_per_s"] > (1 + TOLERANCE) * row["samples_per_s"]:
        rate = format_compact(faster["samples_per_s"])
        why += f" Predicted but not measured: {rate} samples/s with {format_shape(faster)}."
    error = row["samples_per_s"] / row["predicted_samples_per_s"] - 1
    if abs(error) > 0.15:
        why += (
            f" It is {error:+.0%} from its prediction: other programs may have used the "
            "machine; repeat the command."
        )
    if own_global not in (None, chosen):
        why += (
            f" The learning rate is still that for {own_global} rows: search it with --goal loss."
        )
    per_global = {str(size): row["trial"] for size, (row, _) in best.items()}
    return {"best": row["trial"], "per_global": per_global, "why": why}


def format_shape(row: Row) -> str:
    """Format as `micro 32 x accumulation 4 x workers 2`."""
    return " x ".join(f"{name} {row[name]}" for name in ("micro", "accumulation", "workers"))


def _better(rows: Sequence[Row], pairs: list[dict[int, float]]) -> tuple[Row, str]:
    """Return the better of the one or two measured shapes of these rounds, and the reason."""
    contestants = [row for row in rows if row["micro"] in pairs[0] and row["status"] == "finished"]
    if len(contestants) == 1:
        return contestants[0], f"{_rate(contestants[0])}; no other shape is feasible."
    first, second = sorted(
        contestants, key=lambda row: statistics.median(pair[row["micro"]] for pair in pairs)
    )
    ratios = sorted(pair[second["micro"]] / pair[first["micro"]] for pair in pairs)
    ratio = statistics.median(ratios)
    if ratio <= 1 + TOLERANCE and second["peak_gib"] < first["peak_gib"]:
        memory = f"{second['peak_gib']:.2f} GiB instead of {first['peak_gib']:.2f} GiB"
        return second, (
            f"{_rate(second)}, within {TOLERANCE:.0%} of {format_shape(first)}, and needs {memory}."
        )
    doubt = ", so they may be equally fast" if ratios[0] <= 1 else ""
    spread = f"{len(ratios)} pairs, {ratios[0]:.2f} to {ratios[-1]:.2f}{doubt}"
    return first, f"{_rate(first)}, {ratio:.2f} x as many as {format_shape(second)} ({spread})."


def _rate(row: Row) -> str:
    return f"{format_shape(row)} trains {format_compact(row['samples_per_s'])} samples/s"
