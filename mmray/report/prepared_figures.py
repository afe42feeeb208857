"""Plotly histograms of a prepared set: sizes and shapes of images, lengths of texts, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mmray.report.figures import BLUE, MAX_TICKS, ORANGE, Figure, make_figure
from mmray.report.prepared import SetStatistics

MAX_BARS = 40
MIN_BARS = 9  # width of a chart of fewer intervals
MIN_STEP = 0.01
RATIO_STEP = 0.125  # of the logarithm to base 2: 9 %
RATIOS = ((1, 8), (1, 4), (1, 2), (3, 4), (1, 1), (4, 3), (2, 1), (4, 1), (8, 1))  # with a tick


def set_figures(statistics: SetStatistics) -> list[Figure]:
    """Return the histograms of a set.

    Args:
        statistics: Properties of its rows. A property that no row has gets no chart.

    Returns:
        Charts of the sizes and the aspect ratios of images and videos, the durations of audio and
        video, and the lengths of texts in characters and in tokens.
    """
    sides = {"width": statistics.widths, "height": statistics.heights}
    sizes = np.array([statistics.widths, statistics.heights], float)
    ratios = {"width / height": np.log2(sizes[0] / sizes[1]).tolist()}
    ticks = {
        "tickvals": [float(np.log2(width / height)) for width, height in RATIOS],
        "ticktext": [f"{width}:{height}" for width, height in RATIOS],
    }
    durations = {"duration": statistics.durations_s}
    lengths = {"length": statistics.text_lengths}
    tokens = {"length": statistics.token_counts}
    figures = [
        _histogram("sizes", "image sizes", "pixels", sides),
        _histogram("ratios", "aspect ratios", "width : height", ratios, RATIO_STEP, **ticks),
        _histogram("durations", "durations of audio and video", "seconds", durations),
        _histogram("lengths", "text lengths in characters", "characters", lengths),
        _histogram("tokens", "text lengths in tokens", "tokens", tokens),
    ]
    return [figure for figure in figures if figure is not None]


def _histogram(
    name: str,
    title: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    step: float = 0.0,
    **xaxis: Any,
) -> Figure | None:
    """Return bars of the number of values in intervals of equal length; None without values.

    The first interval is around a multiple of its length `step`; 0: about MAX_BARS intervals.
    """
    together = np.concatenate([np.asarray(each, float) for each in values.values()])
    if not len(together):
        return None
    low = float(together.min())
    high = float(together.max())
    if not step:
        step = max((high - low) / MAX_BARS, MIN_STEP)
        # Whole numbers get intervals of whole length, so that no bar has more numbers than another.
        if (together == together.round()).all():
            step = max(1.0, np.ceil((high - low + 1) / MAX_BARS))
    first = round(low / step) * step - step / 2
    edges = first + step * np.arange(np.floor((high - first) / step) + 2)
    middles = (edges[:-1] + edges[1:]) / 2
    traces = []
    colors = cycle((BLUE, ORANGE))
    for label, each in values.items():
        counts, _ = np.histogram(each, edges)
        bars = go.Bar(
            x=middles.tolist(),
            y=counts.tolist(),
            width=float(step),
            name=label,
            marker={"color": next(colors), "opacity": 0.6},
            hovertemplate=f"%{{y:,}}<extra>{label}</extra>",
        )
        traces.append(bars)
    middle = float(np.median(together))
    summary = f"from {low:.4g} to {high:.4g}, median {middle:.4g} {unit}"
    margin = step * max(0.5, (MIN_BARS - len(middles)) / 2)
    limits = [float(edges[0] - margin), float(edges[-1] + margin)]
    return make_figure(
        name,
        title,
        summary,
        traces,
        barmode="overlay",
        bargap=0,
        xaxis={
            "title": {"text": unit, "standoff": 6},
            "nticks": MAX_TICKS,
            "range": limits,
            **xaxis,
        },
        yaxis={"title": {"text": "number"}, "rangemode": "tozero"},
    )
