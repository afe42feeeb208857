"""The symmetric contrastive loss: which caption belongs to which image, among all rows of the global batch.

Reads the two embeddings of a two-tower model; train/step.py gathers the rows of the other ranks for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.protocol import Batch, Outputs


class Contrastive:
    """InfoNCE both ways, averaged (Radford et al. 2021, CLIP, figure 3; Zhang et al. 2020, ConVIRT, equation 2).

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalised, and `logit_scale`, a scalar. A row's loss is the mean of
    its two cross-entropies against all valid rows; invalid rows neither count nor serve as negatives.
    """

    gathered_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    scalar_outputs: tuple[str, ...] = ("logit_scale",)
    row_values: tuple[str, ...] = ("valid",)

    def count(self, batch: Batch) -> Tensor:
        """Valid rows of the batch."""
        return batch["valid"].sum()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss sum over this rank's valid rows, their count, and the sum each way; float32 at least.

        Logits are [local rows, global rows] each way, never [global, global].
        """
        valid = batch["valid"]
        image, text = mask_invalid(outputs["image_embed"], valid), mask_invalid(outputs["text_embed"], valid)
        scale = outputs["logit_scale"].to(image.dtype)
        if gathered is None:
            logits = scale * image @ text.T
            to_text, to_image, columns, offset = logits, logits.T, valid, 0
        else:
            columns, offset = gathered["valid"], gathered["offset"]
            to_text = scale * image @ mask_invalid(gathered["text_embed"], columns).T
            to_image = scale * text @ mask_invalid(gathered["image_embed"], columns).T
        targets = torch.arange(offset, offset + len(valid), device=valid.device)
        image_to_text = _cross_entropy_sum(to_text, targets, valid, columns)
        text_to_image = _cross_entropy_sum(to_image, targets, valid, columns)
        parts = {"loss_image_to_text": image_to_text.detach(), "loss_text_to_image": text_to_image.detach()}
        return (image_to_text + text_to_image) / 2, self.count(batch), parts


def mask_invalid(embed: Tensor, valid: Tensor) -> Tensor:
    """Float32 at least, invalid rows zero: whatever stands in padding, a NaN too, must not reach a gradient."""
    embed = embed.to(torch.promote_types(embed.dtype, torch.float32))
    return torch.where(valid[:, None], embed, 0)


def _cross_entropy_sum(logits: Tensor, targets: Tensor, valid: Tensor, columns: Tensor) -> Tensor:
    """Cross-entropy of the valid rows, summed; invalid columns get no share of the softmax."""
    # The lowest finite number, not -inf: a rank with no valid row at all then yields 0 instead of NaN.
    logits = logits.masked_fill(~columns, torch.finfo(logits.dtype).min)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return torch.where(valid, losses, 0).sum()
