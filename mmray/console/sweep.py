"""Tables and lines of the trials of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.table import Table

from mmray.console.tables import text_table
from mmray.report.run import format_compact, format_number
from mmray.report.sweep import SweepRecord, setting_columns, trial_columns
from mmray.sweep_files import GOALS, TrialRow

if TYPE_CHECKING:
    from mmray.tuning.sweep import SweepProgress


def live_table(rows: Sequence[TrialRow], num_rungs: int, goal: str, limit: int) -> Table:
    """Return the table of a running sweep: running trials first, then the best ones.

    Args:
        rows: settings, status and measurements of each trial, the rows of trials.jsonl.
        num_rungs: number of rungs of the sweep.
        goal: `throughput`, `loss` or `recall`, whose value is a column.
        limit: largest number of trials in the table. The caption counts the others by status.
    """
    sign = -1 if GOALS[goal].maximize else 1

    def order(row: TrialRow) -> tuple[bool, int, float]:
        value = row.rungs[-1].value if row.rungs else 0.0
        return row.status != "running", -len(row.rungs), sign * value

    ordered = sorted(rows, key=order)
    columns = setting_columns(rows)
    lines = []
    for row in ordered[:limit]:
        cells = {"trial": row.trial}
        cells |= {column.title: column.text(row) for column in columns}
        cells["rung"] = f"{len(row.rungs)}/{num_rungs}"
        cells[GOALS[goal].title] = format_number(row.rungs[-1].value if row.rungs else None)
        cells["status"] = row.status.replace("_", " ")
        cells["s"] = format_number(row.elapsed_s, 0)
        lines.append(cells)
    table = text_table(lines)
    hidden = Counter(row.status.replace("_", " ") for row in ordered[limit:])
    if hidden:
        table.caption = "and " + ", ".join(f"{count} {status}" for status, count in hidden.items())
    return table


def trials_table(sweep: SweepRecord, winners: Collection[str]) -> Table:
    """Return the table of trials or of measured batch shapes, with the columns and the order of the
    report of the sweep.

    Args:
        sweep: the sweep, with at least one trial.
        winners: names of the trials that are marked with a star.
    """
    columns = trial_columns(sweep.trials)
    lines = []
    for row in sweep.table:
        cells = {"trial": row.trial + ("*" if row.trial in winners else "")}
        cells["status"] = sweep.status_label(row)
        if not sweep.is_throughput:
            cells[sweep.goal.title] = format_number(sweep.value(row))
        lines.append(cells | {column.title: column.text(row) for column in columns})
    return text_table(lines)


def format_progress(progress: SweepProgress) -> str:
    """Format the time of a sweep as `05:10 elapsed, about 12:00 left, 35% of the budget spent`.

    Args:
        progress: a SweepProgress: `elapsed_s`, `left_s` and `budget_spent` (fraction). Unknown
            parts (None) are omitted.
    """

    def clock(seconds: float) -> str:
        return str(timedelta(seconds=round(seconds))).removeprefix("0:")

    parts = [f"{clock(progress.elapsed_s)} elapsed"]
    if progress.left_s is not None:
        parts.append(f"about {clock(progress.left_s)} left")
    if progress.budget_spent is not None:
        parts.append(f"{min(1.0, progress.budget_spent):.0%} of the budget spent")
    return ", ".join(parts)


def trial_line(row: TrialRow, num_rungs: int) -> str:
    """Format a trial that reached a rung or ended as a line of a log.

    Args:
        row: settings, status and measurements of the trial, a row of trials.jsonl.
        num_rungs: number of rungs of the sweep.

    Returns:
        A line such as `optimizer.lr=0.001: running in 12 s  rung 1 of 3: 2.31 after 4,096 samples`.
        Speed, memory and error follow if they are known.
    """
    settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
    parts = [f"{settings}: {row.status.replace('_', ' ')} in {row.elapsed_s:.0f} s"]
    if row.rungs:
        last = row.rungs[-1]
        rung = f"rung {len(row.rungs)} of {num_rungs}"
        parts.append(f"{rung}: {last.value:.4g} after {last.samples:,} samples")
    if row.samples_per_s is not None:
        parts.append(f"{format_compact(row.samples_per_s)} samples/s")
    if row.peak_gib is not None:
        parts.append(f"{row.peak_gib:.2f} GiB")
    if row.error:
        parts.append(row.error)
    return "  ".join(parts)
