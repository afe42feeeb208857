"""Local losses that are a cross-entropy over targets: classes of rows, texts of boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.blocks import NO_LABEL
from mmray.objectives.protocol import Batch, LossSums, Outputs, at_least_float32

IGNORE_INDEX = -100  # class of a position where nothing is predicted, as in torch


class CrossEntropy(ABC):
    """Base of objectives with a cross-entropy: its sum over the targets, divided by the number of
    targets in the global batch.

    A subclass sets `logits` and `accuracy`, and implements `targets`, from a batch (columns by
    name) to the class to predict at each position, int64 [B, ...], -100 for none. `compute_loss`
    returns the loss sum, the number of targets, and the number of correct ones under the name in
    `accuracy`.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss: none,
            because rows are independent of each other.
        scalar_output_names: Outputs that are one number for the batch: none.
        logits: Name of the output [B, ..., C] with the logits of C classes; set by subclasses.
        accuracy: Name of the metric: the number of targets whose class has the largest logit, which
            is divided by the number of targets in the global batch too; set by subclasses.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()
    logits: str
    accuracy: str

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """Return the class to predict at each position, int64 [B, ...]; IGNORE_INDEX (-100) where
        nothing is predicted.

        Args:
            batch: Columns of the rows by name, such as `label` int64 [B] and `valid` bool [B],
                False for padding; each subclass reads its own.
        """

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets."""
        return (self.targets(batch) != IGNORE_INDEX).sum()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the cross-entropy summed over the targets, their number, and the number of correct
        predictions as `accuracy` (an attribute) names it.
        """
        targets = self.targets(batch)
        counted = targets != IGNORE_INDEX
        logits = at_least_float32(outputs[self.logits])
        # keeps a NaN of padding out of the gradient
        logits = torch.where(counted[..., None], logits, 0)
        loss = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        correct = (counted & (logits.argmax(dim=-1) == targets)).sum()
        return loss, counted.sum(), {self.accuracy: correct.to(loss.dtype)}


class Classification(CrossEntropy):
    """Cross-entropy of the class of each row, divided by the number of valid rows with a label.

    Outputs: `class_logits` [B, C]. The batch's `label` is int64 [B], -1 for a row without a label.

    `compute_loss(outputs, batch, gathered)` returns the loss summed over the valid rows with a
    label, the number of these rows, and the number of correct ones as `class_accuracy`, all
    scalars.
    """

    logits = "class_logits"
    accuracy = "class_accuracy"

    def targets(self, batch: Batch) -> Tensor:
        return torch.where(
            batch["valid"] & (batch["label"] != NO_LABEL), batch["label"], IGNORE_INDEX
        )


class RegionText(CrossEntropy):
    """Cross-entropy of each box over the texts of all labels (Gu et al. 2022, ViLD-text,
    arXiv:2104.13921), divided by the number of labeled boxes of valid rows.
    """

    scalar_output_names = ("logit_scale",)
    logits = "region_logits"
    accuracy = "region_accuracy"

    def targets(self, batch: Batch) -> Tensor:
        labeled = batch["valid"][:, None] & batch["box_mask"] & (batch["box_labels"] != NO_LABEL)
        return torch.where(labeled, batch["box_labels"], IGNORE_INDEX)
