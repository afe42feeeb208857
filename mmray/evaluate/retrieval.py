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


def compute_ranks(
    queries: Tensor,
    gallery: Tensor,
    right: Tensor,
    chunk: int,
    device: torch.device | str = "cpu",
    copies: Tensor | None = None,
) -> Tensor:
    """Rank of each query's best right answer, int64 [Q], 1 being the top; its other right answers do not count.

    queries [Q, D] and gallery [G, D] have length 1; right int64 [2, P]: query and gallery row of each right answer;
    copies int64 [G]: how often a gallery row counts, once without it. Never more than chunk x chunk scores are on
    `device` at once; the gallery stays where it is. A wrong answer that ties stands before the right one. Raises
    ValueError when a query has no right answer.
    """
    right = right[:, right[0].argsort(stable=True)]
    count = right[0].bincount(minlength=len(queries))
    if bool((count == 0).any()):
        raise ValueError(f"query {int((count == 0).nonzero()[0])} has no right answer in the gallery")
    times = torch.ones(len(gallery), dtype=torch.int32) if copies is None else copies.to(torch.int32)
    out = torch.ones(len(queries), dtype=torch.int64)
    for first in range(0, len(queries), chunk):
        rows = slice(first, first + chunk)
        query = exact(queries[rows], device)
        low, high = torch.searchsorted(right[0], torch.tensor([first, first + len(query)])).tolist()
        pairs = torch.stack([right[0, low:high] - first, right[1, low:high]])
        best = _best(query, gallery, pairs, chunk)
        better = torch.zeros(len(query), dtype=torch.int64, device=device)
        for start in range(0, len(gallery), chunk):
            columns = slice(start, start + chunk)
            scores = query @ exact(gallery[columns], device).T
            before = ~(scores < best[:, None])
            row, column = pairs[:, (pairs[1] >= start) & (pairs[1] < start + chunk)].to(device)
            before[row, column - start] = False
            better += torch.where(before, times[columns].to(device), 0).sum(dim=1)
        out[rows] += better.cpu()
    return out


def top_k(
    queries: Tensor, gallery: Tensor, is_right: Tensor, k: int, chunk: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The `k` best gallery rows of each query and their scores: int64 and float64 [Q, min(k, G)], on the CPU.

    is_right: bool [Q, G]. Scores and order are those of `ranks`: a query of rank r has its best right answer in place
    r. Wrong answers that tie stand in the gallery's order; a NaN is the best of wrong answers and the worst of right
    ones.
    """
    query = exact(queries, device)
    best = torch.zeros(len(query), 0, dtype=torch.float64, device=device)
    place, right = best.to(torch.int64), best.to(torch.int8)
    for start in range(0, len(gallery), chunk):
        columns = torch.arange(start, min(start + chunk, len(gallery)))
        among = is_right[:, columns].to(device, torch.int8)
        scores = query @ exact(gallery[columns], device).T
        scores = torch.where(scores.isnan(), torch.where(among > 0, -torch.inf, torch.inf), scores)
        best, right = torch.cat([best, scores], dim=1), torch.cat([right, among], dim=1)
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


def _best(query: Tensor, gallery: Tensor, right: Tensor, chunk: int) -> Tensor:
    """Score of each query's best right answer, float64 [Q] on the device of `query` (NaN where a NaN takes part)."""
    best = query.new_full((len(query),), -torch.inf)
    for start in range(0, right.shape[1], chunk):
        row, column = right[:, start : start + chunk]
        row = row.to(query.device)
        scores = (query[row] * exact(gallery[column], query.device)).sum(dim=1)
        best.scatter_reduce_(0, row, scores, "amax")
    return best
