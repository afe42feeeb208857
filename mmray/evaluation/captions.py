"""Captions of held-out images by the decoder of a model: their perplexity, and examples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mmray.evaluation.batches import EvalDataset
from mmray.evaluation.examples import NUM_SHOWN, select_queries
from mmray.evaluation.retrieval import RankedDirection
from mmray.models.protocol import Model

PERPLEXITY = "caption_perplexity"


def perplexity(losses: Tensor, has_start: bool) -> dict[str, float]:
    """Return `caption_perplexity`, or {} without captions.

    Args:
        losses: Sum of the losses and number of tokens of each caption, float64 [C, 2].
        has_start: Whether captions start with a constant token, which is not counted.
    """
    total, num_tokens = losses.sum(dim=0).tolist()
    if not num_tokens:
        return {}
    mean = total / (num_tokens - has_start * len(losses))
    return {PERPLEXITY: math.exp(min(mean, 700.0))}  # exp of more is infinite


@torch.no_grad()
def caption_examples(
    model: Model, data: EvalDataset, ranked: RankedDirection, device: torch.device
) -> dict[str, str]:
    """Return generated captions of the example images by row; every rank of a sharded model calls
    it.
    """
    rows = ranked.queries.locations[select_queries(ranked.ranks, NUM_SHOWN), 0].numpy()
    pixels = [data.reader.encode_row(row)["image"] for row in data.prepared.read(rows)]
    images = torch.from_numpy(np.concatenate(pixels)).to(device)
    assert data.encoder.end_id is not None  # training/resolve.py checks it
    ids = model.caption(images, data.encoder.end_id).tolist()
    return dict(zip(map(str, rows), map(data.encoder.decode, ids), strict=True))
