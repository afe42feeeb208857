"""Examples of retrieval for the report: hits and misses of each direction."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import decode
from mmray.data.images.transform import thumbnail
from mmray.data.media.excerpt import make_excerpt
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.evaluation.retrieval import TIE, RankedDirection, full_precision

NUM_SHOWN = 6  # hits, and misses, per direction
NUM_RETRIEVED = 5
NUM_CLIPS = 3  # the same of audio and video: a clip takes up to 100 KB
NUM_RETRIEVED_CLIPS = 2


def select_queries(ranks: Tensor, count: int) -> Tensor:
    """Return the indices of at most `count` hits, then of at most `count` misses.

    Hits are evenly spaced, misses in the order of their ranks.

    Args:
        ranks: Rank of the correct result of each query, int64 [Q]; 1 is a hit.
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
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gallery items with the highest scores for each of a few queries.

    The score is the dot product in float32. Of scores that differ by less than TIE (1e-6), those of
    incorrect pairs come first. NaN counts as infinity for an incorrect pair and as minus infinity
    for a correct one, so that a broken model is not rated as good.

    Args:
        queries: L2-normalized embeddings [Q, D].
        gallery: L2-normalized embeddings [E, D].
        is_correct: Whether a gallery item is a correct result of a query, bool [Q, G].
        index: The embedding of each gallery item, int64 [G]; None: item n has embedding n.

    Returns:
        Numbers of gallery items, int64, and their scores, float32, both [Q, min(k, G)] on the CPU,
        the best one first.
    """
    with full_precision("cpu"):
        scores = queries.float() @ gallery.float().T
    if index is not None:
        scores = scores[:, index]
    scores = torch.where(scores.isnan(), torch.where(is_correct, -torch.inf, torch.inf), scores)
    order = torch.where(is_correct, scores - TIE, scores).argsort(
        dim=1, descending=True, stable=True
    )[:, :k]
    return order, scores.gather(1, order)


class RetrievalExamples:
    """Collects hits and misses of directions of retrieval, with their images, frames and sound.

    `add(direction, ranked)` takes the ranks of a direction, and `values(num_rows)` returns the
    content of examples.json.

    Args:
        prepared: The set, for texts and media.
        max_pixels: Images with more pixels are not decoded.
        clip_s: Longest clip of audio and video in seconds; None: the set has images.

    Attributes:
        generated: Captions that the model generated for images, by `row` as text.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        max_pixels: int,
        clip_s: float | None = None,
    ) -> None:
        self._prepared = prepared
        self._max_pixels = max_pixels
        self._clip_s = clip_s
        self._directions: dict[str, list[dict[str, Any]]] = {}
        self._images: dict[str, str] = {}
        self._clips: dict[str, Any] = {}
        self.generated: dict[str, str] = {}

    def add(self, direction: str, ranked: RankedDirection) -> None:
        """Choose hits and misses of a direction, and decode their media.

        Args:
            direction: Name of the direction, a key of the examples, such as `audio_to_text` or
                `image_to_text`.
            ranked: Its ranks, queries and results.
        """
        queries = ranked.queries
        gallery = ranked.gallery
        has_images = self._clip_s is None
        shown_queries = select_queries(ranked.ranks, NUM_SHOWN if has_images else NUM_CLIPS)
        k = NUM_RETRIEVED if has_images else NUM_RETRIEVED_CLIPS
        is_correct = torch.stack([ranked.is_correct(query) for query in shown_queries.tolist()])
        embeds = queries.embeds[queries.embed_index[shown_queries]]
        best, scores = top_k(embeds, gallery.embeds, is_correct, k, gallery.embed_index)
        columns = (
            shown_queries,
            ranked.ranks[shown_queries],
            best,
            scores,
            is_correct.gather(1, best),
        )
        shown = self._directions[direction] = []
        for query, rank, *results in zip(*(column.tolist() for column in columns), strict=True):
            answers = [
                self._describe(gallery.locations[item], not direction.endswith("_text"))
                | {"score": round(score, 4) if math.isfinite(score) else None, "correct": correct}
                for item, score, correct in zip(*results, strict=True)
            ]
            item = self._describe(queries.locations[query], True)
            shown.append(item | {"rank": rank, "answers": answers})

    def values(self, num_rows: int) -> dict[str, Any]:
        """Return the content of examples.json.

        Returns:
            JSON values: for each direction, such as `audio_to_text`, a list of queries {row, key,
            caption, rank, answers: [{row, key, caption, score, correct}]}, in which `row` is the
            index of a row, or for audio and video index of the row and number of the text, such as
            `7.1`. By `row` as text, `images` has a thumbnail, or the middle frame of a video, as
            data URI, and `clips` (missing for a set of images) {start_s, end_s, frames: [{time_s,
            image}], sound}, with thumbnails and an MP3 (None: no sound) as data URIs; what cannot
            be decoded is missing. `generated` (missing without) has captions of the model by
            `row`. `rows` is the number of images or clips.
        """
        clips = {} if self._clip_s is None else {"clips": self._clips}
        if self.generated:
            clips["generated"] = self.generated
        return {"rows": num_rows, **self._directions, **clips, "images": self._images}

    def _describe(self, location: Tensor, shows_media: bool) -> dict[str, Any]:
        """Return row, key and text of an item; decode its media, if they are shown, once."""
        number, text_number = location.tolist()
        item: dict[str, Any] = {"row": number, "key": "", "caption": ""}
        if self._clip_s is not None:
            item["row"] = f"{number}.{text_number}"  # each text has a span of its own
        with suppress(OSError, ValueError):
            [row] = self._prepared.read(np.array([number]))
            clip = row.with_text(text_number)
            item |= {"key": row.key, "caption": "".join(clip.texts)}
            if shows_media and str(item["row"]) not in self._images | self._clips:
                self._add_media(str(item["row"]), clip)
        return item

    def _add_media(self, name: str, clip: Row) -> None:
        """Decode the media of a row with one text. Raises ValueError if they are damaged."""
        if self._clip_s is None:
            self._images[name] = thumbnail(decode(clip.image, self._max_pixels))
            return
        excerpt = make_excerpt(clip, self._clip_s)
        self._clips[name] = excerpt
        if frames := excerpt["frames"]:
            self._images[name] = frames[len(frames) // 2]["image"]
