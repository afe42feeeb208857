"""Next-token loss of captions, next to a contrastive loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmray.objectives.protocol import ROW_LOSSES, Batch, LossSums, Outputs


class Captioning:
    """Cross-entropy of the tokens of the captions (Yu et al. 2022, CoCa, arXiv:2205.01917, equation
    3), divided by their number in the global batch.

    Outputs: `caption_losses` [B], the sum over the tokens of each caption. Rows whose `valid` in
    the batch is False, such as padding, are left out. In the losses by source each row counts as
    the mean over its tokens.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss: none.
        scalar_output_names: Outputs of the model that are one number for the step: none.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of tokens of the valid rows."""
        return _num_tokens(batch).sum()

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss summed over the tokens of the valid rows, and their number."""
        num_tokens = _num_tokens(batch)
        losses = torch.where(batch["valid"], outputs["caption_losses"], 0)
        row_losses = losses.detach() / num_tokens.clamp(min=1)
        return losses.sum(), num_tokens.sum(), {ROW_LOSSES: row_losses}


def _num_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens of each valid row, int64 [B], and 0 for others."""
    return batch["attention_mask"].sum(dim=1) * batch["valid"]
