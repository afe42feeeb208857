"""Read a sweep folder: trials, their table, ranks within each global batch, and the cells of heat
maps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mmray.report.run import format_compact, format_number, format_setting, read_json, read_lines
from mmray.storage.paths import AnyPath
from mmray.sweep_files import BATCH_SETTINGS, SWEEP, TRIALS

# of others: the status
STATUS_LABELS = {"out_of_memory": "out of<br>memory", "finished": "not<br>measured"}


class Goal(NamedTuple):
    """The compared field of a trial, its title, and whether it is maximized."""

    metric: str
    title: str
    maximize: bool


GOALS = {
    "throughput": Goal("samples_per_s", "samples per second", True),
    "loss": Goal("eval_loss", "held-out loss", False),
    "recall": Goal("recall_at_1", "recall@1", True),
    "time-to-quality": Goal("quality_s", "seconds to the target loss", False),
    "memory": Goal("peak_gib", "peak memory in GiB", False),
}
RUNG_GOALS = GOALS | {"time-to-quality": GOALS["loss"]}  # what is compared at rungs
LEARNING_GOALS = ("loss", "recall", "time-to-quality")  # compared by held-out metrics at rungs


class Column(NamedTuple):
    """A column of the table of trials: a field, or the searched setting of that name."""

    field: str
    title: str
    digits: int | None = 0
    scale: float = 1.0

    def text(self, trial: TrialRecord) -> str:
        """Return the cell of a trial."""
        if self.field in trial.settings:
            return format_setting(trial.settings[self.field])
        value = trial.value(self.field)
        return format_number(None if value is None else self.scale * value, self.digits)


COLUMNS = (
    Column("rank", "rank"),
    Column("samples", "samples"),
    Column("eval_loss", "held-out loss", 3),
    Column("recall_at_1", "recall@1", 3),
    Column("quality_s", "seconds to target"),
    Column("global", "global batch"),
    Column("micro", "micro"),
    Column("accumulation", "accum."),
    Column("workers", "workers"),
    Column("samples_per_s", "samples/s", None),
    Column("samples_per_s_min", "min samples/s", None),
    Column("samples_per_s_max", "max samples/s", None),
    Column("step_p50_s", "ms per step", scale=1000.0),
    Column("peak_gib", "peak GiB", 2),
    Column("loss", "training loss", 3),
)
# not shown for goals that depend on learning
SPEED_DETAILS = ("samples_per_s_min", "samples_per_s_max", "step_p50_s")


class Probe(NamedTuple):
    """Measured steps of a worker group, and the fit to them (tuning/README.md has their fields)."""

    number: int
    settings: str
    samples: list[dict[str, Any]]
    limit_gib: float
    fit: dict[str, Any]


class HeatMap(NamedTuple):
    """The best trial of each (micro-batch, row of the map), with titles of the map and of its
    rows.
    """

    title: str
    axis: str
    cells: dict[tuple[int, tuple[Any, ...]], TrialRecord]


@dataclass(frozen=True)
class TrialRecord:
    """One line of trials.jsonl; missing values are None."""

    name: str
    status: str
    values: dict[str, Any] = field(repr=False)
    page: str | None = None  # report of the trial, relative to the sweep's

    def value(self, name: str) -> float | None:
        return self.values.get(name)

    def measured(self, name: str) -> float | None:
        """Return a value of a finished trial or of a predicted batch shape."""
        return self.value(name) if self.status in ("finished", "predicted") else None

    @property
    def shape(self) -> str:
        """Format as `micro × accumulation × workers`."""
        return " × ".join(
            str(self.values.get(name, "?")) for name in ("micro", "accumulation", "workers")
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The searched settings."""
        return self.values.get("settings") or {}

    @property
    def others(self) -> str:
        """The searched settings that are not of the batch."""
        return _format_settings(
            {name: self.settings[name] for name in self.settings if name not in BATCH_SETTINGS}
        )

    @property
    def rung_values(self) -> list[float]:
        """The held-out values at the rungs that were reached."""
        return [rung["value"] for rung in self.values.get("rungs") or []]

    def cell_text(self, name: str, best: TrialRecord | None) -> str:
        """Return the text of a heat map cell: the value, or why there is none."""
        value = self.measured(name)
        if value is None:
            return STATUS_LABELS.get(self.status, self.status)
        text = (
            f"<b>{format_compact(value)}</b>"
            if self.status == "finished"
            else f"≈ {format_compact(value)}"
        )
        text = f"★ {text}" if best is not None and self.name == best.name else text
        predicted = self.value(f"predicted_{name}")
        return (
            (f"{text}<br>≈ {format_compact(predicted)}")
            if predicted and self.status == "finished"
            else text
        )


@dataclass(frozen=True)
class SweepRecord:
    """A sweep and its trials in order."""

    folder: AnyPath
    summary: dict[str, Any]
    trials: list[TrialRecord]

    @classmethod
    def read(cls, folder: AnyPath) -> SweepRecord:
        """Read the sweep in `folder`; the last row of each trial is used."""
        lines = {
            str(line["trial"]): line for line in read_lines(folder / TRIALS) if "trial" in line
        }
        trials = {
            name: TrialRecord(
                name, str(line.get("status", "")), line, page=_report_link(folder, line.get("run"))
            )
            for name, line in lines.items()
        }
        sweep = cls(folder, read_json(folder / SWEEP), list(trials.values()))
        ranks: Counter[Any] = Counter()
        for trial in sorted(trials.values(), key=sweep.sort_key) if not sweep.is_learning else ():
            if trial.measured(sweep.goal.metric) is not None:
                ranks[size := trial.values.get("global")] += 1
                trials[trial.name] = replace(trial, values=trial.values | {"rank": ranks[size]})
        return replace(sweep, trials=list(trials.values()))

    @property
    def status(self) -> str:
        """As in sweep.json; `unfinished` if it is running or was killed."""
        return str(self.summary.get("status", "unfinished")).replace("running", "unfinished")

    @property
    def goal(self) -> Goal:
        return GOALS.get(str(self.summary.get("goal")), GOALS["throughput"])

    def sort_key(self, trial: TrialRecord) -> tuple[bool, float]:
        """Sort the best trial first, unmeasured ones last."""
        value = trial.measured(self.goal.metric)
        return value is None, (value or 0.0) * (-1 if self.goal.maximize else 1)

    @property
    def columns(self) -> list[Column]:
        """The searched settings, and the columns of which some trial has a value."""
        names = dict.fromkeys(
            name for trial in self.trials for name in trial.settings if name not in BATCH_SETTINGS
        )
        shown = [
            column for column in COLUMNS if not (self.is_learning and column.field in SPEED_DETAILS)
        ]
        shown = [
            column
            for column in shown
            if any(trial.value(column.field) is not None for trial in self.trials)
        ]
        return [*(Column(name, name) for name in names), *shown]

    @property
    def table(self) -> list[TrialRecord]:
        """The trials by global batch and rank, or by the last rung and the value there."""

        def key(trial: TrialRecord) -> tuple[float, ...]:
            if not self.is_learning:
                return (trial.value("global") or 0, *self.sort_key(trial))
            return -len(trial.rung_values), sum(trial.rung_values[-1:]) * (
                -1 if self.goal.maximize else 1
            )

        return sorted(self.trials, key=key)

    @property
    def recommendation(self) -> dict[str, Any]:
        return self.summary.get("recommendation") or {}

    @property
    def best(self) -> TrialRecord | None:
        return self.trial(self.recommendation.get("best"))

    @property
    def best_value(self) -> str:
        """The goal's value of the best trial, formatted."""
        column = next(column for column in COLUMNS if column.field == self.goal.metric)
        return column.text(self.best) if self.best else ""

    def trial(self, name: Any) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.name == name), None)

    @property
    def best_per_global_batch(self) -> list[tuple[str, TrialRecord]]:
        """Return (global batch, its best trial) in ascending order of the batch."""
        trials = [
            (size, self.trial(name))
            for size, name in (self.recommendation.get("per_global") or {}).items()
        ]
        return sorted(
            ((size, trial) for size, trial in trials if trial),
            key=lambda item: (len(item[0]), item[0]),
        )

    @property
    def counts(self) -> str:
        """Number of trials with each status, formatted."""
        counts = Counter(map(self.status_label, self.trials))
        return ", ".join(f"{count} {status}" for status, count in counts.most_common())

    def status_label(self, trial: TrialRecord) -> str:
        """Format the status of a trial."""
        labels = {"finished": "measured"} if self.is_probe else {"pruned": "ended early"}
        return labels.get(trial.status, trial.status).replace("_", " ")

    @property
    def rungs(self) -> str:
        """The samples after which trials are compared."""
        *first, last = [f"{samples:,}" for samples in self.summary.get("rungs", [0])]
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def is_learning(self) -> bool:
        """Whether trials are compared by held-out metrics at rungs."""
        return self.summary.get("goal") in LEARNING_GOALS

    @property
    def is_probe(self) -> bool:
        """Whether batch shapes were measured on synthetic batches instead of trained in trials."""
        return self.summary.get("measures") == "shapes"

    @property
    def probes(self) -> list[Probe]:
        """Return the measurements and the fit of each worker group of a probe."""
        pairs = zip(self.summary.get("probes") or [], self.summary.get("fits") or [], strict=True)
        measured = [(probe, fit) for probe, fit in pairs if probe["samples"]]
        return [
            Probe(
                number,
                _format_settings(probe["settings"]),
                probe["samples"],
                probe["limit_gib"],
                fit,
            )
            for number, (probe, fit) in enumerate(measured, 1)
        ]

    @property
    def curve_title(self) -> str:
        """Title of the learning curves of the trials."""
        return "recall@1" if self.summary.get("goal") == "recall" else "held-out loss"

    def heat_maps(self) -> list[HeatMap]:
        """Return the heat maps of more than one cell.

        Rows are accumulation, which trials search; of a probe, where it follows from the global
        batch, they are the global batch and the workers.
        """
        names = ["global", "workers"] if self.is_probe else ["accumulation"]
        varying = [
            name for name in names if len({trial.value(name) for trial in self.trials}) > 1
        ] or names[:1]
        axis = ", ".join({"global": "global batch"}.get(name, name) for name in varying)
        maps: dict[str, HeatMap] = {}
        for trial in sorted(self.trials, key=self.sort_key):
            micro, *row = (trial.values.get(name) for name in ("micro", *varying))
            if isinstance(micro, int) and all(isinstance(value, int) for value in row):
                workers = "" if self.is_probe else f"workers {trial.values.get('workers')}"
                title = ", ".join(filter(None, [self.goal.title, workers, trial.others]))
                maps.setdefault(title, HeatMap(title, axis, {})).cells.setdefault(
                    (micro, tuple(row)), trial
                )
        return [heat_map for heat_map in maps.values() if len(heat_map.cells) > 1]


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {format_setting(value)}" for name, value in settings.items())


def _report_link(folder: AnyPath, run: Any) -> str | None:
    """Return the relative path of a trial's report if it is inside the sweep folder."""
    page = f"{run}/report.html"
    return (
        page
        if run and ".." not in page and not page.startswith("/") and (folder / page).is_file()
        else None
    )
