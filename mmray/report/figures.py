"""The charts of runs, sweeps and prepared sets, as JSON data of Plotly.

Series colors must be visible on light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.engine.metrics.table import EVALUATE, LOSS_CHART, METRICS, SOURCE, is_own
from mmray.evaluation import DIRECTIONS
from mmray.report.run import RunRecord, scores_by_set
from mmray.report.sweep import SweepRecord
from mmray.sweep_files import TrialRow

if TYPE_CHECKING:
    from mmray.report.prepared import SetStatistics

BLUE = "#5b7cfa"
ORANGE = "#e8833a"
TEAL = "#1fa58a"
ROSE = "#e0567a"
GRAY = "#8b93a7"
MAX_TICKS = 8
FEW_POINTS = 25
NUM_BARS = 40  # most bars of a histogram
PERCENT = {"range": [0, 1.03], "tickformat": ".0%"}
_UNITS = {"_per_s": "", "_s": " s", "_gib": " GiB"}  # of an axis, by the end of a metric's name

Trace = dict[str, Any]  # of Plotly


@dataclass(frozen=True)
class Figure:
    """A chart of a page.

    Attributes:
        name: Identifier in the page, such as `loss`.
        summary: Text for screen readers.
        plot: `data` and `layout` of Plotly.
        height: Height in pixels.
        wide: Whether it takes the whole width of the page.
    """

    name: str
    title: str
    summary: str
    plot: dict[str, Any]
    height: int
    wide: bool


def make_figure(
    name: str,
    title: str,
    summary: str,
    traces: Sequence[Trace],
    xaxis: dict[str, Any],
    yaxis: dict[str, Any] | None = None,
    height: int = 260,
    wide: bool = False,
    **layout: object,
) -> Figure:
    """Return a chart in the style of all pages; `xaxis`, `yaxis` and `layout` extend its layout."""
    style = {
        "margin": {"l": 52, "r": 14, "t": 10, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "xaxis": {"showgrid": False, "zeroline": False, "automargin": True, "nticks": MAX_TICKS},
        "yaxis": {"zeroline": False, "automargin": True, "nticks": 6},
    }
    style["xaxis"] |= xaxis
    style["yaxis"] |= yaxis or {}
    plot = {"data": traces, "layout": style | layout}
    return Figure(name, title[0].upper() + title[1:], summary, plot, height, wide)


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 6}


def _curve(name: str, color: str, width: int = 2, **options: object) -> Trace:
    line = {"color": color, "width": width}
    curve = {"type": "scatter", "name": name, "mode": "lines+markers", "line": line}
    return curve | {"marker": {"size": 4 + width}} | options


def run_figures(run: RunRecord) -> dict[str, list[Figure]]:
    """Return the charts of a run by section: `learning`, `recall` and `speed`.

    Charts of metrics that were not logged are omitted.
    """
    sets = list(scores_by_set(run.newest(EVALUATE))) or [""]
    prefixes = {name: f"{EVALUATE}{name}/" if name else EVALUATE for name in sets}
    figures: dict[str, list[Figure]] = {
        "learning": [],
        "recall": [],
        "speed": [],
    }
    for title, curves in _metric_curves(run, prefixes).items():
        first = next(iter(curves))
        yaxis: dict[str, Any] = {"exponentformat": "power"}
        for end, unit in _UNITS.items():
            if first.endswith(end):
                yaxis = {"rangemode": "tozero", "tickformat": ",", "ticksuffix": unit}
                break
        is_speed = first in METRICS and not first.startswith("train/")
        name = re.sub("[^a-z0-9]+", "-", first.lower())
        figures["speed" if is_speed else "learning"] += _step_chart(run, name, title, curves, yaxis)
    for name, prefix in prefixes.items():
        title = f"{f'{name}: recall' if name else 'Recall'}@1 and zero-shot accuracy over the run"
        chart_name = f"scores-{name}" if name else "scores"
        curves = _score_curves(prefix)
        figures["recall"] += _step_chart(run, chart_name, title, curves, PERCENT, 320)
    return figures


def _metric_curves(run: RunRecord, prefixes: dict[str, str]) -> dict[str, dict[str, Trace]]:
    """Return the curves of METRICS and of metrics of the user's code by chart and metric.

    `prefixes` are those of the metrics of each evaluation set, by its name.
    """
    shown = [(name, info.chart, info.line) for name, info in METRICS.items() if info.chart]
    for name in filter(is_own, dict.fromkeys(name for line in run.lines for name in line)):
        title = LOSS_CHART if name.startswith("train/loss_") else name  # a term of the objective
        legend = name.rpartition("/")[2].replace("_", " ")
        if name.startswith(SOURCE):
            title = f"{legend.capitalize()} by source"
            legend = name.split("/")[1]
        shown.append((name, title, legend))
    charts: dict[str, dict[str, Trace]] = {}
    colors = cycle((BLUE, TEAL, ROSE, ORANGE))
    for name, title, legend in shown:
        charts.setdefault(title, {})[name] = _curve(legend, next(colors))
    for (name, prefix), color in zip(prefixes.items(), cycle((ORANGE, TEAL, ROSE)), strict=False):
        # A contrastive loss depends on its number of negatives.
        rows = run.newest(prefix).get("loss_rows")
        other = f" (batch of {rows:,.0f}: not comparable)" if rows else ""
        charts[LOSS_CHART][f"{prefix}loss"] = _curve(f"held out {name}".strip() + other, color)
    return charts


def _score_curves(prefix: str) -> dict[str, Trace]:
    """Return the curves of recall and accuracy by metric; `prefix` precedes those of a set."""
    names = {f"recall_at_1/{each}": f"R@1 {each.replace('_', ' ')}" for each in DIRECTIONS}
    names |= {"zero_shot/top_1": "zero-shot top 1"}
    colors = cycle((BLUE, ORANGE, TEAL, ROSE))
    return {
        f"{prefix}{metric}": _curve(title, color)
        for (metric, title), color in zip(names.items(), colors, strict=False)
    }


def _step_chart(
    run: RunRecord,
    name: str,
    title: str,
    curves: dict[str, Trace],
    yaxis: dict[str, Any],
    height: int = 260,
) -> list[Figure]:
    """Return a chart of metrics over the steps of a run; empty if none of them was measured."""
    traces = []
    ranges = []
    measured: list[int] = []
    for metric, curve in curves.items():
        if values := run.values(metric):
            steps, with_gaps = run.series(metric)
            measured += steps
            mode = "lines+markers" if len(values) <= FEW_POINTS else "lines"
            traces.append(curve | {"x": steps, "y": with_gaps, "mode": mode})
            ends = f"{values[0]:.4g} at the start, {values[-1]:.4g} at the end"
            ranges.append(f"{curve['name']} {ends}")
    if not traces:
        return []
    xaxis: dict[str, Any] = {"title": _axis_title("step"), "tickformat": ",d"}
    if max(measured) - min(measured) < MAX_TICKS:
        xaxis["dtick"] = 1
    return [make_figure(name, title, "; ".join(ranges), traces, xaxis, yaxis, height)]


def sweep_figures(sweep: SweepRecord) -> list[Figure]:
    """Return a chart of the held-out values of the trials over their samples, if there are any."""
    if sweep.is_throughput:
        return []
    best = sweep.best.trial if sweep.best else None

    def style(row: TrialRow) -> tuple[int, str, str]:
        """Return width, color and legend of a trial."""
        if row.trial == best:
            return 3, BLUE, f"{best}, the best"
        if row.is_recipe:
            return 2, ORANGE, "the recipe's own settings"
        return 1, GRAY, "other trials"

    traces: dict[str, Trace] = {}
    legends: set[str] = set()
    rows = [row for row in sweep.trials if row.curve]
    for row in sorted(rows, key=style):  # Wide lines are drawn last, on top.
        width, color, legend = style(row)
        traces[row.trial] = _curve(
            legend,
            color,
            width,
            x=[point.samples for point in row.curve],
            y=[point.value for point in row.curve],
            hovertemplate=f"{row.trial}: %{{y:.4g}} at %{{x:,}} samples<extra></extra>",
            showlegend=legend not in legends,
        )
        legends.add(legend)
    if not traces:
        return []
    title = f"{sweep.goal.title} by samples"
    summary = f"{title} of {len(traces)} trials; the table of trials has the last values"
    xaxis = {"title": _axis_title("samples"), "rangemode": "tozero", "tickformat": ",~r"}
    curves = list(traces.values())
    return [
        make_figure("curves", title, summary, curves, xaxis, None, 320, True, hovermode="closest")
    ]


def set_figures(statistics: SetStatistics) -> list[Figure]:
    """Return the histograms of a set; a property that no row has gets no chart."""
    sides = {"width": statistics.widths, "height": statistics.heights}
    durations = {"duration": statistics.durations_s}
    lengths = {"length": statistics.text_lengths}
    tokens = {"length": statistics.token_counts}
    return [
        *_histogram("sizes", "image sizes", "pixels", sides),
        *_histogram("durations", "durations of audio and video", "seconds", durations),
        *_histogram("lengths", "text lengths in characters", "characters", lengths),
        *_histogram("tokens", "text lengths in tokens", "tokens", tokens),
    ]


def _histogram(
    name: str,
    title: str,
    unit: str,
    values: Mapping[str, Sequence[float] | np.ndarray],
) -> list[Figure]:
    """Return a histogram of one or two properties in the same bins; empty without values."""
    together = np.concatenate([np.asarray(each, float) for each in values.values()])
    if not len(together):
        return []
    low, middle, high = np.quantile(together, (0, 0.5, 1))
    num_bars = NUM_BARS
    if (together == together.round()).all():  # no more bars than whole numbers
        num_bars = min(NUM_BARS, int(high - low) + 1)
    xaxis: dict[str, Any] = {"title": _axis_title(unit)}
    traces = [
        {
            "type": "histogram",
            "x": np.asarray(each).round(3).tolist(),
            "name": label,
            "nbinsx": num_bars,
            "bingroup": name,
            "marker": {"color": color, "opacity": 0.6},
        }
        for (label, each), color in zip(values.items(), (BLUE, ORANGE), strict=False)
    ]
    summary = f"from {low:.4g} to {high:.4g}, median {middle:.4g} {unit}"
    yaxis = {"title": {"text": "number"}, "rangemode": "tozero"}
    return [make_figure(name, title, summary, traces, xaxis, yaxis, barmode="overlay")]
