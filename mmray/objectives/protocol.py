"""Interfaces of objectives: model outputs -> loss.

A loss is a sum and a count, never a mean, so micro-batches and ranks of any size add up to the
global batch. A global loss (`gathered_outputs` is not empty) is computed once per step over the
rows of all ranks; a local loss is a sum over rows, computed in each micro-batch. `build.py` adds up
objectives of both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmray.data.stream.collate import Batch

Outputs = dict[str, Tensor]
LossSums = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss sum, count, sums of further metrics


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return float32 instead of half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Objective(Protocol):
    """Loss of model outputs. `objective.kind: package.module:Class` calls your class with the
    `objective` section.

    `gathered_outputs`: outputs [B, ...] of all ranks that the loss needs at once; empty for a sum
    over rows. A global loss reads only these, its scalar outputs, and the one-dimensional tensors
    of the batch (in evaluation only `valid` and `label`). `scalar_output_names`: outputs that
    belong to the step and not to a row, such as the temperature.
    """

    gathered_outputs: tuple[str, ...]
    scalar_output_names: tuple[str, ...]

    def count(self, batch: Batch) -> Tensor:
        """Denominator of the loss of `batch`, a scalar: valid rows, or target tokens.

        A sum of K losses returns vectors [K] in place of the scalars here and below.
        """

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss summed over the valid rows of `batch`, its count, and the sums of further
        metrics.

        Args:
            outputs: Outputs of the model for the batch, by name.
            batch: The rows of this rank, or of a micro-batch for a local loss.
            gathered: For global losses: each gathered output of all ranks [G, ...], `valid` bool
                [G], and `offset`, the row of `gathered` where this rank's rows start. None: the
                batch is the whole global batch.
        """


class RowLoss:
    """Base of losses that are divided by the number of valid rows."""

    def count(self, batch: Batch) -> Tensor:
        return batch["valid"].sum()


@runtime_checkable
class HardNegativeMining(Protocol):
    """A local loss whose rows first get a hard negative, sampled among all rows of the global
    batch.
    """

    score_outputs: tuple[str, ...]  # outputs that the sampling reads
    gathered_inputs: tuple[str, ...]  # columns of the batch that it copies

    def sample_hard_negatives(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]
    ) -> Batch:
        """Return further columns for the rows of a micro-batch, passed to the model with the batch.

        The result must not depend on how rows are split into micro-batches and ranks.

        Args:
            outputs: `score_outputs` and the scalar outputs, without gradient.
            batch: The micro-batch.
            gathered: `score_outputs` and `gathered_inputs` of all ranks [G, ...], `valid` bool [G],
                and `offset`, where this micro-batch starts.
        """


@runtime_checkable
class PairwiseLoss(Protocol):
    """A global loss that is a sum over pairs, so its scores can be computed in chunks of remote
    rows.
    """

    # needed from all ranks; the others in `gathered_outputs` stay on their rank
    remote_outputs: tuple[str, ...]
    chunk_rows: int  # remote rows at a time

    def pairwise_loss(
        self,
        outputs: Outputs,
        valid: Tensor,
        remote: Outputs,
        remote_valid: Tensor,
        positive_row: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss summed over all pairs of a local and a remote row, and the sums of
        further metrics.

        Args:
            outputs: Outputs of the local rows [B, ...], and the scalars.
            valid: bool [B].
            remote: `remote_outputs` of the remote rows [V, ...].
            remote_valid: bool [V].
            positive_row: int64 [V], the local row that each remote row belongs to; none if it is
                not in 0..B-1.
        """


@dataclass(frozen=True)
class ObjectiveParts:
    """The global and the local loss of an objective, either of which may be None."""

    global_loss: Objective | None
    local_loss: Objective | None

    @property
    def needs_first_pass(self) -> bool:
        """Whether the loss, or the choice of hard negatives, compares all rows of a step."""
        return self.global_loss is not None or self.mining_loss is not None

    @cached_property
    def mining_loss(self) -> HardNegativeMining | None:
        """The local loss, if it needs hard negatives."""
        local = self.local_loss
        return local if isinstance(local, HardNegativeMining) and local.score_outputs else None

    @cached_property
    def pairwise_loss(self) -> PairwiseLoss | None:
        """The global loss, if it is computed in chunks of remote rows."""
        return (
            self.global_loss
            if isinstance(self.global_loss, PairwiseLoss) and self.mining_loss is None
            else None
        )

    @cached_property
    def gathered_names(self) -> tuple[str, ...]:
        """Outputs that are needed from all ranks."""
        of_loss = () if self.global_loss is None else self.global_loss.gathered_outputs
        return tuple(
            dict.fromkeys(
                of_loss + (() if self.mining_loss is None else self.mining_loss.score_outputs)
            )
        )


def split_objective(objective: Any) -> ObjectiveParts:
    """Split an objective into its global and its local loss."""
    single = (
        ObjectiveParts(objective, None)
        if objective.gathered_outputs
        else ObjectiveParts(None, objective)
    )
    return getattr(objective, "objective_parts", single)
