"""Rows of trials from the metrics of their runs, and the recommendation. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mmray.engine.batch import BatchShape
from mmray.errors import UsageError, first_line, is_out_of_memory
from mmray.sweep_files import GOALS, Recommendation, Rung, Status, TrialRow
from mmray.tuning.trials import Trial

# Trials with this status are not continued by a resumed sweep.
ENDED = ("finished", "out_of_memory")
MAX_ERROR_CHARS = 240
# Relative difference of two trials that may be chance.
TOLERANCE = 0.02
# The line of a traceback that has the exception.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


class TrialOutcome(NamedTuple):
    """How a trial ended.

    Attributes:
        status: `finished`, `paused` (may continue), `pruned` (ended early), `stopped`, `failed`,
            `out_of_memory` or `infeasible`.
        error: The reason, if it did not finish.
    """

    status: Status
    error: str | None = None


def classify_error(error: BaseException) -> TrialOutcome:
    """Return status and message of a trial whose run raised an error, which quotes its worker's."""
    if isinstance(error, KeyboardInterrupt):
        return TrialOutcome("stopped")
    message = summarize_error(error)
    # A SIGKILL has other causes, too.
    if is_out_of_memory(error) and "ended by SIGKILL" not in str(error):
        return TrialOutcome("out_of_memory", message)
    return TrialOutcome("infeasible" if isinstance(error, UsageError) else "failed", message)


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error message, or the exception of a traceback, shortened."""
    text = first_line(error)
    if text.startswith("Traceback"):
        text = next((line for line in str(error).splitlines() if _RAISED.match(line)), text)
    return text[:MAX_ERROR_CHARS]


def newest_value(lines: Sequence[dict[str, Any]], goal: str) -> float | str:
    """Return the newest value of the goal, or the reason why there is none.

    Args:
        lines: The lines of metrics.jsonl of the trial's run by step.
    """
    name = GOALS[goal].eval_metric
    if name is None:
        return samples_per_s(lines) or "no step was timed; use longer trials (--train.steps)"
    measured = [line for line in lines if name in line]
    if not measured:
        return f"{name} was not measured; use another --goal for this objective"
    # The recall of weights that are not finite is 0, but the loss next to it is not finite.
    for metric in (name, "evaluate/loss"):
        value = measured[-1].get(metric, 0.0)
        if value is None or not math.isfinite(value):
            return f"{metric} is not finite"
    return measured[-1][name]


def samples_per_s(lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the rows per second of a run by the last line of its metrics; None if not timed."""
    step_s = lines[-1].get("time/step_p50_s") if lines else None
    return lines[-1]["rows_stop"] / lines[-1]["step"] / step_s if step_s else None


def measured_row(
    row: TrialRow, trial: Trial, outcome: TrialOutcome, goal: str, lines: Sequence[dict[str, Any]]
) -> TrialRow:
    """Return the row of a trial with its status and what its run has measured so far.

    Args:
        row: The row of trials.jsonl to update: settings, status and measurements.
        trial: The trial, with its batch shape.
        outcome: How the trial ended: its status, such as `finished`, and its error.
        goal: `throughput`, `loss` or `recall`; selects the metric of the learning curve.
        lines: The lines of metrics.jsonl of the run by step; empty if it has not logged any.

    Returns:
        A copy of the row with status, error and batch shape. If there are lines it also has the
        folder of the run, speed, peak memory and learning curve.
    """
    row = replace(row, status=outcome.status, error=outcome.error)
    if trial.shape is not None:
        row = _with_shape(row, trial.shape, goal, lines)
    if not lines:
        return row
    peaks_gib = [line["memory/peak_gib"] for line in lines if line.get("memory/peak_gib")]
    return replace(
        row,
        run=f"trials/{row.trial}",
        step_p50_s=lines[-1].get("time/step_p50_s"),
        samples_per_s=samples_per_s(lines),
        peak_gib=max(peaks_gib, default=None),
        curve=_learning_curve(lines, GOALS[goal].eval_metric),
    )


def _with_shape(
    row: TrialRow, shape: BatchShape, goal: str, lines: Sequence[dict[str, Any]]
) -> TrialRow:
    """Return the row with the batch shape that its run used.

    A run continues with a smaller micro-batch after it ran out of memory. That does not change what
    it learns, but a requested micro-batch was not measured then.
    """
    requested = shape.micro_batch_size
    line = lines[-1] if lines else {}
    actual = int(line.get("batch/micro") or requested)
    if shape.micro_tokens is not None:
        tokens = int(line.get("batch/tokens") or shape.micro_tokens)
        actual = requested * tokens // shape.micro_tokens
    actual = min(requested, actual)
    if actual < requested and (shape.auto or GOALS[goal].eval_metric):
        shape = shape.with_micro_batch_size(actual)
    row = replace(
        row,
        micro=shape.micro_batch_size,
        accumulation=shape.accumulation,
        workers=shape.world_size,
        global_batch_size=shape.global_batch_size,
    )
    if actual == shape.micro_batch_size or row.status != "finished":
        return row
    error = (
        f"out of memory at micro-batch {requested}; the run continued with {actual}: search "
        f"{actual} or use `auto`"
    )
    return replace(row, status="out_of_memory", error=error)


def _learning_curve(lines: Sequence[dict[str, Any]], name: str | None) -> tuple[Rung, ...]:
    """Return the finite values of a held-out metric; none for the speed of a trial."""
    if name is None:
        return ()
    return tuple(
        Rung(line["rows_stop"], line[name]) for line in lines if line.get(name) is not None
    )


def recommend_trial(rows: Sequence[TrialRow], goal: str) -> Recommendation | None:
    """Return the name of the best trial and the reason as text; None if no trial measured the goal.

    Only trials of the full length are compared. If there are none, the trials with most samples are
    compared, without those that failed.

    Args:
        rows: The rows of trials.jsonl, one per trial or measured batch shape.
        goal: `throughput` (samples/s), `loss` (held-out) or `recall` (mean recall@1).

    Returns:
        The Recommendation; None if no trial measured the goal.
    """
    measured = [row for row in rows if row.status == "finished" and row.value(goal) is not None]
    if not measured:
        # A trial that failed later may have the best value before, as one that diverges.
        reached = [row for row in rows if row.rungs and row.error is None]
        longest = max((row.rungs[-1].samples for row in reached), default=0)
        measured = [row for row in reached if row.rungs[-1].samples == longest]
    if not measured:
        return None
    ranked = sorted(measured, key=lambda row: _value(row, goal), reverse=GOALS[goal].maximize)
    if goal == "throughput":
        return _recommend_fastest(ranked)
    best = ranked[0]
    why = _describe_best(ranked, goal) + _compare_with_recipe(best, rows, goal)
    close = [row.trial for row in ranked[1:] if _is_close(row, best, goal)]
    if close:
        why += f" Not certain, because within {TOLERANCE:.0%} of it: {', '.join(close)}."
    if best.status != "finished":
        why += f" It has {best.rungs[-1].samples:,} samples only."
    return Recommendation(best.trial, why)


def _recommend_fastest(ranked: Sequence[TrialRow]) -> Recommendation:
    """Recommend the trial with the least memory within TOLERANCE of the fastest."""
    near = [row for row in ranked if _is_close(row, ranked[0], "throughput")]
    best = min(near, key=lambda row: row.peak_gib or 0.0)
    why = _describe_best(ranked, "throughput")
    if best is not ranked[0]:
        why += f" {best.trial} is within {TOLERANCE:.0%} of it and needs less memory."
    return Recommendation(best.trial, why)


def _describe_best(ranked: Sequence[TrialRow], goal: str) -> str:
    best = ranked[0]
    text = f"{best.trial} has {_format_value(_value(best, goal), goal)}"
    if len(ranked) == 1:
        return f"{text}; no other trial was trained for as many samples."
    order = "highest" if GOALS[goal].maximize else "lowest"
    return f"{text}, the {order} of {len(ranked)} trials."


def _format_value(value: float, goal: str) -> str:
    """Format as `2.345 held-out loss`, or as `123 samples/s`."""
    return f"{value:,.4g} {GOALS[goal].title}"


def _value(row: TrialRow, goal: str) -> float:
    value = row.value(goal)
    assert value is not None, "only measured trials are ranked"
    return value


def _is_close(row: TrialRow, other: TrialRow, goal: str) -> bool:
    reference = _value(other, goal)
    return abs(_value(row, goal) - reference) <= TOLERANCE * abs(reference)


def _compare_with_recipe(best: TrialRow, rows: Sequence[TrialRow], goal: str) -> str:
    """Compare the best trial with the recipe's own settings at the last rung that both reached."""
    own = next((row for row in rows if row.is_recipe and row.rungs), None)
    if own is None:
        return " The recipe's own settings were not measured."
    if own is best:
        return " These are the recipe's own settings: the search found none that are better."
    last = min(len(own.rungs), len(best.rungs)) - 1
    failed = f" {own.trial} failed later: {own.error}." if own.error else ""
    return (
        f" After {own.rungs[last].samples:,} samples the recipe's own settings ({own.trial}) have "
        f"{_format_value(own.rungs[last].value, goal)} and {best.trial} has "
        f"{best.rungs[last].value:,.4g}.{failed}"
    )
