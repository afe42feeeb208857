"""What an objective is: the step from a model's named outputs to a loss.

Stands between models/ (batch -> outputs) and train/step.py (loss -> gradients). A loss is a sum and a count, never a
mean: only then do micro-batches and ranks add up to the global batch, whatever their sizes.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from mmray.data.collate import Batch

Outputs = dict[str, Tensor]


class Objective(Protocol):
    """Measures outputs; your own is named `package.module:Class` in `objective.kind` and called with the section.

    `coupled` names the outputs whose rows meet in the loss (empty: every row stands alone). A coupled objective reads
    only the outputs in `coupled` and `shared`, and of the batch only the tensors of one dimension (a value a row).
    `shared` names outputs that belong to the step, not to a row, such as a temperature.
    """

    coupled: tuple[str, ...]
    shared: tuple[str, ...]

    def count(self, batch: Batch) -> Tensor:
        """What the loss of `batch` is divided by, as a scalar: its valid rows, or its target tokens."""

    def measure(
        self, outputs: Outputs, batch: Batch, everyone: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss summed over the valid rows of `batch`, its count, and further sums worth a look.

        `everyone` (coupled objectives only): each coupled output of all ranks [G, ...], `valid` bool [G], and `offset`,
        the row of `everyone` at which this rank's rows begin. None: the rows of `batch` are everyone.
        """
