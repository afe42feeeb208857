"""A trial's row: what its run has measured, from the lines of its metrics.jsonl, and how it ended.

Pure: search.py reads the files. A figure that was not measured is None.
"""

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
KEPT = ("finished", "out_of_memory")  # a sweep that goes on does not run these again
ERROR_LENGTH = 240


@dataclass(frozen=True)
class Ended:
    """How a trial ended, as the one who watched it says."""

    status: Status
    error: str | None = None
    elapsed_s: float | None = None


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")  # the line of a traceback that names it


def ended_by(error: BaseException, elapsed_s: float | None = None) -> Ended:
    """The end that an error makes: out_of_memory where it, or what caused it, says so, else failed; in one line."""
    out = any(is_out_of_memory(cause) for cause in _causes(error))
    return Ended("out_of_memory" if out else "failed", one_line(error), elapsed_s)


def one_line(error: BaseException) -> str:
    """The first line of an error's message (of a traceback the last one, which says what it was), cut where long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.startswith("Traceback"):
        text = next((line for line in lines if _RAISED.match(line)), text)
    return text if len(text) <= ERROR_LENGTH else text[: ERROR_LENGTH - 1] + "…"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that led to it: causes, and the workers' own failures that Ray Train carries."""
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


def row_of(trial: Trial, ended: Ended, lines: list[dict[str, Any]], result: dict[str, Any] | None) -> dict[str, Any]:
    """One object of trials.jsonl."""
    shape = trial.shape
    found = _found(shape, lines)
    ended = _without_room(shape, ended, found)
    return {
        "trial": trial.name,
        "status": ended.status,
        "settings": trial.settings,
        **_cut(shape, found),
        "workers": shape.workers if shape else None,
        "global": shape.global_rows if shape else None,
        **figures(lines),
        "recall_at_1": _recall(result),
        "error": ended.error,
        "elapsed_s": ended.elapsed_s,
        "run": None if trial.infeasible else f"trials/{trial.name}",
    }


def _cut(shape: BatchShape | None, found: int) -> dict[str, Any]:
    """Micro-batch and accumulation: those asked for, or, of `auto`, those that the workers found to fit."""
    if shape is None:
        return {"micro": None, "accumulation": None}
    if not shape.auto or found == shape.micro:
        return {"micro": shape.micro, "accumulation": shape.accumulation}
    return {"micro": found, "accumulation": -(-shape.global_rows // (shape.workers * found))}


def _found(shape: BatchShape | None, lines: list[dict[str, Any]]) -> int:
    """Rows of a micro-batch at the run's end: fewer than the shape's where memory held no more."""
    most = shape.micro if shape else 0
    return min(most, int(lines[-1].get("batch/micro") or most)) if lines else most


def _without_room(shape: BatchShape | None, ended: Ended, found: int) -> Ended:
    """The end as the sweep counts it: a run that went on in smaller micro-batches has not measured those asked for."""
    if shape is None or ended.status != "finished" or shape.auto or found == shape.micro:
        return ended
    told = f"no room for micro-batches of {shape.micro} rows; the figures are of {found}: ask for those, or for `auto`"
    return replace(ended, status="out_of_memory", error=told)


def infeasible_row(trial: Trial) -> dict[str, Any]:
    return row_of(trial, Ended("infeasible", trial.infeasible), [], None)


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run's logged lines; rates leave the first window out, which warms up."""
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
    """Samples/s over the windows after the first, and the slowest and fastest of them.

    The first step's window is short and warms up. A last window of fewer steps than half the others says little about
    the spread, and counts for the mean alone.
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
    """Mean loss over the last quarter of the lines: a single step's is noise. None where one was not finite."""
    losses = [line.get("train/loss") for line in lines[-max(1, len(lines) // 4) :]]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def _recall(result: dict[str, Any] | None) -> float | None:
    """Recall@1, the mean of both ways."""
    metrics = (result or {}).get("metrics", {})
    both = [metrics.get(f"recall_at_1/{way}") for way in ("image_to_text", "text_to_image")]
    return sum(both) / 2 if None not in both else None


# Which trial is best, and why, in one sentence: a pure function of the rows.
#
# A contrastive loss is that of picking one row among all of the global batch: it grows with the batch whatever the
# model
# has learned. So trials are ranked within each global batch, and losses of different ones are compared by how far they
# lie below chance, ln(global) - loss (the bound on mutual information of van den Oord et al. 2018, equation 5).
TOLERANCE = 0.02  # trials this close to the best are as good: the spread of one trial is rarely less

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """What is wanted of a trial, and what decides between trials that are as good."""

    figure: str
    largest: bool
    words: str
    tie: str
    tie_largest: bool
    tie_words: str


_SPEED = ("samples_per_s", True, "is faster")
GOALS = {
    "throughput": Goal("samples_per_s", True, "the most samples/s", "peak_gib", False, "takes less memory"),
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


def recommend(rows: list[Row], goal: str, relative_to_chance: bool) -> dict[str, Any] | None:
    """{"best", "per_global", "why"} of the finished trials that measured the goal's figure; None where none did.

    `relative_to_chance`: the objective is contrastive, so losses of different global batches are compared below chance.
    """
    wanted = GOALS[goal]
    measured = [row for row in rows if row["status"] == "finished" and row[wanted.figure] is not None]
    if not measured:
        return None
    sizes = sorted({row["global"] for row in measured})
    per_global = {size: _pick([row for row in measured if row["global"] == size], wanted)[0] for size in sizes}
    if goal == "loss" and relative_to_chance and len(sizes) > 1:
        best = max(per_global.values(), key=_below_chance)
        why = (
            f"{best['trial']} ends {_below_chance(best):.2f} nats below chance, further than the best of the other "
            f"global batches (loss {best['loss']:.3f}, chance ln {best['global']}): a contrastive loss by itself "
            "compares only within one global batch."
        )
    else:
        best, leader = _pick(measured, wanted)
        why = _why(best, leader, len(measured), wanted) + _doubt(best, measured, wanted)
    return {"best": best["trial"], "per_global": {str(g): row["trial"] for g, row in per_global.items()}, "why": why}


def _pick(rows: list[Row], goal: Goal) -> tuple[Row, Row]:
    """The best row, and the row that leads by the goal's figure alone."""
    leader = _extreme(rows, goal.figure, goal.largest)
    margin = abs(leader[goal.figure]) * TOLERANCE
    near = [row for row in rows if abs(row[goal.figure] - leader[goal.figure]) <= margin and row[goal.tie] is not None]
    return (_extreme(near, goal.tie, goal.tie_largest) if near else leader), leader


def _extreme(rows: list[Row], figure: str, largest: bool) -> Row:
    return (max if largest else min)(rows, key=lambda row: row[figure])


def _why(best: Row, leader: Row, count: int, goal: Goal) -> str:
    figure = _told(best, goal.figure)
    if best is leader:
        if count == 1:
            return f"{best['trial']} is the only trial that finished: {figure}."
        return f"{best['trial']} has {goal.words} of {count} trials: {figure}."
    return (
        f"{best['trial']} is within {TOLERANCE:.0%} of {goal.words} ({figure} against {_told(leader, goal.figure)} of "
        f"{leader['trial']}) and {goal.tie_words}: {_told(best, goal.tie)} against {_told(leader, goal.tie)}."
    )


def _doubt(best: Row, rows: list[Row], goal: Goal) -> str:
    """A warning where the next best speed lies within the spread of the best one's windows."""
    others = [row for row in rows if row is not best]
    if goal.figure != "samples_per_s" or not others:
        return ""
    rival = _extreme(others, goal.figure, goal.largest)
    low, high = best["samples_per_s_min"], best["samples_per_s_max"]
    if low is None or not low <= rival[goal.figure] <= high:
        return ""
    return (
        f" That is not certain: {_told(rival, goal.figure)} of {rival['trial']} lies within its spread of {low:,.0f} "
        f"to {high:,.0f}; longer trials (--train.samples) would tell."
    )


def _told(row: Row, figure: str) -> str:
    return _FORMATS[figure].format(row[figure])


def _below_chance(row: Row) -> float:
    loss: float = row["loss"]
    return math.log(row["global"]) - loss
