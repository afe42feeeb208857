"""Recall@k and median rank: exact ranks from chunked matrix products.

Scores are float32 dot products. A negative within TIE of the positive ranks before it, as does a
NaN, so equal embeddings always count against the model and ranks do not depend on the chunk size,
device or number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmray.engine.collectives import Group

TIE = 1e-6  # ten times the rounding error of a float32 dot product of unit vectors
RECALL_AT = (1, 5, 10)
CHUNK = 4096  # queries and gallery rows scored at once; memory is CHUNK x CHUNK


class RetrievalItems(NamedTuple):
    """The queries or the results of a direction of retrieval: N items with E embeddings.

    Attributes:
        embeds: L2-normalized embeddings [E, D].
        embed_index: The embedding of each item, int64 [N]; equal texts share one.
        locations: Row in the set, and number of the text within the row, of each item, int64
            [N, 2].
    """

    embeds: Tensor
    embed_index: Tensor
    locations: Tensor


class RankedDirection(NamedTuple):
    """Ranks of a direction of retrieval, such as `audio_to_text`.

    Attributes:
        ranks: Rank of the best correct result of each query, int64 [Q]; 1 is the top.
        queries: The Q queries.
        gallery: The G items that are searched.
        positives: Embeddings of the query and of the gallery of each correct pair, int64 [2, P].
    """

    ranks: Tensor
    queries: RetrievalItems
    gallery: RetrievalItems
    positives: Tensor

    def is_correct(self, query: int) -> Tensor:
        """Return which items of the gallery are correct results of a query, bool [G]."""
        is_own = self.positives[0] == self.queries.embed_index[query]
        return torch.isin(self.gallery.embed_index, self.positives[1, is_own])


def rank_direction(
    queries: RetrievalItems, gallery: RetrievalItems, positives: Tensor, group: Group
) -> RankedDirection:
    """Return the ranks of a direction, of which each rank of the group computes a part; a
    collective call, with equal arguments on all ranks.

    Args:
        positives: Embeddings of the query and of the gallery of each correct pair, int64 [2, P]; at
            least one pair for each query.
    """
    first = len(queries.embeds) * group.rank // group.world_size
    end = len(queries.embeds) * (group.rank + 1) // group.world_size
    pairs = positives[:, (positives[0] >= first) & (positives[0] < end)]
    ranks = compute_ranks(
        queries.embeds[first:end],
        gallery.embeds,
        torch.stack([pairs[0] - first, pairs[1]]),
        group.device,
        gallery.embed_index.bincount(minlength=len(gallery.embeds)),
    )
    ranks = group.all_gather_variable(ranks).cpu()
    return RankedDirection(ranks[queries.embed_index], queries, gallery, positives)


def number_equal(values: Tensor) -> tuple[Tensor, Tensor]:
    """Number equal values by first occurrence; return numbers [N] and first indices [K]."""
    _, first, inverse = np.unique(values.numpy(), return_index=True, return_inverse=True)
    order = first.argsort()
    return torch.from_numpy(order.argsort()[inverse]), torch.from_numpy(first[order])


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
    counts = torch.ones(len(gallery)) if gallery_counts is None else gallery_counts
    counts = counts.to(torch.int32)
    out = torch.ones(len(queries), dtype=torch.int64)
    with full_precision(device):
        for first in range(0, len(queries), CHUNK):
            query = queries[first : first + CHUNK].to(device, torch.float32)
            is_own = (positives[0] >= first) & (positives[0] < first + len(query))
            pairs = torch.stack([positives[0, is_own] - first, positives[1, is_own]])
            # score of the best positive; NaN if one is NaN
            best = query.new_full((len(query),), -torch.inf)
            for part in pairs.split(CHUNK, dim=1):
                row = part[0].to(device)
                scores = (query[row] * gallery[part[1]].to(device, torch.float32)).sum(dim=1)
                best.scatter_reduce_(0, row, scores, "amax")
            threshold = best[:, None] - TIE
            before = torch.zeros(len(query), dtype=torch.int64, device=device)
            for start in range(0, len(gallery), CHUNK):
                results = gallery[start : start + CHUNK].to(device, torch.float32)
                negative_before = ~(query @ results.T < threshold)
                is_here = (pairs[1] >= start) & (pairs[1] < start + CHUNK)
                row, column = pairs[:, is_here].to(device)
                negative_before[row, column - start] = False
                copies = counts[start : start + CHUNK].to(device)
                before += torch.where(negative_before, copies, 0).sum(dim=1)
            out[first : first + CHUNK] += before.cpu()
    return out


def retrieval_metrics(ranks: Tensor, direction: str) -> dict[str, float]:
    """Return `recall_at_K/DIRECTION` (0 to 1) for K 1, 5 and 10, and `median_rank/DIRECTION`, of at
    least one rank.
    """
    metrics = {f"recall_at_{k}/{direction}": (ranks <= k).double().mean().item() for k in RECALL_AT}
    metrics[f"median_rank/{direction}"] = float(np.median(ranks.numpy()))
    return metrics


def mean_recall(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `recall_at_1/mean`, over the directions in `metrics`."""
    recalls = [value for name, value in metrics.items() if name.startswith("recall_at_1/")]
    return {"recall_at_1/mean": sum(recalls) / len(recalls)}


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
