"""Tables and lines of the trials of a sweep."""

from __future__ import annotations

from rich.table import Table

from mmray.console.tables import text_table
from mmray.report.run import format_compact, format_number
from mmray.report.sweep import SweepRecord, trial_columns
from mmray.sweep_files import TrialRow


def trials_table(sweep: SweepRecord) -> Table:
    """Return the table of trials or of measured batch shapes, with the columns and the order of the
    report of the sweep; the recommended one has a star.
    """
    columns = trial_columns(sweep.trials)
    lines = []
    for row in sweep.table:
        cells = {"trial": row.trial + "*" * (row == sweep.best)}
        cells["status"] = sweep.status_label(row)
        if not sweep.is_throughput:
            cells[sweep.goal.title] = format_number(sweep.value(row))
        lines.append(cells | {column.title: column.text(row) for column in columns})
    return text_table(lines)


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
