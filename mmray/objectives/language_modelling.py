"""Language modelling: which token comes next, asked of a model that writes; only tokens that are learned count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.collate import IGNORE_INDEX
from mmray.objectives.protocol import Batch, LossSums, Outputs


class LanguageModelling:
    """Cross-entropy of the next token, divided by the learned tokens of the global batch, not of each micro-batch.

    Outputs: `logits` [B, T, V], at each token what follows it. The batch's `labels` is int64 [B, T], -100 for a token
    that is not learned: the prompt, the image's, padding.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Learned tokens of valid rows that have a token before them."""
        return (_targets(batch) != IGNORE_INDEX).sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the learned tokens, their count, and how many were the most likely; float32 at least."""
        targets = _targets(batch)
        learned = targets != IGNORE_INDEX
        logits = outputs["logits"][:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(learned[..., None], logits, 0)  # a NaN in padding stays there
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        right = (learned & (logits.argmax(dim=-1) == targets)).sum()
        return loss, learned.sum(), {"token_accuracy": right.to(loss.dtype)}


def _targets(batch: Batch) -> Tensor:
    """The token after each but the last, int64 [B, T - 1]."""
    return torch.where(batch["valid"][:, None], batch["labels"][:, 1:], IGNORE_INDEX)
