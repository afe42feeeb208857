"""A weighted sum of objectives, each divided by a count of its own: `contrastive + 0.5 * matching`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmray.objectives.protocol import Batch, Measured, Mining, Objective, ObjectiveParts, Outputs, Pairwise


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
