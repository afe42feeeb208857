"""Plotly charts of a run, in the style of all charts.

Series colors must be visible on light and dark pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import plotly.graph_objects as go

from mmray.engine.metrics.table import EVALUATE, LOSS_CHART, METRICS, is_own
from mmray.evaluation import DIRECTIONS
from mmray.report.run import RunRecord, scores_by_set

BLUE = "#5b7cfa"
ORANGE = "#e8833a"
TEAL = "#1fa58a"
ROSE = "#e0567a"
GRAY = "#8b93a7"
MAX_TICKS = 8
FEW_POINTS = 25
_UNITS = {"_per_s": "", "_s": " s", "_gib": " GiB"}  # of an axis, by the end of a metric's name


@dataclass(frozen=True)
class Figure:
    """A chart of a page.

    Attributes:
        name: Identifier in the page, such as `loss`.
        title: Heading.
        summary: Text for screen readers.
        plot: The figure as JSON data of Plotly: `data` and `layout`.
        height: Height in pixels.
        wide: Whether it takes the whole width of the page.
    """

    name: str
    title: str
    summary: str
    plot: dict[str, Any]
    height: int = 260
    wide: bool = False


def make_figure(
    name: str,
    title: str,
    summary: str,
    traces: list[Any],
    height: int = 260,
    wide: bool = False,
    **layout: Any,
) -> Figure:
    """Return a chart in the style of the page.

    Args:
        name: Identifier of the chart in the page, such as `loss`.
        title: Heading; its first letter becomes upper case.
        summary: Text for screen readers.
        traces: Plotly traces, objects such as `plotly.graph_objects.Scatter`.
        height: Height in pixels.
        wide: Whether the chart takes the whole width of the page.
        layout: Options of `plotly.graph_objects.Figure.update_layout`.

    Returns:
        A Figure: `name`, `title`, `summary`, `height`, `wide`, and `plot`, the JSON data of Plotly
        (`data` and `layout`).
    """
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
    return Figure(name, title[0].upper() + title[1:], summary, plot.to_plotly_json(), height, wide)


def _recall_lines(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the lines of a chart of recall by metric; `prefix` precedes the metrics of a set."""
    lines = {}
    for k, dash in {1: "solid", 5: "dash", 10: "dot"}.items():
        colors = cycle((BLUE, ORANGE, TEAL, ROSE))
        for direction, color in zip(DIRECTIONS, colors, strict=False):
            line = _line(f"R@{k} {direction.replace('_', ' ')}", color, dash=dash)
            # Six legend entries are too wide for a narrow page.
            line |= {"legendgroup": direction, "showlegend": k == 1}
            line["opacity"] = 1 if k == 1 else 0.75
            lines[f"{prefix}recall_at_{k}/{direction}"] = line
    return lines


def run_figures(run: RunRecord) -> dict[str, list[Figure]]:
    """Return the charts of a run.

    Returns:
        By page section (`learning`, `recall`, `speed` and `start`) a list of charts, each a Figure
        with `name`, `title`, `summary` and `plot` (JSON data of Plotly). Charts of metrics that
        were not logged are omitted.
    """
    names = list(scores_by_set(run.newest(EVALUATE))) or [""]
    prefixes = {name: f"{EVALUATE}{name}/" if name else EVALUATE for name in names}
    parts = {
        **_metric_charts(run, prefixes),
        "recall": _recall_charts(run, prefixes),
        "start": [_start_timeline(run)],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _metric_charts(run: RunRecord, prefixes: dict[str, str]) -> dict[str, list[Figure | None]]:
    """Return the charts of METRICS, and one for each metric of the user's code.

    `prefixes` are those of the metrics of each evaluation set, by its name.
    """
    logged = dict.fromkeys(name for line in run.lines for name in line)
    shown = [(name, info.chart, info.line) for name, info in METRICS.items() if info.chart]
    for name in filter(is_own, logged):
        title = LOSS_CHART if name.startswith("train/loss_") else name  # a term of the objective
        shown.append((name, title, name.rpartition("/")[2].replace("_", " ")))
    charts: dict[str, dict[str, dict[str, Any]]] = {}
    colors = cycle((BLUE, TEAL, ROSE, ORANGE))
    for name, title, line in shown:
        charts.setdefault(title, {})[name] = _line(line, next(colors))
    for (name, prefix), color in zip(prefixes.items(), cycle((ORANGE, TEAL, ROSE)), strict=False):
        charts[LOSS_CHART][f"{prefix}loss"] = _line(f"held out {name}".strip(), color)
    parts: dict[str, list[Figure | None]] = {"learning": [], "speed": []}
    for title, lines in charts.items():
        first = next(iter(lines))
        yaxis: dict[str, Any] = {"exponentformat": "power"}
        units = [unit for end, unit in _UNITS.items() if first.endswith(end)]
        if units:
            yaxis = {"rangemode": "tozero", "tickformat": ",", "ticksuffix": units[0]}
        is_speed = first in METRICS and not first.startswith("train/")
        parts["speed" if is_speed else "learning"].append(
            _chart(run, re.sub("[^a-z0-9]+", "-", first.lower()), title, lines, **yaxis)
        )
    return parts


def _recall_charts(run: RunRecord, prefixes: dict[str, str]) -> list[Figure | None]:
    """Return charts of recall and zero-shot accuracy of each evaluation set.

    `prefixes` are those of the metrics of each set, by its name.
    """
    percent = {"range": [0, 1.03], "tickformat": ".0%"}
    recall = []
    zero_shot = []
    for name, prefix in prefixes.items():
        title = f"{f'{name}: recall' if name else 'Recall'} over the run (R@5 dashed, R@10 dotted)"
        chart_name = f"recall-{name}" if name else "recall"
        recall.append(_chart(run, chart_name, title, _recall_lines(prefix), 320, **percent))
        title = f"{f'{name}: zero-shot' if name else 'Zero-shot'} accuracy over the run"
        lines = {
            f"{prefix}zero_shot/top_1": _line("top 1", BLUE),
            f"{prefix}zero_shot/top_5": _line("top 5", ORANGE),
            f"{prefix}zero_shot/mean_per_class_recall": _line("mean of classes", TEAL),
        }
        zero_shot.append(_chart(run, f"zero-shot-{name}", title, lines, 320, **percent))
    return recall + zero_shot


def _start_timeline(run: RunRecord) -> Figure | None:
    """Return a bar per stage between the command and its first step;

    None if less than a stage was recorded.
    """
    stages = next(iter(run.result.get("starts") or [[]]))
    durations_s = [after["at_s"] - stage["at_s"] for stage, after in pairwise(stages)]
    if not durations_s:
        return None
    names = [stage["stage"] for stage in stages[:-1]]
    end_s = stages[-1]["at_s"]
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
        f"{end_s:.1f} s; longest: {names[durations_s.index(max(durations_s))]}, "
        f"{max(durations_s):.1f} s",
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
    run: RunRecord,
    name: str,
    title: str,
    metrics: dict[str, dict[str, Any]],
    height: int = 260,
    **yaxis: Any,
) -> Figure | None:
    """Return lines of the measured metrics over the steps of a run; None without any."""
    traces = []
    ranges = []
    for metric, style in metrics.items():
        if values := run.values(metric):
            steps, with_gaps = run.series(metric)
            mode = "lines+markers" if len(values) <= FEW_POINTS else "lines"
            traces.append(go.Scatter(x=steps, y=with_gaps, mode=mode, marker={"size": 6}, **style))
            ranges.append(
                f"{style['name']} {values[0]:.4g} at the start, {values[-1]:.4g} at the end"
            )
    if not traces:
        return None
    few = run.lines[-1]["step"] - run.lines[0]["step"] < MAX_TICKS
    ticks = {"dtick": 1} if few else {"nticks": MAX_TICKS}
    xaxis = {"title": {"text": "step", "standoff": 6}, "tickformat": ",d", **ticks}
    return make_figure(name, title, "; ".join(ranges), traces, height, xaxis=xaxis, yaxis=yaxis)
