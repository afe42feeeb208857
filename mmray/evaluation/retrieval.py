"""Recall@k and median rank: exact ranks from chunked matrix products.

Scores are float32 dot products. A negative within TIE of the positive ranks before it, as does a
NaN, so equal embeddings always count against the model and ranks do not depend on the chunk size,
device or number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TIE = 1e-6  # ten times the rounding error of a float32 dot product of unit vectors
RECALL_AT = (1, 5, 10)
CHUNK = 4096  # queries and gallery rows scored at once; memory is CHUNK x CHUNK


class HeadHits(NamedTuple):
    """Number of correct predictions of a classification head.

    Attributes:
        hits: Counts in the top 1, in the top 5, and with a valid label, int64 [3].
        num_classes: Number of classes.
        unit: What is counted: `rows` or `boxes`.
    """

    hits: Tensor  # int64 [3], `topk_hits`
    num_classes: int
    unit: str  # what is counted, such as rows


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings of N distinct images and C captions on the CPU, sorted by row, as `embed_dataset`
    returns them.

    Rows with the same image are one image with the captions of all. Equal captions are one text
    and are correct for all their images.

    Attributes:
        row: int64 [N], the first row of the set with the image.
        image: Embeddings of the images, float32 [N, D].
        caption_row: int64 [C], the `row` of the image of each caption.
        own_row: int64 [C], the row that has the caption.
        text: Embeddings of the U distinct texts of captions, float32 [U, D].
        text_id: int64 [C], index in `text` of each caption.
        label: Class of each image, int64 [N]; -1: none.
        heads: Correct predictions of each classification head by its name; empty for a model with
            embeddings only.
        scalar_outputs: Outputs of the model that belong to no row, scalars by name, such as
            `logit_scale`.
    """

    row: Tensor
    image: Tensor
    caption_row: Tensor
    own_row: Tensor
    text: Tensor
    text_id: Tensor
    label: Tensor
    heads: dict[str, HeadHits]
    scalar_outputs: dict[str, Tensor]

    @property
    def image_index(self) -> Tensor:
        """Index in `image` (embeddings of the distinct images) of the image of each caption, int64
        [C].
        """
        return torch.searchsorted(self.row, self.caption_row)

    def matching_captions(self, image: int) -> Tensor:
        """Return which of the C captions are correct for an image: its own, and equal ones of other
        images.

        Args:
            image: Index of the image, 0..N-1.

        Returns:
            bool [C].
        """
        return torch.isin(self.text_id, self.text_id[self.image_index == image])

    def matching_images(self, caption: int) -> Tensor:
        """Return which images have the text of a caption as a caption.

        Args:
            caption: Index of the caption, 0..C-1.

        Returns:
            bool [N].
        """
        correct = torch.zeros(len(self.row), dtype=torch.bool)
        correct[self.image_index[self.text_id == self.text_id[caption]]] = True
        return correct


def first_index(dense_id: Tensor) -> Tensor:
    """Return the index of the first occurrence of each id in a tensor.

    Args:
        dense_id: Ids 0, 1, ..., K-1, each at least once, int64 [N].

    Returns:
        int64 [K].
    """
    index = torch.arange(len(dense_id))
    first = torch.full((int(dense_id.max()) + 1 if len(dense_id) else 0,), len(dense_id))
    return first.scatter_reduce_(0, dense_id, index, "amin")


def compute_ranks(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor,
    device: torch.device | str = "cpu",
    gallery_counts: Tensor | None = None,
) -> Tensor:
    """Return the rank of the best positive of each query; its other positives are not counted.

    The score is the dot product in float32. A negative ranks before the positive unless its score
    is lower by more than TIE (1e-6); NaN of a negative ranks before it too.

    Args:
        queries: L2-normalized embeddings [Q, D].
        gallery: L2-normalized embeddings [G, D].
        positives: Index of the query and of the gallery embedding of each correct pair, int64 [2,
            P]; at least one pair per query.
        device: Where scores are computed.
        gallery_counts: How many equal items of the gallery each embedding represents, int64 [G];
            None: one each.

    Returns:
        Ranks, int64 [Q] on the CPU; 1 is the top.
    """
    positives = positives[:, positives[0].argsort(stable=True)]
    counts = (
        torch.ones(len(gallery), dtype=torch.int32)
        if gallery_counts is None
        else gallery_counts.to(torch.int32)
    )
    out = torch.ones(len(queries), dtype=torch.int64)
    with full_precision(device):
        for first in range(0, len(queries), CHUNK):
            query = queries[first : first + CHUNK].to(device, torch.float32)
            low, high = torch.searchsorted(
                positives[0], torch.tensor([first, first + len(query)])
            ).tolist()
            pairs = torch.stack([positives[0, low:high] - first, positives[1, low:high]])
            # score of the best positive; NaN if one is NaN
            best = query.new_full((len(query),), -torch.inf)
            for row, column in zip(*(side.split(CHUNK) for side in pairs), strict=True):
                scores = (query[row.to(device)] * gallery[column].to(device, torch.float32)).sum(
                    dim=1
                )
                best.scatter_reduce_(0, row.to(device), scores, "amax")
            threshold = best[:, None] - TIE
            before = torch.zeros(len(query), dtype=torch.int64, device=device)
            for start in range(0, len(gallery), CHUNK):
                columns = slice(start, start + CHUNK)
                negative_before = ~(
                    query @ gallery[columns].to(device, torch.float32).T < threshold
                )
                row, column = pairs[:, (pairs[1] >= start) & (pairs[1] < start + CHUNK)].to(device)
                negative_before[row, column - start] = False
                before += torch.where(negative_before, counts[columns].to(device), 0).sum(dim=1)
            out[first : first + CHUNK] += before.cpu()
    return out


def retrieval_metrics(ranks: Tensor, direction: str) -> dict[str, float]:
    """Return recall at 1, 5 and 10 and the median rank.

    Args:
        ranks: Rank of the correct result of each query, int64 [Q], 1 is the top; at least one.

    Returns:
        `recall_at_K/DIRECTION` (0 to 1) for K 1, 5 and 10, and `median_rank/DIRECTION`.
    """
    metrics = {f"recall_at_{k}/{direction}": (ranks <= k).double().mean().item() for k in RECALL_AT}
    middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
    return metrics | {f"median_rank/{direction}": middle.double().mean().item()}


@contextmanager
def full_precision(device: torch.device | str) -> Iterator[None]:
    """Return a context manager that disables TF32 and autocast, and restores the state before.

    TF32 has an error of 1e-3, which would change ranks. An evaluation may run in autocast.

    Args:
        device: Device of the products in the block; autocast is disabled for its type.
    """
    before = torch.get_float32_matmul_precision()
    # otherwise unset may become set: a global state that compiled code depends on
    changes = before != "highest"
    if changes:
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        if changes:
            torch.set_float32_matmul_precision(before)
