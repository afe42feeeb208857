"""Image-text matching with hard negatives, for models with cross-attention.

Negatives are a function of the rows of the global batch and their positions in the sample order, so
they do not depend on micro-batches, ranks or resumes.
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
    Outputs,
    RowLoss,
    at_least_float32,
)

NO_NEGATIVE = -1
# splitmix64's constants, signed
SPLITMIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class Matching(RowLoss):
    """Image-text matching with in-batch hard negatives (Li et al. 2021, ALBEF, arXiv:2107.07651,
    section 3.2).

    Outputs: `match` and `match_negative` [B], the logits that an image matches its own caption and
    the negative one. A row's loss is the mean of two binary cross-entropies; the second is 0 if the
    batch has no other caption. Negatives are sampled from the softmax over the similarities of the
    two embeddings, excluding equal captions.

    `compute_loss(outputs, batch, gathered)` returns the losses summed over the valid rows, the
    number of these rows, and half the number of correct decisions as `match_accuracy`, all scalars.

    Attributes:
        gathered_outputs: Outputs of the model that are gathered from all ranks for the loss: none.
        scalar_output_names: Outputs of the model that are one number for the step.
        score_outputs: Outputs from whose similarities negatives are chosen.
        gathered_inputs: Columns of the batch that are gathered to copy negatives from.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_output_names: tuple[str, ...] = ("logit_scale",)
    score_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    gathered_inputs: tuple[str, ...] = ("input_ids", "attention_mask", "pos")

    def compute_loss(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None
    ) -> LossSums:
        """Return the loss of a classifier of own captions and hard negatives.

        A row's loss is the mean of two binary cross-entropies.

        Args:
            outputs: Logits `match` and `match_negative` [B].
            batch: `valid` and `has_negative` bool [B]; without a negative its cross-entropy is 0,
                and its decision counts as wrong in `match_accuracy`.
            gathered: Unused, because the batch has the negatives.
        """
        valid = self.counted_rows(batch)
        has_negative = valid & batch["has_negative"]
        match = at_least_float32(outputs["match"])
        negative = at_least_float32(outputs["match_negative"])
        match = torch.where(valid, match, 0)
        negative = torch.where(has_negative, negative, 0)
        losses = torch.where(valid, F.softplus(-match), 0) + torch.where(
            has_negative, F.softplus(negative), 0
        )
        correct = (valid & (match > 0)).sum() + (has_negative & (negative <= 0)).sum()
        sums = {"match_accuracy": correct.to(losses.dtype) / 2, ROW_LOSSES: losses.detach() / 2}
        return losses.sum() / 2, self.count(batch), sums

    def sample_hard_negatives(
        self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]
    ) -> Batch:
        """Return `negative_ids` and `negative_mask` int64 [B, T], the tokens of a caption of any
        rank for each image, and `has_negative` bool [B], False if no caption differs from its own.
        """
        chosen = sample_negatives(outputs, batch, gathered, self.score_outputs[0])
        has_negative = chosen != NO_NEGATIVE
        local_rows = torch.arange(len(chosen), device=chosen.device) + gathered["offset"]
        row = torch.where(has_negative, chosen, local_rows)
        return {
            "negative_ids": gathered["input_ids"][row],
            "negative_mask": gathered["attention_mask"][row],
            "has_negative": has_negative,
        }


class ClipMatching(Matching):
    """Matching of texts with audio and video, of which a row may lack some, against in-batch hard
    negative texts.

    Similarities are those of the text with the sum of the embeddings of audio and video, the output
    `media_embed_sum` [B, D]. Rows without text, or with neither audio nor video, have no loss.

    A row's loss is the mean of two binary cross-entropies, for its own text and for the negative
    one. `compute_loss(outputs, batch, gathered)` returns the sum, the number of rows with a loss,
    and half the number of correct decisions as `match_accuracy`, all scalars.
    """

    score_outputs = ("media_embed_sum", "text_embed")

    def counted_rows(self, batch: Batch) -> Tensor:
        media = [batch[name] for name in ("has_audio", "has_video") if name in batch]
        return batch["valid"] & batch["has_text"] & torch.stack(media).any(dim=0)


def sample_negatives(
    outputs: Outputs, batch: Batch, gathered: dict[str, Any], name: str = "image_embed"
) -> Tensor:
    """Sample a hard negative caption for each image, with probability softmax(logit_scale x
    similarity), by the Gumbel-max trick.

    Noise is a hash of the positions of both rows in the sample order, so it does not depend on
    ranks and micro-batches. Captions equal to the image's own one, rows without text and rows that
    are not valid are excluded.

    Returns:
        Index of each image's negative among the G rows of all ranks, int64 [B]; -1 if no caption
        differs.
    """
    image = at_least_float32(outputs[name])
    text = at_least_float32(gathered["text_embed"])
    scores = (outputs["logit_scale"] * image @ text.T).double() + gumbel_noise(
        batch["pos"], gathered["pos"]
    )
    offset = gathered["offset"]
    captions = hash_captions(gathered["input_ids"], gathered["attention_mask"])
    local = captions[offset : offset + len(scores)]
    has_text = gathered["valid"] & text.any(dim=1)
    allowed = has_text[None] & (captions[None] != local[:, None])
    best = scores.masked_fill(~allowed, -torch.inf).argmax(dim=1)
    return torch.where(allowed.any(dim=1), best, NO_NEGATIVE)


def gumbel_noise(row: Tensor, column: Tensor) -> Tensor:
    """Return standard Gumbel noise float64 [B, G], a hash of the positions in the sample order of B
    images and G captions.
    """
    mixed = row[:, None] * SPLITMIX[0] + column[None] * SPLITMIX[1]
    for shift, factor in ((30, SPLITMIX[1]), (27, SPLITMIX[2]), (31, 1)):
        mixed = (mixed ^ _logical_shift_right(mixed, shift)) * factor
    uniform = (_logical_shift_right(mixed, 12).double() + 0.5) / 2**52  # never 0, never 1
    return -(-uniform.log()).log()


def hash_captions(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a hash of each caption's tokens, int64 [B], that does not depend on the padding."""
    positions = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    mixed = (input_ids + 1) * SPLITMIX[0] + positions * SPLITMIX[1]
    mixed = (mixed ^ _logical_shift_right(mixed, 29)) * SPLITMIX[2]
    return torch.where(attention_mask.bool(), mixed, 0).sum(dim=1)


def _logical_shift_right(bits: Tensor, positions: int) -> Tensor:
    """Logical right shift; torch's operator is arithmetic."""
    return (bits >> positions) & ((1 << (64 - positions)) - 1)
