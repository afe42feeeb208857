"""From the `objective` section to an objective: built-in by name, a user's own, or a weighted sum of several."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmray import plugins
from mmray.errors import UsageError
from mmray.objectives.classification import Classification
from mmray.objectives.combined import Combined, Term
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.language_modelling import LanguageModelling
from mmray.objectives.matching import Matching
from mmray.objectives.protocol import Objective
from mmray.objectives.region_text import RegionText
from mmray.objectives.sigmoid import Sigmoid

if TYPE_CHECKING:
    from mmray.config import Objective as Section

BUILT_IN: dict[str, Callable[[Any], Objective]] = {
    "contrastive": lambda _: Contrastive(),
    "sigmoid": lambda section: Sigmoid(section.chunk),
    "matching": lambda _: Matching(),
    "classification": lambda section: Classification(section.label_smoothing),
    "region_text": lambda _: RegionText(),
    "language_modelling": lambda _: LanguageModelling(),
}
_TERM = re.compile(r"(?:([\d.]+(?:e-?\d+)?)\s*\*)?\s*([A-Za-z_][\w.:]*)$")
SEAM = ("coupled", "shared", "count", "measure")


def build(section: Section) -> Objective:
    """The objective that `section.kind` names. Raises UsageError."""
    terms = [Term(name, weight, _named(name, section)) for name, weight in terms_of(section.kind).items()]
    if len(terms) == 1 and terms[0].weight == 1:
        only: Objective = terms[0].objective
        return only
    combined: Any = Combined(terms)
    return combined


def terms_of(kind: str) -> dict[str, float]:
    """The names of a sum with their weights: `contrastive + 0.5 * matching`. Raises UsageError."""
    terms: dict[str, float] = {}
    for text in kind.split("+"):
        found = _TERM.match(text.strip())
        weight = _number(found[1]) if found else None
        if found is None or weight is None or weight <= 0 or found[2] in terms:
            raise UsageError(
                f"objective.kind: `{kind}` is not an objective or a sum of different ones: `{text.strip()}`; write "
                "for example `contrastive` or `contrastive + 0.5 * matching`"
            )
        terms[found[2]] = weight
    return terms


def _number(text: str | None) -> float | None:
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        return None


def _named(name: str, section: Section) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name](section)
    objective = plugins.load(name, "objective.kind", tuple(BUILT_IN))(section)
    missing = [part for part in SEAM if not hasattr(objective, part)]
    if missing:
        raise UsageError(f"objective.kind: `{name}` has no {', '.join(missing)} (see objectives/protocol.py)")
    return objective
