"""Counts the tokens of rows with the processor of a model (data/prepare/token_counts.py)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from mmray.data.messages import Message, message_text
from mmray.data.prepare.token_counts import RowCounter
from mmray.data.store.stored_row import Media, Row
from mmray.data.vlm.encoder import CHECK_SIDE, MediaSize, ProcessorEncoder, preference_of
from mmray.data.vlm.families import CHECK_ERRORS, GENERAL, refusal
from mmray.data.vlm.video import clip_length_s
from mmray.errors import DataError, ResourceError
from mmray.processes import Channel, ChildDied, ChildProcess

# Place of frames in their intervals. Later times have no fewer digits, which some models write.
LATEST = 0.999


@dataclass(frozen=True)
class ProcessorCounter:
    """Counts the tokens of rows with the processor of a model; cheap to pickle.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        limits: Arguments of ProcessorEncoder; `max_tokens` is ignored.
        question: User message of a row that has only captions. Of several captions that are used
            the longest counts.
        pairs: Whether a row is a chosen and a rejected answer, which count twice the longer one, as
            they are padded to it.
    """

    weights: str
    limits: dict[str, Any] = field(default_factory=dict)
    question: str = ""
    pairs: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the counts: the processor and `question`."""
        parts = f"{self.encoder_digest} {self.question}{' pairs in spans' * self.pairs}"
        return hashlib.sha256(parts.encode()).hexdigest()

    @property
    def encoder_digest(self) -> str:
        """`ProcessorEncoder.digest` of the processor."""
        return self._processor[0]

    @property
    def search(self) -> UnusedTextSearch:
        """Searches rows for what the processor does not use; it is loaded on first use."""
        return self._processor[1]

    @cached_property
    def _processor(self) -> tuple[str, UnusedTextSearch]:
        if "transformers" in sys.modules:
            return self._inspect(without_torch=False)
        # In this process transformers would import torch, or not find it for the user's own code.
        inspected: tuple[str, UnusedTextSearch] = _in_child(_inspect_in_child, self)
        return inspected

    def explain(self, row: Row) -> str:
        """Return why the tokens of a row cannot be counted."""
        return str(_in_child(_explain_in_child, self, row))

    def _inspect(self, without_torch: bool) -> tuple[str, UnusedTextSearch]:
        encoder = self._encoder(without_torch)
        if encoder.family == GENERAL:
            check_counts(encoder)
        search = UnusedTextSearch(
            tuple(encoder.reserved_tokens),
            encoder.template.omitted_reasoning,
            bool(encoder.template.turn_end),
        )
        return encoder.digest, search

    def build(self) -> RowCounter:
        """Load the processor, and return the function that counts the tokens of a stored row, from
        the sizes and durations of its media.
        """
        encoder = self._encoder(without_torch=True)

        def count(row: Row) -> int:
            counts = []
            _check_sizes(row)
            conversations = row.conversations(self.question)
            if self.pairs:
                conversations = [*preference_of(row)]
            for number, messages in enumerate(conversations):
                # Both conversations of a pair are about the same media.
                span = row.spans[0 if self.pairs else number] if row.spans else None
                sizes = [_size(media, span, encoder) for media in row.media]
                counts.append(encoder.count_tokens(messages, sizes))
            return max(counts) * (2 if self.pairs else 1)

        return count

    def _encoder(self, without_torch: bool) -> ProcessorEncoder:
        limits = self.limits | {"max_tokens": sys.maxsize, "without_torch": without_torch}
        return ProcessorEncoder(self.weights, **limits)


def _in_child(work: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a function in a child process. Raises ResourceError."""
    child = ChildProcess("processor", work, *arguments)
    try:
        return child.result()
    except ChildDied as error:
        raise ResourceError(str(error)) from None
    finally:
        child.kill()


def _inspect_in_child(_channel: Channel, counter: ProcessorCounter) -> tuple[str, UnusedTextSearch]:
    return counter._inspect(without_torch=True)


def _explain_in_child(_channel: Channel, counter: ProcessorCounter, row: Row) -> str:
    try:
        counter.build()(row)
    except ValueError as error:
        return str(error)
    return "it can be counted now"


@dataclass(frozen=True)
class UnusedTextSearch:
    """Searches rows for texts that a processor does not use, as a TokenCounter.

    Its value of a row is the place in `tokens`, from 1, of the first one that is in the row (0:
    none is); plus 1 + the number of `tokens` if the template omits some reasoning.

    Args:
        tokens: Tokens that are removed from texts.
        omitted_reasoning: `ChatTemplate.omitted_reasoning`.
        ends_turns: Whether the template writes a token at the end of an answer.
    """

    tokens: tuple[str, ...]
    omitted_reasoning: tuple[str, ...] = ()
    ends_turns: bool = True

    @property
    def digest(self) -> str:
        parts = ("unused texts", self.tokens, self.omitted_reasoning)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def build(self) -> RowCounter:
        def find(row: Row) -> int:
            text = orjson.dumps(row.conversations("")).decode()
            found = (place for place, token in enumerate(self.tokens, 1) if token in text)
            place = next(found, 0)
            return place + (1 + len(self.tokens)) * self._omits_reasoning(row.messages or [])

        return find

    def _omits_reasoning(self, messages: Sequence[Message]) -> bool:
        questions = [number for number, each in enumerate(messages) if each["role"] == "user"]
        answers = [each for each in messages[: max(questions, default=0)] if each["role"] != "user"]
        has = {
            "reasoning_content": any("reasoning_content" in each for each in answers),
            "</think>": any("</think>" in message_text(each) for each in answers),
        }
        return any(has[name] for name in self.omitted_reasoning)

    def describe(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield a text for each kind of what is not used, and the numbers of its rows.

        Args:
            values: Value of each row, int [num_rows].
        """
        places = values % (1 + len(self.tokens))
        for place in np.unique(places[places > 0]).tolist():
            yield (
                f"`{self.tokens[place - 1]}` in a text is removed, because it stands for a medium, "
                "or for a start or an end of a turn",
                np.flatnonzero(places == place),
            )
        if (omitted := np.flatnonzero(values > len(self.tokens))).size:
            yield "the chat template omits the reasoning before the last question", omitted


def check_counts(encoder: ProcessorEncoder) -> None:
    """Check that the processor of a model without a descriptor encodes images, and that the counts
    of tokens are those of encoded rows.

    Raises:
        UsageError: It does not.
    """
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    turns: list[Message] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "b"},
    ]
    try:
        for height, width in ((1, 2), (3, 1)):
            image = np.zeros((height * CHECK_SIDE, width * CHECK_SIDE, 3), np.uint8)
            sizes = [MediaSize(image.shape[1], image.shape[0])] * 2
            row = encoder.encode(turns, [image] * 2)
            count = encoder.count_tokens(turns, sizes)
            if count != len(row.input_ids):
                raise ValueError(f"{count} tokens are counted, and {len(row.input_ids)} encoded")
    except CHECK_ERRORS as error:
        raise refusal(encoder.weights, encoder.config, "placeholders", error) from error


def _check_sizes(row: Row) -> None:
    """Raise DataError if the set does not have the sizes that tokens depend on."""
    for media in row.media:
        if not media.width if media.kind == "image" else media.duration is None:
            raise DataError(
                f"the tokens of row {row.key} ({row.source}) depend on the size of its "
                f"{media.kind}, which was not checked: prepare the set with --check full"
            )


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
