"""An overview of a prepared set: a sample of its rows, statistics of more of them, repeated images,
and quarantined rows. Reading is bounded, whatever the size of the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmray.data.images.decode import BadImage
from mmray.data.images.read import is_inside
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.media.excerpt import make_excerpt
from mmray.data.message_fields import REJECTED, to_json
from mmray.data.messages import message_text
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.mixture import ROW_ERRORS, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row
from mmray.data.text.tokenizer import TextEncoder
from mmray.errors import DataError, UsageError
from mmray.report.summary import quarantine_summary
from mmray.storage.paths import AnyPath, to_path

MAX_ROWS = 10_000  # read for statistics
MAX_BYTES = 512 << 20  # limit of these rows, estimated from the size of the shards
ROWS_PER_READ = 256
MAX_TOKENS = 1 << 20
CLIP_S = 10.0  # longest excerpt of audio and video
MAX_IMAGES = 8  # shown of a row
MAX_CLIPS = 3  # shown of a row: one for each of its first texts
MAX_CELL = 80  # characters of a text in a table
MAX_VALUE = 200  # characters of the value of a column
TABLE_COLUMNS = ("key", "media", "tokens", "text")


@dataclass
class SetStatistics:
    """Properties of some rows of a set, or of all if it is small, as `read_statistics` computes
    them.

    Attributes:
        num_rows: Number of rows that were read.
        num_unsized: Number of images whose size is not known, because `prepare` did not check them.
        widths: Width of each image and video in pixels.
        heights: Height of each of these in pixels.
        durations_s: Duration of each audio and video in seconds.
        text_lengths: Number of characters of each caption, or of all messages of a conversation.
        token_counts: Number of tokens of the same texts; empty without a tokenizer.
    """

    num_rows: int = 0
    num_unsized: int = 0
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SetRecord:
    """What the page of a prepared set shows; `SetRecord.read` makes it.

    Attributes:
        prepared: The set, or a split of it.
        rows: The sampled rows as JSON values. All have `key`, `text` (the first 80 characters of
            all texts) and `error` (a sentence if the row cannot be read, else None); others also:
            `source` (its place in the source), `media` (kinds and sizes as text, such as `image 640
            × 480`), `tokens` (of each text, as one text), `facts` (pairs of name and text, such as
            split and scores), `images` (thumbnails as data URIs; None: not decodable), `num_hidden`
            (number of further images), `texts` (dicts of `text`, `tokens`, `span` in seconds and
            `column`, and of audio or video `clip` or `clip_error`), and `turns` of a conversation
            ({role, parts}; None: no conversation).
        statistics: Properties of more rows.
        quarantine: Counts and examples of quarantined rows: `num_read`, `num_rows`, `reasons`
            (pairs of reason and count), `shown` (examples as {reason, key, source, detail}), and
            the other keys of `quarantine_summary`.
        unread_folder: Folder of the source, if it has images that were not read because it is in
            none of the folders that the user named; otherwise "".
        page: The HTML file; None before it is written.
    """

    prepared: PreparedSet
    rows: list[dict[str, Any]]
    statistics: SetStatistics
    quarantine: dict[str, Any]
    unread_folder: str = ""
    page: AnyPath | None = None

    @property
    def table(self) -> list[dict[str, str]]:
        """The sampled rows for a terminal or a DataFrame: key, media, tokens and start of the
        texts.
        """
        return [{name: row.get(name, "") for name in TABLE_COLUMNS} for row in self.rows]

    @property
    def num_images(self) -> int:
        """The number of images of the set, without those of audio and video."""
        by_number = self.prepared.rows_by_num_images
        return sum(number * rows for number, rows in by_number.items())

    @property
    def basis(self) -> str:
        """A sentence: on how many rows the charts are based."""
        total = self.prepared.num_rows
        read = self.statistics.num_rows
        if read == total:
            return f"Based on all {total:,} rows."
        groups = f"random groups of {RECORD_BATCH_ROWS} adjacent rows"
        return f"Based on {read:,} of {total:,} rows: {groups}."

    @property
    def unread_text(self) -> str:
        """A sentence about images of the source that were not read; "" if there are none."""
        if not self.unread_folder:
            return ""
        folder = self.unread_folder
        return f"Images in the folder of the source are not read; --root {folder} shows them."

    @classmethod
    def read(
        cls,
        prepared: PreparedSet,
        num_rows: int,
        seed: int,
        tokenizer_json: str | None,
        roots: Sequence[str] = (),
    ) -> SetRecord:
        """Read a random sample of a set, and statistics of at most MAX_ROWS (10,000) rows.

        Args:
            num_rows: Number of rows of the sample, or all if the set has fewer.
            tokenizer_json: None: tokens are not counted.
            roots: Folders whose images may be read if the set refers to them, because the set and
                the folder that it names may be somebody else's.

        Raises:
            DataError: A shard is damaged, or lacks columns such as scores.
            OSError: The set cannot be read.
        """
        draw = np.random.default_rng(seed)
        total = prepared.num_rows
        row_numbers = np.sort(draw.choice(total, min(num_rows, total), replace=False))
        encoder = TextEncoder(tokenizer_json, MAX_TOKENS) if tokenizer_json else None
        with closing(SubprocessDecoder()) as decoder:
            viewer = _RowViewer(prepared, encoder, decoder, roots)
            columns = prepared.columns(row_numbers)
            read = zip(row_numbers.tolist(), viewer.read(row_numbers), columns, strict=True)
            rows = [viewer.view(number, row, values) for number, row, values in read]
            statistics = read_statistics(prepared, statistics_rows(prepared, draw), encoder)
        unread = str(prepared.manifest.source.get("folder")) if viewer.has_unread else ""
        quarantine = quarantine_summary(prepared.folder)
        return cls(prepared, rows, statistics, quarantine, unread)


def _may_read_source(prepared: PreparedSet, roots: Sequence[str]) -> bool:
    """Return whether the source of a set is in one of `roots` or in the set."""
    with suppress(UsageError, KeyError):
        folder = to_path(prepared.manifest.source["address"])
        return is_inside(folder, [prepared.folder, *map(to_path, roots)])
    return False


def statistics_rows(prepared: PreparedSet, draw: np.random.Generator) -> np.ndarray:
    """Return the numbers of the rows of which statistics are computed.

    They are random groups of 8 adjacent rows, which one request to an object store reads.
    """
    total = prepared.num_rows
    mean_bytes = max(1.0, prepared.num_bytes / max(1, total))
    limit = min(total, MAX_ROWS, max(RECORD_BATCH_ROWS, int(MAX_BYTES / mean_bytes)))
    num_groups = -(-total // RECORD_BATCH_ROWS)
    groups = draw.choice(num_groups, -(-limit // RECORD_BATCH_ROWS), replace=False)
    starts = np.sort(groups) * RECORD_BATCH_ROWS
    rows = (starts[:, None] + np.arange(RECORD_BATCH_ROWS)).ravel()
    return rows[rows < total]


def read_statistics(
    prepared: PreparedSet, rows: np.ndarray, encoder: TextEncoder | None
) -> SetStatistics:
    """Compute the statistics of some rows, without decoding their media.

    Args:
        rows: Row numbers int64 [N], sorted.
        encoder: Its `encode(texts)` counts tokens; None: they are not counted.

    Raises:
        DataError: A shard is damaged.
        OSError: The set cannot be read.
    """
    statistics = SetStatistics()
    for start in range(0, len(rows), ROWS_PER_READ):
        numbers = rows[start : start + ROWS_PER_READ]
        try:
            read = prepared.read_without_references(numbers)
        except ValueError as error:
            raise DataError(f"{error}. Prepare the set again into another folder.") from None
        texts: list[str] = []
        for row in read:
            statistics.num_rows += 1
            _add_media(statistics, row)
            texts += _texts_of(row)
        statistics.text_lengths += map(len, texts)
        statistics.token_counts += _count_tokens(encoder, texts)
    return statistics


def _column_facts(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of each value that is not missing."""
    return [
        (name, f"{value:.6g}" if isinstance(value, float) else str(value)[:MAX_VALUE])
        for name, value in columns.items()
        if value is not None
    ]


def _add_media(statistics: SetStatistics, row: Row) -> None:
    for media in row.media:
        if media.duration is not None:
            statistics.durations_s.append(media.duration)
        if media.width:
            statistics.widths.append(media.width)
            statistics.heights.append(media.height)
        elif media.kind == "image":
            statistics.num_unsized += 1


def _texts_of(row: Row) -> list[str]:
    """Return the captions of a row, or its messages as one text."""
    if row.messages:
        return ["\n".join(message_text(message) for message in row.messages)]
    return row.texts


def _count_tokens(encoder: TextEncoder | None, texts: Sequence[str]) -> list[int]:
    if encoder is None or not texts:
        return []
    captions = [encoder.format_caption(text) for text in texts]
    counts: list[int] = encoder.encode(captions)[1].tolist()
    return counts


class _RowViewer:
    """Converts rows to values for the page; a child process decodes their media.

    Args:
        encoder: Counts tokens; None: they are not counted.
        decoder: The child process.
        roots: Folders in which images of the source may be read.

    Attributes:
        has_unread: Whether the rows so far refer to images that were not read.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        encoder: TextEncoder | None,
        decoder: SubprocessDecoder,
        roots: Sequence[str],
    ) -> None:
        self._prepared = prepared
        self._encoder = encoder
        self._decoder = decoder
        self._reads_source = _may_read_source(prepared, roots)
        self.has_unread = False

    def read(self, numbers: np.ndarray) -> list[Row | Exception]:
        """Return rows by their numbers, or the errors of those that cannot be read."""
        if self._reads_source:
            return read_each(self._prepared, numbers)
        try:
            rows = self._prepared.read_without_references(numbers)
        except ROW_ERRORS as error:
            if len(numbers) == 1:
                return [error]
            return [row for number in numbers for row in self.read(np.array([number]))]
        self.has_unread |= any(media.ref for row in rows for media in row.media)
        return list(rows)

    def view(self, number: int, row: Row | Exception, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a row.

        Args:
            number: Number of the row in the set.
            row: The row, or the error with which reading it failed.
            columns: Values of its columns by name, such as scores.

        Returns:
            `key`, `text` (the first 80 characters of all texts) and `error`, a sentence if the row
            cannot be read. Otherwise also `source`, `media` and `tokens` as text, `facts` (pairs of
            name and text, such as size and split), `images` (data URIs; None for one that cannot be
            decoded), `num_hidden` (of the images), `texts` ({`text`, `tokens`, `span`, `column`}
            and maybe `clip` or `clip_error`), and `turns` of a conversation, otherwise None.
        """
        if isinstance(row, Exception):
            return {"key": f"row {number:,}", "text": str(row), "error": str(row)}
        images = [media for media in row.media if media.kind == "image"]
        thumbnails = [self._decoder.thumbnail(media.data) for media in images[:MAX_IMAGES]]
        texts = _texts_of(row)
        tokens = _count_tokens(self._encoder, texts)
        media_facts = _media_facts(row)
        values: dict[str, Any] = {
            "error": None,
            "key": row.key,
            "source": row.source,
            "media": "; ".join(f"{name} {value}" for name, value in media_facts),
            "tokens": ", ".join(f"{count:,}" for count in tokens),
            "text": _shorten(" | ".join(texts).replace("\n", " | ")),
            "facts": media_facts + self._facts(row) + _column_facts(columns),
            "images": thumbnails,
            "num_hidden": len(images) - len(thumbnails),
            "texts": [],
            "turns": None,
        }
        if row.messages:
            values["turns"] = self._turns(row, thumbnails)
            if tokens:
                values["facts"].append(("text tokens", values["tokens"]))
            return values
        for index, text in enumerate(row.texts):
            entry: dict[str, Any] = {"text": text, "tokens": tokens[index] if tokens else None}
            entry["span"] = row.spans[index] if row.spans else None
            entry["column"] = row.text_columns[index] if row.text_columns else None
            if index < MAX_CLIPS:
                entry |= self._clip(row.with_text(index))
            values["texts"].append(entry)
        if not row.texts:
            no_text = dict.fromkeys(("text", "tokens", "span", "column"))
            values["texts"].append(no_text | self._clip(row))
        return values

    def _turns(self, row: Row, thumbnails: list[str | None]) -> list[dict[str, Any]]:
        """Return the messages of a conversation, with their other fields as texts; each media part
        takes the next medium.
        """
        images = iter(thumbnails)
        others = {
            kind: iter([media for media in row.media if media.kind == kind])
            for kind in ("audio", "video")
        }
        turns = []
        for message in row.messages or ():
            parts: list[dict[str, Any]] = [
                {"text": f"{name}: {_shown_field(name, value)}"}
                for name, value in message.items()
                if name not in ("role", "content")
            ]
            for part in message["content"]:
                kind = part["type"]
                if kind == "image":
                    parts.append({"image": next(images, None)})
                elif kind == "text":
                    parts.append({"text": part["text"]})
                else:
                    media = [next(others[kind])]
                    parts.append(self._clip(replace(row, media=media)))
            turns.append({"role": message["role"], "parts": parts})
        return turns

    def _clip(self, row: Row) -> dict[str, Any]:
        """Return the excerpt of a row with at most one text as `clip`, or its error as
        `clip_error`; nothing for a row without audio and video.
        """
        if all(media.kind == "image" for media in row.media):
            return {}
        try:
            return {"clip": self._decoder.request(make_excerpt, row, CLIP_S)}
        except BadImage as bad:
            return {"clip_error": str(bad)}

    def _facts(self, row: Row) -> list[tuple[str, str]]:
        facts = []
        if row.label is not None:
            names = self._prepared.manifest.class_names
            name = f" ({names[row.label]})" if row.label < len(names) else ""
            facts.append(("label", f"{row.label}{name}"))
        if row.split:
            facts.append(("split", row.split))
        return facts


def _media_facts(row: Row) -> list[tuple[str, str]]:
    """Return name and description of the images, the audio and the video of a row."""
    facts = []
    for kind in dict.fromkeys(media.kind for media in row.media):
        same = [_describe_media(media) for media in row.media if media.kind == kind]
        name = kind if len(same) == 1 else f"{len(same)} {kind}s"
        facts.append((name, "; ".join(dict.fromkeys(same[:MAX_IMAGES]))))
    return facts


def _shorten(text: str) -> str:
    """Return the first MAX_CELL (80) characters of a text."""
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def _describe_media(media: Media) -> str:
    """Return size, duration, rate and channels of an image, audio or video in one line."""
    parts = [f"{media.width} × {media.height}"] if media.width else []
    if media.duration is not None:
        parts.append(f"{media.duration:.2f} s")
    if media.rate:
        unit = "frames/s" if media.kind == "video" else "Hz"
        parts.append(f"{media.rate:g} {unit}")
    if media.channels and media.kind == "audio":
        parts.append(f"{media.channels} channel{'s' * (media.channels > 1)}")
    return ", ".join(parts) or "not checked"


def _shown_field(name: str, value: object) -> str:
    """Return a field of a message as text: of a rejected answer its texts, of others JSON."""
    if name == REJECTED and isinstance(value, list):
        return "\n".join(map(message_text, value))
    return value if isinstance(value, str) else to_json(value).decode()
