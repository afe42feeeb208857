"""Plotly charts of a run and of a sweep. Series colours must be visible on light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from mmray.report.run import RunRecord
from mmray.report.sweep import HeatMap, Sweep

BLUE, ORANGE, TEAL, ROSE, GREY = "#5b7cfa", "#e8833a", "#1fa58a", "#e0567a", "#8b93a7"
COLOURS = (BLUE, ORANGE, TEAL, ROSE, "#9b6bdf", "#b98a16", GREY)
FILLS = {BLUE: "rgba(91,124,250,.14)", ORANGE: "rgba(232,131,58,.30)", TEAL: "rgba(31,165,138,.14)"}
SCALE = [[0, "#dbe4ff"], [0.35, "#9db4fb"], [0.7, "#5b7cfa"], [1, "#2c3fb1"]]  # Plotly derives the text colour
MAX_TICKS, FEW_POINTS = 8, 25
MAX_HEAT_MAPS, MAX_BARS = 12, 30  # longer lists are only in the table
DIRECTIONS = {"image_to_text": ("image to text", BLUE), "text_to_image": ("text to image", ORANGE)}


@dataclass(frozen=True)
class Figure:
    """A chart with its title, and a text summary for screen readers."""

    name: str
    title: str
    summary: str
    plot: dict[str, Any]
    height: int = 260
    wide: bool = False


def figure(
    name: str, title: str, summary: str, traces: list[Any], height: int = 260, wide: bool = False, **layout: Any
) -> Figure:
    """Return a chart of these traces in the page's style; `layout` is passed to Plotly."""
    drawn = go.Figure(traces)
    drawn.update_layout(
        template="none",
        margin={"l": 52, "r": 14, "t": 10, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        showlegend=sum(trace.showlegend is not False for trace in traces) > 1,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    drawn.update_xaxes(showgrid=False, zeroline=False, automargin=True)
    drawn.update_yaxes(zeroline=False, automargin=True, nticks=6)
    drawn.update_layout(**layout)
    return Figure(name, title, summary, drawn.to_plotly_json(), height, wide)


def run_figures(run: RunRecord) -> dict[str, list[Figure]]:
    """Return the charts of the measured metrics by page section."""
    loss = [("train/loss", "training", BLUE), ("evaluate/loss", "held out", ORANGE)]
    lr = {"exponentformat": "power", "nticks": 5}
    rate, peak = ("throughput/samples_per_s", "samples/s", BLUE), ("memory/peak_gib", "peak", ROSE)
    parts = {
        "learning": [
            _metric_figure(run, "loss", "Loss", loss),
            _metric_figure(run, "lr", "Learning rate", [("train/lr", "learning rate", TEAL)], fill=True, **lr),
            _metric_figure(run, "gradient", "Gradient norm", [("train/grad_norm", "before clipping", ROSE)]),
        ],
        "recall": [_recall(run)],
        "speed": [
            _metric_figure(run, "throughput", "Samples per second", [rate], fill=True),
            _step_time(run),
            _metric_figure(run, "memory", "Peak memory of a worker", [peak], rangemode="tozero", ticksuffix=" GiB"),
        ],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _metric_figure(
    run: RunRecord, name: str, title: str, metrics: list[tuple[str, str, str]], fill: bool = False, **axis: Any
) -> Figure | None:
    """Return a chart of (metric, label, colour) over steps; None if the first metric was not measured."""
    if not run.values(metrics[0][0]):
        return None
    style = {"fill": "tozeroy", "fillcolor": FILLS[metrics[0][2]]} if fill else {}
    axis = {"rangemode": "tozero"} | axis if fill else axis
    traces = [_line(run, *metric, **style) for metric in metrics if run.values(metric[0])]
    return _steps_figure(run, name, title, _range_text(run, metrics[0][0], title), traces, yaxis=axis)


def _steps_figure(run: RunRecord, name: str, title: str, summary: str, traces: list[Any], **layout: Any) -> Figure:
    """Return a chart over the steps of a run, with integer ticks."""
    few = run.lines[-1]["step"] - run.lines[0]["step"] < MAX_TICKS
    ticks = {"dtick": 1} if few else {"nticks": MAX_TICKS}
    xaxis = {"title": {"text": "step", "standoff": 6}, "tickformat": ",d", **ticks}
    return figure(name, title, summary, traces, xaxis=xaxis, **layout)


def _line(run: RunRecord, name: str, title: str, colour: str, **style: Any) -> go.Scatter:
    """Return the line of a metric over steps, with markers if there are few points."""
    steps, values = run.series(name)
    line = {"color": colour, "width": 2} | style.pop("line", {})
    mode = {"mode": "lines+markers" if len(values) <= FEW_POINTS else "lines", "marker": {"size": 6}}
    return go.Scatter(x=steps, y=values, name=title, line=line, **mode | style)


def _range_text(run: RunRecord, name: str, title: str) -> str:
    values = run.values(name)
    return f"{title}: {values[0]:.4g} at the start, {values[-1]:.4g} at the end, at most {max(values):.4g}"


def _recall(run: RunRecord) -> Figure | None:
    if not run.values("evaluate/recall_at_1/image_to_text"):
        return None
    traces = [
        _line(
            run,
            f"evaluate/recall_at_{k}/{way}",
            title if k == 1 else f"R@{k} {title}",
            colour,
            mode="lines+markers",
            line={"dash": dash, "width": 2.5 if k == 1 else 1.5},
            opacity=1 if k == 1 else 0.75,
            legendgroup=way,
            showlegend=k == 1,  # six legend entries are too wide for a narrow page
        )
        for k, dash in {1: "solid", 5: "dash", 10: "dot"}.items()
        for way, (title, colour) in DIRECTIONS.items()
    ]
    ranges = (
        _range_text(run, f"evaluate/recall_at_1/{way}", f"recall at 1 {name}")
        for way, (name, _) in DIRECTIONS.items()
        if run.values(f"evaluate/recall_at_1/{way}")
    )
    title, axis = "Recall over the run: R@1, dashed R@5, dotted R@10", {"range": [0, 1.03], "tickformat": ".0%"}
    return _steps_figure(run, "recall", title, "; ".join(ranges), traces, height=320, yaxis=axis)


def _step_time(run: RunRecord) -> Figure | None:
    """Stacked chart of compute time and data wait per step."""
    steps, whole = run.series("time/step_s")
    waits = run.series("time/data_wait_s")[1]
    if not steps or len(waits) != len(whole):
        return None
    wait_ms = [None if wait is None else 1000 * wait for wait in waits]
    busy_ms = [None if s is None or w is None else 1000 * s - w for s, w in zip(whole, wait_ms, strict=True)]
    mode = {"mode": "lines+markers" if len(steps) <= FEW_POINTS else "lines", "stackgroup": "step"}
    traces = [
        go.Scatter(x=steps, y=y, name=name, line={"color": colour, "width": 1.5}, fillcolor=FILLS[colour], **mode)
        for name, y, colour in (("compute", busy_ms, TEAL), ("waiting for data", wait_ms, ORANGE))
    ]
    title, summary = "Where a step's time goes", "milliseconds per step, computing and waiting for data"
    axis = {"rangemode": "tozero", "ticksuffix": " ms"}
    return _steps_figure(run, "step", title, summary, traces, yaxis=axis)


def sweep_figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Return heat maps, throughput bars and memory bars of the measured trials."""
    heat_maps = [_heat_map(number, each, sweep) for number, each in enumerate(sweep.heat_maps()[:MAX_HEAT_MAPS], 1)]
    bars = [
        _bars(sweep, "throughput", "samples_per_s", "Samples per second, with the spread of its windows", ",.0f"),
        _bars(sweep, "memory", "peak_gib", "Peak memory of a worker, GiB", ".2f"),
    ]
    return {"grids": heat_maps, "bars": [each for each in bars if each is not None]}


def _heat_map(number: int, heat_map: HeatMap, sweep: Sweep) -> Figure:
    """One trace for the measured cells and one for the others; all heat maps have one colour scale."""
    goal = sweep.goal
    measured = [trial.measured(goal.figure) for trial in sweep.trials]
    everywhere = [value for value in measured if value is not None]
    cells = [[heat_map.cells.get((micro, rows)) for micro in heat_map.micro] for rows in heat_map.accumulation]
    x, y = [str(each) for each in heat_map.micro], [str(each) for each in heat_map.accumulation]
    values = [[trial and trial.measured(goal.figure) for trial in row] for row in cells]
    style: dict[str, Any] = {"x": x, "y": y, "texttemplate": "%{text}", "textfont": {"size": 12}, "xgap": 3, "ygap": 3}
    style |= {"showscale": False, "showlegend": False}
    traces = [
        go.Heatmap(
            z=values,
            text=[[trial.cell_text(goal.figure, sweep.best) if trial else "" for trial in row] for row in cells],
            hovertemplate=f"micro %{{x}}, accumulation %{{y}}: %{{z:,.4g}} {goal.title}<extra></extra>",
            colorscale=SCALE,
            reversescale=not goal.largest,
            zmin=min(everywhere, default=None),
            zmax=max(everywhere, default=None),
            **style,
        ),
        go.Heatmap(
            z=[[1 if trial and trial.measured(goal.figure) is None else None for trial in row] for row in cells],
            text=[[trial.missing_text(goal.figure) if trial else "" for trial in row] for row in cells],
            hovertemplate="micro %{x}, accumulation %{y}: %{text}<extra></extra>",
            colorscale=[[0, "#b3324f"], [1, "#b3324f"]],
            **style,
        ),
    ]
    return figure(
        f"grid-{number}",
        heat_map.title,
        f"{goal.title} by micro-batch and accumulation; the table of trials has the values",
        traces,
        height=110 + 62 * len(y),
        wide=len(x) > 6,
        hovermode="closest",
        xaxis={"type": "category", "title": {"text": "micro-batch", "standoff": 6}},
        yaxis={"type": "category", "title": {"text": "accumulation", "standoff": 6}},
    )


def _bars(sweep: Sweep, name: str, metric: str, title: str, digits: str) -> Figure | None:
    """Return bars of the finished trials in descending order, coloured by global batch, with the range of windows."""
    measured = [trial for trial in sweep.trials if trial.measured(metric) is not None]
    trials = sorted(measured, key=lambda trial: -(trial.figure(metric) or 0.0))[:MAX_BARS]
    if not trials:
        return None
    traces = []
    sizes = sorted({trial.values.get("global") for trial in trials}, key=lambda size: (size is None, size))
    for size, colour in zip(sizes, cycle(COLOURS), strict=False):
        group = [trial for trial in trials if trial.values.get("global") == size]
        values = [trial.figure(metric) or 0.0 for trial in group]
        ends = [[trial.figure(f"{metric}_{end}") or 0.0 for trial in group] for end in ("min", "max")]
        less, more = ([abs(e - v) if e else 0.0 for e, v in zip(end, values, strict=True)] for end in ends)
        spread = {"type": "data", "symmetric": False, "array": more, "arrayminus": less}
        bar = go.Bar(
            y=[trial.label for trial in group],
            x=values,
            name=f"global {size}",
            orientation="h",
            marker={"color": colour},
            text=values,
            texttemplate=f"%{{text:{digits}}}",
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": "#10131a"},  # contrast of at least 4.4:1 on every series colour
            error_x=spread | {"color": GREY, "thickness": 1.5, "width": 5} if any(more + less) else None,
        )
        traces.append(bar)
    labels = [trial.label for trial in reversed(trials)]
    return figure(
        name,
        title,
        f"{title}: {len(trials)} trials, the most {trials[0].figure(metric):.4g} of {trials[0].label}",
        traces,
        height=110 + 27 * len(trials),
        hovermode="closest",
        barmode="overlay",  # each trial is in one trace only
        bargap=0.25,
        yaxis={"categoryorder": "array", "categoryarray": labels, "nticks": len(trials), "showgrid": False},
        xaxis={"rangemode": "tozero", "showgrid": True, "nticks": 6},
    )
