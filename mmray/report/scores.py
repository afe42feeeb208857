"""Evaluation metrics as text, for the command line and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping

_IN_THE_TABLE = ("recall_at_", "median_rank/")  # shown in the recall table
_COUNTS = ("rows", "boxes", "tokens", "answered")


def non_retrieval_metrics(scores: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return (name, value) of all non-retrieval metrics in order; bad_rows only if above 0."""
    return [
        (name.replace("_", " ").replace("/", ", "), format_metric(name, value))
        for name, value in scores.items()
        if not name.startswith(_IN_THE_TABLE) and not (name == "bad_rows" and not value)
    ]


def format_metric(name: str, value: float | None) -> str:
    """Format with three decimals, counts without, non-finite values as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if name.endswith(_COUNTS) else f"{value:,.3f}"
