"""Plotly charts of a run's metrics. Series colours must be visible on light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from mmray.report.run import RunRecord

BLUE, ORANGE, TEAL, ROSE, GREY = "#5b7cfa", "#e8833a", "#1fa58a", "#e0567a", "#8b93a7"
MOST_TICKS = 8
DIRECTIONS = {"image_to_text": ("image to text", BLUE), "text_to_image": ("text to image", ORANGE)}
FILLS = {BLUE: "rgba(91,124,250,.14)", ORANGE: "rgba(232,131,58,.30)", TEAL: "rgba(31,165,138,.14)"}


@dataclass(frozen=True)
class Figure:
    """A chart with its title, and a text summary for screen readers."""

    name: str
    title: str
    summary: str
    plot: dict[str, Any]
    height: int = 260
    wide: bool = False


def figure(name: str, title: str, summary: str, traces: list[Any], height: int = 260, **layout: Any) -> Figure:
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
    return Figure(name, title, summary, drawn.to_plotly_json(), height)


def run_figures(run: RunRecord) -> dict[str, list[Figure]]:
    """Return the charts of the measured metrics by page section."""
    parts = {
        "learning": [_loss(run), _lr(run), _gradient(run)],
        "recall": [_recall(run)],
        "speed": [_throughput(run), _step_time(run), _memory(run)],
    }
    return {part: [each for each in figures if each is not None] for part, figures in parts.items()}


def _line(run: RunRecord, name: str, title: str, colour: str, scale: float = 1.0, **style: Any) -> go.Scatter:
    """Return the line of a metric over steps, with markers if there are few points."""
    steps, values = run.series(name)
    scaled = [None if value is None else value * scale for value in values]
    mode = "lines+markers" if len(values) <= 25 else "lines"
    drawn = {"mode": mode, "marker": {"size": 6}, "line": {"color": colour, "width": 2}}
    drawn["line"] = drawn["line"] | style.pop("line", {})
    return go.Scatter(x=steps, y=scaled, name=title, **drawn | style)


def _loss(run: RunRecord) -> Figure | None:
    if not run.values("train/loss"):
        return None
    traces = [_line(run, "train/loss", "training", BLUE)]
    if run.values("evaluate/loss"):
        traces.append(_line(run, "evaluate/loss", "held out", ORANGE, mode="lines+markers"))
    return figure("loss", "Loss", _range_text(run, "train/loss", "training loss"), traces, **_step_axis(run))


def _lr(run: RunRecord) -> Figure | None:
    if not run.values("train/lr"):
        return None
    traces = [_line(run, "train/lr", "learning rate", TEAL, fill="tozeroy", fillcolor=FILLS[TEAL])]
    summary = f"learning rate, at most {max(run.values('train/lr')):.3g}"
    return figure(
        "lr",
        "Learning rate",
        summary,
        traces,
        **_step_axis(run, yaxis={"rangemode": "tozero", "exponentformat": "power", "nticks": 5}),
    )


def _gradient(run: RunRecord) -> Figure | None:
    if not run.values("train/grad_norm"):
        return None
    traces = [_line(run, "train/grad_norm", "before clipping", ROSE)]
    return figure(
        "gradient", "Gradient norm", _range_text(run, "train/grad_norm", "gradient norm"), traces, **_step_axis(run)
    )


def _recall(run: RunRecord) -> Figure | None:
    if not run.values("evaluate/recall_at_1/image_to_text"):
        return None
    dash = {1: "solid", 5: "dash", 10: "dot"}
    traces = [
        _line(
            run,
            f"evaluate/recall_at_{k}/{way}",
            title if k == 1 else f"R@{k} {title}",
            colour,
            mode="lines+markers",
            line={"dash": dash[k], "width": 2.5 if k == 1 else 1.5},
            opacity=1 if k == 1 else 0.75,
            legendgroup=way,
            showlegend=k == 1,  # six legend entries are too wide for a narrow page
        )
        for k in dash
        for way, (title, colour) in DIRECTIONS.items()
    ]
    summary = "; ".join(
        _range_text(run, f"evaluate/recall_at_1/{way}", f"recall at 1 {title}")
        for way, (title, _) in DIRECTIONS.items()
    )
    title = "Recall over the run: R@1, dashed R@5, dotted R@10"
    return figure(
        "recall", title, summary, traces, 320, **_step_axis(run, yaxis={"range": [0, 1.03], "tickformat": ".0%"})
    )


def _throughput(run: RunRecord) -> Figure | None:
    name = "throughput/samples_per_s"
    if not run.values(name):
        return None
    traces = [_line(run, name, "samples/s", BLUE, fill="tozeroy", fillcolor=FILLS[BLUE])]
    summary = f"samples per second, {min(run.values(name)):,.0f} to {max(run.values(name)):,.0f}"
    return figure("throughput", "Samples per second", summary, traces, **_step_axis(run, yaxis={"rangemode": "tozero"}))


def _step_time(run: RunRecord) -> Figure | None:
    """Stacked chart of compute time and data wait per step."""
    steps, whole = run.series("time/step_s")
    waits = run.series("time/data_wait_s")[1]
    if not steps or len(waits) != len(whole):
        return None
    busy = [None if s is None or w is None else 1000 * (s - w) for s, w in zip(whole, waits, strict=True)]
    style = {"mode": "lines+markers" if len(steps) <= 25 else "lines", "stackgroup": "step", "marker": {"size": 5}}
    traces = [
        go.Scatter(x=steps, y=busy, name="compute", line={"color": TEAL, "width": 1.5}, fillcolor=FILLS[TEAL], **style),
        go.Scatter(
            x=steps,
            y=[None if w is None else 1000 * w for w in waits],
            name="waiting for data",
            line={"color": ORANGE, "width": 1.5},
            fillcolor=FILLS[ORANGE],
            **style,
        ),
    ]
    summary = "milliseconds per step, computing and waiting for data"
    return figure(
        "step",
        "Where a step's time goes",
        summary,
        traces,
        **_step_axis(run, yaxis={"rangemode": "tozero", "ticksuffix": " ms"}),
    )


def _memory(run: RunRecord) -> Figure | None:
    name = "memory/peak_gib"
    if not run.values(name):
        return None
    traces = [_line(run, name, "peak", ROSE)]
    summary = f"peak memory of a worker, at most {max(run.values(name)):.2f} GiB"
    return figure(
        "memory",
        "Peak memory of a worker",
        summary,
        traces,
        **_step_axis(run, yaxis={"rangemode": "tozero", "ticksuffix": " GiB"}),
    )


def _step_axis(run: RunRecord, **layout: Any) -> dict[str, Any]:
    """Layout of the step axis, with integer ticks."""
    few = run.lines[-1]["step"] - run.lines[0]["step"] < MOST_TICKS
    ticks = {"dtick": 1} if few else {"nticks": MOST_TICKS}
    return {"xaxis": {"title": {"text": "step", "standoff": 6}, "tickformat": ",d", **ticks}, **layout}


def _range_text(run: RunRecord, name: str, title: str) -> str:
    values = run.values(name)
    return f"{title} {values[0]:.3f} at the start, {values[-1]:.3f} at the end" if values else f"{title} not measured"
