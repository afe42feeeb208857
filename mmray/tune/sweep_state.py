"""State of a running sweep: trials, results and listener. Independent of Ray.

trainable.py calls `now` and `end` for events of Ray Tune; each row is written when its trial ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from mmray.train.monitor import ProgressReporter
from mmray.tune.results import TrialOutcome, row_of
from mmray.tune.sweep_dir import SweepDir
from mmray.tune.trials import Trial

Row = dict[str, Any]


class SweepListener(ProgressReporter, Protocol):
    """Receives the progress of data preparation, then of the trials."""

    def trials(self, rows: list[Row]) -> None:
        """Receive all rows; a running trial has `status` running, `doing`, and its newest metrics."""

    def ended(self, row: Row) -> None:
        """Receive the row of an ended trial."""


@dataclass
class SweepState:
    """State of a sweep: `rows` of ended trials, `live` rows of running trials."""

    folder: SweepDir
    trials: dict[str, Trial]
    rows: dict[str, Row]
    listener: SweepListener
    live: dict[str, Row] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def table(self) -> list[Row]:
        """Return one row per trial in order."""
        return [self.rows.get(name) or self.live.get(name) or _waiting(trial) for name, trial in self.trials.items()]

    def now(self, name: str, figures: Row) -> None:
        """Update the row of a running trial."""
        if name not in self.rows:
            self.live[name] = {**_waiting(self.trials[name]), **self.live.get(name, {}), **figures}

    def end(self, name: str, ended: TrialOutcome) -> None:
        """Write the row of an ended trial from the files of its run."""
        if name in self.rows:
            return
        self.live.pop(name, None)
        run = self.folder.path / "trials" / name
        result = SweepDir(run).read_json("result.json")
        self.rows[name] = row_of(self.trials[name], ended, _lines(run / "metrics.jsonl"), result)
        self.folder.write_rows(list(self.rows.values()))
        self.listener.ended(self.rows[name])

    def announce(self, identity: dict[str, Any], goal: str, kept: int, at_once: int) -> None:
        """Log the trials, the search space and the goal."""
        infeasible = sum(row["status"] == "infeasible" for row in self.rows.values())
        more = [f"{kept} already measured" if kept else "", f"{infeasible} infeasible" if infeasible else ""]
        trials = f"{len(self.trials)} of {identity['samples_per_trial']:,} samples each"
        space = "  ".join(f"{key}={','.join(str(v) for v in values)}" for key, values in identity["space"].items())
        self.listener.log(str(self.folder.path), "sweep")
        self.listener.log(space, "space")
        self.listener.log(", ".join([trials, *filter(None, more)]), "trials")
        self.listener.log(f"{goal}; {at_once} at a time", "goal")

    def status(self) -> str:
        """Return the final status of the sweep: finished if any trial was measured."""
        statuses = [row["status"] for row in self.table()]
        if "stopped" in statuses or "waiting" in statuses:
            return "stopped"
        return "finished" if "finished" in statuses else "failed"


def _waiting(trial: Trial) -> Row:
    return row_of(trial, TrialOutcome("stopped"), [], None) | {"status": "waiting"}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Parse the complete lines of a metrics.jsonl; a killed run may leave an incomplete last line."""
    if not file.exists():
        return []
    return [orjson.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
