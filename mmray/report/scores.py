"""Figures of an evaluation by the names that people read: what the command line and the page tell alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

_IN_THE_TABLE = ("recall_at_", "median_rank/")  # of retrieval, which has a table of its own
_COUNTS = ("rows", "boxes", "tokens", "answered")


def other_scores(scores: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """(name, value) of each figure but those of retrieval, in their order; rows that cannot be read where any were."""
    return [
        (name.replace("_", " ").replace("/", ", "), score_text(name, value))
        for name, value in scores.items()
        if not name.startswith(_IN_THE_TABLE) and not (name == "bad_rows" and not value)
    ]


def score_text(name: str, value: float | None) -> str:
    """Three digits, of a count none; a dash for what is not a number."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if name.endswith(_COUNTS) else f"{value:,.3f}"
