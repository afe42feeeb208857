"""Examples of retrieval between texts, audio and video for the report: hits and misses."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.media.excerpt import make_excerpt
from mmray.data.store.prepared_set import PreparedSet
from mmray.evaluation.retrieval import select_queries, top_k

NUM_SHOWN = 3  # hits, and misses, per direction; a clip takes up to 100 KB
NUM_RETRIEVED = 2


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
        chosen = select_queries(found.ranks, NUM_SHOWN)
        is_correct = found.query_ids[chosen, None] == found.gallery_ids
        best, best_scores = top_k(
            found.queries[chosen], found.gallery, is_correct, NUM_RETRIEVED, self._device
        )
        shown = self._directions[direction] = []
        columns = (chosen, best, best_scores, is_correct.gather(1, best))
        for index, *results in zip(*(column.tolist() for column in columns), strict=True):
            answers = []
            for item, score, correct in zip(*results, strict=True):
                answer = self._describe(int(found.gallery_numbers[item]))
                answer["score"] = round(score, 4) if math.isfinite(score) else None
                answer["correct"] = correct
                answers.append(answer)
            query = self._describe(int(found.numbers[index]))
            shown.append(query | {"rank": int(found.ranks[index]), "answers": answers})

    def values(self) -> dict[str, Any]:
        """Return the content of examples.json.

        Returns:
            JSON values: a list for each direction as in `retrieval_examples`, in which `row` is the
            number of a clip; `clips` has the excerpt (`make_excerpt`) of each clip that can be
            decoded by its number as text, and `images` the frame in its middle. `rows` is the
            number of clips.
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
