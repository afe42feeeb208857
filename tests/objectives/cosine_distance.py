"""An example of an objective: the cosine distance of each image and its text."""

from typing import Any

import torch

from mmray.objectives.protocol import Batch, LossSums, Outputs, RowLoss


class CosineDistance(RowLoss):
    """1 - cosine similarity, averaged over the valid rows by its base class.

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalized.
    """

    gathered_outputs = ()  # a sum over rows needs no rows of other ranks
    scalar_output_names = ()

    def __init__(self, section: Any = None) -> None:
        """`section`: the `objective` section; not passed to an entry of OBJECTIVES."""

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss sum over the valid rows, their count, and no further metrics."""
        similarity = (outputs["image_embed"] * outputs["text_embed"]).sum(dim=-1)
        loss = torch.where(batch["valid"], 1 - similarity, 0).sum()
        return loss, self.count(batch), {}
