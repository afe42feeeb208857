"""A sweep under way: its trials, what of them is measured, and who is told. Knows nothing of Ray.

search.py hears from Ray Tune and calls `now` and `end`; every row is on disk as soon as its trial has ended.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from mmray.train.monitor import ProgressReporter
from mmray.tune.results import Ended, row_of
from mmray.tune.sweep_dir import SweepDir
from mmray.tune.trials import Trial

Row = dict[str, Any]


class SweepListener(ProgressReporter, Protocol):
    """Who is told what a sweep does: of its preparation as of a run's, then of its trials."""

    def trials(self, rows: list[Row]) -> None:
        """All trials as they stand; a running one has `status` running, `doing`, and its newest figures."""

    def ended(self, row: Row) -> None:
        """A trial has ended."""


@dataclass
class Running:
    """A sweep on the main thread: `rows` are of trials that have ended, `live` of those that run."""

    folder: SweepDir
    trials: dict[str, Trial]
    rows: dict[str, Row]
    listener: SweepListener
    live: dict[str, Row] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def table(self) -> list[Row]:
        """A row for every trial, in order."""
        return [self.rows.get(name) or self.live.get(name) or _waiting(trial) for name, trial in self.trials.items()]

    def now(self, name: str, figures: Row) -> None:
        """News of a trial that runs."""
        if name not in self.rows:
            self.live[name] = {**_waiting(self.trials[name]), **self.live.get(name, {}), **figures}

    def end(self, name: str, ended: Ended) -> None:
        """A trial has ended: its row, from what its run has left, on disk at once."""
        if name in self.rows:
            return
        self.live.pop(name, None)
        run = self.folder.path / "trials" / name
        result = SweepDir(run).read_json("result.json")
        self.rows[name] = row_of(self.trials[name], ended, _lines(run / "metrics.jsonl"), result)
        self.folder.write_rows(list(self.rows.values()))
        self.listener.ended(self.rows[name])

    def announce(self, identity: dict[str, Any], goal: str, kept: int, at_once: int) -> None:
        """Say what is about to be tried."""
        infeasible = sum(row["status"] == "infeasible" for row in self.rows.values())
        more = [f"{kept} measured before" if kept else "", f"{infeasible} cannot be run" if infeasible else ""]
        trials = f"{len(self.trials)} of {identity['samples_per_trial']:,} samples each"
        space = "  ".join(f"{key}={','.join(str(v) for v in values)}" for key, values in identity["space"].items())
        self.listener.log(str(self.folder.path), "sweep")
        self.listener.log(space, "space")
        self.listener.log(", ".join([trials, *filter(None, more)]), "trials")
        self.listener.log(f"{goal}; {at_once} at a time", "goal")

    def status(self) -> str:
        """How the sweep stands once no trial runs any more: finished where any could be measured."""
        statuses = [row["status"] for row in self.table()]
        if "stopped" in statuses or "waiting" in statuses:
            return "stopped"
        return "finished" if "finished" in statuses else "failed"


def _waiting(trial: Trial) -> Row:
    return row_of(trial, Ended("stopped"), [], None) | {"status": "waiting"}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics.jsonl: a killed run may have left half of one."""
    if not file.exists():
        return []
    return [orjson.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
