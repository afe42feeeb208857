"""Plotly charts of a run, in the style of all charts.

Series colors must be visible on light and dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import plotly.graph_objects as go

from mmray.evaluation import DIRECTIONS
from mmray.report.run import RunRecord, scores_by_set

BLUE = "#5b7cfa"
ORANGE = "#e8833a"
TEAL = "#1fa58a"
ROSE = "#e0567a"
GRAY = "#8b93a7"
MAX_TICKS = 8
FEW_POINTS = 25


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

    Args:
        run: The content of the run folder, such as its config and metrics.

    Returns:
        By page section (`learning`, `recall`, `speed` and `start`) a list of charts, each a Figure
        with `name`, `title`, `summary` and `plot` (JSON data of Plotly). Charts of metrics that
        were not logged are omitted.
    """
    names = list(scores_by_set(run.newest("evaluate/"))) or [""]
    prefixes = {name: f"evaluate/{name}/" if name else "evaluate/" for name in names}
    parts = {
        "learning": _learning_charts(run, prefixes),
        "recall": _recall_charts(run, prefixes),
        "speed": _speed_charts(run),
        "start": [_start_timeline(run)],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _learning_charts(run: RunRecord, prefixes: dict[str, str]) -> list[Figure | None]:
    """Return charts of the loss, the learning rate and the gradients.

    `prefixes` are those of the metrics of each evaluation set, by its name.
    """
    loss = {"train/loss": _line("training", BLUE)}
    for (name, prefix), color in zip(prefixes.items(), cycle((ORANGE, TEAL, ROSE)), strict=False):
        loss[f"{prefix}loss"] = _line(f"held out {name}".strip(), color)
    rate = {"train/lr": _line("rate", TEAL)}
    gradient = {"train/grad_norm": _line("before clipping", ROSE)}
    return [
        _chart(run, "loss", "Loss", loss),
        _chart(run, "lr", "Learning rate", rate, exponentformat="power"),
        _chart(run, "gradient", "Gradient norm", gradient),
    ]


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


def _speed_charts(run: RunRecord) -> list[Figure | None]:
    """Return charts of throughput, of the times of a step, and of memory."""
    rate = {"throughput/samples_per_s": _line("samples/s", BLUE)}
    step = {
        "time/step_s": _line("whole step", TEAL),
        "time/data_wait_s": _line("waiting for data", ORANGE),
    }
    memory = {"memory/peak_gib": _line("peak", ROSE)}
    from_zero: dict[str, Any] = {"rangemode": "tozero"}
    return [
        _chart(run, "throughput", "Samples per second", rate, **from_zero, tickformat=","),
        _chart(run, "step", "Where a step's time goes", step, **from_zero, ticksuffix=" s"),
        _chart(run, "memory", "Peak memory of a worker", memory, **from_zero, ticksuffix=" GiB"),
    ]


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
