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
    ROW_LOSSES,
    Batch,
    HardNegativeMining,
    LossSums,
    Objective,
    ObjectiveParts,
    Outputs,
)

if TYPE_CHECKING:
    from mmray.config import Objective as ObjectiveConfig

# Built-in objectives with settings.
WITH_SETTINGS = ("dpo",)
REQUIRED = ("gathered_outputs", "scalar_output_names", "count", "compute_loss")


def build(config: ObjectiveConfig) -> Objective:
    """Build the objective that the `objective` section names; for a sum, or a weight other than 1,
    it is a WeightedSum.

    Raises:
        UsageError: A class cannot be imported, or it lacks a member of Objective.
    """
    terms = []
    for name, weight in config.terms.items():
        objective_class = plugins.load_part(name, "objective.kind", OBJECTIVES)
        takes_settings = name not in OBJECTIVES or name in WITH_SETTINGS
        objective = objective_class(config) if takes_settings else objective_class()
        missing = [part for part in REQUIRED if not hasattr(objective, part)]
        if missing:
            raise UsageError(
                f"objective.kind: `{name}` lacks {', '.join(missing)}; see "
                "mmray/objectives/protocol.py"
            )
        terms.append(Term(name, weight, objective))
    return _merge_terms(terms)


class Term(NamedTuple):
    """One weighted objective of a sum; each is divided by its own count.

    Attributes:
        name: Name of the objective, such as `matching`.
    """

    name: str
    weight: float
    objective: Objective


def _merge_terms(terms: list[Term]) -> Objective:
    """Terms of one kind as one objective; a single term of weight 1 is used as it is."""
    if len(terms) == 1 and terms[0].weight == 1:
        return terms[0].objective
    return WeightedSum(terms)


class WeightedSum:
    """A sum of objectives such as `contrastive + 0.5 * matching`.

    A step computes it in two parts, `objective_parts`: the terms over pairs of rows of all ranks,
    and the terms that are sums over rows. `count` and `compute_loss` return vectors [K] with an
    element for each of K terms, because each loss has its own denominator: the loss of a step is
    the sum of each weighted loss sum divided by its own count.

    Args:
        terms: The K objectives with their names and weights.

    Attributes:
        gathered_outputs: Outputs of the model that the terms need from all ranks, by name.
        scalar_output_names: Outputs of the model that are one number for the step.
        score_outputs: Outputs from which terms choose hard negatives.
        gathered_inputs: Columns of the batch that are copied for hard negatives.
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
        """The terms that compare rows of all ranks (those with `gathered_outputs`), and the others,
        each as one objective.
        """
        global_terms = [term for term in self._terms if term.objective.gathered_outputs]
        local_terms = [term for term in self._terms if not term.objective.gathered_outputs]
        return ObjectiveParts(
            _merge_terms(global_terms) if global_terms else None,
            _merge_terms(local_terms) if local_terms else None,
        )

    def count(self, batch: Batch) -> Tensor:
        """Return the denominators of the K terms' losses, int64 [K], such as numbers of rows or
        tokens.
        """
        return torch.stack([term.objective.count(batch) for term in self._terms])

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the weighted losses [K] of the K terms, their counts int64 [K], and metrics by
        name.

        Metrics are those of each term, and its unweighted loss sum as `loss_TERM`, such as
        `loss_matching`. A metric is a vector [K] with its sum at the index of its term and 0
        elsewhere. If an earlier term has a metric of the same name, `_TERM` is appended.
        """
        losses = []
        counts = []
        row_losses = []
        metric_sums = {}
        for index, term in enumerate(self._terms):
            loss, count, sums = term.objective.compute_loss(outputs, batch, gathered)
            losses.append(term.weight * loss)
            counts.append(count)
            if ROW_LOSSES in sums:
                row_losses.append(term.weight * sums.pop(ROW_LOSSES))
            for name, value in {f"loss_{term.name}": loss.detach(), **sums}.items():
                # an earlier term has this metric too
                key = f"{name}_{term.name}" if name in metric_sums else name
                metric_sums[key] = torch.zeros(
                    len(self._terms), dtype=value.dtype, device=value.device
                )
                metric_sums[key][index] = value
        if len(row_losses) == len(self._terms):
            metric_sums[ROW_LOSSES] = torch.stack(row_losses).sum(dim=0)
        return torch.stack(losses), torch.stack(counts), metric_sums

    def sample_hard_negatives(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]
    ) -> Batch:
        """Return the columns of hard negatives of all terms that need them, such as Matching."""
        columns: Batch = {}
        for objective in self._mining:
            columns |= objective.sample_hard_negatives(outputs, batch, gathered)
        return columns


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
