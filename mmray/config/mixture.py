"""`data.train` of several sets: `prepared/a + 2 * prepared/b`, each with the weight of its rows in an epoch."""

from __future__ import annotations

import math
import re

_TERM = re.compile(r"(?:(\S+) \* +)?(\S.*)")


def parse_mixture(text: str) -> list[tuple[str, float]]:
    """(address, weight) of each set, in order; a plain address is one set of weight 1. Raises ValueError."""
    found: list[tuple[str, float]] = []
    for term in text.split(" + "):
        match = _TERM.fullmatch(term.strip())
        weight = _weight(match[1]) if match else None
        if match is None or weight is None or match[2] in dict(found):
            raise ValueError(
                f"`{text}` is neither a set nor a sum of different ones, at `{term.strip()}`; write for example "
                "`prepared/a + 2 * prepared/b`"
            )
        found.append((match[2], weight))
    return found


def is_mixture(text: str) -> bool:
    """Whether it is more than one set as it stands."""
    return parse_mixture(text) != [(text.strip(), 1.0)]


def write_mixture(terms: list[tuple[str, float]]) -> str:
    """The text that parse_mixture reads."""
    return " + ".join(address if weight == 1 else f"{weight:g} * {address}" for address, weight in terms)


def _weight(text: str | None) -> float | None:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        return None
    return weight if 0 < weight < math.inf else None
