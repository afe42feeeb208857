"""What an objective is: the step from a model's named outputs to a loss.

Stands between models/ (batch -> outputs) and train/step.py (loss -> gradients). A loss is a sum and a count, never a
mean: only then do micro-batches and ranks add up to the global batch, whatever their sizes.

Two kinds: a cross-row loss (`coupled` names the outputs whose rows meet in it) is formed once over the whole global
batch; a row-wise one, a sum over rows, in each micro-batch. `combined.py` adds up objectives of both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mmray.data.stream.collate import Batch

Outputs = dict[str, Tensor]
LossSums = tuple[Tensor, Tensor, dict[str, Tensor]]


class Objective(Protocol):
    """Measures outputs; your own is named `package.module:Class` in `objective.kind` and called with the section.

    `coupled` names the outputs whose rows meet in the loss (empty: every row stands alone). A coupled objective reads
    only the outputs in `coupled` and `shared`, and of the batch only the tensors of one dimension (a value a row).
    `shared` names outputs that belong to the step, not to a row, such as a temperature.

    A coupled objective that reads nothing of the batch but `valid` may say so, `row_values = ("valid",)`: a small
    global batch then needs one collective a step fewer.
    """

    gathered_outputs: tuple[str, ...]
    scalar_outputs: tuple[str, ...]

    def count(self, batch: Batch) -> Tensor:
        """What the loss of `batch` is divided by, as a scalar: its valid rows, or its target tokens.

        A sum of several losses, each with a count of its own, gives vectors [K] for the scalars here and below.
        """

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss summed over the valid rows of `batch`, its count, and further sums worth a look.

        `everyone` (coupled objectives only): each coupled output of all ranks [G, ...], `valid` bool [G], and `offset`,
        the row of `everyone` at which this rank's rows begin. None: the rows of `batch` are everyone.
        """


@runtime_checkable
class HardNegativeMining(Protocol):
    """An objective whose rows stand alone once each has been given a partner, chosen by a look at all rows.

    `looks_at` names the outputs that the choice is made by, `borrows` the columns of the batch that a partner lends.
    """

    score_outputs: tuple[str, ...]
    gathered_inputs: tuple[str, ...]

    def sample_hard_negatives(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]) -> Batch:
        """Further columns for the rows of a micro-batch, which the model will see.

        outputs: those in `looks_at` and `shared`, without gradient. everyone: the outputs in `looks_at` and the columns
        in `borrows` of all ranks [G, ...], `valid` bool [G], and `offset`, where the rows of this micro-batch begin.
        The choice may depend on the rows alone, not on how they are cut into micro-batches and ranks.
        """


@runtime_checkable
class Pairwise(Protocol):
    """A coupled objective that is a sum over pairs, so that the texts of other ranks can come by, a chunk at a time.

    `visiting` names the outputs that travel; the others in `coupled` stay at home. `chunk` is in rows.
    """

    rotating_outputs: tuple[str, ...]
    chunk: int

    def pairwise_loss(
        self, outputs: Outputs, valid: Tensor, visitors: Outputs, visitors_valid: Tensor, partner: int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss summed over the pairs of rows at home and visiting rows, and further sums.

        partner: visiting row i belongs to row i + partner at home; None: the visitors are another rank's.
        """


@dataclass(frozen=True)
class ObjectiveParts:
    """An objective as the step takes it: `cross_row` needs all rows at once, `row_wise` is a sum over rows."""

    global_loss: Objective | None
    local_loss: Objective | None

    @property
    def mining(self) -> HardNegativeMining | None:
        """The part that must look at all rows before it can stand alone."""
        return (
            self.local_loss
            if isinstance(self.local_loss, HardNegativeMining) and self.local_loss.score_outputs
            else None
        )


def split_objective(objective: Any) -> ObjectiveParts:
    """The two parts of an objective, one of which may be missing."""
    if hasattr(objective, "objective_parts"):
        found: ObjectiveParts = objective.objective_parts
        return found
    return ObjectiveParts(objective, None) if objective.gathered_outputs else ObjectiveParts(None, objective)
