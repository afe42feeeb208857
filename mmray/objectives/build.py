"""From the `objective` section to an objective: built-in by name, a user's own, or a weighted sum of several."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmray import plugins
from mmray.errors import UsageError
from mmray.objectives.classification import Classification
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.language_modelling import LanguageModelling
from mmray.objectives.matching import Matching
from mmray.objectives.protocol import Batch, Measured, Mining, Objective, ObjectiveParts, Outputs, Pairwise
from mmray.objectives.region_text import RegionText
from mmray.objectives.sigmoid import Sigmoid

if TYPE_CHECKING:
    from mmray.config import Objective as Section


# A weighted sum of objectives, each divided by a count of its own: `contrastive + 0.5 * matching`.
@dataclass(frozen=True)
class Term:
    """One objective of a sum."""

    name: str
    weight: float
    objective: Any


class Combined:
    """Several objectives as one; what meets is formed over the global batch, what stands alone in each micro-batch."""

    def __init__(self, terms: list[Term]) -> None:
        cross_row = [term for term in terms if term.objective.coupled]
        row_wise = [term for term in terms if not term.objective.coupled]
        self.objective_parts = ObjectiveParts(_one(cross_row), _one(row_wise))
        both = [part for part in (self.objective_parts.cross_row, self.objective_parts.row_wise) if part is not None]
        self.coupled: tuple[str, ...] = both[0].coupled
        self.shared: tuple[str, ...] = _union(part.shared for part in both)


class Weighted:
    """Objectives of one sort, added up: sums and counts are vectors [K], one number a term."""

    def __init__(self, terms: list[Term]) -> None:
        self._terms = terms
        mining = [term.objective for term in terms if isinstance(term.objective, Mining)]
        self._mining = mining
        self.coupled: tuple[str, ...] = _union(term.objective.coupled for term in terms)
        self.shared: tuple[str, ...] = _union(term.objective.shared for term in terms)
        self.looks_at: tuple[str, ...] = _union(objective.looks_at for objective in mining)
        self.borrows: tuple[str, ...] = _union(objective.borrows for objective in mining)

    def count(self, batch: Batch) -> Tensor:
        """The terms' counts [K]."""
        return torch.stack([term.objective.count(batch) for term in self._terms])

    def measure(self, outputs: Outputs, batch: Batch, everyone: dict[str, Any] | None = None) -> Measured:
        """The terms' weighted sums [K], their counts [K], and each term's own loss and sums at its place in a [K]."""
        losses, parts = [], {}
        for place, term in enumerate(self._terms):
            loss, _, further = term.objective.measure(outputs, batch, everyone)
            losses.append(term.weight * loss)
            for name, value in {f"loss_{term.name}": loss.detach(), **further}.items():
                parts[name] = torch.zeros(len(self._terms), dtype=value.dtype, device=value.device)
                parts[name][place] = value
        return torch.stack(losses), self.count(batch), parts

    def mine(self, outputs: Outputs, batch: Batch, everyone: dict[str, Any]) -> Batch:
        """The columns that the terms ask for."""
        columns: Batch = {}
        for objective in self._mining:
            columns |= objective.mine(outputs, batch, everyone)
        return columns


class WeightedPairs(Weighted):
    """One term that is a sum over pairs: what it looks at still comes by a chunk at a time."""

    def __init__(self, term: Term) -> None:
        super().__init__([term])
        self._term = term
        self.visiting: tuple[str, ...] = term.objective.visiting
        self.chunk: int = term.objective.chunk

    def pairs(
        self, outputs: Outputs, valid: Tensor, visitors: Outputs, visitors_valid: Tensor, partner: int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term's weighted loss summed over the pairs, its own loss and its sums."""
        loss, parts = self._term.objective.pairs(outputs, valid, visitors, visitors_valid, partner)
        return self._term.weight * loss, {f"loss_{self._term.name}": loss.detach(), **parts}


def _one(terms: list[Term]) -> Objective | None:
    """Terms of one sort as one objective; a single one of weight 1 is itself."""
    if len(terms) == 1 and terms[0].weight == 1:
        only: Objective = terms[0].objective
        return only
    if len(terms) == 1 and isinstance(terms[0].objective, Pairwise):
        return WeightedPairs(terms[0])
    return Weighted(terms) if terms else None


def _union(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


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
