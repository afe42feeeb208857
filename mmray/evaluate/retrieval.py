"""Recall@k and median rank: for each query, how many gallery rows score as well as the right one. Pure, on tensors.

score.py brings the embeddings of the whole evaluation set; here they become ranks, a chunk of queries against a chunk
of the gallery at a time, and ranks become metrics.

Scores are exact, so that ranks depend neither on the chunks nor on the device nor on who computes them: embeddings are
rounded to multiples of 2^-22 (a float32 near 1 is hardly finer) and multiplied in float64, where neither the products
nor their sums need rounding. Equal embeddings therefore tie, always; and a tie counts against the model, as does a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = (
    2.0**22
)  # products are multiples of 2^-44: float64 holds their sums exactly up to 2^9, far beyond a unit vector's
RECALL_AT = (1, 5, 10)


def ranks(
    queries: Tensor,
    query_owner: Tensor,
    gallery: Tensor,
    gallery_owner: Tensor,
    chunk: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Rank of each query's best right answer, int64 [Q], 1 being the top; the right answers share the query's owner.

    queries [Q, D] and gallery [G, D] have length 1; owners are int64 [Q] and [G]. Never more than chunk x chunk scores
    are on `device` at once; the gallery stays where it is. A wrong answer that ties stands before the right one. Raises
    ValueError when a query has no right answer in the gallery.
    """
    out = torch.ones(len(queries), dtype=torch.int64)
    for first in range(0, len(queries), chunk):
        rows = slice(first, first + chunk)
        owner, query = query_owner[rows].to(device), exact(queries[rows], device)
        right = _right_scores(query, query_owner[rows], gallery, gallery_owner, chunk)
        better = torch.zeros(len(query), dtype=torch.int64, device=device)
        for start in range(0, len(gallery), chunk):
            columns = slice(start, start + chunk)
            scores = query @ exact(gallery[columns], device).T
            wrong = gallery_owner[columns].to(device) != owner[:, None]
            better += (wrong & ~(scores < right[:, None])).sum(dim=1)
        out[rows] += better.cpu()
    return out


def top(
    queries: Tensor,
    query_owner: Tensor,
    gallery: Tensor,
    gallery_owner: Tensor,
    k: int,
    chunk: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """The `k` best gallery rows of each query and their scores: int64 and float64 [Q, min(k, G)], on the CPU.

    Scores and order are those of `ranks`: a query of rank r has its best right answer in place r. Wrong answers that
    tie stand in the gallery's order; a NaN is the best of wrong answers and the worst of right ones.
    """
    query, owner = exact(queries, device), query_owner.to(device)
    best = torch.zeros(len(query), 0, dtype=torch.float64, device=device)
    place, right = best.to(torch.int64), best.to(torch.int8)
    for start in range(0, len(gallery), chunk):
        columns = torch.arange(start, min(start + chunk, len(gallery)))
        is_right = (gallery_owner[columns].to(device) == owner[:, None]).to(torch.int8)
        scores = query @ exact(gallery[columns], device).T
        scores = torch.where(scores.isnan(), torch.where(is_right > 0, -torch.inf, torch.inf), scores)
        best, right = torch.cat([best, scores], dim=1), torch.cat([right, is_right], dim=1)
        place = torch.cat([place, columns.to(device).expand(len(query), -1)], dim=1)
        # Stable, the lesser criterion first: what ties keeps the gallery's order, right answers behind wrong ones.
        order = right.argsort(dim=1, stable=True)
        order = order.gather(1, best.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :k]
        best, right, place = best.gather(1, order), right.gather(1, order), place.gather(1, order)
    return place.cpu(), best.cpu()


def retrieval_metrics(ranks: Tensor, direction: str) -> dict[str, float]:
    """`recall_at_K/direction` for K of 1, 5, 10 and `median_rank/direction`, from ranks int64 [Q], Q at least 1."""
    metrics = {f"recall_at_{k}/{direction}": (ranks <= k).double().mean().item() for k in RECALL_AT}
    middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
    return metrics | {f"median_rank/{direction}": middle.double().mean().item()}


def exact(embed: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Embeddings in float64 on `device`, on the grid on which their dot products are exact."""
    return (embed.to(device, torch.float64) * GRID).round() / GRID


def _right_scores(query: Tensor, query_owner: Tensor, gallery: Tensor, gallery_owner: Tensor, chunk: int) -> Tensor:
    """Score of each query's best right answer, float64 [Q] on the device of `query` (NaN where a NaN takes part)."""
    pairs = _pairs(query_owner, gallery_owner)
    best = query.new_full((len(query),), -torch.inf)
    for start in range(0, pairs.shape[1], chunk):
        row, column = pairs[:, start : start + chunk]
        row = row.to(query.device)
        scores = (query[row] * exact(gallery[column], query.device)).sum(dim=1)
        best.scatter_reduce_(0, row, scores, "amax")
    return best


def _pairs(query_owner: Tensor, gallery_owner: Tensor) -> Tensor:
    """(query, gallery row) of equal owners, int64 [2, P]."""
    ordered, order = gallery_owner.sort()
    query_owner = query_owner.contiguous()  # a rank's slice is strided
    first = torch.searchsorted(ordered, query_owner)
    count = torch.searchsorted(ordered, query_owner, right=True) - first
    if bool((count == 0).any()):
        raise ValueError(f"owner {int(query_owner[count == 0][0])} of a query has no right answer in the gallery")
    row = torch.arange(len(query_owner)).repeat_interleave(count)
    within = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return torch.stack([row, order[first[row] + within]])
