"""Counts the tokens of rows with the processor of a model (data/prepare/token_counts.py)."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property

from mmray.data.messages import conversations_of
from mmray.data.prepare.token_counts import RowCounter
from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import ProcessorEncoder


@dataclass(frozen=True)
class ProcessorCounter:
    """Counts the tokens of rows with the processor of a model; cheap to pickle.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        max_pixels: Maximum width x height of an image after resizing; None: the processor's
            default.
        min_pixels: Minimum width x height of an image after resizing; None: the processor's
            default.
        question: User message of a row that has only captions. Of several captions the longest
            counts.
    """

    weights: str
    max_pixels: int | None = None
    min_pixels: int | None = None
    question: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the counts: the processor and `question`.

        Loads the processor on first use.
        """
        digest = self._encoder(without_torch=False).digest
        return hashlib.sha256(f"{digest} {self.question}".encode()).hexdigest()

    def build(self) -> RowCounter:
        """Load the processor, and return the function that counts the tokens of a stored row.

        The row needs no bytes of images; the sizes of its images are read.
        """
        encoder = self._encoder(without_torch=True)

        def count(row: Row) -> int:
            sizes = [(media.width, media.height) for media in row.media]
            conversations = conversations_of(row, self.question)
            return max(encoder.count_tokens(messages, sizes) for messages in conversations)

        return count

    def _encoder(self, without_torch: bool) -> ProcessorEncoder:
        return ProcessorEncoder(
            self.weights, sys.maxsize, self.max_pixels, self.min_pixels, without_torch
        )
