"""Rows of trials.jsonl and their ranking, computed from metrics and outcomes. Missing values are None."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmray.engine.batch import BatchShape
from mmray.errors import is_out_of_memory
from mmray.tune.trials import Trial

Status = Literal["finished", "out_of_memory", "failed", "stopped", "infeasible"]
REUSABLE = ("finished", "out_of_memory")  # not repeated by a resumed sweep
ERROR_LENGTH = 240


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial: status, error and duration."""

    status: Status
    error: str | None = None
    elapsed_s: float | None = None


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")  # the exception line of a traceback


def outcome_of(error: BaseException, elapsed_s: float | None = None) -> TrialOutcome:
    """Return the outcome for an error: out_of_memory if it or one of its causes is an OOM, otherwise failed."""
    out = any(is_out_of_memory(cause) for cause in _causes(error))
    return TrialOutcome("out_of_memory" if out else "failed", one_line(error), elapsed_s)


def one_line(error: BaseException) -> str:
    """Return the first line of an error message or the exception line of a traceback, cut to ERROR_LENGTH."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.startswith("Traceback"):
        text = next((line for line in lines if _RAISED.match(line)), text)
    return text if len(text) <= ERROR_LENGTH else text[: ERROR_LENGTH - 1] + "…"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and worker failures inside Ray Train's errors."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        cause = waiting.pop()
        if cause in seen:
            continue
        seen.append(cause)
        yield cause
        waiting += [e for e in (cause.__cause__, cause.__context__) if e is not None]
        waiting += getattr(cause, "worker_failures", {}).values()


def row_of(
    trial: Trial, ended: TrialOutcome, lines: list[dict[str, Any]], result: dict[str, Any] | None
) -> dict[str, Any]:
    """Return one object of trials.jsonl."""
    shape = trial.shape
    found = _final_micro(shape, lines)
    ended = _mark_oom(shape, ended, found)
    return {
        "trial": trial.name,
        "status": ended.status,
        "settings": trial.settings,
        **_batch_split(shape, found),
        "workers": shape.workers if shape else None,
        "global": shape.global_rows if shape else None,
        **figures(lines),
        "recall_at_1": _recall(result),
        "error": ended.error,
        "elapsed_s": ended.elapsed_s,
        "run": None if trial.infeasible else f"trials/{trial.name}",
    }


def _batch_split(shape: BatchShape | None, found: int) -> dict[str, Any]:
    """Return micro-batch and accumulation as requested or as found by `auto`."""
    if shape is None:
        return {"micro": None, "accumulation": None}
    if not shape.auto or found == shape.micro:
        return {"micro": shape.micro, "accumulation": shape.accumulation}
    return {"micro": found, "accumulation": -(-shape.global_rows // (shape.workers * found))}


def _final_micro(shape: BatchShape | None, lines: list[dict[str, Any]]) -> int:
    """Return the micro-batch at the end of the run; smaller than requested after an OOM."""
    most = shape.micro if shape else 0
    return min(most, int(lines[-1].get("batch/micro") or most)) if lines else most


def _mark_oom(shape: BatchShape | None, ended: TrialOutcome, found: int) -> TrialOutcome:
    """Mark a run that continued with smaller micro-batches as out_of_memory; it measured another shape."""
    if shape is None or ended.status != "finished" or shape.auto or found == shape.micro:
        return ended
    told = f"out of memory at micro-batch {shape.micro}; the run continued with {found}: search {found} or use `auto`"
    return replace(ended, status="out_of_memory", error=told)


def infeasible_row(trial: Trial) -> dict[str, Any]:
    return row_of(trial, TrialOutcome("infeasible", trial.infeasible), [], None)


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregate the logged metrics of a run; rates exclude the first window (warm-up)."""
    last = lines[-1] if lines else {}
    return {
        "steps": last.get("step"),
        "samples": last.get("rows_stop"),
        **_rates(lines),
        "step_p50_s": last.get("time/step_p50_s"),
        "step_p95_s": last.get("time/step_p95_s"),
        "peak_gib": max((line["memory/peak_gib"] for line in lines if line.get("memory/peak_gib")), default=None),
        "loss": _last_loss(lines),
    }


def _rates(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean, minimum and maximum samples/s over the logging windows after the first.

    A final window with less than half the steps counts for the mean only.
    """
    windows = []
    before = 0
    for line in lines:
        rate, steps = line.get("throughput/samples_per_s"), line["step"] - before
        before = line["step"]
        if rate is not None:
            windows.append((rate, line["time/step_s"] * steps, steps))
    windows = windows[1:] or windows
    if not windows:
        return dict.fromkeys(("samples_per_s", "samples_per_s_min", "samples_per_s_max"))
    longest = max(steps for _, _, steps in windows)
    whole = [rate for rate, _, steps in windows if 2 * steps > longest]
    mean = sum(rate * busy_s for rate, busy_s, _ in windows) / sum(busy_s for _, busy_s, _ in windows)
    return {"samples_per_s": mean, "samples_per_s_min": min(whole), "samples_per_s_max": max(whole)}


def _last_loss(lines: list[dict[str, Any]]) -> float | None:
    """Return the mean loss over the last quarter of the lines; None if any is not finite."""
    losses = [line.get("train/loss") for line in lines[-max(1, len(lines) // 4) :]]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def _recall(result: dict[str, Any] | None) -> float | None:
    """Return the mean recall@1 of both directions."""
    metrics = (result or {}).get("metrics", {})
    both = [metrics.get(f"recall_at_1/{way}") for way in ("image_to_text", "text_to_image")]
    return sum(both) / 2 if None not in both else None


# A contrastive loss grows with the global batch, because each row is classified among all rows of the batch. So trials
# are ranked within each global batch, and losses of different global batches are compared by ln(global) - loss, a lower
# bound on mutual information (van den Oord et al. 2018, equation 5).
TOLERANCE = 0.02  # relative; the noise of a trial is rarely smaller

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """The metric to optimize, and the tie-breaker among nearly equal trials."""

    figure: str
    largest: bool
    words: str
    tie: str
    tie_largest: bool
    tie_words: str


_SPEED = ("samples_per_s", True, "is faster")
GOALS = {
    "throughput": Goal("samples_per_s", True, "the most samples/s", "peak_gib", False, "uses less memory"),
    "loss": Goal("loss", False, "the lowest loss", *_SPEED),
    "recall": Goal("recall_at_1", True, "the highest recall@1", *_SPEED),
    "memory": Goal("peak_gib", False, "the least memory", *_SPEED),
}
_FORMATS = {
    "samples_per_s": "{:,.0f} samples/s",
    "loss": "loss {:.3f}",
    "recall_at_1": "recall@1 {:.3f}",
    "peak_gib": "{:.2f} GiB",
}


def select_best(rows: list[Row], goal: str, relative_to_chance: bool) -> dict[str, Any] | None:
    """Return {"best", "per_global", "why"} of the finished trials that measured the goal; None without any.

    `relative_to_chance`: compare losses of different global batches by ln(global) - loss (contrastive objectives).
    """
    wanted = GOALS[goal]
    measured = [row for row in rows if row["status"] == "finished" and row[wanted.figure] is not None]
    if not measured:
        return None
    sizes = sorted({row["global"] for row in measured})
    per_global = {size: _pick([row for row in measured if row["global"] == size], wanted)[0] for size in sizes}
    if goal == "loss" and relative_to_chance and len(sizes) > 1:
        best = max(per_global.values(), key=_nats_below_chance)
        why = (
            f"{best['trial']} ends {_nats_below_chance(best):.2f} nats below chance, more than the best of the other "
            f"global batches (loss {best['loss']:.3f}, chance ln {best['global']}): contrastive "
            "losses are comparable only within one global batch."
        )
    else:
        best, leader = _pick(measured, wanted)
        why = _why(best, leader, len(measured), wanted) + _uncertainty(best, measured, wanted)
    return {"best": best["trial"], "per_global": {str(g): row["trial"] for g, row in per_global.items()}, "why": why}


def _pick(rows: list[Row], goal: Goal) -> tuple[Row, Row]:
    """Return the best row with the tie-breaker, and the best by the metric alone."""
    leader = _extreme(rows, goal.figure, goal.largest)
    margin = abs(leader[goal.figure]) * TOLERANCE
    near = [row for row in rows if abs(row[goal.figure] - leader[goal.figure]) <= margin and row[goal.tie] is not None]
    return (_extreme(near, goal.tie, goal.tie_largest) if near else leader), leader


def _extreme(rows: list[Row], figure: str, largest: bool) -> Row:
    return (max if largest else min)(rows, key=lambda row: row[figure])


def _why(best: Row, leader: Row, count: int, goal: Goal) -> str:
    figure = _format(best, goal.figure)
    if best is leader:
        if count == 1:
            return f"{best['trial']} is the only trial that finished: {figure}."
        return f"{best['trial']} has {goal.words} of {count} trials: {figure}."
    return (
        f"{best['trial']} is within {TOLERANCE:.0%} of {goal.words} ({figure}; {leader['trial']}: "
        f"{_format(leader, goal.figure)}) and {goal.tie_words} ({_format(best, goal.tie)}; {leader['trial']}: "
        f"{_format(leader, goal.tie)})."
    )


def _uncertainty(best: Row, rows: list[Row], goal: Goal) -> str:
    """Return a warning if the second-best speed is within the range of the best trial's windows."""
    others = [row for row in rows if row is not best]
    if goal.figure != "samples_per_s" or not others:
        return ""
    rival = _extreme(others, goal.figure, goal.largest)
    low, high = best["samples_per_s_min"], best["samples_per_s_max"]
    if low is None or not low <= rival[goal.figure] <= high:
        return ""
    return (
        f" {rival['trial']} may be as fast: its {_format(rival, goal.figure)} is within the range of {low:,.0f} to "
        f"{high:,.0f}; run longer trials (--train.samples) to decide."
    )


def _format(row: Row, figure: str) -> str:
    return _FORMATS[figure].format(row[figure])


def _nats_below_chance(row: Row) -> float:
    loss: float = row["loss"]
    return math.log(row["global"]) - loss
