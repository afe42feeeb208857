"""A trial's row: what its run has measured, from the lines of its metrics.jsonl, and how it ended.

Pure: search.py reads the files. A figure that was not measured is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmray.engine.batch import BatchShape
from mmray.engine.room import is_out_of_memory
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
