"""Local losses that are a cross-entropy over targets: classes of rows, next tokens, texts of
boxes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.images.boxes import NO_LABEL
from mmray.data.stream.collate import IGNORE_INDEX
from mmray.objectives.protocol import Batch, LossSums, Outputs, at_least_float32


class CrossEntropy:
    """Cross-entropy of each target, divided by the number of targets in the global batch."""

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()
    logits: str  # output [B, ..., C]
    accuracy: str  # metric

    def targets(self, batch: Batch) -> Tensor:
        """Classes int64 [B, ...]; IGNORE_INDEX does not count."""
        raise NotImplementedError

    def count(self, batch: Batch) -> Tensor:
        return (self.targets(batch) != IGNORE_INDEX).sum()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the cross-entropy over the targets.

        Args:
            outputs: Outputs of the model, with its logits [..., C].
            batch: Columns with the targets; those of IGNORE_INDEX do not count.
            gathered: Unused, because rows are independent of each other.

        Returns:
            Loss sum over the targets, their count, and how many were the argmax; at least float32.
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
    """Cross-entropy of the row's class.

    Outputs: `class_logits` [B, C]. The batch's `label` is int64 [B], -1 for a row without a label.
    """

    logits = "class_logits"
    accuracy = "class_accuracy"

    def targets(self, batch: Batch) -> Tensor:
        """Labels of valid rows [B]."""
        return torch.where(
            batch["valid"] & (batch["label"] != NO_LABEL), batch["label"], IGNORE_INDEX
        )


class TokenCrossEntropy(CrossEntropy):
    """Next-token loss of models with logits.

    Outputs: `logits` [B, T, V], the prediction of the next token. The batch's `labels` is int64 [B,
    T], -100 for tokens without a loss: the prompt, the image, padding.
    """

    logits = "logits"
    accuracy = "token_accuracy"

    def targets(self, batch: Batch) -> Tensor:
        """Next token at each position of valid rows [B, T], none at the last."""
        following = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        return torch.where(batch["valid"][:, None], following, IGNORE_INDEX)


class RegionText(CrossEntropy):
    """Cross-entropy of each box over the texts of all labels (Gu et al. 2022, ViLD-text,
    arXiv:2104.13921, eq. 2).

    Outputs: `region_logits` [B, N, C], box against label text. The batch's `box_labels` is int64
    [B, N], -1 for a box without a label, `box_mask` bool [B, N].
    """

    scalar_output_names = ("logit_scale",)
    logits = "region_logits"
    accuracy = "region_accuracy"

    def targets(self, batch: Batch) -> Tensor:
        """Labels of the boxes of valid rows [B, N]."""
        labeled = batch["valid"][:, None] & batch["box_mask"] & (batch["box_labels"] != NO_LABEL)
        return torch.where(labeled, batch["box_labels"], IGNORE_INDEX)
