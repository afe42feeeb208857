"""Region-text loss: classify boxes over the texts of all labels; boxes without a label do not count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.reader import NO_LABEL
from mmray.objectives.protocol import Batch, LossSums, Outputs


class RegionText:
    """Cross-entropy of each box over the texts of all labels (Gu et al. 2022, ViLD-text, arXiv:2104.13921, eq. 2).

    Outputs: `region_logits` [B, N, C], box against label text. The batch's `box_labels` is int64 [B, N], -1 for a box
    without a label, `box_mask` bool [B, N]. Divided by the labelled boxes of the global batch, so each box has the same
    weight.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ("logit_scale",)

    def count(self, batch: Batch) -> Tensor:
        """Labelled boxes of valid rows."""
        return _is_labelled(batch).sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the labelled boxes, their count, and how many were classified correctly; at least float32."""
        logits, counted = outputs["region_logits"], _is_labelled(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(counted[..., None], logits, 0)  # keeps a NaN of padding out of the gradient
        target = torch.where(counted, batch["box_labels"], NO_LABEL)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="sum")
        correct = (counted & (logits.argmax(dim=-1) == target)).sum()
        return loss, counted.sum(), {"region_accuracy": correct.to(loss.dtype)}


def _is_labelled(batch: Batch) -> Tensor:
    """Labelled boxes, bool [B, N]."""
    return batch["valid"][:, None] & batch["box_mask"] & (batch["box_labels"] != NO_LABEL)
