"""Read a sweep folder: trials, ranks within each global batch, and the cells of heat maps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mmray.report.run import read_json, read_lines
from mmray.storage.paths import AnyPath

SWEEP, TRIALS = "sweep.json", "trials.jsonl"
BATCH_SETTINGS = ("batch.micro", "batch.accumulation", "batch.global", "cluster.workers")
STATUS_LABELS = {"out_of_memory": "out of<br>memory", "finished": "not<br>measured"}  # of others: the status


class Goal(NamedTuple):
    """The compared field of a trial, its title, and whether it is maximized."""

    metric: str
    title: str
    maximize: bool


GOALS = {
    "throughput": Goal("samples_per_s", "samples/s", True),
    "loss": Goal("eval_loss", "held-out loss", False),
    "recall": Goal("recall_at_1", "recall@1", True),
    "time-to-quality": Goal("quality_s", "seconds to the target loss", False),
    "memory": Goal("peak_gib", "peak GiB", False),
}
LEARNING_GOALS = ("loss", "recall", "time-to-quality")  # compared by held-out metrics at rungs
RECIPE_TRIAL = "t001"  # with the recipe's own settings, if they are in the search space


@dataclass(frozen=True)
class TrialRecord:
    """One line of trials.jsonl; missing values are None."""

    name: str
    status: str
    values: dict[str, Any] = field(repr=False)
    rank: int | None = None  # among measured trials of the same global batch; 1 is best
    page: str | None = None  # report of the trial, relative to the sweep's

    def value(self, name: str) -> float | None:
        return self.values.get(name)

    def measured(self, name: str) -> float | None:
        """Return a value of a finished trial or of a predicted batch shape."""
        return self.value(name) if self.status in ("finished", "predicted") else None

    @property
    def shape(self) -> str:
        """Format as `micro × accumulation × workers`."""
        return " × ".join(str(self.values.get(name, "?")) for name in ("micro", "accumulation", "workers"))

    @property
    def label(self) -> str:
        return f"{self.name}  {self.shape}"

    @property
    def others(self) -> str:
        """The searched settings that are not of the batch."""
        settings = (self.values.get("settings") or {}).items()
        return ", ".join(f"{name} {value}" for name, value in settings if name not in BATCH_SETTINGS)

    @property
    def details(self) -> str:
        """Details below the row: other searched settings, and the error."""
        return "; ".join(part for part in (self.others, self.values.get("error")) if part)

    def cell_text(self, name: str, best: TrialRecord | None) -> str:
        """Return the text of a heat map cell: the value, or why there is none."""
        value = self.measured(name)
        if value is None:
            return STATUS_LABELS.get(self.status, self.status)
        text = f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
        text = f"≈ {text}" if self.status == "predicted" else text
        return f"<b>★ {text}</b>" if best is not None and self.name == best.name else text


@dataclass(frozen=True)
class SweepRecord:
    """A sweep and its trials in order."""

    folder: AnyPath
    summary: dict[str, Any]
    trials: list[TrialRecord]

    @classmethod
    def read(cls, folder: AnyPath) -> SweepRecord:
        """Read the sweep in `folder`; the last row of each trial is used."""
        lines = {str(line["trial"]): line for line in read_lines(folder / TRIALS) if "trial" in line}
        trials = {
            name: TrialRecord(name, str(line.get("status", "")), line, page=_report_link(folder, line.get("run")))
            for name, line in lines.items()
        }
        sweep = cls(folder, read_json(folder / SWEEP), list(trials.values()))
        by_global: dict[Any, list[TrialRecord]] = defaultdict(list)
        for trial in sorted(trials.values(), key=sweep.sort_key):
            if trial.measured(sweep.goal.metric) is not None:
                by_global[trial.values.get("global")].append(trial)
        for group in by_global.values():
            trials |= {trial.name: replace(trial, rank=rank) for rank, trial in enumerate(group, 1)}
        return replace(sweep, trials=list(trials.values()))

    @property
    def goal(self) -> Goal:
        return GOALS.get(str(self.summary.get("goal")), GOALS["throughput"])

    def sort_key(self, trial: TrialRecord) -> tuple[bool, float]:
        """Sort the best trial first, unmeasured ones last."""
        value = trial.measured(self.goal.metric)
        return value is None, (value or 0.0) * (-1 if self.goal.maximize else 1)

    @property
    def recommendation(self) -> dict[str, Any]:
        return self.summary.get("recommendation") or {}

    @property
    def best(self) -> TrialRecord | None:
        return self.trial(self.recommendation.get("best"))

    def trial(self, name: Any) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.name == name), None)

    @property
    def best_per_global_batch(self) -> list[tuple[str, TrialRecord]]:
        """Return (global batch, its best trial) in ascending order of the batch."""
        trials = [(size, self.trial(name)) for size, name in (self.recommendation.get("per_global") or {}).items()]
        return sorted(((size, trial) for size, trial in trials if trial), key=lambda item: (len(item[0]), item[0]))

    def count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

    def heat_maps(self) -> dict[str, dict[tuple[int, int], TrialRecord]]:
        """Return {title: {(micro, accumulation): its best trial}}, without heat maps of one cell."""
        maps: dict[str, dict[tuple[int, int], TrialRecord]] = defaultdict(dict)
        for trial in sorted(self.trials, key=self.sort_key):
            micro, accumulation = (trial.values.get(name) for name in ("micro", "accumulation"))
            if isinstance(micro, int) and isinstance(accumulation, int):
                title = ", ".join(filter(None, [f"workers {trial.values.get('workers')}", trial.others]))
                maps[title].setdefault((micro, accumulation), trial)
        return {title: cells for title, cells in maps.items() if len(cells) > 1}


def _report_link(folder: AnyPath, run: Any) -> str | None:
    """Return the relative path of a trial's report if it is inside the sweep folder."""
    page = f"{run}/report.html"
    return page if run and ".." not in page and not page.startswith("/") and (folder / page).is_file() else None
