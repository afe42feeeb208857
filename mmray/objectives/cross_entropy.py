"""Cross-entropy of the class of each row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.blocks import NO_LABEL
from mmray.objectives.protocol import ROW_LOSSES, Batch, LossSums, Outputs, at_least_float32

IGNORE_INDEX = -100  # class of a position where nothing is predicted, as in torch


class Classification:
    """Cross-entropy of the class of each row, divided by the number of valid rows with a label.

    Outputs: `class_logits` [B, C]. The batch's `label` is int64 [B], -1 for a row without a label.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss: none.
        scalar_output_names: Outputs that are one number for the batch: none.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of valid rows with a label."""
        return _has_target(batch).sum()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss summed over the valid rows with a label, their number, and the number of
        correct ones as `class_accuracy`.
        """
        counted = _has_target(batch)
        targets = torch.where(counted, batch["label"], IGNORE_INDEX)
        logits = at_least_float32(outputs["class_logits"])
        # keeps a NaN of padding out of the gradient
        logits = torch.where(counted[:, None], logits, 0)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
        correct = (counted & (logits.argmax(dim=1) == targets)).sum()
        sums = {"class_accuracy": correct.to(losses.dtype), ROW_LOSSES: losses.detach()}
        return losses.sum(), counted.sum(), sums


def _has_target(batch: Batch) -> Tensor:
    return batch["valid"] & (batch["label"] != NO_LABEL)
