"""Region and text: which of the labels' texts does the picture show in this box; boxes without a label do not count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.reader import NO_LABEL
from mmray.objectives.protocol import Batch, LossSums, Outputs


class RegionText:
    """Cross-entropy of each box over the texts of all labels (Gu et al. 2022, ViLD-text, arXiv:2104.13921, eq. 2).

    Outputs: `region_logits` [B, N, C], how well each box goes with each text. The batch's `box_labels` is int64 [B, N],
    -1 for a box without one, `box_mask` bool [B, N]. Divided by the labelled boxes of the global batch, so that each
    counts alike, however many its image has.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ("logit_scale",)

    def count(self, batch: Batch) -> Tensor:
        """Labelled boxes of valid rows."""
        return _counted(batch).sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the labelled boxes, their count, and how many got their own text; float32 at least."""
        logits, counted = outputs["region_logits"], _counted(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(counted[..., None], logits, 0)  # a NaN in padding stays there
        target = torch.where(counted, batch["box_labels"], NO_LABEL)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="sum")
        right = (counted & (logits.argmax(dim=-1) == target)).sum()
        return loss, counted.sum(), {"region_accuracy": right.to(loss.dtype)}


def _counted(batch: Batch) -> Tensor:
    """Boxes that count, bool [B, N]."""
    return batch["valid"][:, None] & batch["box_mask"] & (batch["box_labels"] != NO_LABEL)
