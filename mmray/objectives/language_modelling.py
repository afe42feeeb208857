"""Next-token loss of generative models; only target tokens count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.data.stream.collate import IGNORE_INDEX
from mmray.objectives.protocol import Batch, LossSums, Outputs


class LanguageModelling:
    """Cross-entropy of the next token, divided by the target tokens of the global batch, not of each micro-batch.

    Outputs: `logits` [B, T, V], the prediction of the next token. The batch's `labels` is int64 [B, T], -100 for tokens
    without a loss: the prompt, the image, padding.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Target tokens of valid rows, the first token of each row excluded."""
        return (_targets(batch) != IGNORE_INDEX).sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the target tokens, their count, and how many were the argmax; at least float32."""
        targets = _targets(batch)
        counted = targets != IGNORE_INDEX
        logits = outputs["logits"][:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(counted[..., None], logits, 0)  # keeps a NaN of padding out of the gradient
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        correct = (counted & (logits.argmax(dim=-1) == targets)).sum()
        return loss, counted.sum(), {"token_accuracy": correct.to(loss.dtype)}


def _targets(batch: Batch) -> Tensor:
    """Next token at each position but the last, int64 [B, T - 1]."""
    return torch.where(batch["valid"][:, None], batch["labels"][:, 1:], IGNORE_INDEX)
