"""Request, budget, folder and state of a sweep, without Ray.

STORAGE/NAME/ recipe.yaml (base of all trials) sweep.json trials.jsonl (one row per trial) best.yaml
               trials/tNNN/ (run folders)
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

from mmray.config import Config, from_yaml
from mmray.config.search_space import Space
from mmray.errors import ForceExit, StorageError, UsageError
from mmray.report.run import read_lines
from mmray.storage import lease
from mmray.storage.paths import AnyPath
from mmray.sweep_files import SWEEP, TRIALS
from mmray.training.backend import num_gpus
from mmray.training.monitor import RunReporter
from mmray.training.run_dir import RunDir, forbidden_changes, has_other_files, select_folder
from mmray.tuning.results import ENDED, Row, TrialOutcome, build_row
from mmray.tuning.trials import SweepPlan, Trial

T = TypeVar("T")
# Settings of the recipe that a resumed sweep may change.
_RESUMABLE_DATA = ("data.cache", "data.local_cache", "data.local_cache_gb")
RESUMABLE_CHANGES = ("run", "cluster.address", "cluster.start_timeout_s", *_RESUMABLE_DATA)
STOP_FILE = "stop"  # its existence makes running trials stop at a checkpoint
TABLE_INTERVAL_S = 1.0
# pauses while the storage fails; trials go on meanwhile
STORAGE_RETRIES_S = (5.0, 15.0, 30.0, 60.0, 120.0)
SAVE_INTERVAL_S = 10.0  # at most this much time of a killed command does not count for the budget


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep over all its commands; None: no limit."""

    seconds: float | None = None
    gpu_seconds: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> Budget:
        """Parse `2h`, `30m`, `90s` or `40gpu-hours`. Raises UsageError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|gpu-hours)", text or "")
        if text and (match is None or not float(match[1])):
            raise UsageError(
                f"--budget {text}: write a time such as 2h or 30m, or GPU-hours such as 40gpu-hours"
            )
        if match is None:
            return cls()
        unit_s = {"s": 1, "m": 60, "h": 3600, "gpu-hours": 3600}[match[2]]
        seconds = float(match[1]) * unit_s
        return cls(gpu_seconds=seconds) if match[2] == "gpu-hours" else cls(seconds)

    def is_spent(self, seconds: float, gpu_seconds: float) -> bool:
        spent = ((seconds, self.seconds), (gpu_seconds, self.gpu_seconds))
        return any(limit is not None and value >= limit for value, limit in spent)


@dataclass(frozen=True)
class Sweep:
    """A search request."""

    base: Config  # with the length of the recipe (steps, samples or epochs), for best.yaml
    trial_settings: Config  # equal, but with the length of a trial if the user gave one
    space: Space
    goal: str
    concurrency: int | None = None  # None: 1 on a single machine, as many as fit on a cluster
    searcher: str = "random"  # or `optuna`
    scheduler: str = "halving"  # or `asha`, `pbt`
    budget: Budget = field(default_factory=Budget)
    # global batch of the recipe; `base` has none if accumulation is searched
    recipe_rows: int | None = None


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Paths and files of one sweep, on storage that all nodes share."""

    def write_rows(self, rows: list[Row]) -> None:
        """Write all rows in trial order."""
        self.write(
            TRIALS,
            "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["trial"])),
        )

    def read_rows(self) -> dict[str, Row]:
        """Return the rows of earlier commands by trial."""
        return {
            row["trial"]: {"rungs": [], "parent": None} | row
            for row in read_lines(self.path / TRIALS)
        }


def resolve_sweep_dir(base: Config, identity: dict[str, Any], reporter: RunReporter) -> SweepDir:
    """Return the folder of this sweep, whose sweep.json must match `identity`. Raises UsageError.

    Logs why the newest earlier sweep of this recipe is not resumed.
    """

    def inspect(path: AnyPath) -> tuple[list[str], bool] | None:
        before = RunDir(path).read_json(SWEEP)
        if before is None:
            if has_other_files(path, (lease.FOLDER, "recipe.yaml", STOP_FILE)):
                raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
            return None
        changes = [
            f"{key}: {before.get(key)} -> {now}"
            for key, now in identity.items()
            if before.get(key) != now
        ]
        recipe = from_yaml((path / "recipe.yaml").read_text(), str(path / "recipe.yaml"))
        old, new = (config.model_dump(mode="json", by_alias=True) for config in (recipe, base))
        return changes + forbidden_changes(old, new, RESUMABLE_CHANGES), before[
            "status"
        ] == "finished"

    selection = select_folder(base.run, f"{base.recipe}-tune", inspect, "sweep")
    if selection.skipped:
        reporter.log(selection.skipped[-1], "not resumed")
    return SweepDir(selection.path)


@dataclass(frozen=True)
class TimeLeft:
    """Seconds of a sweep; None: unknown, or no budget."""

    elapsed_s: float
    estimated_s: float | None  # to the end, from the samples per second of this command
    budget_s: float | None  # of time, or of GPUs at the rate of the running trials


class SweepReporter(RunReporter, Protocol):
    """Receives the progress of data preparation, then of the trials.

    `rungs` are those of a full trial, in samples.
    """

    def progress(self, row: Row, rungs: tuple[int, ...]) -> None:
        """Receive the row of a trial that reached a rung or ended."""

    def table(self, rows: Sequence[Row], rungs: tuple[int, ...], time_left: TimeLeft) -> None:
        """Receive all rows, once a second."""


@dataclass
class SweepState:
    """The rows of a running sweep by trial.

    Called by Ray Tune in its thread, and by signal handlers.
    """

    folder: SweepDir
    plan: SweepPlan
    reporter: SweepReporter
    rows: dict[str, Row]  # of earlier commands too
    budget: Budget = field(default_factory=Budget)
    summary: dict[str, Any] = field(default_factory=dict)  # content of sweep.json
    planned_samples: int = 0  # of all trials
    trials: dict[str, Trial] = field(default_factory=dict)  # of this command
    # trial: start of its workers by `clock`
    running: dict[str, float | None] = field(default_factory=dict)
    stop_reason: str | None = None  # `stopped` by the user, or `budget`
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # of earlier commands
        self._earlier_s = (self.folder.read_json(SWEEP) or {}).get("elapsed_s", 0.0)
        self._start_s, self._stop_s, self._shown_s, self._saved_s = (
            self.clock(),
            0.0,
            -math.inf,
            self.clock(),
        )
        # by earlier commands
        self._spent_s = {name: row["elapsed_s"] or 0.0 for name, row in self.rows.items()}
        self._earlier_samples = self._num_samples()
        for row in self.rows.values():
            # the earlier command was killed
            row["status"] = row["status"].replace("running", "stopped")

    @property
    def elapsed_s(self) -> float:
        """Seconds of all commands of this sweep."""
        return self._earlier_s + self.clock() - self._start_s

    @property
    def gpu_seconds(self) -> float:
        """Seconds of all trials times their GPUs (workers, if they train on CPUs)."""
        gpus = num_gpus(self.plan.base)
        return sum(
            self._trial_s(name) * (row["workers"] or 0) * gpus for name, row in self.rows.items()
        )

    def _trial_s(self, name: str) -> float:
        """Return the seconds that a trial has had workers."""
        start_s = self.running.get(name)
        return self._spent_s.get(name, 0.0) + (0.0 if start_s is None else self.clock() - start_s)

    def time_left(self) -> TimeLeft:
        """Return the time until the end and until the budget is spent."""
        samples, this_s = self._num_samples() - self._earlier_samples, self.clock() - self._start_s
        left = self.planned_samples - self._num_samples()
        budget_s = None if self.budget.seconds is None else self.budget.seconds - self.elapsed_s
        if self.budget.gpu_seconds is not None:
            active = [name for name, start_s in self.running.items() if start_s is not None]
            gpus = sum((self.rows[name]["workers"] or 0) for name in active) * num_gpus(
                self.plan.base
            )
            budget_s = (self.budget.gpu_seconds - self.gpu_seconds) / max(gpus, 1)
        estimated_s = max(0, left) * this_s / samples if samples else None
        return TimeLeft(
            self.elapsed_s, estimated_s, budget_s if budget_s is None else max(0.0, budget_s)
        )

    def _num_samples(self) -> int:
        """Return the samples of all reached rungs."""
        return sum(
            row["rungs"][-1]["samples"] - (row["parent"] or {"samples": 0})["samples"]
            for row in self.rows.values()
            if row["rungs"]
        )

    def add(self, settings: dict[str, Any]) -> str:
        """Return the name of a suggested trial: that of an earlier command with the same settings,
        or the next.
        """
        trial = self.plan.trial("", settings)
        names = (
            name
            for name, row in self.rows.items()
            if name not in self.trials
            and row["settings"] == trial.settings
            and row["parent"] is None
        )
        name = next(names, None) or self._next_name()
        self.trials[name] = self.plan.trial(name, settings)
        return name

    def _next_name(self) -> str:
        return f"t{max((int(name[1:]) for name in {*self.rows, *self.trials}), default=0) + 1:03}"

    def add_child(self, parent: str, settings: dict[str, Any], samples: int) -> str:
        """Add a trial that continues `parent` after these samples, and return its name.

        Reuses the name of an earlier command. The child has the rungs of its parent.
        """
        origin = {"trial": parent, "samples": samples}
        for name, row in self.rows.items():
            if name not in self.trials and (row["parent"], row["settings"]) == (origin, settings):
                self.trials[name] = self.plan.trial(name, settings)
                return name
        name = self._next_name()
        self.trials[name] = self.plan.trial(name, settings)
        rungs = [
            rung | {"elapsed_s": 0.0}
            for rung in self.rows[parent]["rungs"]
            if rung["samples"] <= samples
        ]
        row = build_row(
            self.trials[name], TrialOutcome("paused"), self.plan.goal, rungs=rungs, parent=origin
        )
        self.rows[name] = row
        self._write_rows()
        return name

    def has_reached(self, name: str, rung: int) -> bool:
        """Return whether a trial needs no training to the rung, counted from 0."""
        row = self.rows.get(name)
        return row is not None and (len(row["rungs"]) > rung or row["status"] in ENDED)

    def start(self, name: str) -> None:
        """Write the row of a started trial, so that the next command finds its run.

        It may wait for its workers.
        """
        self.running[name] = None
        if self.rows.get(name, {}).get("status") not in ENDED:
            self._write_row(name, TrialOutcome("running"))

    def start_workers(self, name: str) -> None:
        """Count the time of a trial from now on; waiting for nodes costs no GPU."""
        if name in self.running and self.running[name] is None:
            self.running[name] = self.clock()

    def reach(self, name: str, rung: Row) -> None:
        """Add a rung that a trial has reached; a trial of an earlier command reports its rungs
        again.
        """
        if name not in self.running:
            self.start(name)
        rungs = self.rows[name]["rungs"]
        if all(rung["samples"] != each["samples"] for each in rungs):
            rungs.append(rung | {"elapsed_s": self._trial_s(name)})
            self._write_row(name, TrialOutcome("running"))
            if rung["samples"] < self.plan.rungs[-1]:  # otherwise `end` reports it
                self.reporter.progress(self.rows[name], self.plan.rungs)

    def end(self, name: str, outcome: TrialOutcome | None = None) -> None:
        """Write the row of an ended trial.

        Without an outcome the scheduler ended it, unless it was complete.
        """
        self._spent_s[name] = self._trial_s(name)
        self.running.pop(name, None)
        row = self.rows.get(name)
        if row is not None and row["status"] != "running":  # ended before
            row["elapsed_s"] = self._spent_s[name]  # a cooldown adds to it
            return
        if outcome is None:
            rungs = row["rungs"] if row is not None else []
            complete = bool(rungs) and rungs[-1]["samples"] >= self.plan.rungs[-1]
            outcome = TrialOutcome("finished" if complete else "pruned" if rungs else "stopped")
        self._write_row(name, outcome)
        if outcome.status not in ("stopped", "paused"):
            self.reporter.progress(self.rows[name], self.plan.rungs)

    def prune_paused(self, keep: Sequence[str] = ()) -> None:
        """Mark the trials that no later rung continues."""
        for name, row in self.rows.items():
            if row["status"] == "paused" and name not in keep:
                row["status"] = "pruned"
        self._write_rows()

    def _write_row(self, name: str, outcome: TrialOutcome) -> None:
        """Write the row of a trial from the files of its run."""
        run, row = RunDir(self.folder.path / "trials" / name), self.rows.get(name, {})
        # maybe suggested by an earlier command
        trial = self.trials.get(name) or self.plan.trial(name, row["settings"])
        lines = self._with_retries(lambda: list(read_lines(run.path / "metrics.jsonl")))
        result = self._with_retries(lambda: run.read_json("result.json"))
        self.rows[name] = build_row(
            trial,
            outcome,
            self.plan.goal,
            lines,
            result,
            row.get("rungs", []),
            self._trial_s(name),
            row.get("parent") is None and self.plan.is_recipe(trial),
            row.get("parent"),
        )
        self._write_rows()

    def _write_rows(self) -> None:
        self._with_retries(lambda: self.folder.write_rows(list(self.rows.values())))

    def write_summary(self, **changes: Any) -> None:
        """Write sweep.json with these changes and the time used so far."""
        self.summary |= changes | {
            "elapsed_s": self.elapsed_s,
            "gpu_hours": self.gpu_seconds / 3600,
        }
        self._with_retries(lambda: self.folder.write_json(SWEEP, self.summary))

    def _with_retries(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeated while the storage fails: an error in Ray Tune would
        end all trials.
        """
        for pause_s in STORAGE_RETRIES_S:
            try:
                return call()
            except (OSError, StorageError) as error:
                self.reporter.log(
                    f"cannot access {self.folder.path}: {error}; retrying in {pause_s:g} s",
                    "storage",
                )
                time.sleep(pause_s)
        return call()

    def is_stopped(self) -> bool:
        """Stop when the budget is spent. Return whether no trial runs, or one does not stop, after
        a request.

        Ray Tune calls it several times a second, so it also shows the trials.
        """
        now_s = self.clock()
        if now_s >= self._shown_s + TABLE_INTERVAL_S:
            self._shown_s = now_s
            self.reporter.table(list(self.rows.values()), self.plan.rungs, self.time_left())
        if self.is_budget_spent() and self.stop_reason is None:
            self.request_stop("budget", "the budget is spent; stopping the running trials")
        # then a run would end a worker that saves
        stop_wait_s = self.plan.base.cluster.state_limits_s["saving"]
        return self.stop_reason is not None and (
            not self.running or self.clock() > self._stop_s + stop_wait_s
        )

    def is_budget_spent(self) -> bool:
        """Return whether the budget is spent. Saves the time of the sweep; to be called often."""
        if self.clock() >= self._saved_s + SAVE_INTERVAL_S:
            self._saved_s = self.clock()
            for name in self.running:
                self.rows[name]["elapsed_s"] = self._trial_s(name)
            self._write_rows()
            self.write_summary()
        return self.budget.is_spent(self.elapsed_s, self.gpu_seconds)

    def request_stop(self, reason: str, message: str) -> None:
        """Make running trials stop at a checkpoint, and those that start now at once."""
        self.stop_reason, self._stop_s = reason, self.clock()
        self.reporter.log(message, "stop")
        self._with_retries(lambda: self.folder.write(STOP_FILE, reason))

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """Stop the running trials on the first Ctrl-C or SIGTERM, and keep the results; exit on the
        second.
        """
        if self.stop_reason == "stopped":
            raise ForceExit
        self.request_stop(
            "stopped", "stopping the running trials; press Ctrl-C again to exit immediately"
        )
