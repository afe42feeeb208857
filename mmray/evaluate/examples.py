"""Examples of retrieval: hits and misses in both directions, with captions and thumbnails, for the report.

Selected from the ranks that recall is computed from, without another forward pass: hits evenly spaced over the set,
misses from the smallest to the largest rank.
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
from mmray.data.images.transform import thumbnail
from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.evaluate.embeddings import EmbeddingSet
from mmray.evaluate.retrieval import top_k

NUM_SHOWN = 6  # hits, and misses, per direction
TOP_K = 5


@dataclass(frozen=True)
class _Side:
    """Images or captions, as queries or gallery."""

    embed: Tensor  # float32 [N, D]
    owner: Tensor  # int64 [N]
    caption: Tensor  # int64 [N], index among the captions of its row; 0 for images

    def describe(self, index: int, rows: dict[int, Row]) -> dict[str, Any]:
        number = int(self.owner[index])
        texts = rows[number].texts if number in rows else []
        return {"row": number, "caption": texts[int(self.caption[index])] if texts else ""}


@dataclass(frozen=True)
class _Example:
    """A selected query: its index and rank, and its best gallery rows."""

    query: int
    rank: int
    answers: list[int]
    scores: list[float]
    correct: list[bool]


def retrieval_examples(
    embedded: EmbeddingSet,
    ranks: dict[str, Tensor],
    prepared: PreparedSet,
    chunk: int,
    device: torch.device | str,
    max_pixels: int,
) -> dict[str, Any]:
    """`rows`, `image_to_text`, `text_to_image` and `images`, as JSON values for examples.json.

    Each direction is a list of {row, key, caption, rank, answers: [{row, caption, score, correct}]}; an image is
    represented by its first caption. `images` maps a row to a data URI, for the rows that can be read.
    """
    first_caption = torch.searchsorted(embedded.owner, embedded.owner)
    text = _Side(embedded.text, embedded.owner, torch.arange(len(embedded.owner)) - first_caption)
    image = _Side(embedded.image, embedded.row, torch.zeros_like(embedded.row))
    sides = {"image_to_text": (image, text), "text_to_image": (text, image)}
    matching = {"image_to_text": embedded.matching_captions, "text_to_image": embedded.matching_images}
    shown = {way: _top_answers(*sides[way], matching[way], ranks[way], chunk, device) for way in sides}
    rows = _read_rows(prepared, {row for way in sides for row in _rows_of(shown[way], *sides[way])})
    examples: dict[str, Any] = {way: [_format_query(item, *sides[way], rows) for item in shown[way]] for way in sides}
    shown_rows = {item["row"] for way in sides for item in examples[way]}
    shown_rows |= {answer["row"] for item in examples["text_to_image"] for answer in item["answers"]}
    images = _thumbnails({number: rows[number] for number in sorted(shown_rows & rows.keys())}, max_pixels)
    return {"rows": len(embedded.row), **examples, "images": images}


def select_queries(ranks: Tensor, shown: int = NUM_SHOWN) -> Tensor:
    """Indices of the queries to show, int64: `shown` hits (rank 1), then `shown` misses, or as many as there are."""
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
    matching: Callable[[int], Tensor],
    ranks: Tensor,
    chunk: int,
    device: torch.device | str,
) -> list[_Example]:
    """Select queries and find their best answers; `matching(query)` returns the correct ones."""
    chosen = select_queries(ranks)
    is_correct = torch.stack([matching(query) for query in chosen.tolist()])
    answers, scores = top_k(queries.embed[chosen], gallery.embed, is_correct, TOP_K, chunk, device)
    columns = (chosen, ranks[chosen], answers, scores, is_correct.gather(1, answers))
    return [_Example(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _rows_of(shown: list[_Example], queries: _Side, gallery: _Side) -> list[int]:
    """Row numbers of all queries and answers."""
    query_rows = [int(queries.owner[item.query]) for item in shown]
    return query_rows + [int(gallery.owner[index]) for item in shown for index in item.answers]


def _format_query(item: _Example, queries: _Side, gallery: _Side, rows: dict[int, Row]) -> dict[str, Any]:
    query = queries.describe(item.query, rows)
    answers = [gallery.describe(index, rows) for index in item.answers]
    for answer, score, correct in zip(answers, item.scores, item.correct, strict=True):
        answer["score"] = round(score, 4) if math.isfinite(score) else None
        answer["correct"] = correct
    key = rows[query["row"]].key if query["row"] in rows else ""
    return {**query, "key": key, "rank": item.rank, "answers": answers}


def _read_rows(prepared: PreparedSet, numbers: set[int]) -> dict[int, Row]:
    """Read rows; unreadable ones are omitted."""
    rows = {}
    for number in sorted(numbers):
        try:
            rows[number] = prepared.read(np.array([number]))[0]
        except (OSError, ValueError):
            continue
    return rows


def _thumbnails(rows: dict[int, Row], max_pixels: int) -> dict[str, str]:
    images = {}
    for number, row in rows.items():
        try:
            images[str(number)] = thumbnail(decode(row.image, max_pixels))
        except (OSError, ValueError):
            continue
    return images
