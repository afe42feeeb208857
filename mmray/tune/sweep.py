"""Folder and state of a sweep, without Ray.

STORAGE/NAME/  recipe.yaml (base of all trials)  sweep.json  trials.jsonl (one row per trial)  best.yaml
               trials/tNNN/ (run folders)
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from mmray.config import Config, from_yaml
from mmray.errors import ForceExit, UsageError
from mmray.report.run import read_lines
from mmray.report.sweep import TRIALS
from mmray.storage import lease
from mmray.storage.paths import AnyPath
from mmray.train.monitor import RunReporter
from mmray.train.run_dir import RunDir, forbidden_changes, has_other_files, select_folder
from mmray.tune.results import REUSABLE, Row, TrialOutcome, build_row
from mmray.tune.trials import Trial

# Settings of the recipe that a resumed sweep may change.
_RESUMABLE_DATA = ("data.cache", "data.local_cache", "data.local_cache_gb")
RESUMABLE_CHANGES = ("run", "cluster.address", "cluster.start_timeout_s", *_RESUMABLE_DATA)


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Paths and files of one sweep, on a file system that all nodes share."""

    path: Path

    def write_rows(self, rows: list[Row]) -> None:
        """Write all rows in trial order."""
        self.write(TRIALS, "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["trial"])))

    def reusable_rows(self, trials: list[Trial]) -> dict[str, Row]:
        """Return rows of earlier commands by trial, if the trial still has the same settings."""
        settings = {trial.name: trial.settings for trial in trials}
        rows = {row["trial"]: row for row in read_lines(self.path / TRIALS) if row["status"] in REUSABLE}
        return {name: row for name, row in rows.items() if settings.get(name) == row["settings"]}


def resolve_sweep_dir(base: Config, identity: dict[str, Any]) -> SweepDir:
    """Return the folder of this sweep, whose sweep.json must match `identity`. Raises UsageError."""
    if "://" in base.run.storage:
        raise UsageError(
            f"run.storage: {base.run.storage} is on an object store; a sweep needs a folder that all nodes share, "
            "such as a network mount"
        )

    def inspect(path: AnyPath) -> tuple[list[str], bool] | None:
        before = RunDir(path).read_json("sweep.json")
        if before is None:
            if has_other_files(path, (lease.FOLDER, "recipe.yaml")):
                raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
            return None
        changes = [f"{key}: {before.get(key)} -> {now}" for key, now in identity.items() if before.get(key) != now]
        recipe = from_yaml((path / "recipe.yaml").read_text(), str(path / "recipe.yaml"))
        old, new = (config.model_dump(mode="json", by_alias=True) for config in (recipe, base))
        return changes + forbidden_changes(old, new, RESUMABLE_CHANGES), before["status"] == "finished"

    return SweepDir(Path(str(select_folder(base.run, f"{base.recipe}-tune", inspect, "sweep").path)))


class SweepReporter(RunReporter, Protocol):
    """Receives the progress of data preparation, then of the trials."""

    def ended(self, row: Row) -> None:
        """Receive the row of an ended trial."""


@dataclass
class SweepState:
    """The rows of a running sweep by trial."""

    folder: SweepDir
    trials: dict[str, Trial]
    rows: dict[str, Row]
    reporter: SweepReporter
    stop: threading.Event = field(default_factory=threading.Event)

    def end(self, name: str, outcome: TrialOutcome) -> None:
        """Write the row of an ended trial from the files of its run."""
        if name in self.rows:
            return
        run = RunDir(self.folder.path / "trials" / name)
        lines = list(read_lines(run.path / "metrics.jsonl"))
        self.rows[name] = build_row(self.trials[name], outcome, lines, run.read_json("result.json"))
        self.folder.write_rows(list(self.rows.values()))
        if outcome.status != "stopped":
            self.reporter.ended(self.rows[name])

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """End the running trials on the first Ctrl-C or SIGTERM, and keep the results; exit on the second."""
        if self.stop.is_set():
            raise ForceExit
        self.stop.set()
        self.reporter.log("stopping the running trials; press Ctrl-C again to exit immediately", "stop")
