"""Recall@k, median rank and examples: exact ranks and top gallery rows from chunked matrix
products.

Scores are float32 dot products. A negative within TIE of the positive ranks before it, as does a
NaN, so equal embeddings always count against the model and ranks do not depend on the chunk size,
device or number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import decode
from mmray.data.images.transform import thumbnail
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row

TIE = 1e-6  # ten times the rounding error of a float32 dot product of unit vectors
RECALL_AT = (1, 5, 10)
CHUNK = 4096  # queries and gallery rows scored at once; memory is CHUNK x CHUNK
NUM_SHOWN = 6  # hits, and misses, per direction
NUM_RETRIEVED = 5


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
    """Embeddings of N distinct images and C captions on the CPU, sorted by row.

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
        scalar_outputs: Outputs of the model that belong to no row, such as the temperature.
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


def top_k(
    queries: Tensor,
    gallery: Tensor,
    is_correct: Tensor,
    k: int,
    device: torch.device | str = "cpu",
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gallery items with the highest scores for each query.

    The score is the dot product in float32. Of scores that differ by less than TIE (1e-6), those of
    incorrect pairs come first. NaN counts as infinity for an incorrect pair and as minus infinity
    for a correct one, so that a broken model is not rated as good.

    Args:
        queries: L2-normalized embeddings [Q, D].
        gallery: L2-normalized embeddings [E, D].
        is_correct: Whether a gallery item is a correct result of a query, bool [Q, G].
        k: Number of results per query.
        device: Where scores are computed.
        index: The embedding of each gallery item, int64 [G]; None: item n has embedding n.

    Returns:
        Numbers of gallery items, int64, and their scores, float32, both [Q, min(k, G)] on the CPU,
        the best one first.
    """
    query = queries.to(device, torch.float32)
    with full_precision(device):
        parts = [(query @ rows.to(device, torch.float32).T).cpu() for rows in gallery.split(CHUNK)]
    scores = torch.cat(parts, dim=1)
    if index is not None:
        scores = scores[:, index]
    scores = torch.where(scores.isnan(), torch.where(is_correct, -torch.inf, torch.inf), scores)
    order = torch.where(is_correct, scores - TIE, scores).argsort(
        dim=1, descending=True, stable=True
    )[:, :k]
    return order, scores.gather(1, order)


def retrieval_metrics(ranks: Tensor, direction: str) -> dict[str, float]:
    """Return recall at 1, 5 and 10 and the median rank.

    Args:
        ranks: Rank of the correct result of each query, int64 [Q], 1 is the top; at least one.
        direction: `image_to_text` or `text_to_image`, the end of the names.

    Returns:
        `recall_at_K/DIRECTION` (0 to 1) for K 1, 5 and 10, and `median_rank/DIRECTION`.
    """
    metrics = {f"recall_at_{k}/{direction}": (ranks <= k).double().mean().item() for k in RECALL_AT}
    middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
    return metrics | {f"median_rank/{direction}": middle.double().mean().item()}


def retrieval_examples(
    embedded: EmbeddingSet,
    ranks: dict[str, Tensor],
    prepared: PreparedSet,
    device: torch.device,
    max_pixels: int,
) -> dict[str, Any]:
    """Return examples for the report: hits spread over the set, and misses by their rank.

    Args:
        embedded: The embeddings of all rows, N images and C captions.
        ranks: Rank of each image among the captions, `image_to_text` int64 [N], and of each caption
            among the images, `text_to_image` int64 [C]; 1 is the top.
        prepared: The set, for captions and images.
        device: Where scores are computed.
        max_pixels: Images with more pixels are not decoded.

    Returns:
        JSON values for examples.json. `image_to_text` and `text_to_image` are lists of {row, key,
        caption, rank, answers: [{row, caption, score, correct}]}; an image is represented by its
        first caption. `images` maps the index of a row, as text, to a data URI, if the row can be
        read. `rows` is the number of images.
    """
    # number of the embedding, row, and number of the caption within its row
    every_image = torch.arange(len(embedded.row))
    image = embedded.image, every_image, embedded.row, torch.zeros_like(embedded.row)
    text = embedded.text, embedded.text_id, embedded.own_row, _index_in_run(embedded.own_row)
    examples: dict[str, Any] = {"image_to_text": [], "text_to_image": []}
    rows: dict[int, Row | None] = {}

    def describe(side: tuple[Tensor, Tensor, Tensor, Tensor], index: int) -> dict[str, Any]:
        number = int(side[2][index])
        if number not in rows:
            rows[number] = None
            with suppress(OSError, ValueError):
                [rows[number]] = prepared.read(np.array([number]))
        row = rows[number]
        return {
            "row": number,
            "caption": row.texts[int(side[3][index])] if row and row.texts else "",
        }

    for way, queries, gallery in (("image_to_text", image, text), ("text_to_image", text, image)):
        matching = (
            embedded.matching_captions if way == "image_to_text" else embedded.matching_images
        )
        chosen = select_queries(ranks[way])
        is_correct = torch.stack([matching(query) for query in chosen.tolist()])
        best, scores = top_k(
            queries[0][queries[1][chosen]],
            gallery[0],
            is_correct,
            NUM_RETRIEVED,
            device,
            index=gallery[1],
        )
        columns = (chosen, ranks[way][chosen], best, scores, is_correct.gather(1, best))
        for query, rank, *answers in zip(*(column.tolist() for column in columns), strict=True):
            item = describe(queries, query)
            row = rows[item["row"]]
            item |= {"key": row.key if row else "", "rank": rank, "answers": []}
            for index, score, correct in zip(*answers, strict=True):
                rounded = round(score, 4) if math.isfinite(score) else None
                item["answers"].append(
                    describe(gallery, index) | {"score": rounded, "correct": correct}
                )
            examples[way].append(item)
    shown = {item["row"] for way in ("image_to_text", "text_to_image") for item in examples[way]}
    shown |= {answer["row"] for item in examples["text_to_image"] for answer in item["answers"]}
    images = {}
    for number in sorted(shown):
        with suppress(OSError, ValueError):
            if (row := rows[number]) is not None:
                images[str(number)] = thumbnail(decode(row.image, max_pixels))
    return {"rows": len(embedded.row), **examples, "images": images}


def _index_in_run(values: Tensor) -> Tensor:
    """Return the index of each value in its run of equal values."""
    _, lengths = values.unique_consecutive(return_counts=True)
    starts = lengths.cumsum(0) - lengths
    return torch.arange(len(values)) - starts.repeat_interleave(lengths)


def select_queries(ranks: Tensor, count: int = NUM_SHOWN) -> Tensor:
    """Return the indices of the queries to show as examples.

    Args:
        ranks: Rank of the correct result of each query, int64 [Q]; 1 is a hit.
        count: Number of hits, and of misses, at least 2.

    Returns:
        int64, at most `count` hits, evenly spaced, then at most `count` misses, evenly spaced in
        the order of their ranks.
    """
    hits = (ranks == 1).nonzero().flatten()
    misses = (ranks > 1).nonzero().flatten()
    misses = misses[ranks[misses].argsort(stable=True)]
    steps = torch.arange(count)  # first and last included
    return torch.cat(
        [p if len(p) <= count else p[steps * (len(p) - 1) // (count - 1)] for p in (hits, misses)]
    )


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
