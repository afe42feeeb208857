"""Matching: do this image and this text belong together, asked of a model that looks at both at once.

Each row is asked about its own caption and about a hard negative: another row's caption that its image's embedding is
close to. The choice is made over the whole global batch, and by nothing but the rows and their places in the run, so
that micro-batches, ranks and resumes choose alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.protocol import Batch, LossSums, Outputs

NO_NEGATIVE = -1
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's, as signed numbers


class Matching:
    """Image-text matching with in-batch hard negatives (Li et al. 2021, ALBEF, arXiv:2107.07651, section 3.2).

    Outputs: `match`, `match_negative` [B], logits. A row's loss is the mean of two binary cross-entropies; where the
    batch holds no other caption for a row, the second is left out. Negatives are drawn with the probability that the
    softmax over the scores of the two embeddings gives them, equal captions apart.
    """

    gathered_outputs: tuple[str, ...] = ()
    scalar_outputs: tuple[str, ...] = ("logit_scale",)
    score_outputs: tuple[str, ...] = ("image_embed", "text_embed")
    gathered_inputs: tuple[str, ...] = ("input_ids", "attention_mask", "pos")

    def count(self, batch: Batch) -> Tensor:
        """Valid rows of the batch."""
        return batch["valid"].sum()

    def compute_loss(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any] | None = None) -> LossSums:
        """Loss sum over the valid rows, their count, and how many pairs were judged rightly (of 2 a row, halved)."""
        valid = batch["valid"]
        asked = valid & batch["has_negative"]
        match, negative = _float(outputs["match"]), _float(outputs["match_negative"])
        match, negative = torch.where(valid, match, 0), torch.where(asked, negative, 0)  # a NaN in padding stays there
        losses = torch.where(valid, F.softplus(-match), 0) + torch.where(asked, F.softplus(negative), 0)
        right = (valid & (match > 0)).sum() + (asked & (negative <= 0)).sum()
        return losses.sum() / 2, self.count(batch), {"match_accuracy": right.to(losses.dtype) / 2}

    def sample_hard_negatives(self, outputs: Outputs, batch: Batch, gathered: dict[str, Any]) -> Batch:
        """`negative_ids`, `negative_mask` [B, T] and `has_negative` [B]: another row's caption for each row."""
        chosen = sample_negatives(outputs, batch, gathered)
        found = chosen != NO_NEGATIVE
        own = torch.arange(len(chosen), device=chosen.device) + gathered["offset"]
        row = torch.where(found, chosen, own)
        return {
            "negative_ids": gathered["input_ids"][row],
            "negative_mask": gathered["attention_mask"][row],
            "has_negative": found,
        }


def sample_negatives(outputs: Outputs, batch: Batch, gathered: dict[str, Any]) -> Tensor:
    """Row of `everyone` whose caption is the hard negative of each row, int64 [B]; -1 where there is none.

    Sampling by the Gumbel-max trick, its noise drawn from the positions of the two rows.
    """
    scores = outputs["logit_scale"] * _float(outputs["image_embed"]) @ _float(gathered["text_embed"]).T
    scores = scores.double() + gumbel_noise(batch["pos"], gathered["pos"])
    offset = gathered["offset"]
    captions = hash_captions(gathered["input_ids"], gathered["attention_mask"])
    own = captions[offset : offset + len(scores)]
    allowed = gathered["valid"][None] & (captions[None] != own[:, None])
    best = scores.masked_fill(~allowed, -torch.inf).argmax(dim=1)
    return torch.where(allowed.any(dim=1), best, NO_NEGATIVE)


def gumbel_noise(row: Tensor, column: Tensor) -> Tensor:
    """Standard Gumbel noise float64 [B, G] that is a function of two int64 positions."""
    mixed = row[:, None] * _ODD[0] + column[None] * _ODD[1]
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
        mixed = (mixed ^ _logical_shift_right(mixed, shift)) * factor
    uniform = (_logical_shift_right(mixed, 12).double() + 0.5) / 2**52  # never 0, never 1
    return -(-uniform.log()).log()


def hash_captions(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A number for each caption, int64 [B]: the same for the same tokens, whatever fills them up."""
    places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    mixed = (input_ids + 1) * _ODD[0] + places * _ODD[1]
    mixed = (mixed ^ _logical_shift_right(mixed, 29)) * _ODD[2]
    return torch.where(attention_mask.bool(), mixed, 0).sum(dim=1)


def _logical_shift_right(bits: Tensor, places: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _float(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
