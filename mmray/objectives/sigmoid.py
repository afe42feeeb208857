"""The sigmoid loss of pairs: for each image and each text of the global batch, do they belong together?

Unlike softmax it needs no sum over all rows, so the texts of other ranks come by one rank at a time (train/ring.py) and
memory does not grow with the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.contrastive import mask_invalid
from mmray.objectives.protocol import Batch, LossSums, Outputs

CHUNK = 4096  # visiting texts that are scored at once


class Sigmoid:
    """SigLIP's loss (Zhai et al. 2023, arXiv:2303.15343, equation 1): summed over all pairs, divided by the rows.

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalised; `logit_scale` and `logit_bias`, scalars. Pairs with an
    invalid row do not count.
    """

    gathered_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    scalar_outputs: tuple[str, ...] = ("logit_scale", "logit_bias")
    rotating_outputs: tuple[str, ...] = ("text_embed",)

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk

    def count(self, batch: Batch) -> Tensor:
        """Valid rows of the batch."""
        return batch["valid"].sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over this rank's images and everyone's texts, the valid rows, and the sum of either sort of pair."""
        if gathered is None:
            gathered = {"text_embed": outputs["text_embed"], "valid": batch["valid"], "offset": 0}
        visitors = {"text_embed": gathered["text_embed"]}
        loss, parts = self.pairwise_loss(outputs, batch["valid"], visitors, gathered["valid"], -gathered["offset"])
        return loss, self.count(batch), parts

    def pairwise_loss(
        self, outputs: Outputs, valid: Tensor, visitors: Outputs, visitors_valid: Tensor, partner: int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss summed over images at home [B] and visiting texts [V]; text i is that of image i + partner."""
        image, text = mask_invalid(outputs["image_embed"], valid), mask_invalid(visitors["text_embed"], visitors_valid)
        logits = outputs["logit_scale"].to(image.dtype) * image @ text.T + outputs["logit_bias"].to(image.dtype)
        rows = torch.arange(len(image), device=image.device)[:, None]
        columns = torch.arange(len(text), device=image.device)[None]
        own = rows == columns + partner if partner is not None else torch.zeros_like(logits, dtype=torch.bool)
        counted = valid[:, None] & visitors_valid[None]
        losses = torch.where(counted, -F.logsigmoid(torch.where(own, logits, -logits)), 0)
        positive = torch.where(own, losses, 0).sum()
        total = losses.sum()
        parts = {"loss_positive": positive.detach(), "loss_negative": (total - positive).detach()}
        return total, parts
