"""Rows of trials.jsonl and their ranking, computed from metrics and outcomes. Missing values are None."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from mmray.errors import first_line, is_out_of_memory
from mmray.report.run import DIRECTIONS
from mmray.report.sweep import GOALS
from mmray.tune.trials import Trial

Status = Literal["finished", "out_of_memory", "failed", "stopped", "infeasible"]
Row = dict[str, Any]
REUSABLE = ("finished", "out_of_memory")  # not repeated by a resumed sweep
MAX_ERROR_CHARS = 240
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")  # the exception line of a traceback


class TrialOutcome(NamedTuple):
    """Outcome of a trial: status, error and duration."""

    status: Status
    error: str | None = None
    elapsed_s: float | None = None


def classify_error(error: BaseException, elapsed_s: float | None = None) -> TrialOutcome:
    """Return the outcome for an error; the error of a run quotes that of its worker."""
    status: Status = "out_of_memory" if is_out_of_memory(error) else "failed"
    return TrialOutcome(status, summarize_error(error), elapsed_s)


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error message or the exception line of a traceback, cut to MAX_ERROR_CHARS."""
    text = first_line(error)
    if text.startswith("Traceback"):
        text = next((line for line in str(error).splitlines() if _RAISED.match(line)), text)
    return text[:MAX_ERROR_CHARS]


def build_row(trial: Trial, outcome: TrialOutcome, lines: list[Row] | None = None, result: Row | None = None) -> Row:
    """Return one object of trials.jsonl; a run that continued with smaller micro-batches is out_of_memory."""
    shape, lines = trial.shape, lines or []
    row: Row = {"trial": trial.name, "status": outcome.status, "settings": trial.settings}
    row |= dict.fromkeys(("micro", "accumulation", "workers", "global"))
    row |= aggregate_metrics(lines) | {"recall_at_1": None, "error": outcome.error, "elapsed_s": outcome.elapsed_s}
    row["run"] = None if trial.infeasible else f"trials/{trial.name}"
    if shape is not None:
        row |= {"micro": shape.micro, "accumulation": shape.accumulation}
        row |= {"workers": shape.workers, "global": shape.global_rows}
        actual_micro = min(shape.micro, int(lines[-1].get("batch/micro") or shape.micro)) if lines else shape.micro
        if actual_micro < shape.micro and shape.auto:
            row |= {"micro": actual_micro, "accumulation": -(-shape.global_rows // (shape.workers * actual_micro))}
        elif actual_micro < shape.micro and outcome.status == "finished":
            advice = f"the run continued with {actual_micro}: search {actual_micro} or use `auto`"
            row |= {"status": "out_of_memory", "error": f"out of memory at micro-batch {shape.micro}; {advice}"}
    scores = (result or {}).get("scores", {})
    recalls = [scores.get(f"recall_at_1/{direction}") for direction in DIRECTIONS]
    if None not in recalls:
        row["recall_at_1"] = sum(recalls) / 2
    return row


def aggregate_metrics(lines: list[Row]) -> Row:
    """Aggregate the logged metrics: samples/s of steps without the first window, mean loss of the last quarter.

    Not the logged rate, which has evaluations and checkpoints: these are not what a sweep compares.
    """
    last = lines[-1] if lines else {}
    losses: list[Any] = [line.get("train/loss") for line in lines[-max(1, len(lines) // 4) :]]
    rates: Row = dict.fromkeys(("samples_per_s", "samples_per_s_min", "samples_per_s_max"))
    windows = [
        (line["rows_stop"] / line["step"] / line["time/step_s"], line["time/step_s"], line["step"] - before)
        for line, before in zip(lines, [0, *(line["step"] for line in lines)], strict=False)
        if line.get("time/step_s") is not None
    ]
    if windows := windows[1:] or windows:  # the first is warm-up
        longest = max(steps for *_, steps in windows)
        full_windows = [rate for rate, _, steps in windows if 2 * steps > longest]  # not a short last one
        total_s = sum(step_s * steps for _, step_s, steps in windows)
        mean = sum(rate * step_s * steps for rate, step_s, steps in windows) / total_s
        rates = {"samples_per_s": mean, "samples_per_s_min": min(full_windows), "samples_per_s_max": max(full_windows)}
    return {
        "steps": last.get("step"),
        "samples": last.get("rows_stop"),
        **rates,
        "step_p50_s": last.get("time/step_p50_s"),
        "step_p95_s": last.get("time/step_p95_s"),
        "peak_gib": max((line["memory/peak_gib"] for line in lines if line.get("memory/peak_gib")), default=None),
        "loss": None if not losses or None in losses else sum(losses) / len(losses),
    }


# A contrastive loss grows with the global batch, because each row is classified among all rows of the batch. So trials
# are ranked within each global batch, and losses of different global batches are compared by ln(global) - loss, a lower
# bound on mutual information (van den Oord et al. 2018, equation 5).
TOLERANCE = 0.02  # relative; the noise of a trial is rarely smaller
_FORMATS = {
    "samples_per_s": "{:,.0f} samples/s",
    "loss": "loss {:.3f}",
    "recall_at_1": "recall@1 {:.3f}",
    "peak_gib": "{:.2f} GiB",
}


def select_best(rows: list[Row], goal: str, relative_to_chance: bool) -> Row | None:
    """Return {best, per_global, why} of the finished trials that measured the goal; None without any."""
    metric, _, maximize = GOALS[goal]
    measured = [row for row in rows if row["status"] == "finished" and row[metric] is not None]
    if not measured:
        return None
    per_global = {
        str(size): _pick([row for row in measured if row["global"] == size], goal)[0]
        for size in sorted({row["global"] for row in measured})
    }
    if goal == "loss" and relative_to_chance and len(per_global) > 1:
        best = max(per_global.values(), key=lambda row: math.log(row["global"]) - row["loss"])
        why = (
            f"{best['trial']} ends {math.log(best['global']) - best['loss']:.2f} nats below chance, more than the best "
            f"of the other global batches (loss {best['loss']:.3f}, chance ln {best['global']}): contrastive losses "
            "are comparable only within one global batch."
        )
    else:
        best, leader = _pick(measured, goal)
        value = f"{best['trial']} has {_FORMATS[metric].format(best[metric])}"
        order = "highest" if maximize else "lowest"
        why = f"{value}, the {order} of {len(measured)} trials."
        if best is not leader:
            reason = "uses less memory" if goal == "throughput" else "is faster"
            top = _FORMATS[metric].format(leader[metric])
            why = f"{value}, within {TOLERANCE:.0%} of the {order} ({top} of {leader['trial']}), and {reason}."
        why += _close_rival(best, measured) if goal == "throughput" and best["samples_per_s_min"] else ""
    return {"best": best["trial"], "per_global": {size: row["trial"] for size, row in per_global.items()}, "why": why}


def _pick(rows: list[Row], goal: str) -> tuple[Row, Row]:
    """Return the best row and the leader by the metric alone: near the leader, less memory or more speed is better."""
    metric, _, maximize = GOALS[goal]
    leader = (max if maximize else min)(rows, key=lambda row: row[metric])
    tie_breaker = "peak_gib" if goal == "throughput" else "samples_per_s"
    margin = abs(leader[metric]) * TOLERANCE
    near = [row for row in rows if abs(row[metric] - leader[metric]) <= margin and row[tie_breaker] is not None]
    if not near:
        return leader, leader
    return (min if goal == "throughput" else max)(near, key=lambda row: row[tie_breaker]), leader


def _close_rival(best: Row, rows: list[Row]) -> str:
    """Return a warning if the speed of another trial is within the range of the best one's windows."""
    low, high = best["samples_per_s_min"], best["samples_per_s_max"]
    rival = max((row for row in rows if row is not best), key=lambda row: row["samples_per_s"], default=None)
    if rival is None or not low <= rival["samples_per_s"] <= high:
        return ""
    return (
        f" {rival['trial']} may be as fast: its {rival['samples_per_s']:,.0f} samples/s are within the range of "
        f"{low:,.0f} to {high:,.0f}; run longer trials (--train.samples) to decide."
    )
