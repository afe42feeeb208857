"""Build the objective that the `objective` section names: a built-in one, a user's class, or a
weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmray import plugins
from mmray.builtin import OBJECTIVES
from mmray.errors import UsageError
from mmray.objectives.protocol import (
    Batch,
    HardNegativeMining,
    LossSums,
    Objective,
    ObjectiveParts,
    Outputs,
)

if TYPE_CHECKING:
    from mmray.config import Objective as ObjectiveConfig

REQUIRED = ("gathered_outputs", "scalar_output_names", "count", "compute_loss")


def build(config: ObjectiveConfig) -> Any:
    """Build the objective named by `config.kind`. Raises UsageError."""
    terms = []
    for name, weight in config.terms.items():
        objective_class = plugins.load_part(name, "objective.kind", OBJECTIVES)
        objective = objective_class() if name in OBJECTIVES else objective_class(config)
        missing = [part for part in REQUIRED if not hasattr(objective, part)]
        if missing:
            raise UsageError(
                f"objective.kind: `{name}` lacks {', '.join(missing)}; see "
                "mmray/objectives/protocol.py"
            )
        terms.append(Term(name, weight, objective))
    return _merge_terms(terms)


class Term(NamedTuple):
    """One weighted objective of a sum; each is divided by its own count."""

    name: str
    weight: float
    objective: Any


def _merge_terms(terms: list[Term]) -> Objective | None:
    """Terms of one kind as one objective; a single term of weight 1 is used as it is."""
    if len(terms) == 1 and terms[0].weight == 1:
        return terms[0].objective
    return WeightedSum(terms) if terms else None


class WeightedSum:
    """A sum of objectives such as `contrastive + 0.5 * matching`.

    It is computed in two `objective_parts`: the sum of its global and the sum of its local losses.
    In a sum of K losses of one kind, loss sums and counts are vectors [K].
    """

    def __init__(self, terms: list[Term]) -> None:
        self._terms = terms
        self._mining = [
            term.objective for term in terms if isinstance(term.objective, HardNegativeMining)
        ]
        self.gathered_outputs = _union(term.objective.gathered_outputs for term in terms)
        self.scalar_output_names = _union(term.objective.scalar_output_names for term in terms)
        self.score_outputs = _union(objective.score_outputs for objective in self._mining)
        self.gathered_inputs = _union(objective.gathered_inputs for objective in self._mining)

    @property
    def objective_parts(self) -> ObjectiveParts:
        global_terms = [term for term in self._terms if term.objective.gathered_outputs]
        local_terms = [term for term in self._terms if not term.objective.gathered_outputs]
        return ObjectiveParts(_merge_terms(global_terms), _merge_terms(local_terms))

    def count(self, batch: Batch) -> Tensor:
        return torch.stack([term.objective.count(batch) for term in self._terms])

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the weighted losses of the terms.

        Args:
            outputs: Outputs of the model for the local rows.
            batch: The columns of these rows.
            gathered: Columns and outputs of the rows of all ranks, for objectives over them; None:
                the local rows are all rows.

        Returns:
            Loss sums [K] and counts [K] of the K terms, and the sums of each term's metrics, at its
            index of a vector [K].
        """
        losses = []
        metric_sums = {}
        for index, term in enumerate(self._terms):
            loss, _, sums = term.objective.compute_loss(outputs, batch, gathered)
            losses.append(term.weight * loss)
            for name, value in {f"loss_{term.name}": loss.detach(), **sums}.items():
                # an earlier term has this metric too
                key = f"{name}_{term.name}" if name in metric_sums else name
                metric_sums[key] = torch.zeros(
                    len(self._terms), dtype=value.dtype, device=value.device
                )
                metric_sums[key][index] = value
        return torch.stack(losses), self.count(batch), metric_sums

    def sample_hard_negatives(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]
    ) -> Batch:
        columns: Batch = {}
        for objective in self._mining:
            columns |= objective.sample_hard_negatives(outputs, batch, gathered)
        return columns


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
