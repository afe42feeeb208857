"""Recall@k and median rank: exact ranks from chunked matrix products, and the top k answers for examples.

Scores are float32 dot products. A wrong answer within TIE of the correct one ranks before it, as does a NaN, so equal
embeddings always count against the model and ranks do not depend on the chunk size, the device or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

TIE = 1e-6  # ten times the rounding error of a float32 dot product of unit vectors
RECALL_AT = (1, 5, 10)
CHUNK = 4096  # queries and gallery rows scored at once; memory is CHUNK x CHUNK


@dataclass(frozen=True)
class EmbeddingSet:
    """Embeddings on the CPU, sorted by row. Equal captions have one embedding and are correct for all their images."""

    row: Tensor  # int64 [N]
    image: Tensor  # float32 [N, D]
    caption_row: Tensor  # int64 [C], row of each caption
    text: Tensor  # float32 [C, D]
    text_id: Tensor  # int64 [C], 0, 1, ...; equal for equal captions
    label: Tensor  # int64 [N], -1 for none
    class_hits: Tensor  # int64 [3], `topk_hits` of the classification head
    region_hits: Tensor  # int64 [3], `topk_hits` of the region head
    scalar_outputs: dict[str, Tensor]  # outputs of the model that belong to no row, such as the temperature

    @property
    def image_index(self) -> Tensor:
        """Index of each caption's image, int64 [C]."""
        return torch.searchsorted(self.row, self.caption_row)

    def matching_captions(self, image: int) -> Tensor:
        """Captions that are correct for an image: its own, and equal ones; bool [C]."""
        return torch.isin(self.text_id, self.text_id[self.image_index == image])

    def matching_images(self, caption: int) -> Tensor:
        """Images that have this caption's text; bool [N]."""
        correct = torch.zeros(len(self.row), dtype=torch.bool)
        correct[self.image_index[self.text_id == self.text_id[caption]]] = True
        return correct


def dedupe_texts(text: Tensor, text_id: Tensor) -> tuple[Tensor, Tensor]:
    """Give equal captions one embedding, without differences by rounding; renumber text ids from 0."""
    _, number = text_id.unique(return_inverse=True)
    return text[first_index(number)][number], number


def first_index(number: Tensor) -> Tensor:
    """Index of the first occurrence of each of the numbers 0, 1, ..."""
    index = torch.arange(len(number))
    first = torch.full((int(number.max()) + 1 if len(number) else 0,), len(number))
    return first.scatter_reduce_(0, number, index, "amin")


def compute_ranks(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor,
    device: torch.device | str = "cpu",
    multiplicity: Tensor | None = None,
) -> Tensor:
    """Rank of the best correct answer of each query, int64 [Q], 1 = top; other correct answers are not counted.

    queries [Q, D] and gallery [G, D] are L2-normalised; positives int64 [2, P]: query and gallery row of each correct
    answer, at least one per query; multiplicity int64 [G]: how often each gallery row counts.
    """
    positives = positives[:, positives[0].argsort(stable=True)]
    counts = torch.ones(len(gallery), dtype=torch.int32) if multiplicity is None else multiplicity.to(torch.int32)
    out = torch.ones(len(queries), dtype=torch.int64)
    with _full_precision():
        for first in range(0, len(queries), CHUNK):
            query = queries[first : first + CHUNK].to(device, torch.float32)
            low, high = torch.searchsorted(positives[0], torch.tensor([first, first + len(query)])).tolist()
            pairs = torch.stack([positives[0, low:high] - first, positives[1, low:high]])
            best = query.new_full((len(query),), -torch.inf)  # score of the best correct answer; NaN if one is NaN
            for row, column in zip(*(side.split(CHUNK) for side in pairs), strict=True):
                scores = (query[row.to(device)] * gallery[column].to(device, torch.float32)).sum(dim=1)
                best.scatter_reduce_(0, row.to(device), scores, "amax")
            threshold = best[:, None] - TIE
            before = torch.zeros(len(query), dtype=torch.int64, device=device)
            for start in range(0, len(gallery), CHUNK):
                columns = slice(start, start + CHUNK)
                wrong_before = ~(query @ gallery[columns].to(device, torch.float32).T < threshold)
                row, column = pairs[:, (pairs[1] >= start) & (pairs[1] < start + CHUNK)].to(device)
                wrong_before[row, column - start] = False
                before += torch.where(wrong_before, counts[columns].to(device), 0).sum(dim=1)
            out[first : first + CHUNK] += before.cpu()
    return out


def top_k(
    queries: Tensor, gallery: Tensor, is_correct: Tensor, k: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The `k` best gallery rows of each query and their scores, int64 and float32 [Q, min(k, G)], as `compute_ranks`.

    is_correct: bool [Q, G].
    """
    query = queries.to(device, torch.float32)
    with _full_precision():
        parts = [(query @ rows.to(device, torch.float32).T).cpu() for rows in gallery.split(CHUNK)]
    scores = torch.cat(parts, dim=1)
    scores = torch.where(scores.isnan(), torch.where(is_correct, -torch.inf, torch.inf), scores)
    order = torch.where(is_correct, scores - TIE, scores).argsort(dim=1, descending=True, stable=True)[:, :k]
    return order, scores.gather(1, order)


def retrieval_metrics(ranks: Tensor, direction: str) -> dict[str, float]:
    """`recall_at_K/direction` for K of 1, 5, 10 and `median_rank/direction`, from ranks int64 [Q], Q at least 1."""
    metrics = {f"recall_at_{k}/{direction}": (ranks <= k).double().mean().item() for k in RECALL_AT}
    middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
    return metrics | {f"median_rank/{direction}": middle.double().mean().item()}


@contextmanager
def _full_precision() -> Iterator[None]:
    """Disable TF32: its error of 1e-3 would change ranks."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
