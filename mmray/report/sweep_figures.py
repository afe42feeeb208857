"""Plotly charts of a sweep: learning curves of trials, or speed and memory of batch shapes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from mmray.report.figures import (
    BLUE,
    GRAY,
    MAX_TICKS,
    ORANGE,
    ROSE,
    TEAL,
    Figure,
    make_figure,
)
from mmray.report.run import format_setting
from mmray.report.sweep import SweepRecord
from mmray.sweep_files import TrialRow


def sweep_figures(sweep: SweepRecord) -> dict[str, list[Figure]]:
    """Return the charts of a sweep.

    Args:
        sweep: The content of the sweep folder: its summary and the rows of its trials.

    Returns:
        Charts by page section: `learning` (held-out values of the trials over their samples) or
        `shapes` (speed and memory over the micro-batch, for goal `throughput`); the other section
        is empty.
    """
    if not sweep.is_throughput:
        curves = _learning_curves(sweep)
        return {"learning": [curves] if curves else [], "shapes": []}
    speed = _shape_chart(
        sweep, "speed", "Samples per second", lambda row: row.samples_per_s, rangemode="tozero"
    )
    memory = _shape_chart(
        sweep,
        "memory",
        "Peak memory of a worker",
        lambda row: row.peak_gib,
        rangemode="tozero",
        ticksuffix=" GiB",
    )
    return {"learning": [], "shapes": [each for each in (speed, memory) if each]}


def _learning_curves(sweep: SweepRecord) -> Figure | None:
    """Return the held-out values of the trials over their samples."""
    rows = [row for row in sweep.trials if row.curve]
    if not rows:
        return None
    best = sweep.best.trial if sweep.best else None

    def style(row: TrialRow) -> tuple[int, str, str]:
        """Return width, color and legend of a trial."""
        if row.trial == best:
            return 3, BLUE, f"{best}, the best"
        if row.is_recipe:
            return 2, ORANGE, "the recipe's own settings"
        return 1, GRAY, "other trials"

    traces: list[go.Scatter] = []
    labels: set[str] = set()
    for row in sorted(rows, key=style):  # Wide lines are drawn last, on top.
        width, color, label = style(row)
        line = go.Scatter(
            x=[point.samples for point in row.curve],
            y=[point.value for point in row.curve],
            name=label,
            mode="lines+markers",
            line={"color": color, "width": width},
            marker={"size": 4 + width},
            hovertemplate=f"{row.trial}: %{{y:.4g}} at %{{x:,}} samples<extra></extra>",
            showlegend=label not in labels,
        )
        labels.add(label)
        traces.append(line)
    title = f"{sweep.goal.title} by samples"
    summary = f"{title} of {len(rows)} trials; the table of trials has the last values"
    xaxis = {
        "title": {"text": "samples", "standoff": 6},
        "nticks": MAX_TICKS,
        "rangemode": "tozero",
        "tickformat": ",~r",
    }
    return make_figure(
        "curves", title, summary, traces, 320, wide=True, hovermode="closest", xaxis=xaxis
    )


def _shape_chart(
    sweep: SweepRecord,
    name: str,
    title: str,
    measure: Callable[[TrialRow], float | None],
    **yaxis: Any,
) -> Figure | None:
    """Return a measure of the batch shapes over the micro-batch, a line per global batch and other
    settings.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in sweep.trials:
        value = measure(row)
        if row.micro is not None and value is not None and row.error is None:
            lines.setdefault(_line_name(row), []).append((row.micro, value))
    if not lines:
        return None
    traces = []
    colors = cycle((BLUE, ORANGE, TEAL, ROSE))
    for label, points in lines.items():
        points.sort()
        trace = go.Scatter(
            x=[micro for micro, _ in points],
            y=[value for _, value in points],
            name=label,
            mode="lines+markers",
            line={"color": next(colors), "width": 2},
            hovertemplate="micro-batch %{x}: %{y:,.4~g}<extra>%{data.name}</extra>",
        )
        traces.append(trace)
    sizes = sorted({micro for points in lines.values() for micro, _ in points})
    xaxis = {
        "type": "log",
        "tickvals": sizes,
        "title": {"text": "rows of a micro-batch", "standoff": 6},
    }
    summary = f"{title} by micro-batch; the table of shapes has the values"
    return make_figure(
        f"shapes-{name}",
        title,
        summary,
        traces,
        320,
        hovermode="closest",
        xaxis=xaxis,
        yaxis=yaxis,
    )


def _line_name(row: TrialRow) -> str:
    others = [f"{name} {format_setting(value)}" for name, value in row.settings.items()]
    return ", ".join([f"global batch {row.global_batch_size}", f"workers {row.workers}", *others])
