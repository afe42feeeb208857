"""The runs and sweeps of a folder with their state, steps and scores, without importing Ray, torch
or pydantic.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from mmray.errors import UsageError
from mmray.report.run import RunRecord
from mmray.report.sweep import SweepRecord
from mmray.storage import lease
from mmray.storage.paths import AnyPath
from mmray.storage.requests import iter_parallel
from mmray.sweep_files import SWEEP, TRIALS

# the newest is the last activity
FILES = ("config.yaml", "metrics.jsonl", "result.json", SWEEP, TRIALS)
THREADS = 16  # folders read at once: an object store needs about ten requests per run


def list_runs(folder: AnyPath) -> list[dict[str, Any]]:
    """Summarize the runs and sweeps directly in a folder, the last active first."""
    try:
        children: list[AnyPath] = list(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"cannot list {folder}: {error.strerror or error}; give a folder of runs"
        ) from None
    rows = [row for row in iter_parallel(_summarize, children, THREADS) if row is not None]
    return sorted(rows, key=lambda row: row["age_s"])


def _summarize(folder: AnyPath) -> dict[str, Any] | None:
    """Return the row of a run or sweep; None for other entries and without access."""
    changed_s = []
    for name in FILES:
        with suppress(OSError):
            changed_s.append((folder / name).stat().st_mtime)
    try:
        if (folder / SWEEP).is_file():
            row = _sweep_row(SweepRecord.read(folder))
        elif (folder / "config.yaml").is_file():
            row = _run_row(folder)
        else:
            return None
    except PermissionError:
        return None
    if lease.is_live(folder):
        row["state"] = "running"
    return {"name": folder.name, **row, "age_s": max(0.0, time.time() - max(changed_s))}


def _run_row(folder: AnyPath) -> dict[str, Any]:
    """Return kind, state, steps, last loss and scores, and the best score once the run ended."""
    run = RunRecord(folder)
    if run.status in ("finished", "stopped"):  # metrics.jsonl, which may be large, is not needed
        steps = run.result.get("steps")
        last = run.result.get("metrics") or {}
        scores = run.result.get("scores") or {}
    else:
        last = run.lines[-1] if run.lines else {}
        steps = last.get("step")
        scores = run.newest("evaluate/")
    return {
        "kind": "run",
        "state": run.status,
        "steps": steps,
        "loss": last.get("train/loss"),
        "scores": scores,
        "best": run.result.get("best"),
    }


def _sweep_row(sweep: SweepRecord) -> dict[str, Any]:
    """Return the same of a sweep: its ended trials, and the value of the recommended one."""
    best = sweep.best
    return {
        "kind": "sweep",
        "state": sweep.status,
        "trials": len(sweep.trials),
        "scores": {},
        "best": best
        and {"trial": best.trial, "metric": sweep.goal.title, "score": sweep.value(best)},
    }
