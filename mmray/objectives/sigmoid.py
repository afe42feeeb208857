"""SigLIP's sigmoid loss: a binary cross-entropy for each image-text pair, computed on a ring of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.contrastive import mask_invalid
from mmray.objectives.protocol import Batch, LossSums, Outputs, RowLoss

CHUNK = 4096  # remote texts scored at once


class Sigmoid(RowLoss):
    """SigLIP's loss (Zhai et al. 2023, arXiv:2303.15343, equation 1): summed over all pairs, divided by the rows.

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalised; `logit_scale` and `logit_bias`, scalars. Pairs with an
    invalid row do not count.
    """

    gathered_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    scalar_output_names: tuple[str, ...] = ("logit_scale", "logit_bias")
    rotating_outputs: tuple[str, ...] = ("text_embed",)

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over this rank's images and all texts, the valid rows, and the sums by kind of pair."""
        if gathered is None:
            gathered = {"text_embed": outputs["text_embed"], "valid": batch["valid"], "offset": 0}
        texts = {"text_embed": gathered["text_embed"]}
        loss, parts = self.pairwise_loss(outputs, batch["valid"], texts, gathered["valid"], -gathered["offset"])
        return loss, self.count(batch), parts

    def pairwise_loss(
        self, outputs: Outputs, valid: Tensor, remote: Outputs, remote_valid: Tensor, offset: int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss summed over local images [B] and remote texts [V]; text i belongs to image i + offset."""
        image, text = mask_invalid(outputs["image_embed"], valid), mask_invalid(remote["text_embed"], remote_valid)
        logits = outputs["logit_scale"].to(image.dtype) * image @ text.T + outputs["logit_bias"].to(image.dtype)
        rows = torch.arange(len(image), device=image.device)[:, None]
        columns = torch.arange(len(text), device=image.device)[None]
        positive = rows == columns + offset if offset is not None else torch.zeros_like(logits, dtype=torch.bool)
        counted = valid[:, None] & remote_valid[None]
        losses = torch.where(counted, -F.logsigmoid(torch.where(positive, logits, -logits)), 0)
        positive_sum, total = torch.where(positive, losses, 0).sum(), losses.sum()
        return total, {"loss_positive": positive_sum.detach(), "loss_negative": (total - positive_sum).detach()}
