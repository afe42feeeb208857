"""Examples of retrieval for people to look at: a few hits and misses each way, with captions and small pictures.

Taken from the ranks that the recall was computed from, on one rank, without another pass of the model. Which queries
are shown follows from the ranks alone: hits spread evenly over the set, misses from the narrowest to the widest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import decode
from mmray.data.images.thumbnail import thumbnail
from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.evaluate.embeddings import EmbeddingSet
from mmray.evaluate.retrieval import top_k

NUM_SHOWN = 6  # of hits, and of misses, each way
TOP_K = 5


@dataclass(frozen=True)
class _Side:
    """Pictures, or captions, as they ask or are asked: embeddings, the row of each, and which of its captions it is."""

    embed: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [N]
    caption: Tensor  # int64 [N]; 0 for a picture, which is told by its first caption

    def told(self, place: int, rows: dict[int, Row]) -> dict[str, Any]:
        number = int(self.owner[place])
        texts = rows[number].texts if number in rows else []
        return {"row": number, "caption": texts[int(self.caption[place])] if texts else ""}


@dataclass(frozen=True)
class _Shown:
    """A query that is shown: its place among the queries, its rank, and the best places of the gallery."""

    query: int
    rank: int
    places: list[int]
    scores: list[float]
    right: list[bool]


def retrieval_examples(
    embedded: EmbeddingSet,
    found: dict[str, Tensor],
    prepared: PreparedSet,
    chunk: int,
    device: torch.device | str,
    max_pixels: int,
) -> dict[str, Any]:
    """`rows`, `image_to_text`, `text_to_image` and `pictures`: plain values, as examples.json holds them.

    Each way is a list of {row, key, caption, rank, answers: [{row, caption, score, right}]}; a picture that asks (or is
    an answer) is told by its first caption. `pictures` maps a row to a data URI, of as many rows as could be read.
    """
    first_caption = torch.searchsorted(embedded.owner, embedded.owner)
    text = _Side(embedded.text, embedded.owner, torch.arange(len(embedded.owner)) - first_caption)
    image = _Side(embedded.image, embedded.row, torch.zeros_like(embedded.row))
    sides = {"image_to_text": (image, text), "text_to_image": (text, image)}
    right = {"image_to_text": embedded.right_captions, "text_to_image": embedded.right_images}
    shown = {way: _top_answers(*sides[way], right[way], found[way], chunk, device) for way in sides}
    rows = _read_rows(prepared, {row for way in sides for row in _rows_of(shown[way], *sides[way])})
    told: dict[str, Any] = {way: [_format_query(item, *sides[way], rows) for item in shown[way]] for way in sides}
    looked_at = {item["row"] for way in sides for item in told[way]}
    looked_at |= {answer["row"] for item in told["text_to_image"] for answer in item["answers"]}
    pictures = _thumbnails({number: rows[number] for number in sorted(looked_at & rows.keys())}, max_pixels)
    return {"rows": len(embedded.row), **told, "pictures": pictures}


def select_queries(ranks: Tensor, shown: int = NUM_SHOWN) -> Tensor:
    """Numbers of the queries to show, int64: `shown` hits (rank 1), then `shown` misses, or as many as there are."""
    hits, misses = (ranks == 1).nonzero().flatten(), (ranks > 1).nonzero().flatten()
    by_rank = misses[ranks[misses].argsort(stable=True)]
    return torch.cat([_evenly_spaced(hits, shown), _evenly_spaced(by_rank, shown)])


def _evenly_spaced(numbers: Tensor, wanted: int) -> Tensor:
    """`wanted` of the numbers at even distances, first and last included."""
    if len(numbers) <= wanted:
        return numbers
    return numbers[torch.arange(wanted) * (len(numbers) - 1) // (wanted - 1)]


def _top_answers(
    queries: _Side,
    gallery: _Side,
    right_of: Callable[[int], Tensor],
    ranks: Tensor,
    chunk: int,
    device: torch.device | str,
) -> list[_Shown]:
    """The queries to show, with the best of the gallery; `right_of` a query says which rows of it are right."""
    chosen = select_queries(ranks)
    is_right = torch.stack([right_of(query) for query in chosen.tolist()])
    places, scores = top_k(queries.embed[chosen], gallery.embed, is_right, TOP_K, chunk, device)
    columns = (chosen, ranks[chosen], places, scores, is_right.gather(1, places))
    return [_Shown(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _rows_of(shown: list[_Shown], queries: _Side, gallery: _Side) -> list[int]:
    """Numbers of all rows that take part."""
    asked = [int(queries.owner[item.query]) for item in shown]
    return asked + [int(gallery.owner[place]) for item in shown for place in item.places]


def _format_query(item: _Shown, queries: _Side, gallery: _Side, rows: dict[int, Row]) -> dict[str, Any]:
    query = queries.told(item.query, rows)
    answers = [gallery.told(place, rows) for place in item.places]
    for answer, score, right in zip(answers, item.scores, item.right, strict=True):
        answer["score"] = round(score, 4) if math.isfinite(score) else None
        answer["right"] = right
    key = rows[query["row"]].key if query["row"] in rows else ""
    return {**query, "key": key, "rank": item.rank, "answers": answers}


def _read_rows(prepared: PreparedSet, numbers: set[int]) -> dict[int, Row]:
    """The rows that can be read; what cannot is left out, for an example is not worth an error."""
    rows = {}
    for number in sorted(numbers):
        try:
            rows[number] = prepared.read(np.array([number]))[0]
        except (OSError, ValueError):
            continue
    return rows


def _thumbnails(rows: dict[int, Row], max_pixels: int) -> dict[str, str]:
    pictures = {}
    for number, row in rows.items():
        try:
            pictures[str(number)] = thumbnail(decode(row.image, max_pixels))
        except (OSError, ValueError):
            continue
    return pictures
