"""A sweep's folder as the report reads it: trials, their ranks within each global batch, the cells of its heat maps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmray.report.run import read_json, read_lines

SWEEP, TRIALS = "sweep.json", "trials.jsonl"
AXES = ("batch.micro", "batch.accumulation", "batch.global")
OUT_OF_MEMORY = "out_of_memory"
# How a goal is read: the field of a trial, its title, and whether more is better.
GOALS = {
    "throughput": ("samples_per_s", "samples/s", True),
    "loss": ("loss", "loss", False),
    "recall": ("recall_at_1", "recall@1", True),
    "memory": ("peak_gib", "peak GiB", False),
}


@dataclass(frozen=True)
class Trial:
    """One line of trials.jsonl; figures that were not measured are None."""

    name: str
    status: str
    values: dict[str, Any] = field(repr=False)
    rank: int | None = None  # among the measured trials of its global batch, 1 being the best
    page: str | None = None  # its own report, relative to the sweep's

    def figure(self, name: str) -> float | None:
        value = self.values.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def shape(self) -> str:
        """micro x accumulation x workers."""
        return " × ".join(str(self.values.get(name, "?")) for name in ("micro", "accumulation", "workers"))

    @property
    def others(self) -> str:
        """The searched settings that are no axis of a heat map, the workers left out."""
        settings = (self.values.get("settings") or {}).items()
        return ", ".join(f"{name} {value}" for name, value in settings if name not in (*AXES, "cluster.workers"))

    @property
    def told(self) -> str:
        """What is said below its figures: other searched settings, and why it failed."""
        return "; ".join(part for part in (self.others, self.values.get("error")) if part)


@dataclass(frozen=True)
class Grid:
    """A heat map: the trials of one number of workers and one choice of all other settings."""

    title: str
    micro: list[int]
    accumulation: list[int]
    cells: dict[tuple[int, int], Trial]  # (micro, accumulation) -> its best trial


@dataclass(frozen=True)
class Sweep:
    """A sweep and its trials, as they were tried."""

    folder: Path
    about: dict[str, Any]
    trials: list[Trial]

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """The sweep in `folder`; a trial that was written twice counts as it was written last."""
        about = read_json(folder / SWEEP)
        lines = {str(line["trial"]): line for line in read_lines(folder / TRIALS) if "trial" in line}
        trials = [
            Trial(name, str(line.get("status", "")), line, page=_page(folder, line.get("run")))
            for name, line in lines.items()
        ]
        return cls(folder, about, _ranked(trials, *_goal(about)))

    @property
    def goal(self) -> tuple[str, str, bool]:
        """The field that is compared, its title, and whether more of it is better."""
        name, more = _goal(self.about)
        return name, next((title for field, title, _ in GOALS.values() if field == name), name), more

    @property
    def recommendation(self) -> dict[str, Any]:
        return self.about.get("recommendation") or {}

    @cached_property
    def best(self) -> Trial | None:
        return self.trial(self.recommendation.get("best"))

    def trial(self, name: Any) -> Trial | None:
        return next((trial for trial in self.trials if trial.name == name), None)

    @property
    def per_global(self) -> list[tuple[str, Trial]]:
        """(global batch, its best trial), the smallest batch first."""
        found = [(size, self.trial(name)) for size, name in (self.recommendation.get("per_global") or {}).items()]
        return sorted(((size, trial) for size, trial in found if trial), key=lambda item: (len(item[0]), item[0]))

    def count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

    def grids(self) -> list[Grid]:
        """A grid for each choice of workers and other settings; none where nothing but one cell would be in each."""
        groups: dict[str, list[Trial]] = defaultdict(list)
        for trial in self.trials:
            if isinstance(trial.values.get("micro"), int) and isinstance(trial.values.get("accumulation"), int):
                workers = f"workers {trial.values.get('workers')}"
                groups[f"{workers}, {trial.others}" if trial.others else workers].append(trial)
        grids = [_grid(title, trials, self.goal) for title, trials in groups.items()]
        return [grid for grid in grids if len(grid.cells) > 1]


def _goal(about: dict[str, Any]) -> tuple[str, bool]:
    name, _, more = GOALS.get(str(about.get("goal")), GOALS["throughput"])
    return name, more


def _page(folder: Path, run: Any) -> str | None:
    """Where a trial's own report is, if it is inside the sweep's folder."""
    page = folder / str(run or "") / "report.html"
    inside = page.resolve().is_relative_to(folder.resolve())
    return page.resolve().relative_to(folder.resolve()).as_posix() if run and inside and page.is_file() else None


def _ranked(trials: list[Trial], name: str, more: bool) -> list[Trial]:
    """Trials with their ranks; different global batches train differently, so they are not compared."""
    ranks: dict[str, int] = {}
    by_global: dict[Any, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.status == "finished" and trial.figure(name) is not None:
            by_global[trial.values.get("global")].append(trial)
    for group in by_global.values():
        best_first = sorted(group, key=lambda trial: trial.figure(name) or 0.0, reverse=more)
        ranks |= {trial.name: place for place, trial in enumerate(best_first, 1)}
    return [Trial(each.name, each.status, each.values, ranks.get(each.name), each.page) for each in trials]


def _grid(title: str, trials: list[Trial], goal: tuple[str, str, bool]) -> Grid:
    cells: dict[tuple[int, int], Trial] = {}
    for trial in trials:
        place = trial.values["micro"], trial.values["accumulation"]
        if place not in cells or _is_better(trial, cells[place], goal):
            cells[place] = trial
    micro, accumulation = ({place[axis] for place in cells} for axis in (0, 1))
    return Grid(title, sorted(micro), sorted(accumulation), cells)


def _is_better(trial: Trial, other: Trial, goal: tuple[str, str, bool]) -> bool:
    one, two = trial.figure(goal[0]), other.figure(goal[0])
    if one is None or two is None:
        return two is None and one is not None
    return one > two if goal[2] else one < two
