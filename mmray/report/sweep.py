"""Read a sweep folder, and choose what its page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmray.report.run import format_number, format_setting, read_json
from mmray.storage.paths import AnyPath, read_lines
from mmray.sweep_files import BATCH_SETTINGS, GOALS, SWEEP, TRIALS, Goal, Recommendation, TrialRow


class Column(NamedTuple):
    """A column of the table of trials.

    `text(row)` returns the cell of a trial.

    Attributes:
        field: Name of a searched setting, such as `optimizer.lr`, or of a measurement in
            trials.jsonl, such as `peak_gib`.
        title: Heading.
        digits: Digits after the point; None: about three significant digits.
        scale: Factor by which the value is multiplied before it is shown.
    """

    field: str
    title: str
    digits: int | None = 0
    scale: float = 1.0

    def text(self, row: TrialRow) -> str:
        """Return the cell of a trial in this column; a value that was not measured is a dash."""
        if self.field in row.settings:
            return format_setting(row.settings[self.field])
        value = getattr(row, self.field, None)
        return format_number(None if value is None else self.scale * value, self.digits)


COLUMNS = (
    Column("samples", "samples"),
    Column("global_batch_size", "global"),
    Column("micro", "micro"),
    Column("accumulation", "accum"),
    Column("workers", "workers"),
    Column("samples_per_s", "samples/s", None),
    Column("step_p50_s", "ms/step", scale=1000.0),
    Column("peak_gib", "GiB", 2),
)


def trial_columns(rows: Sequence[TrialRow]) -> list[Column]:
    """Return the columns of the table of trials: the settings that the sweep varies, then what was
    measured of a trial.

    The batch, such as its micro-batch, is among the measurements.
    """
    names = dict.fromkeys(name for row in rows for name in row.settings)
    settings = [Column(name, name) for name in names if name not in BATCH_SETTINGS]
    measured = [
        column for column in COLUMNS if any(getattr(row, column.field) is not None for row in rows)
    ]
    return settings + measured


@dataclass(frozen=True)
class SweepRecord:
    """Content of the folder of a sweep, in which trials with different settings were compared.

    Attributes:
        folder: The folder.
        summary: Content of sweep.json, {} if it is missing: `status`, `recommendation` ({best,
            why}, or None), `elapsed_s`, `recipe`, `goal` and `environment`. Of trials that train
            also `space` (by setting the listed values, or the range as text), `rungs` and
            `concurrency`; of measured batch shapes `measures` (`shapes`) and `workers`.
        trials: The rows of trials.jsonl, one per trial: settings, status and measurements.
    """

    folder: AnyPath
    summary: dict[str, Any]
    trials: list[TrialRow]

    @classmethod
    def read(cls, folder: AnyPath) -> SweepRecord:
        """Read the files of a sweep folder: sweep.json and trials.jsonl.

        The last row of each trial in trials.jsonl is used. Missing files give an empty summary and
        no trials.
        """
        rows = [
            TrialRow.from_json(line)
            for line in read_lines(folder / TRIALS)
            if "trial" in line and "status" in line
        ]
        by_trial = {row.trial: row for row in rows}
        return cls(folder, read_json(folder / SWEEP), list(by_trial.values()))

    @property
    def status(self) -> str:
        """`finished`, `stopped` (by the user), `budget` (spent), `failed` or `unfinished`."""
        status = self.summary.get("status", "unfinished")
        return "unfinished" if status == "running" else str(status)

    @property
    def goal_name(self) -> str:
        """`throughput` (also if sweep.json has no valid goal), `loss` or `recall`."""
        name = str(self.summary.get("goal"))
        return name if name in GOALS else "throughput"

    @property
    def goal(self) -> Goal:
        """What the sweep optimizes, a Goal: `title` (with the unit), `maximize` (whether higher is
        better) and `eval_metric` (held-out metric by which trials are compared; None: their speed).
        """
        return GOALS[self.goal_name]

    @property
    def is_throughput(self) -> bool:
        """Whether the sweep compares training speed, not held-out loss or recall."""
        return self.goal.eval_metric is None

    @property
    def recommendation(self) -> Recommendation | None:
        """The recommended trial, a Recommendation: `best` (name of the trial) and `why` (the reason
        as text); None if there is none yet.
        """
        values = self.summary.get("recommendation")
        return Recommendation(**values) if values else None

    @property
    def best(self) -> TrialRow | None:
        """The row of the recommended trial in trials.jsonl, a TrialRow with `trial` (name),
        `status`, `settings`, `samples_per_s` and others; None if there is no recommendation.
        """
        name = self.recommendation.best if self.recommendation else None
        return next((row for row in self.trials if row.trial == name), None)

    def value(self, row: TrialRow) -> float | None:
        """Return samples/s, or the newest held-out metric of a trial; None if not measured."""
        return row.value(self.goal_name)

    @property
    def table(self) -> list[TrialRow]:
        """All trials in the order of the table.

        Trials that train are ordered by the number of rungs that they reached, most first, and then
        by their value, the best first. Batch shapes are ordered by the global batch, ascending, and
        then by their speed.
        """
        sign = -1 if self.goal.maximize else 1

        def key(row: TrialRow) -> tuple[int, bool, float]:
            value = self.value(row)
            group = (row.global_batch_size or 0) if self.is_throughput else -len(row.rungs)
            return group, value is None, sign * (value or 0.0)

        return sorted(self.trials, key=key)

    @property
    def counts(self) -> str:
        """Number of trials with each status as text, such as `5 finished, 2 out of memory`."""
        counts = Counter(self.status_label(row) for row in self.trials)
        return ", ".join(f"{count} {status}" for status, count in counts.most_common())

    def status_label(self, row: TrialRow) -> str:
        """Return the status of a trial as text for the page, such as `ended early` for `pruned`."""
        labels = {"finished": "measured"} if self.is_throughput else {"pruned": "ended early"}
        return labels.get(row.status, row.status).replace("_", " ")

    @property
    def rungs(self) -> str:
        """The numbers of samples after which trials are compared, as text such as `1,024, 4,096 and
        16,384`.
        """
        texts = [f"{samples:,}" for samples in self.summary.get("rungs", [0])]
        return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]

    def report_link(self, row: TrialRow) -> str | None:
        """Return the path of a trial's report.html relative to the sweep folder, for a link."""
        page = f"{row.run}/report.html"
        if row.run is None or ".." in page or page.startswith("/"):
            return None
        return page if (self.folder / page).is_file() else None
