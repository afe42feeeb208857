"""Counts the tokens of rows with the processor of a model (data/prepare/token_counts.py)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from mmray.data.prepare.token_counts import RowCounter
from mmray.data.store.stored_row import Media, Row
from mmray.data.vlm.encoder import MediaSize, ProcessorEncoder
from mmray.data.vlm.video import clip_length_s

# Place of frames in their intervals. Later times have no fewer digits, which some models write.
LATEST = 0.999


@dataclass(frozen=True)
class ProcessorCounter:
    """Counts the tokens of rows with the processor of a model; cheap to pickle.

    `build()` returns the function that counts: from a stored row to its number of tokens, an int.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        limits: Limits by name, as in `model.inputs`: `max_pixels`, `min_pixels`, `frames`,
            `frame_rate` and `frame_pixels`; `max_tokens` is ignored.
        question: User message of a row that has only captions. Of several captions that
            are used the longest counts.
    """

    weights: str
    limits: dict[str, Any] = field(default_factory=dict)
    question: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the counts: the processor and `question`.

        Loads the processor on first use.
        """
        return hashlib.sha256(f"{self._processor[0]} {self.question}".encode()).hexdigest()

    @property
    def reserved_tokens(self) -> tuple[str, ...]:
        """Tokens that the processor removes from texts; it is loaded on first use."""
        return self._processor[1]

    @cached_property
    def _processor(self) -> tuple[str, tuple[str, ...]]:
        encoder = self._encoder(without_torch=False)
        return encoder.digest, tuple(encoder.reserved_tokens)

    def build(self) -> RowCounter:
        """Load the processor, and return the function that counts the tokens of a stored row.

        The function is called with a Row and returns an int. The row needs no bytes of media; their
        sizes and durations are read.
        """
        encoder = self._encoder(without_torch=True)

        def count(row: Row) -> int:
            counts = []
            for number, messages in enumerate(row.conversations(self.question)):
                span = row.spans[number] if row.spans else None
                sizes = [_size(media, span, encoder) for media in row.media]
                counts.append(encoder.count_tokens(messages, sizes))
            return max(counts)

        return count

    def _encoder(self, without_torch: bool) -> ProcessorEncoder:
        limits = self.limits | {"max_tokens": sys.maxsize, "without_torch": without_torch}
        return ProcessorEncoder(self.weights, **limits)


@dataclass(frozen=True)
class TokenSearch:
    """Searches the texts of rows for tokens, as a TokenCounter: what it counts for a row is the
    place in `tokens`, from 1, of the first one that is in the row; 0: none is.
    """

    tokens: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(("tokens in texts", self.tokens)).encode()).hexdigest()

    def build(self) -> RowCounter:
        def find(row: Row) -> int:
            text = orjson.dumps(row.conversations("")).decode()
            found = (place for place, token in enumerate(self.tokens, 1) if token in text)
            return next(found, 0)

        return find


def _size(media: Media, span: Sequence[float] | None, encoder: ProcessorEncoder) -> MediaSize:
    """Return what determines the tokens of a medium, of video and audio in the span of a text."""
    if media.kind not in encoder.kinds:
        raise ValueError(f"the row has {media.kind}, which the model does not take")
    if media.kind == "image":
        return MediaSize(media.width, media.height)
    length_s = clip_length_s(media, span)
    if media.kind == "audio":
        return MediaSize(samples=encoder.num_samples(length_s))
    return MediaSize(media.width, media.height, encoder.choose_times(length_s, LATEST))
