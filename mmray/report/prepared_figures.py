"""Plotly histograms of a prepared set: sizes and shapes of images, lengths of texts, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mmray.report.figures import BLUE, MAX_TICKS, ORANGE, Figure, make_figure
from mmray.report.prepared import SetStatistics

NUM_BARS = 40  # most bars
# Ratios of width to height that have a tick.
RATIOS = ((1, 8), (1, 4), (1, 2), (3, 4), (1, 1), (4, 3), (2, 1), (4, 1), (8, 1))


def set_figures(statistics: SetStatistics) -> list[Figure]:
    """Return the histograms of a set.

    Args:
        statistics: Properties of its rows, such as `widths`, `durations_s` and `text_lengths`. A
            property that no row has gets no chart.

    Returns:
        Charts of the sizes and the aspect ratios of images and videos, the durations of audio and
        video, and the lengths of texts in characters and in tokens, each a Figure with `name`,
        `title`, `summary` and `plot` (JSON data of Plotly).
    """
    sides = {"width": statistics.widths, "height": statistics.heights}
    sizes = np.array([statistics.widths, statistics.heights], float)
    ratios = {"width / height": sizes[0] / sizes[1]}
    durations = {"duration": statistics.durations_s}
    lengths = {"length": statistics.text_lengths}
    tokens = {"length": statistics.token_counts}
    figures = [
        _histogram("sizes", "image sizes", "pixels", sides),
        _histogram("ratios", "aspect ratios", "width : height", ratios, is_ratio=True),
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
    is_ratio: bool = False,
) -> Figure | None:
    """Return a histogram of one or two properties in the same bins; None without values.

    The axis of ratios is logarithmic.
    """
    together = np.concatenate([np.asarray(each, float) for each in values.values()])
    if not len(together):
        return None
    low, middle, high = np.quantile(together, (0, 0.5, 1))
    num_bars = NUM_BARS
    if (together == together.round()).all():  # no more bars than whole numbers
        num_bars = min(NUM_BARS, int(high - low) + 1)
    xaxis: dict[str, Any] = {"title": {"text": unit, "standoff": 6}, "nticks": MAX_TICKS}
    if is_ratio:
        xaxis |= {
            "tickvals": [float(np.log2(width / height)) for width, height in RATIOS],
            "ticktext": [f"{width}:{height}" for width, height in RATIOS],
            # Wide enough for a tick also if all images have one ratio.
            "range": [float(np.log2(low)) - 0.6, float(np.log2(high)) + 0.6],
        }
    traces = [
        go.Histogram(
            x=np.log2(each) if is_ratio else np.asarray(each),
            name=label,
            nbinsx=num_bars,
            xbins={"size": 0.125} if is_ratio else None,
            bingroup=name,
            marker={"color": color, "opacity": 0.6},
        )
        for (label, each), color in zip(values.items(), (BLUE, ORANGE), strict=False)
    ]
    return make_figure(
        name,
        title,
        f"from {low:.4g} to {high:.4g}, median {middle:.4g} {unit}",
        traces,
        barmode="overlay",
        xaxis=xaxis,
        yaxis={"title": {"text": "number"}, "rangemode": "tozero"},
    )
