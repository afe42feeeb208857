"""Folder and state of a sweep, without Ray.

STORAGE/NAME/  recipe.yaml (base of all trials)  sweep.json  trials.jsonl (one row per trial)  best.yaml
               trials/tNNN/ (run folders)
"""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mmray.config import Config, from_yaml, to_yaml
from mmray.errors import UsageError
from mmray.report.run import read_lines
from mmray.report.sweep import TRIALS
from mmray.storage import lease
from mmray.train.monitor import ProgressReporter
from mmray.train.run_dir import RunDir, candidate_names, forbidden_changes
from mmray.tune.results import REUSABLE, Row, TrialOutcome, build_row
from mmray.tune.trials import Trial

# Settings of the recipe that a resumed sweep may change.
RESUMABLE_CHANGES = (
    *("run", "cluster.address", "cluster.start_timeout_s"),
    *("data.cache", "data.local_cache", "data.local_cache_gb"),
)


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Paths and files of one sweep, on a file system that all nodes share."""

    path: Path

    def write_rows(self, rows: list[Row]) -> None:
        """Write all rows in trial order."""
        ordered = sorted(rows, key=lambda row: row["trial"])
        self.write(TRIALS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered))

    def reusable_rows(self, trials: list[Trial]) -> dict[str, Row]:
        """Return rows of earlier commands by trial, if the trial still has the same settings."""
        settings, rows = {trial.name: trial.settings for trial in trials}, read_lines(self.path / TRIALS)
        reusable = (row for row in rows if row["status"] in REUSABLE and settings.get(row["trial"]) == row["settings"])
        return {row["trial"]: row for row in reusable}


def resolve_sweep_dir(base: Config, identity: dict[str, Any]) -> SweepDir:
    """Return the folder of this sweep, whose sweep.json must match `identity`. Raises UsageError."""
    if "://" in base.run.storage:
        raise UsageError(
            f"run.storage: {base.run.storage} is on an object store; a sweep needs a folder that all nodes share, "
            "such as a network mount"
        )
    storage = Path(base.run.storage).expanduser().resolve()
    for name in candidate_names(f"{base.recipe}-tune", base.run.name):
        path, sweep = storage / name, SweepDir(storage / name)
        before = sweep.read_json("sweep.json")
        if before is None:
            if base.run.resume == "must":
                raise UsageError(f"--run.resume must: no sweep at {path}")
            if path.exists() and any(file.name not in (lease.FOLDER, "recipe.yaml") for file in path.iterdir()):
                raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
            return sweep
        changes = [f"{key}: {before.get(key)} -> {now}" for key, now in identity.items() if before.get(key) != now]
        recipe = from_yaml((path / "recipe.yaml").read_text(), str(path / "recipe.yaml"))
        old, new = (config.model_dump(mode="json", by_alias=True) for config in (recipe, base))
        changes += forbidden_changes(old, new, RESUMABLE_CHANGES)
        if base.run.name is not None:
            if base.run.resume == "never":
                raise UsageError(f"{path} exists; choose another --run.name, or resume with --run.resume auto")
            if changes:
                raise UsageError(
                    f"{path} is another sweep:\n  " + "\n  ".join(changes) + "\n"
                    "Its trials cannot be compared with these: choose another --run.name, or set these back."
                )
            return sweep
        if not changes and before["status"] != "finished" and base.run.resume != "never":
            return sweep
    raise AssertionError("the names never end")


def create_sweep_dir(sweep: SweepDir, base: Config) -> None:
    """Create the folder and write the base recipe."""
    try:
        (sweep.path / "trials").mkdir(parents=True, exist_ok=True)
        sweep.write("recipe.yaml", to_yaml(base))
    except OSError as error:
        raise UsageError(
            f"cannot write the sweep's folder {sweep.path}: {error}; choose another --run.storage"
        ) from None


class SweepListener(ProgressReporter, Protocol):
    """Receives the progress of data preparation, then of the trials."""

    def trials(self, rows: list[Row]) -> None:
        """Receive all rows; a running trial has `status` running, `activity`, and its newest metrics."""

    def ended(self, row: Row) -> None:
        """Receive the row of an ended trial."""


@dataclass
class SweepState:
    """State of a running sweep: `rows` of ended trials, `live` rows of running trials."""

    folder: SweepDir
    trials: dict[str, Trial]
    rows: dict[str, Row]
    listener: SweepListener
    live: dict[str, Row] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def table(self) -> list[Row]:
        """Return one row per trial in order."""
        stopped = {name: build_row(trial, TrialOutcome("stopped")) for name, trial in self.trials.items()}
        waiting = {name: row | {"status": "waiting"} for name, row in stopped.items()}
        return list((waiting | self.live | self.rows).values())

    def clear(self, name: str) -> None:
        """Remove the files of an interrupted trial, because trials do not resume."""
        run = self.folder.path / "trials" / name
        if run.exists():
            shutil.rmtree(run)

    def update(self, name: str, activity: str) -> None:
        """Update the row of a running trial."""
        if name not in self.rows:
            self.live[name] = self._row(name, TrialOutcome("stopped")) | {"status": "running", "activity": activity}

    def end(self, name: str, outcome: TrialOutcome) -> None:
        """Write the row of an ended trial."""
        if name not in self.rows:
            self.live.pop(name, None)
            self.rows[name] = self._row(name, outcome)
            self.folder.write_rows(list(self.rows.values()))
            self.listener.ended(self.rows[name])

    def _row(self, name: str, outcome: TrialOutcome) -> Row:
        """Return the row of a trial from the files of its run; a killed run may leave an incomplete last line."""
        run = SweepDir(self.folder.path / "trials" / name)
        lines = list(read_lines(run.path / "metrics.jsonl"))
        return build_row(self.trials[name], outcome, lines, run.read_json("result.json"))

    def status(self) -> str:
        """Return the final status of the sweep: finished if any trial was measured."""
        statuses = [row["status"] for row in self.table()]
        if "stopped" in statuses or "waiting" in statuses:
            return "stopped"
        return "finished" if "finished" in statuses else "failed"
