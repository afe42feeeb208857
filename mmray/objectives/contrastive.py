"""Losses over all image-text pairs of the global batch: CLIP's symmetric softmax, and SigLIP's
sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.protocol import (
    ROW_LOSSES,
    Batch,
    LossSums,
    MetricSums,
    Outputs,
    RowLoss,
    at_least_float32,
)

CHUNK = 4096  # remote texts scored at once
IGNORED = -100  # target of an invalid row


class Contrastive(RowLoss):
    """InfoNCE in both directions, averaged (Radford et al. 2021, CLIP, figure 3; Zhang et al. 2020,
    ConVIRT, eq. 2).

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalized, and `logit_scale`, a scalar. A row's
    loss is the mean of its two cross-entropies against all valid rows. Rows whose `valid` in the
    batch is False, such as padding, have no loss and do not serve as negatives.

    `compute_loss(outputs, batch, gathered)` returns the losses summed over the valid rows, the
    number of these rows, and the sums of the two directions as the metrics `loss_image_to_text` and
    `loss_text_to_image`, all scalars.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss.
        scalar_output_names: Outputs of the model that are one number for the step.
    """

    gathered_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    scalar_output_names: tuple[str, ...] = ("logit_scale",)

    @property
    def modalities(self) -> list[str]:
        """The two modalities, such as `image` and `text`."""
        return [name.removesuffix("_embed") for name in self.gathered_outputs]

    def valid_pairs(self, outputs: Outputs, valid: Tensor) -> Tensor:
        """Return the rows that have a loss and serve as negatives, bool [B]; a subclass may exclude
        more, such as rows without audio.
        """
        return valid

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return CLIP's loss: the mean of the image-to-text and the text-to-image cross-entropy of
        each row.

        Each local row is compared with all valid rows of all ranks, so the matrices of logits are
        [B, G], never [G, G].

        Args:
            outputs: `image_embed` and `text_embed` [B, D], L2-normalized, and the scalar
                `logit_scale`, for the B local rows.
            batch: `valid` bool [B], False for padding; such rows have no loss and do not serve as
                negatives.
            gathered: Rows of all ranks: `image_embed` and `text_embed` [G, D], `valid` bool [G],
                and the int `offset`, the index of the first local row among the G. None: the local
                rows are all rows.

        Returns:
            The loss summed over the valid local rows, their number (int64 scalar), and the sums of
            the two directions as `loss_image_to_text` and `loss_text_to_image`. Sums are scalars in
            at least float32.
        """
        first, second = self.gathered_outputs
        valid = self.valid_pairs(outputs, batch["valid"])
        image = mask_invalid(outputs[first], valid)
        text = mask_invalid(outputs[second], valid)
        scale = outputs["logit_scale"].to(image.dtype)
        if gathered is None:
            logits = scale * image @ text.T
            to_text = logits
            to_image = logits.T
            columns = valid
            offset = 0
        else:
            columns = self.valid_pairs(gathered, gathered["valid"])
            offset = gathered["offset"]
            to_text = scale * image @ mask_invalid(gathered[second], columns).T
            to_image = scale * text @ mask_invalid(gathered[first], columns).T
        rows = torch.arange(offset, offset + len(valid), device=valid.device)
        targets = rows.masked_fill(~valid, IGNORED)
        # The lowest finite number instead of -inf: a rank without any valid row then yields 0, not
        # NaN.
        lowest = torch.finfo(to_text.dtype).min
        excluded = to_text.new_zeros(len(columns)).masked_fill(~columns, lowest)
        losses = [
            F.cross_entropy(logits + excluded, targets, reduction="none", ignore_index=IGNORED)
            for logits in (to_text, to_image)
        ]
        sums = [each.sum() for each in losses]
        query, gallery = self.modalities
        metric_sums = {
            f"loss_{query}_to_{gallery}": sums[0].detach(),
            f"loss_{gallery}_to_{query}": sums[1].detach(),
            ROW_LOSSES: (losses[0] + losses[1]).detach() / 2,
        }
        return (sums[0] + sums[1]) / 2, self.count(batch), metric_sums


class PairContrastive(Contrastive):
    """InfoNCE between two modalities, in both directions, either of which a row may lack (Girdhar
    et al. 2023, ImageBind, arXiv:2305.05665, equation 1).

    The embedding of a missing modality is 0. Rows that lack one of the two, and rows of padding,
    have no loss and do not serve as negatives. A subclass sets `gathered_outputs`, the names of the
    two embeddings.

    A row's loss is the mean of its two cross-entropies. `compute_loss(outputs, batch, gathered)`
    returns their sum over the valid rows with both modalities, the number of these rows, and the
    sums of the two directions as metrics such as `loss_audio_to_text`, all scalars.
    """

    def valid_pairs(self, outputs: Outputs, valid: Tensor) -> Tensor:
        first, second = (outputs[name].detach().any(dim=1) for name in self.gathered_outputs)
        return valid & first & second

    def counted_rows(self, batch: Batch) -> Tensor:
        first, second = self.modalities
        return batch["valid"] & batch[f"has_{first}"] & batch[f"has_{second}"]


class AudioText(PairContrastive):
    """InfoNCE between audio and texts, in both directions."""

    gathered_outputs = ("audio_embed", "text_embed")


class VideoText(PairContrastive):
    """InfoNCE between videos and texts, in both directions."""

    gathered_outputs = ("video_embed", "text_embed")


class AudioVideo(PairContrastive):
    """InfoNCE between audio and videos, in both directions."""

    gathered_outputs = ("audio_embed", "video_embed")


class Sigmoid(RowLoss):
    """SigLIP's loss (Zhai et al. 2023, arXiv:2303.15343, equation 1): binary cross-entropies of all
    pairs of an image and a text, summed, and divided by the number of valid rows.

    Outputs: `image_embed`, `text_embed` [B, D], L2-normalized; `logit_scale` and `logit_bias`,
    scalars. Pairs with a row whose `valid` in the batch is False, such as padding, are left out.

    `compute_loss(outputs, batch, gathered)` returns the sum over the pairs of the local images, the
    number of valid local rows, and the sums over pairs of one row and over other pairs as the
    metrics `loss_positive` and `loss_negative`, all scalars.

    Args:
        chunk_rows: Number of texts of all ranks that are scored at a time, which bounds memory.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss.
        scalar_output_names: Outputs of the model that are one number for the step.
        remote_outputs: Those that are needed of remote rows (those of all ranks).
    """

    gathered_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    scalar_output_names: tuple[str, ...] = ("logit_scale", "logit_bias")
    remote_outputs: tuple[str, ...] = ("text_embed",)

    def __init__(self, chunk_rows: int = CHUNK) -> None:
        self.chunk_rows = chunk_rows

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss of the pairs of a local image and any rank's text, the number of valid
        local images, and the sums `loss_positive` and `loss_negative`.
        """
        if gathered is None:
            gathered = {"text_embed": outputs["text_embed"], "valid": batch["valid"], "offset": 0}
        valid = gathered["valid"]
        row = torch.arange(len(valid), device=valid.device) - gathered["offset"]
        loss, metric_sums = self.pairwise_loss(outputs, batch["valid"], gathered, valid, row)
        return loss, self.count(batch), metric_sums

    def pairwise_loss(
        self,
        outputs: Outputs,
        valid: Tensor,
        remote: Outputs,
        remote_valid: Tensor,
        positive_row: Tensor,
    ) -> tuple[Tensor, MetricSums]:
        """Return SigLIP's loss of the B local images with V texts of any rank.

        Args:
            outputs: `image_embed` [B, D], L2-normalized, and the scalars `logit_scale` and
                `logit_bias`, for the local rows.
            valid: bool [B], False for local rows of padding and unreadable ones; their pairs are
                left out.
            remote: `text_embed` [V, D], L2-normalized.
            remote_valid: bool [V], the same of the rows of the texts.
            positive_row: Local row of each text's own image, int64 [V]; -1 or any other number
                outside 0..B-1 if that image is on another rank.
        """
        image = mask_invalid(outputs["image_embed"], valid)
        text = mask_invalid(remote["text_embed"], remote_valid)
        bias = outputs["logit_bias"].to(image.dtype)
        logits = outputs["logit_scale"].to(image.dtype) * image @ text.T + bias
        positive = torch.arange(len(image), device=image.device)[:, None] == positive_row
        counted = valid[:, None] & remote_valid[None]
        losses = torch.where(counted, -F.logsigmoid(torch.where(positive, logits, -logits)), 0)
        positive_sum = torch.where(positive, losses, 0).sum()
        total = losses.sum()
        return total, {
            "loss_positive": positive_sum.detach(),
            "loss_negative": (total - positive_sum).detach(),
            ROW_LOSSES: losses.detach().sum(dim=1),
        }


def mask_invalid(embed: Tensor, valid: Tensor) -> Tensor:
    """Return embeddings [B, D] in at least float32, with zeros for rows that are not valid."""
    return torch.where(valid[:, None], at_least_float32(embed), 0)
