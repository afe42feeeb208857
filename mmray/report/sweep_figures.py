"""Plotly charts of a sweep: learning curves, settings, measured steps with their fit, and heat maps
of batch shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from mmray.report.figures import (
    BLUE,
    GRAY,
    MAX_TICKS,
    ORANGE,
    ROSE,
    Figure,
    linear_ticks,
    log_axis,
    log_ticks,
    make_figure,
)
from mmray.report.importance import Importance
from mmray.report.run import format_compact, format_setting
from mmray.report.sweep import HeatMap, Probe, SweepRecord

# Plotly derives the text color
COLORSCALE = [[0, "#dbe4ff"], [0.35, "#9db4fb"], [0.7, "#5b7cfa"], [1, "#2c3fb1"]]
MAX_HEAT_MAPS, MAX_PROBES = 12, 4  # longer lists are only in the table
FEW_VALUES = 6  # each is a tick of its axis
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}


def sweep_figures(sweep: SweepRecord, importance: Sequence[Importance]) -> dict[str, list[Figure]]:
    """Return the charts of a sweep by page section."""
    heat_maps = sweep.heat_maps()[:MAX_HEAT_MAPS]
    parts: dict[str, Sequence[Figure | None]] = {
        "learning": [_curves(sweep, by_time=False), _curves(sweep, by_time=True)],
        "settings": [_importance(importance), _parallel_coordinates(sweep)],
        "grids": [
            _heat_map(f"grid-{number}", each, sweep) for number, each in enumerate(heat_maps, 1)
        ],
        "probes": [
            chart
            for probe in sweep.probes[:MAX_PROBES]
            for chart in (_step_times(probe), _memory(probe))
        ],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _curves(sweep: SweepRecord, by_time: bool) -> Figure | None:
    """Return the held-out values of the trials over their samples, or over their training time."""
    curves = {
        trial.name: trial.values["curve"] for trial in sweep.trials if trial.values.get("curve")
    }
    if not curves:
        return None
    longest_s = max(curve[-1][2] for curve in curves.values())
    unit, seconds = next((item for item in UNITS.items() if longest_s >= 2 * item[1]), ("s", 1.0))
    best = sweep.best.name if sweep.best else None
    traces: list[go.Scatter] = []
    styles = dict.fromkeys(curves, ("other trials", GRAY, 1))
    recipe = [
        trial.name
        for trial in sweep.trials
        if trial.values.get("is_recipe") and trial.name in curves
    ]
    styles |= dict.fromkeys(recipe, ("the recipe's own settings", ORANGE, 3))
    styles |= {best: (f"{best}, the best", BLUE, 3)} if best in curves else {}
    # wide lines on top
    for name, (label, color, width) in sorted(styles.items(), key=lambda item: item[1][2]):
        samples, values, times_s = zip(*curves[name], strict=True)
        line = go.Scatter(
            x=[each / seconds for each in times_s] if by_time else samples,
            y=values,
            name=label,
            mode="lines+markers",
            line={"color": color, "width": width},
            marker={"size": 4 + width},
            hovertemplate=f"{name}: %{{y:.4g}} at %{{x:,.4~g}}<extra></extra>",
            showlegend=all(label != trace.name for trace in traces),
        )
        traces.append(line)
    axis = f"training time, {unit}" if by_time else "samples"
    value = sweep.curve_title
    return make_figure(
        f"curves-{'time' if by_time else 'samples'}",
        f"{value} by {'training time' if by_time else 'samples'}",
        f"{value} by {axis} of {len(traces)} trials; the table of trials has the last values",
        traces,
        320,
        hovermode="closest",
        xaxis={
            "title": {"text": axis, "standoff": 6},
            "nticks": MAX_TICKS,
            "rangemode": "tozero",
            "tickformat": ",~r",
        },
    )


def _importance(found: Sequence[Importance]) -> Figure | None:
    """Return a bar per setting with the share of the differences it explains, and what chance
    explains.
    """
    if not found:
        return None
    names = [each.setting for each in found]
    bars = go.Bar(
        y=names,
        x=[each.share for each in found],
        name="this sweep",
        orientation="h",
        marker={"color": BLUE},
        hovertemplate="%{y}: %{x:.0%}<extra></extra>",
    )
    chance = go.Scatter(
        y=names,
        x=[each.by_chance for each in found],
        name="95% of shuffled results explain less",
        mode="markers",
        marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": ORANGE}},
        hovertemplate="%{y}: 95% of shuffled results are below %{x:.0%}<extra></extra>",
    )
    return make_figure(
        "importance",
        "Share of the differences that a setting explains",
        "; ".join(
            f"{each.setting} {each.share:.0%}, by chance up to {each.by_chance:.0%}"
            for each in found
        ),
        [bars, chance],
        height=110 + 34 * len(found),
        wide=True,
        hovermode="closest",
        bargap=0.4,
        xaxis={"range": [0, 1.02], "tickformat": ".0%", "showgrid": True},
        yaxis={"autorange": "reversed", "showgrid": False, "dtick": 1},
    )


def _parallel_coordinates(sweep: SweepRecord) -> Figure | None:
    """Return a line per trial of a learning goal through its settings and its value at the first
    rung.

    Not Plotly's own chart of this kind, which needs WebGL.
    """
    trials = [
        trial for trial in sweep.trials if trial.rung_values and trial.values.get("parent") is None
    ]
    trials.sort(key=lambda trial: trial.rung_values[0], reverse=sweep.goal.maximize)
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    if len(trials) < 2 or not sweep.is_learning:
        return None
    axes = [_axis([trial.settings.get(name) for trial in trials]) for name in names]
    axes.append(_axis([trial.rung_values[0] for trial in trials]))
    num_best = max(1, len(trials) // 4)
    traces = []
    for rank, trial in reversed(list(enumerate(trials))):  # the best on top
        name, color, width = (
            ("best quarter", BLUE, 2) if rank < num_best else ("other trials", GRAY, 1)
        )
        settings = [f"{key} {format_setting(value)}" for key, value in trial.settings.items()]
        line = go.Scatter(
            x=list(range(len(axes))),
            y=[positions[rank] for positions, _ in axes],
            name=name,
            mode="lines+markers",
            line={"color": color, "width": width},
            marker={"size": 5},
            hovertext="<br>".join(
                [trial.name, *settings, f"{sweep.curve_title} {trial.rung_values[0]:.4g}"]
            ),
            hoverinfo="text",
            showlegend=rank in (0, num_best),
        )
        traces.append(line)
    ticks = [
        (number, position, text)
        for number, (_, ticks) in enumerate(axes)
        for position, text in ticks
    ]
    x, y, texts = zip(*ticks, strict=True)
    sides = [_tick_side(number, position, len(axes) - 1) for number, position, _ in ticks]
    labels = {
        "text": [f" {text} " for text in texts],
        "textposition": sides,
        "mode": "text",
        "cliponaxis": False,
    }
    traces.append(go.Scatter(x=x, y=y, **labels, hoverinfo="skip", showlegend=False))
    rung = f"after {sweep.summary['rungs'][0]:,} samples"
    return make_figure(
        "settings",
        f"Settings and {sweep.curve_title} {rung}",
        f"{sweep.curve_title} {rung} by {', '.join(names)} of {len(trials)} trials; the table has "
        "the values",
        traces,
        340,
        wide=True,
        hovermode="closest",
        xaxis={
            "tickvals": list(range(len(axes))),
            "ticktext": [*names, sweep.curve_title],
            "range": [-0.3, len(axes) - 0.7],
            "showgrid": True,
        },
        yaxis={"visible": False, "range": [-0.14, 1.14]},
    )


def _tick_side(axis: int, position: float, last: int) -> str:
    """Return where a tick label of parallel coordinates crosses the fewest lines."""
    if 0 < axis < last and not 0.05 < position < 0.95:
        return "top center" if position > 0.5 else "bottom center"
    return "middle left" if axis == 0 else "middle right"


def _axis(values: list[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the positions of values from 0 to 1, and the ticks; wide ranges of numbers are
    logarithmic.
    """
    scaled: list[float] = values
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        texts = [format_setting(value) for value in values]
        categories = sorted(set(texts))
        scaled = [categories.index(text) for text in texts]
        ticks = [(float(number), text) for number, text in enumerate(categories)]
    else:
        low, high, few = min(values), max(values), sorted(set(values))
        logarithmic = low > 0 and high > 10 * low
        numbers = (
            few
            if len(few) <= FEW_VALUES
            else (log_ticks if logarithmic else linear_ticks)(low, high)
        )
        scale = math.log10 if logarithmic else float
        scaled, ticks = (
            [scale(value) for value in values],
            [(scale(tick), format_compact(tick)) for tick in numbers],
        )
    start, width = min(scaled), max(scaled) - min(scaled) or 1.0
    return [(each - start) / width for each in scaled], [
        ((each - start) / width, text) for each, text in ticks
    ]


def _step_times(probe: Probe) -> Figure:
    """Return the measured times of single and accumulated steps over the rows of a micro-batch,
    with the fit.
    """
    fit = probe.fit
    traces: list[go.Scatter] = []
    numbers = sorted({sample["accumulation"] for sample in probe.samples})
    for number, color in zip(numbers, (BLUE, ORANGE), strict=False):
        samples = [sample for sample in probe.samples if sample["accumulation"] == number]
        measured = [(sample["micro"], 1000 * sample["step_s"]) for sample in samples]
        times_s = [
            fit["optimizer_s"] + first_s * (1 + fit["further"] * (number - 1))
            for first_s in fit["first_s"]
        ]
        fitted = {
            micro: 1000 * step_s for micro, step_s in zip(fit["micros"], times_s, strict=True)
        }
        traces += _with_fit(
            "1 micro-batch" if number == 1 else f"{number} micro-batches", color, measured, fitted
        )
    times_ms = [1000 * sample["step_s"] for sample in probe.samples]
    return _probe_chart(
        probe, "time", "Time of a step, without communication", traces, log_axis(times_ms, " ms")
    )


def _memory(probe: Probe) -> Figure:
    """Return the measured peak memory over the rows of a micro-batch, with the fit, and the limit
    if it is near.
    """
    fit, limit_gib = probe.fit, probe.limit_gib
    measured = [
        (sample["micro"], sample["peak_gib"])
        for sample in probe.samples
        if sample["accumulation"] == 1
    ]
    fitted = {micro: fit["base_gib"] + fit["row_gib"] * micro for micro in fit["micros"]}
    traces = _with_fit("1 micro-batch", ROSE, measured, fitted)
    if limit_gib < 2 * max(gib for _, gib in measured):
        style = {"color": GRAY, "dash": "dash"}
        traces.append(
            go.Scatter(
                x=traces[0].x,
                y=[limit_gib] * len(traces[0].x),
                name="limit",
                mode="lines",
                line=style,
            )
        )
    yaxis = {"rangemode": "tozero", "ticksuffix": " GiB"}
    return _probe_chart(
        probe, "memory", f"Peak memory of a worker, of {limit_gib:.3g} GiB", traces, yaxis
    )


def _with_fit(
    name: str, color: str, measured: list[tuple[int, float]], fitted: dict[int, float]
) -> list[go.Scatter]:
    """Return the line of the fit and the measured points; a size may be measured several times."""
    rows = sorted({micro for micro, _ in measured})
    hover = "%{x} rows: %{y:,.4~g}<extra>%{data.name}</extra>"
    line = go.Scatter(
        x=rows,
        y=[fitted[each] for each in rows],
        name=f"{name}, fit",
        mode="lines",
        line={"color": color},
    )
    x, y = zip(*measured, strict=True)
    marker = {"color": color, "size": 8, "opacity": 0.6}
    points = go.Scatter(
        x=x, y=y, name=f"{name}, measured", mode="markers", marker=marker, hovertemplate=hover
    )
    return [line.update(hovertemplate=hover), points]


def _probe_chart(
    probe: Probe, name: str, title: str, traces: list[go.Scatter], yaxis: dict[str, Any]
) -> Figure:
    """Return a chart over the rows of a micro-batch."""
    sizes = sorted({sample["micro"] for sample in probe.samples})
    xaxis = {
        "type": "log",
        "tickvals": sizes,
        "title": {"text": "rows of a micro-batch", "standoff": 6},
    }
    full_title = f"{title}, {probe.settings}" if probe.settings else title
    summary = "; ".join(f"{trace.name}: {trace.y[0]:.4g} to {trace.y[-1]:.4g}" for trace in traces)
    name = f"probe-{name}-{probe.number}"
    return make_figure(
        name, full_title, summary, traces, 320, hovermode="closest", xaxis=xaxis, yaxis=yaxis
    )


def _heat_map(name: str, heat_map: HeatMap, sweep: SweepRecord) -> Figure:
    """Return the goal of each batch shape, or why it was not measured; all heat maps have one color
    scale.
    """
    goal, cells = sweep.goal, heat_map.cells
    measured = [
        value for trial in sweep.trials if (value := trial.measured(goal.metric)) is not None
    ]
    columns, rows = sorted({micro for micro, _ in cells}), sorted({row for _, row in cells})
    trials = [[cells.get((micro, row)) for micro in columns] for row in rows]
    plot = go.Heatmap(
        x=[str(micro) for micro in columns],
        y=[", ".join(map(str, row)) for row in rows],
        z=[[trial.measured(goal.metric) if trial else None for trial in row] for row in trials],
        text=[
            [trial.cell_text(goal.metric, sweep.best) if trial else "" for trial in row]
            for row in trials
        ],
        zmin=min(measured, default=None),
        zmax=max(measured, default=None),
        colorscale=COLORSCALE,
        reversescale=not goal.maximize,
        showscale=False,
        texttemplate="%{text}",
        hovertemplate=f"micro-batch %{{x}}, {heat_map.axis} %{{y}}: %{{text}}<extra></extra>",
        xgap=3,
        ygap=3,
        textfont={"size": 12},
    )
    summary = f"{goal.title} by micro-batch and {heat_map.axis}; the table of trials has the values"
    titles = ("micro-batch", heat_map.axis)
    x, y = (
        {"type": "category", "dtick": 1, "showgrid": False, "title": {"text": title, "standoff": 6}}
        for title in titles
    )
    height, wide = 110 + 62 * len(rows), len(columns) > 6
    return make_figure(
        name, heat_map.title, summary, [plot], height, wide, hovermode="closest", xaxis=x, yaxis=y
    )
