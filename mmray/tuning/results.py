"""Rows of trials.jsonl and their ranking, computed from metrics and outcomes.

Missing values are None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from mmray.errors import UsageError, first_line, is_out_of_memory
from mmray.evaluation import DIRECTIONS
from mmray.report.sweep import GOALS, LEARNING_GOALS, RUNG_GOALS
from mmray.sweep_files import BATCH_SETTINGS
from mmray.tuning.trials import Trial, num_promoted

# `paused`: at a rung; `pruned`: not continued there; `stopped`: by the user or the budget.
Status = Literal[
    "running", "paused", "finished", "pruned", "out_of_memory", "failed", "stopped", "infeasible"
]
Row = dict[str, Any]
ENDED = ("finished", "out_of_memory")  # not continued by a resumed sweep
MAX_ERROR_CHARS = 240
EVAL_METRICS = {"recall": "evaluate/recall_at_1/mean"}  # by goal; of the others: the held-out loss
# the exception line of a traceback
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


class TrialOutcome(NamedTuple):
    """Outcome of a trial: status, and error or reason."""

    status: Status
    error: str | None = None


def classify_error(error: BaseException) -> TrialOutcome:
    """Return the outcome for an error; the error of a run quotes that of its worker."""
    if isinstance(error, KeyboardInterrupt):
        return TrialOutcome("stopped")
    # SIGKILL has other causes too
    if is_out_of_memory(error) and "ended by SIGKILL" not in str(error):
        return TrialOutcome("out_of_memory", summarize_error(error))
    return TrialOutcome(
        "infeasible" if isinstance(error, UsageError) else "failed", summarize_error(error)
    )


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error message or the exception line of a traceback, cut to
    MAX_ERROR_CHARS.
    """
    text = first_line(error)
    if text.startswith("Traceback"):
        text = next((line for line in str(error).splitlines() if _RAISED.match(line)), text)
    return text[:MAX_ERROR_CHARS]


def eval_metric(goal: str) -> str:
    """Return the name of the held-out metric by which the trials of a learning goal are
    compared.
    """
    return EVAL_METRICS.get(goal, "evaluate/loss")


def rung_value(lines: Sequence[Row], goal: str) -> float | str:
    """Return the newest value of the goal's metric, or why there is none."""
    if goal not in LEARNING_GOALS:
        value = aggregate_metrics(lines)[GOALS[goal].metric]
        return f"no {GOALS[goal].title} was measured" if value is None else value
    name = eval_metric(goal)
    values = [line[name] for line in lines if name in line]
    if not values:
        return f"{name} was not measured; use another --goal for this objective"
    return (
        values[-1]
        if values[-1] is not None and math.isfinite(values[-1])
        else (f"{name} is not finite")
    )


def build_row(
    trial: Trial,
    outcome: TrialOutcome,
    goal: str,
    lines: Sequence[Row] = (),
    result: Row | None = None,
    rungs: Sequence[Row] = (),
    elapsed_s: float | None = None,
    is_recipe: bool = False,
    parent: Row | None = None,
) -> Row:
    """Return one object of trials.jsonl. is_recipe, parent: see README.md.

    A run that continued with smaller micro-batches is out_of_memory, unless the goal does not
    depend on them.
    """
    shape, name = trial.shape, eval_metric(goal)
    row: Row = {"trial": trial.name, "status": outcome.status, "settings": trial.settings}
    row |= dict.fromkeys(("micro", "accumulation", "workers", "global"))
    row |= aggregate_metrics(lines) | {
        "recall_at_1": None,
        "error": outcome.error,
        "elapsed_s": elapsed_s,
    }
    row |= {
        "rungs": list(rungs),
        "eval_loss": None,
        "quality_s": None,
        "is_recipe": is_recipe,
        "parent": parent,
    }
    row["curve"] = learning_curve(lines, name)
    row["run"] = f"trials/{trial.name}" if lines else None
    if shape is not None:
        row |= {"micro": shape.micro_batch_size, "accumulation": shape.accumulation}
        row |= {"workers": shape.world_size, "global": shape.global_batch_size}
        actual_micro = (
            min(shape.micro_batch_size, int(lines[-1].get("batch/micro") or shape.micro_batch_size))
            if lines
            else shape.micro_batch_size
        )
        if actual_micro < shape.micro_batch_size and (shape.auto or goal in LEARNING_GOALS):
            row |= {
                "micro": actual_micro,
                "accumulation": -(-shape.global_batch_size // (shape.world_size * actual_micro)),
            }
        elif actual_micro < shape.micro_batch_size and outcome.status == "finished":
            advice = f"the run continued with {actual_micro}: search {actual_micro} or use `auto`"
            row |= {
                "status": "out_of_memory",
                "error": f"out of memory at micro-batch {shape.micro_batch_size}; {advice}",
            }
    scores = (result or {}).get("scores") or {}
    recalls: list[Any] = [scores.get(f"recall_at_1/{direction}") for direction in DIRECTIONS]
    if None not in recalls:
        row["recall_at_1"] = sum(recalls) / 2
    if rungs and goal in LEARNING_GOALS:
        row["recall_at_1" if goal == "recall" else "eval_loss"] = rungs[-1]["value"]
    return row


def learning_curve(lines: Sequence[Row], name: str) -> list[list[float]]:
    """Return [samples, held-out value, seconds of training without evaluations and checkpoints] per
    evaluation.
    """
    curve, seconds, step = [], 0.0, 0
    for line in lines:
        seconds += (line.get("time/step_s") or 0.0) * (line["step"] - step)
        step = line["step"]
        if line.get(name) is not None:
            curve.append([line["rows_stop"], line[name], seconds])
    return curve


def aggregate_metrics(lines: Sequence[Row]) -> Row:
    """Aggregate the logged metrics: samples/s of steps without the first window, mean loss of the
    last quarter.

    Not the logged rate, which has evaluations and checkpoints: these are not what a sweep compares.
    """
    last = lines[-1] if lines else {}
    losses: list[Any] = [line.get("train/loss") for line in lines[-max(1, len(lines) // 4) :]]
    rates: Row = dict.fromkeys(("samples_per_s", "samples_per_s_min", "samples_per_s_max"))
    windows = [
        (
            line["rows_stop"] / line["step"] / line["time/step_s"],
            line["time/step_s"],
            line["step"] - before,
        )
        for line, before in zip(lines, [0, *(line["step"] for line in lines)], strict=False)
        if line.get("time/step_s") is not None
    ]
    if windows := windows[1:] or windows:  # the first is warm-up
        longest = max(steps for *_, steps in windows)
        # not a short last one
        full_windows = [rate for rate, _, steps in windows if 2 * steps > longest]
        total_s = sum(step_s * steps for _, step_s, steps in windows)
        mean = sum(rate * step_s * steps for rate, step_s, steps in windows) / total_s
        rates = {
            "samples_per_s": mean,
            "samples_per_s_min": min(full_windows),
            "samples_per_s_max": max(full_windows),
        }
    return {
        "steps": last.get("step"),
        "samples": last.get("rows_stop"),
        **rates,
        "step_p50_s": last.get("time/step_p50_s"),
        "step_p95_s": last.get("time/step_p95_s"),
        "peak_gib": max(
            (line["memory/peak_gib"] for line in lines if line.get("memory/peak_gib")), default=None
        ),
        "loss": None if not losses or None in losses else sum(losses) / len(losses),
    }


# Trials are ranked within each global batch too, because their training losses are not comparable.
TOLERANCE = 0.02  # relative; the noise of a trial is rarely smaller
MAX_CLOSE = 3  # trials named as close to the best one
_FORMATS = {
    "samples_per_s": "{:,.4g} samples/s",
    "eval_loss": "held-out loss {:.3f}",
    "recall_at_1": "recall@1 {:.3f}",
    "peak_gib": "{:.2f} GiB",
    "quality_s": "{:,.0f} s of training to the target loss",
}


def flag_unequal_losses(rows: Sequence[Row]) -> None:
    """Set `error` of trials whose loss is not that of another shape of the same global batch, after
    as many samples.

    Equal global batches train alike however they are split, unless rows of a micro-batch interact
    in the model.
    """
    first: dict[str, Row] = {}
    for row in rows:
        if row["loss"] is None or row["error"] or row["parent"]:
            continue
        other = {key: value for key, value in row["settings"].items() if key not in BATCH_SETTINGS}
        like = first.setdefault(json.dumps([row["global"], row["samples"], other]), row)
        if not _is_close(row["loss"], like["loss"]):
            row["error"] = (
                f"training loss {row['loss']:.3f} instead of {like['loss']:.3f} of "
                f"{like['trial']}, which splits the "
                "same global batch differently: batch norm or dropout depend on the micro-batches"
            )


def promoted(rows: Sequence[Row], rung: int, maximize: bool) -> list[str]:
    """Return the trials that continue after the rung (counted from 0): the best quarter, but at
    least two.
    """
    reached = [row for row in rows if len(row["rungs"]) > rung]
    reached.sort(key=lambda row: row["rungs"][rung]["value"], reverse=maximize)
    return [row["trial"] for row in reached[: num_promoted(len(reached))]]


def select_best(rows: list[Row], goal: str) -> Row | None:
    """Return {best, per_global, why} of the trials that measured the goal; None without any.

    Learning goals compare the trials with the most samples. Sets `quality_s` of the rows for
    `time-to-quality`.
    """
    metric, _, maximize = GOALS[goal]
    learning = goal in LEARNING_GOALS
    if goal == "time-to-quality":
        set_time_to_quality(rows)
    measured = [row for row in rows if row["status"] == "finished" and row[metric] is not None]
    if learning and not measured:  # the budget ended before the last rung
        reached = [row for row in rows if row["rungs"] and row[metric] is not None]
        top = max((row["rungs"][-1]["samples"] for row in reached), default=0)
        measured = [row for row in reached if row["rungs"][-1]["samples"] == top]
    if not measured:
        return None
    per_global = {
        str(size): _pick([row for row in measured if row["global"] == size], goal)[0]
        for size in sorted({row["global"] for row in measured})
    }
    best, leader = _pick(measured, goal)
    why = f"{best['trial']} has {_FORMATS[metric].format(best[metric])}"
    order = "highest" if maximize else "lowest"
    if best is not leader:
        value = _FORMATS[metric].format(leader[metric])
        why += f", within {TOLERANCE:.0%} of the {order} ({value} of {leader['trial']}), and " + (
            "needs less memory." if goal == "throughput" else "is faster."
        )
    elif len(measured) > 1:
        why += f", the {order} of {len(measured)} trials."
    else:
        why += (
            "; no other trial was trained for as many samples."
            if learning
            else ("; no other trial was measured.")
        )
    if learning:
        why += (
            _against_recipe(best, rows, goal)
            + _lineage(best, rows)
            + _doubts(best, measured, metric)
        )
    return {
        "best": best["trial"],
        "per_global": {size: row["trial"] for size, row in per_global.items()},
        "why": why,
    }


def set_time_to_quality(rows: list[Row]) -> None:
    """Set `quality_s`, the seconds of training to the target, of all rows that reached it.

    The target is the last loss of the recipe's own settings, otherwise the highest loss of a
    finished trial.
    """
    measured = [row for row in rows if row["eval_loss"] is not None]
    own = [row["eval_loss"] for row in measured if row["is_recipe"]]
    finished = [row["eval_loss"] for row in measured if row["status"] == "finished"]
    if not own and not finished:
        return
    target: float = max(own or finished)
    for row in rows:
        samples = samples_to(row["curve"], target)
        row["quality_s"] = (
            samples / row["samples_per_s"] if samples is not None and row["samples_per_s"] else None
        )


def samples_to(
    curve: Sequence[Sequence[float]], target: float, maximize: bool = False
) -> float | None:
    """Return the samples at which a learning curve first reaches the target, interpolated;

    None if never.
    """
    sign = -1.0 if maximize else 1.0
    if curve and sign * curve[0][1] <= sign * target:
        return curve[0][0]
    for (before, high, *_), (after, low, *_) in pairwise(curve):
        if sign * low <= sign * target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def _against_recipe(best: Row, rows: list[Row], goal: str) -> str:
    """Compare the best trial with the recipe's own settings after the samples that both were
    trained for.
    """
    metric, _, maximize = RUNG_GOALS[goal]
    own = next((row for row in rows if row["is_recipe"] and row["rungs"]), None)
    if own is None:
        return " The recipe's own settings were not measured."
    if own is best:
        return " These are the recipe's own settings: the search found none that are better."
    target, last = own["rungs"][-1]["value"], own["rungs"][-1]["samples"]
    same = best["rungs"][len(own["rungs"]) - 1]["value"]
    text = (
        f" After {last:,} samples the recipe's own settings ({own['trial']}) have "
        f"{_FORMATS[metric].format(target)}"
    )
    text += f" and {best['trial']} has {same:.3f}"
    needed = samples_to(best["curve"], target, maximize)
    if needed is None:
        return f"{text}; it never reached their value."
    if needed < last:
        return (
            f"{text}; it reached their value after about {needed:,.0f} "
            f"({1 - needed / last:.0%} fewer)."
        )
    return (
        (f"{text}; it reached their value after about {needed:,.0f}.")
        if needed > last
        else f"{text}."
    )


def _lineage(best: Row, rows: list[Row]) -> str:
    """Name the trials that a trial of population based training continues; its recipe has only the
    last settings.
    """
    by_name, parts = {row["trial"]: row for row in rows}, []
    while best["parent"] is not None:
        source = by_name[best["parent"]["trial"]]
        settings = " ".join(f"{key}={value}" for key, value in source["settings"].items())
        parts.append(f"{source['trial']} ({settings}) until {best['parent']['samples']:,} samples")
        best = source
    if not parts:
        return ""
    return (
        f" It continues {', which continues '.join(parts)}; best.yaml has its last settings "
        "only, which is untested."
    )


def _doubts(best: Row, measured: list[Row], metric: str) -> str:
    """Name the trials that are too close to call, and a best trial that is not a full one."""
    near = [
        row["trial"] for row in measured if row is not best and _is_close(row[metric], best[metric])
    ]
    names = ", ".join(near[:MAX_CLOSE]) + (f" and {len(near) - MAX_CLOSE} more") * (
        len(near) > MAX_CLOSE
    )
    text = (
        (f" Not certain: {names} {'are' if len(near) > 1 else 'is'} within {TOLERANCE:.0%} of it.")
        if near
        else ""
    )
    return text + (
        ""
        if best["status"] == "finished"
        else f" It has {best['rungs'][-1]['samples']:,} samples only."
    )


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= TOLERANCE * abs(other)


def _pick(rows: list[Row], goal: str) -> tuple[Row, Row]:
    """Return the best row and the leader by the metric alone.

    Of trials within TOLERANCE of the leader, `throughput` takes the one with the least memory, and
    `memory` the fastest.
    """
    metric, _, maximize = GOALS[goal]
    leader = (max if maximize else min)(rows, key=lambda row: row[metric])
    near = [
        row
        for row in rows
        if _is_close(row[metric], leader[metric])
        and row["samples_per_s"] is not None
        and row["peak_gib"] is not None
    ]
    if goal in LEARNING_GOALS or not near:
        return leader, leader
    if goal == "throughput":
        return min(near, key=lambda row: (row["peak_gib"], -row["samples_per_s"])), leader
    return max(near, key=lambda row: row["samples_per_s"]), leader
