"""Classification loss with label smoothing; rows without a label do not count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.reader import NO_LABEL
from mmray.objectives.protocol import Batch, LossSums, Outputs


class Classification:
    """Cross-entropy with smoothed labels (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Outputs: `class_logits` [B, C]. The batch's `label` is int64 [B], -1 for a row without a label.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ()

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def count(self, batch: Batch) -> Tensor:
        """Labelled valid rows."""
        return _is_labelled(batch).sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the labelled rows, their count, and how many were classified correctly."""
        logits, counted = outputs["class_logits"], _is_labelled(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(counted[:, None], logits, 0)  # keeps a NaN of padding out of the gradient
        target = torch.where(counted, batch["label"], NO_LABEL)
        losses = F.cross_entropy(
            logits, target, ignore_index=NO_LABEL, reduction="none", label_smoothing=self.label_smoothing
        )
        correct = (counted & (logits.argmax(dim=1) == target)).sum()
        loss = torch.where(counted, losses, 0).sum()
        return loss, self.count(batch), {"class_accuracy": correct.to(loss.dtype)}


def _is_labelled(batch: Batch) -> Tensor:
    return batch["valid"] & (batch["label"] != NO_LABEL)
