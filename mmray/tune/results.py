"""Rows of trials.jsonl and their ranking, computed from metrics and outcomes. Missing values are None."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from mmray.errors import is_out_of_memory
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
    """Return the outcome for an error: out_of_memory if it or one of its causes is an OOM, otherwise failed."""
    is_oom = any(is_out_of_memory(cause) for cause in _causes(error))
    return TrialOutcome("out_of_memory" if is_oom else "failed", summarize_error(error), elapsed_s)


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error message or the exception line of a traceback, cut to MAX_ERROR_CHARS."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.startswith("Traceback"):
        text = next((line for line in lines if _RAISED.match(line)), text)
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and worker failures inside Ray Train's errors."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        cause = waiting.pop()
        if cause not in seen:
            seen.append(cause)
            yield cause
            waiting += [e for e in (cause.__cause__, cause.__context__) if e is not None]
            waiting += getattr(cause, "worker_failures", {}).values()


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
    metrics = (result or {}).get("metrics", {})
    recalls = [metrics.get(f"recall_at_1/{way}") for way in DIRECTIONS]
    if None not in recalls:
        row["recall_at_1"] = sum(recalls) / 2
    return row


def aggregate_metrics(lines: list[Row]) -> Row:
    """Aggregate the logged metrics: samples/s without the first window, mean loss of the last quarter."""
    last = lines[-1] if lines else {}
    losses: list[Any] = [line.get("train/loss") for line in lines[-max(1, len(lines) // 4) :]]
    rates: Row = dict.fromkeys(("samples_per_s", "samples_per_s_min", "samples_per_s_max"))
    windows, before = [], 0
    for line in lines:
        rate, steps = line.get("throughput/samples_per_s"), line["step"] - before
        before = line["step"]
        if rate is not None:
            windows.append((rate, line["time/step_s"] * steps, steps))
    if windows := windows[1:] or windows:  # the first is warm-up
        longest = max(steps for _, _, steps in windows)
        full_windows = [rate for rate, _, steps in windows if 2 * steps > longest]  # not a short last one
        mean = sum(rate * window_s for rate, window_s, _ in windows) / sum(window_s for _, window_s, _ in windows)
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


PHRASES = {
    "throughput": "the most samples/s",
    "loss": "the lowest loss",
    "recall": "the highest recall@1",
    "memory": "the least memory",
}
_FORMATS = {
    "samples_per_s": "{:,.0f} samples/s",
    "loss": "loss {:.3f}",
    "recall_at_1": "recall@1 {:.3f}",
    "peak_gib": "{:.2f} GiB",
}


def select_best(rows: list[Row], goal: str, relative_to_chance: bool) -> Row | None:
    """Return {best, per_global, why} of the finished trials that measured the goal; None without any."""
    metric, _, largest = GOALS[goal]
    measured = [row for row in rows if row["status"] == "finished" and row[metric] is not None]
    if not measured:
        return None
    # Among nearly equal trials the one with less memory is best, or the faster one.
    tie_breaker, tie_breaker_largest = ("peak_gib", False) if goal == "throughput" else ("samples_per_s", True)

    def pick(rows: list[Row]) -> tuple[Row, Row]:
        """Return the best row with the tie-breaker, and the best by the metric alone."""
        leader = _extreme(rows, metric, largest)
        margin = abs(leader[metric]) * TOLERANCE
        near = [row for row in rows if abs(row[metric] - leader[metric]) <= margin and row[tie_breaker] is not None]
        return (_extreme(near, tie_breaker, tie_breaker_largest) if near else leader), leader

    sizes = sorted({row["global"] for row in measured})
    per_global = {size: pick([row for row in measured if row["global"] == size])[0] for size in sizes}
    if goal == "loss" and relative_to_chance and len(sizes) > 1:
        best = max(per_global.values(), key=lambda row: math.log(row["global"]) - row["loss"])
        why = (
            f"{best['trial']} ends {math.log(best['global']) - best['loss']:.2f} nats below chance, more than the best "
            f"of the other global batches (loss {best['loss']:.3f}, chance ln {best['global']}): contrastive losses "
            "are comparable only within one global batch."
        )
    else:
        best, leader = pick(measured)
        why = _why(best, leader, measured, goal, metric, tie_breaker)
    return {"best": best["trial"], "per_global": {str(g): row["trial"] for g, row in per_global.items()}, "why": why}


def _extreme(rows: list[Row], metric: str, largest: bool) -> Row:
    return (max if largest else min)(rows, key=lambda row: row[metric])


def _why(best: Row, leader: Row, rows: list[Row], goal: str, metric: str, tie_breaker: str) -> str:
    """Return the reason, with a warning if the second-best speed is within the range of the best trial's windows."""

    def text(row: Row, metric: str) -> str:
        return _FORMATS[metric].format(row[metric])

    if best is not leader:
        why = (
            f"{best['trial']} is within {TOLERANCE:.0%} of {PHRASES[goal]} ({text(best, metric)}; {leader['trial']}: "
            f"{text(leader, metric)}) and {'uses less memory' if tie_breaker == 'peak_gib' else 'is faster'} "
            f"({text(best, tie_breaker)}; {leader['trial']}: {text(leader, tie_breaker)})."
        )
    elif len(rows) == 1:
        return f"{best['trial']} is the only trial that finished: {text(best, metric)}."
    else:
        why = f"{best['trial']} has {PHRASES[goal]} of {len(rows)} trials: {text(best, metric)}."
    low, high = best["samples_per_s_min"], best["samples_per_s_max"]
    if metric == "samples_per_s" and low is not None:
        rival = _extreme([row for row in rows if row is not best], metric, largest=True)
        if low <= rival[metric] <= high:
            why += (
                f" {rival['trial']} may be as fast: its {text(rival, metric)} is within the range of {low:,.0f} to "
                f"{high:,.0f}; run longer trials (--train.samples) to decide."
            )
    return why
