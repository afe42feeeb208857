"""Folder and state of a sweep, without Ray.

STORAGE/NAME/ recipe.yaml (base of all trials) sweep.json trials.jsonl (one row per trial) best.yaml
              trials/tNNN/ (run folders)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

from mmray.config import Config, from_yaml
from mmray.data.prepare.pipeline import PrepareProgress
from mmray.errors import ForceExit, UsageError
from mmray.report.sweep import SweepRecord
from mmray.storage import lease
from mmray.storage.paths import AnyPath, read_lines
from mmray.sweep_files import SWEEP, TRIALS, Recommendation, Rung, TrialRow
from mmray.training import RunReporter
from mmray.training.run_dir import RunDir, forbidden_changes, has_other_files, select_folder
from mmray.tuning.results import ENDED, TrialOutcome, measured_row
from mmray.tuning.rungs import planned_samples
from mmray.tuning.trials import SweepPlan

# Settings of the recipe that a resumed sweep may change.
RESUMABLE_CHANGES = (
    "run",
    "cluster.address",
    "cluster.start_timeout_s",
    "cluster.queue_timeout_s",
    "data.cache",
    "data.local_cache",
    "data.local_cache_gb",
)
# While this file exists in the folder of a sweep, its running trials stop at a checkpoint.
STOP_FILE = "stop"
# So much time of a killed command may not count for the budget.
SAVE_INTERVAL_S = 10.0


@dataclass(frozen=True)
class SweepDir(RunDir):
    """The folder of one sweep, with sweep.json, trials.jsonl and the runs of its trials, on storage
    that all nodes share.

    `write_rows` writes the TrialRow of each trial, and `run(name)` returns the RunDir of one.
    """

    def run(self, trial: str) -> RunDir:
        """Return the folder of the run of a trial."""
        return RunDir(self.path / "trials" / trial)

    def write_rows(self, rows: Sequence[TrialRow]) -> None:
        """Replace the content of trials.jsonl, in the order of the names of the trials."""
        ordered = sorted(rows, key=lambda row: row.trial)
        self.write(TRIALS, "".join(json.dumps(row.to_json()) + "\n" for row in ordered))


def resolve_sweep_dir(
    base: Config, identity: dict[str, Any], reporter: RunReporter, restart: bool = False
) -> SweepDir:
    """Return the folder of an unfinished sweep to resume, or of a new one, and log why.

    Args:
        identity: Entries of sweep.json that must be equal for a sweep to be resumed.

    Raises:
        UsageError: `run.name` is something else, or a sweep with other settings.
    """
    inspect = partial(_compare_sweep, base=base, identity=identity, restart=restart)
    selection = select_folder(base.run, f"{base.recipe}-tune", inspect, "sweep")
    if selection.skipped:
        reporter.log(selection.skipped[-1], "not resumed")
    return SweepDir(selection.path)


def _compare_sweep(
    path: AnyPath, base: Config, identity: dict[str, Any], restart: bool
) -> tuple[list[str], bool] | None:
    """Return what prevents resuming the sweep in a folder, and whether it has finished; None if the
    folder has no sweep. Raises UsageError if it has other files.
    """
    before = RunDir(path).read_json(SWEEP)
    if not before:
        if has_other_files(path, (lease.FOLDER, "recipe.yaml", STOP_FILE)):
            raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
        return None
    changes = [
        f"{key}: {before.get(key)} -> {now}"
        for key, now in identity.items()
        if before.get(key) != now
    ]
    recipe = from_yaml((path / "recipe.yaml").read_text(), str(path / "recipe.yaml"))
    changes += forbidden_changes(recipe.to_json(), base.to_json(), RESUMABLE_CHANGES)
    return changes, before["status"] == "finished" and not restart


class SweepReporter(RunReporter, Protocol):
    """Receives the progress of data preparation, then of the trials.

    A class implements the methods of RunReporter, and `trial(row, num_rungs)`, which gets a row of
    trials.jsonl.
    """

    def trial(self, row: TrialRow, num_rungs: int) -> None:
        """Receive the row of a trial that reached a rung or ended.

        Args:
            num_rungs: Number of rungs of the sweep.
        """


class SweepState:
    """The rows of the trials of a running sweep, the time it has taken, and whether it must stop.

    Of each trial `start` and `end` are called for each rung, and `poll` all the time, in a thread
    of Ray Tune. The main thread calls `on_signal` for a signal.

    Attributes:
        folder: The folder of the sweep.
        plan: Recipe, goal, rungs and data.
        reporter: Receives the progress of the trials.
        rows: TrialRow (settings, status and measurements) by name of the trial, also of earlier
            commands.
        stop_reason: `stopped` by the user, or `budget`; None: not stopped.
        clock: Called without arguments; returns seconds, as time.monotonic does.
    """

    def __init__(
        self,
        folder: SweepDir,
        plan: SweepPlan,
        reporter: SweepReporter,
        summary: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the rows and the time of earlier commands.

        Args:
            summary: Entries of sweep.json that do not change, such as `goal`, JSON values by name.
        """
        self.folder = folder
        self.plan = plan
        self.reporter = reporter
        earlier = SweepRecord.read(folder.path)
        self.rows = {row.trial: row for row in earlier.trials}
        self.stop_reason: str | None = None
        self._summary = dict(summary or {})
        self.clock = clock
        self._start_s = clock()
        self._earlier_s = earlier.summary.get("elapsed_s", 0.0)
        self._stop_s = 0.0
        self._save_s = clock()
        self._running: set[str] = set()  # trials of this command
        for name, row in self.rows.items():
            if row.status == "running":
                # The earlier command was killed.
                self.rows[name] = replace(row, status="stopped")

    @property
    def elapsed_s(self) -> float:
        """Seconds of all commands of this sweep so far, also of those before it was resumed."""
        return self._earlier_s + self.clock() - self._start_s

    def add(self, settings: dict[str, Any]) -> str:
        """Add a trial, and return its name: that of a trial of an earlier command with the same
        settings, otherwise a new one such as `t004`.
        """
        typed = self.plan.trial("", settings).settings
        for name, row in self.rows.items():
            if row.settings == typed:
                return name
        name = f"t{len(self.rows) + 1:03}"
        is_recipe = self.plan.is_recipe(typed)
        self.rows[name] = TrialRow(name, "waiting", typed, is_recipe=is_recipe)
        return name

    def has_reached(self, name: str, rung: int) -> bool:
        """Return whether a trial has reached a rung, or has ended and cannot reach it."""
        row = self.rows[name]
        return len(row.rungs) > rung or row.status in ENDED

    def start(self, name: str) -> None:
        """Mark a trial as running and write its row, so that a resumed sweep finds its run."""
        self._running.add(name)
        self._update(name, TrialOutcome("running"))

    def end(self, name: str, outcome: TrialOutcome, rung: Rung | None = None) -> None:
        """Write the row of a trial that has ended; ignored if it ended before.

        Args:
            rung: The rung that it has reached; None: it has ended before one.
        """
        if name not in self._running:
            return
        self._running.remove(name)
        if rung is not None:
            row = self.rows[name]
            self.rows[name] = replace(row, rungs=(*row.rungs, rung))
            done = sum(each.samples or 0 for each in self.rows.values())
            planned = planned_samples(self.plan.request.space.num_trials, self.plan.rungs)
            self.reporter.prepare_progress(PrepareProgress("tune", done, planned, unit="samples"))
        self._update(name, outcome)
        if outcome.status != "stopped":
            self.reporter.trial(self.rows[name], len(self.plan.rungs))

    def stop_all(self) -> None:
        """Set the status of all running trials to `stopped`, and write their rows to
        trials.jsonl.
        """
        for name in list(self._running):
            self.end(name, TrialOutcome("stopped"))

    def prune_paused(self, keep: Sequence[str] = ()) -> None:
        """Set the status of paused trials to `pruned`, except of those to keep."""
        for name, row in self.rows.items():
            if row.status == "paused" and name not in keep:
                self.rows[name] = replace(row, status="pruned")
        self._write_rows()

    def _update(self, name: str, outcome: TrialOutcome) -> None:
        """Write the row of a trial from its outcome and the metrics of its run."""
        run = self.folder.run(name)
        elapsed_s = run.read_json("result.json").get("elapsed_s", 0.0)
        row = replace(self.rows[name], elapsed_s=elapsed_s)
        trial = self.plan.trial(name, row.settings)
        lines = list(read_lines(run.path / "metrics.jsonl"))
        self.rows[name] = measured_row(row, trial, outcome, self.plan.request.goal, lines)
        self._write_rows()

    def _write_rows(self) -> None:
        self.folder.write_rows(list(self.rows.values()))

    def write_summary(self, status: str, best: Recommendation | None = None) -> None:
        """Write sweep.json with the time used so far and the recommended trial."""
        self._summary["status"] = status
        self._summary["recommendation"] = None if best is None else best._asdict()
        self._summary["elapsed_s"] = self.elapsed_s
        self.folder.write_json(SWEEP, self._summary)

    def poll(self) -> None:
        """Save the time, and stop if the budget is spent.

        Call it several times a second.
        """
        now_s = self.clock()
        if now_s >= self._save_s + SAVE_INTERVAL_S:
            self._save_s = now_s
            self.write_summary("running")
        budget_s = self.plan.request.budget_s
        if self.stop_reason is None and budget_s is not None and self.elapsed_s >= budget_s:
            self._request_stop("budget", "the budget is spent; stopping the running trials")

    def is_stopped(self) -> bool:
        """Return whether a stop of the sweep was requested and its trials have ended.

        True also if a trial did not stop within the time limit of saving a checkpoint.
        """
        if self.stop_reason is None:
            return False
        # As long as a run waits for a worker that saves.
        stop_limit_s = self.plan.request.base.cluster.state_limits_s["saving"]
        return not self._running or self.clock() > self._stop_s + stop_limit_s

    def _request_stop(self, reason: str, message: str) -> None:
        """Make running trials stop at a checkpoint, and those that start now at once."""
        self.stop_reason = reason
        self._stop_s = self.clock()
        self.reporter.log(message, "stop")
        self.folder.write(STOP_FILE, reason)

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """Request that trials stop at a checkpoint; raise ForceExit at the second signal."""
        if self.stop_reason == "stopped":
            raise ForceExit
        self._request_stop(
            "stopped", "stopping the running trials; press Ctrl-C again to exit immediately"
        )
