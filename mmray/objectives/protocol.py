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
from mmray.models.protocol import ROW_COUNTS as ROW_COUNTS
from mmray.models.protocol import ROW_LOSSES as ROW_LOSSES
from mmray.models.protocol import Outputs

MetricSums = dict[str, Tensor]
LossSums = tuple[Tensor, Tensor, MetricSums]  # loss sum, count, sums of further metrics


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, others unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Objective(Protocol):
    """Interface of a loss, as sums and counts, which micro-batches and ranks add up.

    For `objective.kind: package.module:Class` your class is called with the `objective` section.

    A class implements `count(batch)`, the denominator, and `compute_loss(outputs, batch,
    gathered)`, which returns the loss sum, the count, and sums of metrics by name.

    Attributes:
        gathered_outputs: Names of the outputs [B, ...] that the loss needs of all ranks at once;
            empty for a sum over rows. A loss with such outputs reads only these, its scalar
            outputs, and the one-dimensional tensors of the batch (in evaluation only `valid` and
            `label`).
        scalar_output_names: Names of the outputs that belong to the step and not to a row, such as
            the temperature.
    """

    gathered_outputs: tuple[str, ...]
    scalar_output_names: tuple[str, ...]

    def count(self, batch: Batch) -> Tensor:
        """Return the denominator of the loss of `batch`, an int64 scalar: its valid rows, or its
        target tokens.

        A sum of K losses returns vectors [K] in place of the scalars here and in `compute_loss`.

        Args:
            batch: Columns of the rows by name, such as `valid` bool [B], False for padding, and
                `label` int64 [B].
        """

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss summed over the valid rows of `batch`, its count, and sums of metrics.

        Args:
            outputs: Outputs of the model for the B rows of the batch, by name [B, ...], and scalars
                of the step.
            batch: Columns of the rows by name. A local loss (a sum over rows) gets a micro-batch
                with all its columns. A global loss (over pairs of rows of all ranks) gets all rows
                of this rank with the one-dimensional columns, such as `valid` bool [B], False for
                padding, and `label` int64 [B].
            gathered: For global losses, the rows of all ranks: the outputs that the attribute
                `gathered_outputs` names [G, ...], `valid` bool [G], and the int `offset`, the index
                of this rank's first row among the G. None: the batch is the whole global batch.

        Returns:
            The loss sum, its denominator (the number of valid rows or target tokens), and the sums
            of further metrics by name. Each is a scalar tensor. ROW_LOSSES among the metrics, the
            part of each row in the loss sum [B], gives the loss of each source of a mixture; and
            ROW_COUNTS [B] its part in the denominator, if that is no number of valid rows.
        """


class RowLoss:
    """Base of losses that are divided by a number of rows: the valid ones, or those that
    `counted_rows` selects.

    Rows of padding and unreadable rows are not valid.

    A subclass implements `compute_loss(outputs, batch, gathered)`, which returns the loss sum, the
    count and sums of metrics. It may override `counted_rows`, from a batch (columns by name) to
    bool [B], to exclude rows, such as those without audio.
    """

    def counted_rows(self, batch: Batch) -> Tensor:
        """Return the rows that have a loss, bool [B]: the valid ones; a subclass may exclude
        others, such as those without audio.
        """
        return batch["valid"]

    def count(self, batch: Batch) -> Tensor:
        """Return the number of rows that have a loss."""
        return self.counted_rows(batch).sum()


@runtime_checkable
class HardNegativeMining(Protocol):
    """A loss that is a sum over rows (a local loss), each of which first gets a hard negative,
    sampled among all rows of the global batch.

    Besides the members of an Objective (`count`, `compute_loss`, `gathered_outputs`,
    `scalar_output_names`) a class has `sample_hard_negatives(outputs, batch, gathered)`, which
    returns further columns of the batch by name, such as `negative_ids`.

    Attributes:
        score_outputs: Names of the model's outputs that the sampling reads, such as `image_embed`.
        gathered_inputs: Names of the batch's columns that it copies from other rows, such as
            `input_ids`.
    """

    score_outputs: tuple[str, ...]
    gathered_inputs: tuple[str, ...]

    def sample_hard_negatives(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]
    ) -> Batch:
        """Return further columns for the rows of a micro-batch, which the model gets together with
        the batch.

        The result must not depend on how rows are split into micro-batches and ranks.

        Args:
            outputs: The outputs that the attribute `score_outputs` names [B, ...] and the scalars
                that `scalar_output_names` names, without gradient.
            batch: Columns of the B rows of the micro-batch by name, such as `pos` int64 [B], the
                position in the sample order.
            gathered: Rows of all ranks: the outputs in `score_outputs` and the batch's columns in
                the attribute `gathered_inputs` [G, ...], `valid` bool [G], and the int `offset`,
                the index of the micro-batch's first row among the G.

        Returns:
            Columns [B, ...] by name, such as `negative_ids` int64 [B, T].
        """


@runtime_checkable
class PairwiseLoss(Protocol):
    """A loss over rows of all ranks (a global loss) that is a sum over pairs, so its scores can be
    computed in chunks of remote rows (those of all ranks).

    Besides the members of an Objective (`count`, `compute_loss`, `gathered_outputs`,
    `scalar_output_names`) a class has `pairwise_loss(outputs, valid, remote, remote_valid,
    positive_row)`, which returns (loss sum, dict of sums of metrics), scalars over all pairs of B
    local rows and a chunk of V remote rows. `valid` is bool [B], `remote_valid` bool [V];
    `positive_row`, int64 [V], is the number of each remote row among the local ones, outside 0..B-1
    if it is of another rank.

    Attributes:
        remote_outputs: Names of the outputs that the loss needs of remote rows; the others in
            `gathered_outputs` stay on their rank.
        chunk_rows: Number of remote rows whose scores are computed at a time.
    """

    remote_outputs: tuple[str, ...]
    chunk_rows: int

    def pairwise_loss(
        self,
        outputs: Outputs,
        valid: Tensor,
        remote: Outputs,
        remote_valid: Tensor,
        positive_row: Tensor,
    ) -> tuple[Tensor, MetricSums]:
        """Return the loss summed over all pairs of a local and a remote row, and the sums of
        metrics.

        Local rows are those of this rank. Remote rows are a chunk of the rows of all ranks.

        Args:
            outputs: Outputs of the B local rows by name [B, ...], and the scalars; those in
                `remote_outputs` may be absent.
            valid: bool [B], False for local rows without a loss, such as padding; their pairs are
                left out.
            remote: The outputs in `remote_outputs` of the V remote rows [V, ...], by name.
            remote_valid: bool [V], the same of the remote rows.
            positive_row: For each remote row the index of the same row among the local ones, int64
                [V]; outside 0..B-1 if it is a row of another rank.

        Returns:
            The loss sum and the sums of metrics by name, all scalars.
        """


@dataclass(frozen=True)
class ObjectiveParts:
    """The global loss (over pairs of rows of all ranks) and the local loss (a sum over rows) of an
    objective, either of which may be None.

    Both have `count(batch)`, the denominator, and `compute_loss(outputs, batch, gathered)`, which
    returns the loss sum, the count, and sums of metrics by name; weights are applied in it.

    Attributes:
        global_loss: The loss that compares rows of all ranks with each other, such as the
            contrastive loss; None: none.
        local_loss: The loss that is a sum over rows, such as a cross-entropy of classes; None:
            none.
    """

    global_loss: Objective | None
    local_loss: Objective | None

    @property
    def needs_first_pass(self) -> bool:
        """Whether a step embeds all of its rows before it computes gradients of the weights,
        because the loss, or the choice of hard negatives, compares them with each other.
        """
        return self.global_loss is not None or self.mining_loss is not None

    @cached_property
    def mining_loss(self) -> HardNegativeMining | None:
        """The local loss if it needs hard negatives, which its `sample_hard_negatives` chooses from
        the rows of all ranks; otherwise None.
        """
        local = self.local_loss
        return local if isinstance(local, HardNegativeMining) and local.score_outputs else None

    @cached_property
    def pairwise_loss(self) -> PairwiseLoss | None:
        """The global loss if its pairs can be scored in chunks of the gathered rows, which bounds
        memory; None also if hard negatives are sampled, because that needs all embeddings at once.
        """
        if self.mining_loss is None and isinstance(self.global_loss, PairwiseLoss):
            return self.global_loss
        return None

    @cached_property
    def gathered_names(self) -> tuple[str, ...]:
        """Names of the model's outputs that are gathered from all ranks, such as `image_embed`:
        those that the global loss reads, and those by which hard negatives are chosen.
        """
        names: list[str] = []
        if self.global_loss is not None:
            names += self.global_loss.gathered_outputs
        if self.mining_loss is not None:
            names += self.mining_loss.score_outputs
        return tuple(dict.fromkeys(names))


@runtime_checkable
class HasParts(Protocol):
    """A sum of global and local losses."""

    @property
    def objective_parts(self) -> ObjectiveParts:
        """The global terms as one loss, and the local ones."""


def split_objective(objective: Objective) -> ObjectiveParts:
    """Split an objective into its global and its local loss; a single one is either."""
    if isinstance(objective, HasParts):
        return objective.objective_parts
    if objective.gathered_outputs:
        return ObjectiveParts(objective, None)
    return ObjectiveParts(None, objective)
