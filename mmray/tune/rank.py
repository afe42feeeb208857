"""Which trial is best, and why, in one sentence: a pure function of the rows.

A contrastive loss is that of picking one row among all of the global batch: it grows with the batch whatever the model
has learned. So trials are ranked within each global batch, and losses of different ones are compared by how far they
lie below chance, ln(global) - loss (the bound on mutual information of van den Oord et al. 2018, equation 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
