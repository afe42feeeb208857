"""Rows as they are stored in shards: the Arrow schema, and the row of its values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import orjson
import pyarrow as pa

from mmray.data.images.decode import BadImage
from mmray.data.messages import Message, answer_question

_REF = pa.struct([("file", pa.string()), ("offset", pa.int64()), ("length", pa.int64())])
_MEDIA = pa.struct(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        ("ref", _REF),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        ("duration", pa.float64()),
        ("rate", pa.float64()),
        ("channels", pa.int32()),
    ]
)
_PART = pa.struct([pa.field("type", pa.string(), nullable=False), ("text", pa.string())])
# `fields`: JSON of the other fields of the message; null: none.
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(_PART)), ("fields", pa.string())])
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        ("label", pa.int64()),
        ("split", pa.string()),
        ("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        ("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        ("box_labels", pa.list_(pa.int64())),
        pa.field("media", pa.list_(_MEDIA), nullable=False),
        ("messages", pa.list_(_MESSAGE)),
        ("spans", pa.list_(pa.list_(pa.float64(), 2))),
        ("text_columns", pa.list_(pa.string())),
    ]
)


@dataclass
class Media:
    """An image, audio or video of a row.

    Args:
        kind: `image`, `audio` or `video`.
        data: The encoded bytes. In an index-only set, which refers to the images in its source,
            they are empty until the image is read.
        ref: Index-only set: `file`, `offset` and `length` of the bytes in the folder of the source;
            otherwise None.
        sha256: Hex digest of the bytes.
        width: Upright width in pixels; 0 for audio.
        height: Upright height in pixels; 0 for audio.
        duration: Seconds of audio or video; None for an image, and if its header has none.
        rate: Samples of audio or frames of a video per second; None for an image.
        channels: Channels of the sound of audio or video, 0 for a silent video; None for an image.
    """

    kind: str
    data: bytes
    ref: dict[str, Any] | None = None
    sha256: str = ""
    width: int = 0
    height: int = 0
    duration: float | None = None
    rate: float | None = None
    channels: int | None = None

    @cached_property
    def checksum_ok(self) -> bool:
        """Whether the bytes have the digest that `prepare` validated: a damaged JPEG often decodes.

        Cached, because the cache of a node and the reader of a row both read it.
        """
        return self.sha256 == hashlib.sha256(self.data).hexdigest()


@dataclass
class Row:
    """A stored sample: its media, captions or messages, and its location in the source
    (`file:line`).

    `with_text(index)` returns a row with one of its texts and that text's span.

    Attributes:
        key: Name of the row, unique in the set.
        media: Its images, audio and video.
        texts: Its captions; empty if it has `messages`.
        label: Number of its class; None: none.
        split: Split of the row; None: none.
        language: Of sets of earlier versions, and not used; otherwise None.
        source: Location in the source, `file:line`.
        boxes: As `language`.
        box_labels: As `language`.
        messages: A conversation, a list of `Message` of mmray.data.messages. Each part of type
            `image`, `video` or `audio` takes the next of `media`. None: none.
        spans: (start, end) of each text in seconds, None for the whole audio or video; None: no
            text has a span.
        text_columns: Column of the source of each text; None: the source has one column of texts.
        text_weights: Relative frequency with which training takes each text, if `data.captions`
            has weights; None: all alike. Not stored.
    """

    key: str
    media: list[Media]
    texts: list[str]
    label: int | None = None
    split: str | None = None
    language: str | None = None
    source: str = ""
    boxes: list[list[float]] | None = None
    box_labels: list[int] | None = None
    messages: list[Message] | None = None
    spans: list[list[float] | None] | None = None
    text_columns: list[str] | None = None
    text_weights: list[float] | None = None

    @property
    def checksum_ok(self) -> bool:
        """Whether the bytes of all images of this row have the digests of those that `prepare`
        validated.
        """
        return all(media.checksum_ok for media in self.media)

    @property
    def media_kinds(self) -> str:
        """Sorted kinds of its media, such as `audio image image`."""
        return " ".join(sorted(media.kind for media in self.media))

    def with_text(self, number: int) -> Row:
        """Return this row with one of its texts and its span; without texts the row itself."""
        return self._with_texts([number]) if self.texts else self

    def with_captions(self, weights: Mapping[str, float]) -> Row:
        """Return this row with only the texts of some columns of the source, and the frequency with
        which training takes each text.

        Args:
            weights: Relative frequency by column; the texts of a column in a row divide it equally.
                A row whose texts have no columns, such as a conversation, is returned unchanged.
        """
        columns = self.text_columns
        if columns is None:
            return self
        numbers = [number for number, name in enumerate(columns) if name in weights]
        row = self._with_texts(numbers)
        row.text_weights = [weights[columns[n]] / columns.count(columns[n]) for n in numbers]
        return row

    def _with_texts(self, numbers: Sequence[int]) -> Row:
        lists: dict[str, Any] = {
            name: values and [values[number] for number in numbers]
            for name in ("spans", "text_columns", "text_weights")
            if (values := vars(self)[name]) is not None
        }
        return replace(self, texts=[self.texts[number] for number in numbers], **lists)

    def conversations(self, question: str) -> list[list[Message]]:
        """Return the conversation of `messages`, otherwise one for each caption: a part for each
        medium and the question of the user, and the caption of the assistant.
        """
        if self.messages:
            return [self.messages]
        kinds = [media.kind for media in self.media]
        return [answer_question(question, caption, kinds) for caption in self.texts]

    @property
    def image(self) -> bytes:
        """Encoded bytes of the only image, for models that take one image per row.

        Raises:
            BadImage: The row has no image, several, or audio or video.
        """
        others = [media.kind for media in self.media if media.kind in ("audio", "video")]
        if len(self.media) != 1 or others:
            has = " and ".join([f"{len(self.media) - len(others)} images", *others])
            raise BadImage("image-count", f"the row has {has}, not one")
        return self.media[0].data


def to_row(values: dict[str, Any]) -> Row:
    """Convert the values of a row as a shard stores them, by name of the column, to a Row."""
    row = Row(**values | {"media": [Media(**media) for media in values["media"]]})
    for message in row.messages or ():
        message |= orjson.loads(message.pop("fields", None) or "{}")
    return row


def to_stored(messages: Sequence[Message] | None) -> list[Message] | None:
    """Return messages as a shard stores them: other fields than role and content as JSON."""
    if messages is None:
        return None
    stored = []
    for message in messages:
        fields = {name: message[name] for name in message if name not in ("role", "content")}
        stored.append(message | {"fields": orjson.dumps(fields).decode() if fields else None})
    return stored


def hash_key(key: str) -> int:
    """Return the hash of a row key, which is the column `key` of a training batch: a signed 64-bit
    integer, the same in every process.
    """
    return int.from_bytes(
        hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True
    )
