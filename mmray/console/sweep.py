"""Tables and lines of the trials of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mmray.console.tables import COMPACT, rows_table
from mmray.report.run import format_compact
from mmray.sweep_files import BATCH_SETTINGS, GOALS, TrialRow

if TYPE_CHECKING:
    from mmray.tuning.sweep import SweepProgress


def live_table(rows: Sequence[TrialRow], num_rungs: int, goal: str, limit: int) -> Table:
    """Return the table of a running sweep: running trials first, then the best ones.

    Args:
        rows: settings, status and measurements of each trial, the rows of trials.jsonl.
        num_rungs: number of rungs of the sweep (sample counts at which trials are compared).
        goal: `throughput`, `loss` or `recall`, whose value is a column.
        limit: largest number of trials in the table. The caption counts the others by status.
    """
    sign = -1 if GOALS[goal].maximize else 1

    def order(row: TrialRow) -> tuple[bool, int, float]:
        value = row.rungs[-1].value if row.rungs else 0.0
        return row.status != "running", -len(row.rungs), sign * value

    ordered = sorted(rows, key=order)
    shown = [
        settings_cells(row.settings)
        | {
            "trial": row.trial,
            "rung": f"{len(row.rungs)}/{num_rungs}",
            "value": row.rungs[-1].value if row.rungs else None,
            "status": row.status.replace("_", " "),
            "elapsed_s": row.elapsed_s,
        }
        for row in ordered[:limit]
    ]
    columns = {
        "trial": ("trial", ""),
        **settings_columns(rows),
        "rung": ("rung", ""),
        "value": (GOALS[goal].title, ".4g"),
        "status": ("status", ""),
        "elapsed_s": ("s", ",.0f"),
    }
    table = rows_table(shown, columns)
    hidden = Counter(row.status.replace("_", " ") for row in ordered[limit:])
    if hidden:
        table.caption = "and " + ", ".join(f"{count} {status}" for status, count in hidden.items())
    return table


def settings_columns(
    rows: Sequence[TrialRow], without: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the column of each setting that a sweep varies, for a table of trials.

    Args:
        rows: rows of trials.jsonl. All trials vary the same settings, so the first row defines the
            columns.
        without: settings without a column, such as `batch.micro`.

    Returns:
        Setting -> (title, format), such as `{"optimizer.lr": ("lr", "")}`; an empty format means
        text.
    """
    settings = rows[0].settings if rows else {}
    return {key: (key.rpartition(".")[2], "") for key in settings if key not in without}


def settings_cells(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's settings as texts for the cells of a table.

    Args:
        settings: values by setting, such as `{"optimizer.lr": 0.001}`.

    Returns:
        The values as text, such as `{"optimizer.lr": "0.001"}`.
    """
    return {key: str(value) for key, value in settings.items()}


def format_progress(progress: SweepProgress) -> str:
    """Format the time of a sweep as `05:10 elapsed, about 12:00 left, 35% of the budget spent`.

    Args:
        progress: seconds so far and to the end, and the spent part of the budget. Unknown parts are
            omitted.
    """

    def clock(seconds: float) -> str:
        return str(timedelta(seconds=round(seconds))).removeprefix("0:")

    parts = [f"{clock(progress.elapsed_s)} elapsed"]
    if progress.left_s is not None:
        parts.append(f"about {clock(progress.left_s)} left")
    if progress.budget_spent is not None:
        parts.append(f"{min(1.0, progress.budget_spent):.0%} of the budget spent")
    return ", ".join(parts)


def trials_table(rows: Sequence[TrialRow], goal: str, winners: Collection[str]) -> Table:
    """Return the table of trials or of measured batch shapes (global batch and micro-batch).

    Args:
        rows: rows of trials.jsonl (settings, status and measurements of a trial), at least one.
        goal: `throughput`, `loss` or `recall`. The held-out value of the last two is the column
            before the status.
        winners: names of the trials that are marked with a star.
    """
    columns = {
        "trial": ("trial", ""),
        # The batch has columns of its own.
        **settings_columns(rows, without=BATCH_SETTINGS),
        "batch": ("batch", ""),
        "global_rows": ("global", "d"),
        "samples_per_s": ("samples/s", COMPACT),
        "step_p50_s": ("step s", ".3f"),
        "peak_gib": ("GiB", ".2f"),
    }
    if GOALS[goal].eval_metric is not None:
        columns |= {"samples": ("samples", ",d"), "value": (GOALS[goal].title, ".3f")}
    columns["status"] = ("status", "")
    shown = [
        settings_cells(row.settings)
        | {
            "trial": row.trial + ("*" if row.trial in winners else ""),
            "batch": row.shape if row.global_rows else None,
            "global_rows": row.global_rows,
            "samples_per_s": row.samples_per_s,
            "step_p50_s": row.step_p50_s,
            "peak_gib": row.peak_gib,
            "samples": row.samples,
            "value": row.value(goal),
            "status": row.status.replace("_", " "),
        }
        for row in rows
    ]
    return rows_table(shown, columns)


def trial_line(row: TrialRow, num_rungs: int) -> str:
    """Format a trial that reached a rung or ended as a line of a log.

    A rung is a number of samples after which trials are compared.

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
