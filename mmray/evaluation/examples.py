"""Examples of retrieval for the report: hits and misses of each direction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import decode
from mmray.data.images.transform import thumbnail
from mmray.data.media.excerpt import make_excerpt
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.evaluation import retrieval
from mmray.evaluation.retrieval import TIE, EmbeddingSet, full_precision

NUM_SHOWN = 6  # hits, and misses, per direction
NUM_RETRIEVED = 5
NUM_CLIPS = 3  # the same of audio and video: a clip takes up to 100 KB
NUM_RETRIEVED_CLIPS = 2


def select_queries(ranks: Tensor, count: int) -> Tensor:
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
        parts = [
            (query @ rows.to(device, torch.float32).T).cpu()
            for rows in gallery.split(retrieval.CHUNK)
        ]
    scores = torch.cat(parts, dim=1)
    if index is not None:
        scores = scores[:, index]
    scores = torch.where(scores.isnan(), torch.where(is_correct, -torch.inf, torch.inf), scores)
    order = torch.where(is_correct, scores - TIE, scores).argsort(
        dim=1, descending=True, stable=True
    )[:, :k]
    return order, scores.gather(1, order)


def example_queries(
    chosen: Tensor,
    ranks: Tensor,
    queries: Tensor,
    gallery: Tensor,
    is_correct: Tensor,
    k: int,
    device: torch.device,
    index: Tensor | None = None,
) -> Iterator[tuple[int, int, list[tuple[int, dict[str, Any]]]]]:
    """Yield the chosen queries with their best results.

    Args:
        chosen: Indices of E queries, int64 [E].
        ranks: Rank of the correct result of each query, int64 [Q]; 1 is the top.
        queries: L2-normalized embeddings of the chosen queries [E, D].
        gallery: L2-normalized embeddings that are searched [G, D].
        is_correct: Whether a gallery item is a correct result, bool [E, number of items].
        k: Number of results per query.
        device: Where scores are computed.
        index: The embedding of each gallery item; None: item n has embedding n.

    Yields:
        Index and rank of a query, and its results: number of the gallery item, and {score,
        correct}, the score None if it is not finite.
    """
    best, scores = top_k(queries, gallery, is_correct, k, device, index)
    columns = (chosen, ranks[chosen], best, scores, is_correct.gather(1, best))
    for query, rank, *results in zip(*(column.tolist() for column in columns), strict=True):
        answers = [
            (item, {"score": round(score, 4) if math.isfinite(score) else None, "correct": correct})
            for item, score, correct in zip(*results, strict=True)
        ]
        yield query, rank, answers


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
        chosen = select_queries(ranks[way], NUM_SHOWN)
        is_correct = torch.stack([matching(query) for query in chosen.tolist()])
        embeds = queries[0][queries[1][chosen]]
        for query, rank, results in example_queries(
            chosen, ranks[way], embeds, gallery[0], is_correct, NUM_RETRIEVED, device, gallery[1]
        ):
            item = describe(queries, query)
            row = rows[item["row"]]
            answers = [describe(gallery, index) | values for index, values in results]
            item |= {"key": row.key if row else "", "rank": rank, "answers": answers}
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


class ClipRanks(NamedTuple):
    """Ranks of a direction of retrieval, such as `audio_to_text`.

    Attributes:
        numbers: Clips that have both modalities, int64 [Q].
        ranks: Rank of the correct result of each, int64 [Q]; 1 is the top.
        queries: Embedding of the query of each, float32 [Q, D].
        gallery: Embeddings that are searched, float32 [G, D].
        gallery_numbers: Number of a clip that has each of these embeddings, int64 [G].
        query_ids: Identity of each query, int64 [Q]; equal to that of its correct results.
        gallery_ids: Identity of each result, int64 [G].
    """

    numbers: Tensor
    ranks: Tensor
    queries: Tensor
    gallery: Tensor
    gallery_numbers: Tensor
    query_ids: Tensor
    gallery_ids: Tensor


class ClipExamples:
    """Collects hits and misses of directions of retrieval, with their frames and sound.

    Args:
        prepared: The set, for texts, audio and video.
        locations: Row, and number of its text, of each clip, int64 [N, 2].
        clip_s: Longest clip in seconds.
        device: Where scores are computed.
    """

    def __init__(
        self, prepared: PreparedSet, locations: Tensor, clip_s: float, device: torch.device
    ) -> None:
        self._prepared = prepared
        self._locations = locations
        self._clip_s = clip_s
        self._device = device
        self._directions: dict[str, list[dict[str, Any]]] = {}
        self._texts: dict[int, tuple[str, str]] = {}  # key and text of each shown clip
        self._clips: dict[str, Any] = {}

    def add(self, direction: str, found: ClipRanks) -> None:
        """Choose hits and misses of a direction, and decode their clips.

        Args:
            direction: Such as `audio_to_text`.
            found: Its ranks, with the embeddings.
        """
        chosen = select_queries(found.ranks, NUM_CLIPS)
        is_correct = found.query_ids[chosen, None] == found.gallery_ids
        queries = found.queries[chosen]
        shown = self._directions[direction] = []
        k = NUM_RETRIEVED_CLIPS
        for index, rank, results in example_queries(
            chosen, found.ranks, queries, found.gallery, is_correct, k, self._device
        ):
            answers = [
                self._describe(int(found.gallery_numbers[item])) | values
                for item, values in results
            ]
            query = self._describe(int(found.numbers[index]))
            shown.append(query | {"rank": rank, "answers": answers})

    def values(self) -> dict[str, Any]:
        """Return the content of examples.json.

        Returns:
            JSON values: for each direction, such as `audio_to_text`, a list of queries {row, key,
            caption, rank, answers}, in which `row` is the number of a clip; `clips`, by this number
            as text, the frames and the sound of each clip that can be decoded, as data URIs;
            `images`, in the same way, its middle frame; and `rows`, the number of clips.
        """
        images = {
            number: clip["frames"][len(clip["frames"]) // 2]["image"]
            for number, clip in self._clips.items()
            if clip["frames"]
        }
        totals = {"rows": len(self._locations)}
        return totals | self._directions | {"clips": self._clips, "images": images}

    def _describe(self, number: int) -> dict[str, Any]:
        """Return number, key and text of a clip, which is decoded the first time."""
        if number not in self._texts:
            self._texts[number] = "", ""
            row_number, text_number = self._locations[number].tolist()
            with suppress(OSError, ValueError):
                [row] = self._prepared.read(np.array([row_number]))
                clip = row.with_text(text_number)
                self._texts[number] = row.key, "".join(clip.texts)
                self._clips[str(number)] = make_excerpt(clip, self._clip_s)
        key, text = self._texts[number]
        return {"row": number, "key": key, "caption": text}
