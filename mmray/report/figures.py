"""Plotly charts of a run and of a sweep. Series colors must be visible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import plotly.graph_objects as go

from mmray.report.run import DIRECTIONS, RunRecord
from mmray.report.sweep import LEARNING_GOALS, RECIPE_TRIAL, SweepRecord, TrialRecord

BLUE, ORANGE, TEAL, ROSE, GRAY = "#5b7cfa", "#e8833a", "#1fa58a", "#e0567a", "#8b93a7"
COLORS = (BLUE, ORANGE, TEAL, ROSE, "#9b6bdf", "#b98a16", GRAY)
COLORSCALE = [[0, "#dbe4ff"], [0.35, "#9db4fb"], [0.7, "#5b7cfa"], [1, "#2c3fb1"]]  # Plotly derives the text color
MAX_TICKS, FEW_POINTS = 8, 25
MAX_HEAT_MAPS, MAX_BARS = 12, 30  # longer lists are only in the table


@dataclass(frozen=True)
class Figure:
    """A chart with its title, and a text summary for screen readers."""

    name: str
    title: str
    summary: str
    plot: dict[str, Any]
    height: int = 260
    wide: bool = False


def make_figure(
    name: str, title: str, summary: str, traces: list[Any], height: int = 260, wide: bool = False, **layout: Any
) -> Figure:
    """Return a chart of these traces in the page's style; `layout` is passed to Plotly."""
    plot = go.Figure(traces)
    plot.update_layout(
        template="none",
        margin={"l": 52, "r": 14, "t": 10, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        showlegend=sum(getattr(trace, "showlegend", None) is not False for trace in traces) > 1,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    plot.update_xaxes(showgrid=False, zeroline=False, automargin=True)
    plot.update_yaxes(zeroline=False, automargin=True, nticks=6)
    plot.update_layout(**layout)
    return Figure(name, title, summary, plot.to_plotly_json(), height, wide)


def run_figures(run: RunRecord) -> dict[str, list[Figure]]:
    """Return the charts of the measured metrics by page section."""
    loss = {"train/loss": _line("training", BLUE), "evaluate/loss": _line("held out", ORANGE)}
    rate, memory = {"throughput/samples_per_s": _line("samples/s", BLUE)}, {"memory/peak_gib": _line("peak", ROSE)}
    step = {"time/step_s": _line("whole step", TEAL), "time/data_wait_s": _line("waiting for data", ORANGE)}
    recall = {
        f"evaluate/recall_at_{k}/{direction}": _line(f"R@{k} {direction.replace('_', ' ')}", color, dash=dash)
        # Six legend entries are too wide for a narrow page.
        | {"legendgroup": direction, "showlegend": k == 1, "opacity": 1 if k == 1 else 0.75}
        for k, dash in {1: "solid", 5: "dash", 10: "dot"}.items()
        for direction, color in zip(DIRECTIONS, (BLUE, ORANGE), strict=True)
    }
    percent = {"range": [0, 1.03], "tickformat": ".0%"}
    parts = {
        "learning": [
            _chart(run, "loss", "Loss", loss),
            _chart(run, "lr", "Learning rate", {"train/lr": _line("rate", TEAL)}, exponentformat="power"),
            _chart(run, "gradient", "Gradient norm", {"train/grad_norm": _line("before clipping", ROSE)}),
        ],
        "recall": [_chart(run, "recall", "Recall over the run: R@1, dashed R@5, dotted R@10", recall, 320, **percent)],
        "speed": [
            _chart(run, "throughput", "Samples per second", rate, rangemode="tozero"),
            _chart(run, "step", "Where a step's time goes", step, rangemode="tozero", ticksuffix=" s"),
            _chart(run, "memory", "Peak memory of a worker", memory, rangemode="tozero", ticksuffix=" GiB"),
        ],
        "start": [_start_timeline(run)],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _start_timeline(run: RunRecord) -> Figure | None:
    """Return a bar per stage between the command and its first step; None if less than a stage was recorded."""
    stages = next(iter(run.result.get("starts") or [[]]))
    durations_s = [after["at_s"] - stage["at_s"] for stage, after in pairwise(stages)]
    if not durations_s:
        return None
    names, end_s = [stage["stage"] for stage in stages[:-1]], stages[-1]["at_s"]
    bars = go.Bar(
        y=names,
        x=durations_s,
        base=[stage["at_s"] for stage in stages[:-1]],
        orientation="h",
        marker={"color": BLUE},
        text=[f"{each:.1f} s" for each in durations_s],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    return make_figure(
        "start",
        "From the command to the first step",
        f"{end_s:.1f} s; longest: {names[durations_s.index(max(durations_s))]}, {max(durations_s):.1f} s",
        [bars],
        height=90 + 24 * len(names),
        wide=True,
        hovermode="closest",
        xaxis={"range": [0, 1.1 * end_s], "ticksuffix": " s", "nticks": MAX_TICKS},
        yaxis={"autorange": "reversed", "nticks": len(names), "showgrid": False},
    )


def _line(name: str, color: str, dash: str = "solid") -> dict[str, Any]:
    return {"name": name, "line": {"color": color, "width": 2, "dash": dash}}


def _chart(
    run: RunRecord, name: str, title: str, metrics: dict[str, dict[str, Any]], height: int = 260, **yaxis: Any
) -> Figure | None:
    """Return lines of the measured metrics over the steps of a run; None without any."""
    traces, ranges = [], []
    for metric, style in metrics.items():
        if values := run.values(metric):
            steps, with_gaps = run.series(metric)
            mode = "lines+markers" if len(values) <= FEW_POINTS else "lines"
            traces.append(go.Scatter(x=steps, y=with_gaps, mode=mode, marker={"size": 6}, **style))
            ranges.append(f"{style['name']} {values[0]:.4g} at the start, {values[-1]:.4g} at the end")
    if not traces:
        return None
    few = run.lines[-1]["step"] - run.lines[0]["step"] < MAX_TICKS
    ticks = {"dtick": 1} if few else {"nticks": MAX_TICKS}
    xaxis = {"title": {"text": "step", "standoff": 6}, "tickformat": ",d", **ticks}
    return make_figure(name, title, "; ".join(ranges), traces, height, xaxis=xaxis, yaxis=yaxis)


def sweep_figures(sweep: SweepRecord) -> dict[str, list[Figure]]:
    """Return learning curves, heat maps, throughput bars and memory bars of the measured trials."""
    shown = list(sweep.heat_maps().items())[:MAX_HEAT_MAPS]
    heat_maps = [_heat_map(f"grid-{number}", *each, sweep) for number, each in enumerate(shown, 1)]
    bars = [
        _bars(sweep, "throughput", "samples_per_s", "Samples per second, and range over logged intervals", ",.0f"),
        _bars(sweep, "memory", "peak_gib", "Peak memory of a worker, GiB", ".2f"),
    ]
    learning = (_curves(sweep, by_time=False), _curves(sweep, by_time=True), _parallel_coordinates(sweep))
    parts: dict[str, Sequence[Figure | None]] = {"learning": learning, "grids": heat_maps, "bars": bars}
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _curves(sweep: SweepRecord, by_time: bool) -> Figure | None:
    """Return the held-out values of the trials over their samples, or over their seconds of training."""
    traces, best = [], sweep.best
    for trial in sweep.trials:
        curve = trial.values.get("curve")
        if not curve:
            continue
        samples, values, seconds = zip(*curve, strict=True)
        role = "best" if best and trial.name == best.name else "recipe" if trial.name == RECIPE_TRIAL else "others"
        color, width = {"best": (BLUE, 3), "recipe": (ORANGE, 3), "others": (GRAY, 1)}[role]
        name = f"{trial.name} ({role})" if role != "others" else f"{trial.name} {trial.status}"
        line = go.Scatter(x=seconds if by_time else samples, y=values, name=name, mode="lines+markers")
        traces.append(line.update(line={"color": color, "width": width}, showlegend=role != "others"))
    if not traces:
        return None
    value = "recall@1" if sweep.summary.get("goal") == "recall" else "held-out loss"
    axis = "seconds of training" if by_time else "samples"
    return make_figure(
        f"curves-{'time' if by_time else 'samples'}",
        f"{value} by {axis}",
        f"{value} by {axis} of {len(traces)} trials; the table of trials has the last values",
        traces,
        320,
        hovermode="closest",
        xaxis={"title": {"text": axis, "standoff": 6}, "nticks": MAX_TICKS},
    )


def _parallel_coordinates(sweep: SweepRecord) -> Figure | None:
    """Return a line per trial of a learning goal through its settings and its value; None with fewer than two."""
    metric = sweep.goal.metric
    trials = [trial for trial in sweep.trials if trial.value(metric) is not None]
    names = [name for name in sweep.summary.get("space", {}) if trials and name in trials[0].values["settings"]]
    if len(trials) < 2 or not names or sweep.summary.get("goal") not in LEARNING_GOALS:
        return None
    dimensions = [_dimension(name, [trial.values["settings"].get(name) for trial in trials]) for name in names]
    values = [trial.value(metric) for trial in trials]
    color = {"color": values, "colorscale": COLORSCALE, "reversescale": not sweep.goal.maximize}
    plot = go.Parcoords(dimensions=[*dimensions, {"label": sweep.goal.title, "values": values}], line=color)
    summary = f"{sweep.goal.title} by {', '.join(names)} of {len(trials)} trials, which ended at different rungs"
    margin = {"l": 70, "r": 50, "t": 50, "b": 20}
    return make_figure("settings", "Settings and results", summary, [plot], 340, wide=True, margin=margin)


def _dimension(name: str, values: list[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates: logarithmic for positive numbers, otherwise one tick per value."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values):
        ticks = sorted(set(values))[:: max(1, len(set(values)) // MAX_TICKS)]
        logs = [math.log10(value) for value in values]
        return {
            "label": name,
            "values": logs,
            "tickvals": [math.log10(tick) for tick in ticks],
            "ticktext": [f"{tick:.4g}" for tick in ticks],
        }
    texts = [str(value) for value in values]
    ticks = sorted(set(texts))
    numbers = [ticks.index(text) for text in texts]
    return {"label": name, "values": numbers, "tickvals": list(range(len(ticks))), "ticktext": ticks}


def _heat_map(name: str, title: str, trials: dict[tuple[int, int], TrialRecord], sweep: SweepRecord) -> Figure:
    """Return the goal of each batch shape, or why it was not measured; all heat maps have one color scale."""
    goal = sweep.goal
    measured = [value for trial in sweep.trials if (value := trial.measured(goal.metric)) is not None]
    columns, rows = (sorted({cell[axis] for cell in trials}) for axis in (0, 1))
    cells = [[trials.get((micro, accumulation)) for micro in columns] for accumulation in rows]
    heat_map = go.Heatmap(
        x=[str(micro) for micro in columns],
        y=[str(accumulation) for accumulation in rows],
        z=[[trial.measured(goal.metric) if trial else None for trial in row] for row in cells],
        text=[[trial.cell_text(goal.metric, sweep.best) if trial else "" for trial in row] for row in cells],
        zmin=min(measured, default=None),
        zmax=max(measured, default=None),
        colorscale=COLORSCALE,
        reversescale=not goal.maximize,
        showscale=False,
        texttemplate="%{text}",
        hovertemplate="micro %{x}, accumulation %{y}: %{text}<extra></extra>",
        xgap=3,
        ygap=3,
        textfont={"size": 12},
    )
    summary = f"{goal.title} by micro-batch and accumulation; the table of trials has the values"
    x, y = ({"type": "category", "title": {"text": text, "standoff": 6}} for text in ("micro-batch", "accumulation"))
    height, wide = 110 + 62 * len(rows), len(columns) > 6
    return make_figure(name, title, summary, [heat_map], height, wide, hovermode="closest", xaxis=x, yaxis=y)


def _bars(sweep: SweepRecord, name: str, metric: str, title: str, digits: str) -> Figure | None:
    """Return bars of the finished trials in descending order, colored by global batch, with the range of windows."""
    measured = [trial for trial in sweep.trials if trial.measured(metric) is not None]
    trials = sorted(measured, key=lambda trial: -(trial.value(metric) or 0.0))[:MAX_BARS]
    if not trials:
        return None
    traces = []
    sizes = sorted({trial.values.get("global") for trial in trials}, key=lambda size: (size is None, size))
    for size, color in zip(sizes, cycle(COLORS), strict=False):
        group = [trial for trial in trials if trial.values.get("global") == size]
        values = [trial.value(metric) or 0.0 for trial in group]
        ends = [[trial.value(f"{metric}_{end}") or 0.0 for trial in group] for end in ("min", "max")]
        below, above = ([abs(e - v) if e else 0.0 for e, v in zip(end, values, strict=True)] for end in ends)
        spread = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        bar = go.Bar(
            y=[trial.label for trial in group],
            x=values,
            name=f"global {size}",
            orientation="h",
            marker={"color": color},
            text=values,
            texttemplate=f"%{{text:{digits}}}",
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": "#10131a"},  # contrast of at least 4.4:1 on every series color
            error_x=spread | {"color": GRAY, "thickness": 1.5, "width": 5} if any(above + below) else None,
        )
        traces.append(bar)
    labels = [trial.label for trial in reversed(trials)]
    return make_figure(
        name,
        title,
        f"{title}: {len(trials)} trials, the most {trials[0].value(metric):.4g} of {trials[0].label}",
        traces,
        height=110 + 27 * len(trials),
        hovermode="closest",
        barmode="overlay",  # each trial is in one trace only
        bargap=0.25,
        yaxis={"categoryorder": "array", "categoryarray": labels, "nticks": len(trials), "showgrid": False},
        xaxis={"rangemode": "tozero", "showgrid": True, "nticks": 6},
    )
