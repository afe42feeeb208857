"""Parse and validate source rows: a SourceRow, or a BadRow with stage and reason."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, TypeGuard
from urllib.parse import unquote

from mmray.data.images.formats import UNREAD_SUFFIXES
from mmray.data.messages import (
    Conversation,
    PartMedium,
    message_text,
    parse_messages,
    parse_tools,
)
from mmray.data.store.row_columns import is_integer
from mmray.data.store.stored_row import Row
from mmray.storage.address import is_url, redact_url

HELD_OUT_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")  # not trained on
KEPT_COLUMNS = "kept columns"  # dict of the columns of `prepare.keep`, by name
FOLDER = "folder of paths"  # of all media, in the folder of the source
NOTICES = "notices of the reader"  # list of SourceRow.notices that a format adds
_UNUSED = re.compile(r"column (`[^`]*`) is not used")  # an entry of NOTICES
_MAX_SHOWN_NAMES = 12
MORE_TEXTS = "a file has several texts or subtitles next to it, of which one is used"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DATA_URI = "data:"
_FILE_URL = "file://"
IMAGE_COLUMNS = ("image_path", "image", "images")
MEDIA_KINDS = {"audio": ("audio", "audios"), "video": ("video", "videos")}  # columns by kind
MEDIA_COLUMNS = (*MEDIA_KINDS["audio"], *MEDIA_KINDS["video"])
SPAN_COLUMNS = ("t0_s", "t1_s")  # start and end of a text in seconds
# Names of start and end in the segments of a text, as mmray and as Whisper write them.
_SPAN_FIELDS = (SPAN_COLUMNS, ("start", "end"))
MAX_TIME_S = 1e6
MAX_OVERHANG_S = 0.5  # of a span: a last text may end a moment after its video
TEXT_COLUMNS = ("text", "texts")
TEXT_COLUMN = "column of the text"  # name in a text {"text": ...}, of one of several columns
_TEXT_FIELDS = {"text", "timestamp", TEXT_COLUMN, *SPAN_COLUMNS, "start", "end"}
MESSAGE_COLUMNS = ("messages", "conversations")
# Columns of which a row has one.
_KINDS = (
    ("id", "key"),
    IMAGE_COLUMNS,
    *MEDIA_KINDS.values(),
    TEXT_COLUMNS,
    MESSAGE_COLUMNS,
)
# The first characters of images in base64: JPEG, PNG, GIF, WebP, TIFF, BMP, and AVIF or JPEG 2000.
_BASE64_IMAGES = ("/9j/", "_9j_", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkq", "TU0AK", "Qk", "AAAA")
_MIN_BASE64_LENGTH = 64
_BASE64_BYTES = tuple(each.encode() for each in (*_BASE64_IMAGES, _DATA_URI))
_URL_SAFE = str.maketrans("-_", "+/")  # variant of base64 for addresses
_MAX_DIGITS = 20  # of a number of 64 bits
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadRow(ValueError):
    """A source row that is quarantined: written to quarantine.jsonl instead of the prepared set.

    Args:
        stage: Where it failed: `parse` (the record), `columns` (a value), `read` (a file),
            `decode` (an image, audio or video) or `text` (a caption).
        reason: A short word, such as `missing-image`, by which rows are counted.
        detail: A sentence for the user.
        key: Key (name) of the row; None: not known.
    """

    def __init__(self, stage: str, reason: str, detail: str, key: str | None = None) -> None:
        super().__init__(f"{stage} {reason}: {detail}")
        self.stage = stage
        self.reason = reason
        self.detail = detail
        self.key = key


@dataclass(frozen=True)
class ImageRef:
    """Reference to an image, audio or video: a file of the source folder, a byte range of one,
    or inline bytes.

    Attributes:
        name: Name for messages, which contains no secret.
        file: Path of the file, relative to the folder of the source. From `parse_image` it may be
            any path, also an absolute one, which `locate_file` checks. None for inline bytes.
        offset: First byte of the medium in the file.
        length: Number of bytes; None: the complete file.
        data: Inline encoded bytes; None: none.
        kind: `image`, `audio` or `video`.
        root: Folder of `prepare.root` that `file` is relative to; None: the folder of the source.
    """

    name: str
    file: str | None = None
    offset: int = 0
    length: int | None = None
    data: bytes | None = None
    kind: str = "image"
    root: str | None = None

    @property
    def path(self) -> str:
        """Path of the file: relative to the folder of the source, or absolute."""
        return str(self.file) if self.root is None else f"{self.root}/{self.file}"


@dataclass
class SourceRow(Row):
    """A validated row of a source, from `parse_row`, which becomes a stored row once its media are
    read.

    Until then `media` is empty, and `texts` are not cleaned (of a conversation without captions
    they are the assistant's messages). The other attributes are those of Row.

    Attributes:
        images: Its images in order, then its audio and its video; without `messages` at least one.
            With `messages` in the order of their parts.
        columns: Value by name of each column that `prepare.keep` names, such as {"width": 640}.
        notices: What the row has and the set does not, such as "`weight` of a message is not
            used". Prepare and runs log each with its number of rows, so it names no value.
    """

    images: list[ImageRef] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def parse_row(values: dict[str, Any] | BadRow, location: str) -> SourceRow:
    """Validate the values of a source row, and convert them to a SourceRow.

    Args:
        values: Values by mmray's column names: `id` or `key` (text or int), `image`, `images` or
            `image_path` (one or a list of what `parse_image` takes), `text` or `texts` (a text or
            {"text", "t0_s", "t1_s"}, or a list), `label` (int), `split` (a word),
            `messages` or
            `conversations` (what `parse_messages` takes), `tools` (JSON schemas), `audio` or
            `audios`, `video` or `videos` (as images), `t0_s` and `t1_s` (start and end of the texts
            in seconds); and `kept columns`, a dict of those of `prepare.keep`. Others are ignored.
            None is the same as a missing column. A BadRow is raised.
        location: Location of the row, such as `captions.jsonl:12`; also its key if it has none.

    Returns:
        A SourceRow; what the row lacks is None or empty.

    Raises:
        BadRow: With stage `columns` (`decode` for an image format that is not read) and a reason.
    """
    if isinstance(values, BadRow):
        raise values
    values = {name: value for name, value in values.items() if value is not None}
    key = values.get("id", values.get("key", location))
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise BadRow("columns", "key", f"id must be text or an integer (got {type(key).__name__})")
    key = str(key)
    if not key.strip() or len(key) > 1024 or not is_valid_name(key):
        raise BadRow(
            "columns", "key", f"id must be 1 to 1024 characters without controls (got {key[:40]!r})"
        )
    kept = values.pop(KEPT_COLUMNS, {})
    notices = values.pop(NOTICES, [])
    folder = values.pop(FOLDER, "")
    try:
        row = _parse_columns(key, values)
    except BadRow as bad:
        bad.key = key
        raise
    row.source = to_utf8(location)
    row.columns = kept
    if folder:
        row.images = [_move(image, folder) for image in row.images]
    row.notices += notices
    return row


def _parse_columns(key: str, values: dict[str, Any]) -> SourceRow:
    (messages, _, notices), images = _parse_conversation(values)
    answers = [message_text(each) for each in messages if each["role"] == "assistant"]
    texts: Sequence[Any] = [answer for answer in answers if answer.strip()]
    # Audio and video of one row are a pair without a text.
    has_pair = all(has_any(values, names) for names in MEDIA_KINDS.values())
    if has_any(values, TEXT_COLUMNS) or not (messages or has_pair):
        texts = _single_column(values, TEXT_COLUMNS, "no-text")
    text_columns = [item.get(TEXT_COLUMN) for item in texts if isinstance(item, dict)]
    plain, spans = _split_spans(values, texts)
    fields = {name for item in texts if isinstance(item, dict) for name in item} - _TEXT_FIELDS
    notices = [*notices, *(f"`{name}` of a text is not used" for name in sorted(fields))]
    if spans and all(image.kind == "image" for image in images):
        raise BadRow("columns", "span", "a text has a span, and the row has no audio or video")
    label = _parse_label(values.get("label"))
    split = _parse_split(values.get("split"))
    if split is not None and split.lower() in ("train", *HELD_OUT_SPLITS):
        split = split.lower()  # `Test` is no training split
    return SourceRow(
        key=key,
        media=[],
        images=images,
        texts=plain,
        label=label,
        split=split,
        messages=list(messages) or None,
        spans=spans,
        text_columns=[*map(str, text_columns)] if any(text_columns) else None,
        notices=list(notices),
    )


def _parse_label(label: object) -> int | None:
    """Return the number of a class, which may be a text. Raises BadRow."""
    number = label_number(label) if isinstance(label, str) else label
    if label is None:
        return None
    if _is_label(number):
        return number
    hint = "label must be an integer, unless all labels are names; number your classes, or name all"
    if isinstance(label, (list, dict)) or (isinstance(label, str) and label.startswith("[")):
        hint = "a row has one label: write a row for each class, or the classes into its text"
    raise BadRow("columns", "label", f"{hint} (got {str(label)[:40]!r})")


def _parse_split(split: object) -> str | None:
    """Return a short plain word, because it becomes a part of file names. Raises BadRow."""
    if split is None or (isinstance(split, str) and _WORD.fullmatch(split)):
        return split
    detail = f"split must be a word of letters, digits, . _ - (got {str(split)[:40]!r})"
    raise BadRow("columns", "split", detail)


def _split_spans(
    values: dict[str, Any], texts: Sequence[Any]
) -> tuple[list[Any], list[list[float] | None] | None]:
    """Return the texts of a row, and the span of each in seconds; None if none has one.

    A text is a string, or {"text", "t0_s", "t1_s"}. The columns `t0_s` and `t1_s` are the span of
    the other texts of the row. Raises BadRow.
    """
    of_row = _parse_span(values, SPAN_COLUMNS)
    plain = []
    spans: list[list[float] | None] = []
    for text in texts:
        span = of_row
        if isinstance(text, dict) and "text" in text:
            if isinstance(text.get("timestamp"), list):  # as pipelines of transformers write it
                start, end = (*text["timestamp"], None, None)[:2]
                # Whisper does not write the end of a last text that is cut.
                end = math.inf if end is None and start is not None else end
                text = text | dict(zip(SPAN_COLUMNS, (start, end), strict=True))
            names = next((each for each in _SPAN_FIELDS if each[0] in text), SPAN_COLUMNS)
            span = _parse_span(text, names) or of_row
            text = text["text"]
        plain.append(text)
        spans.append(span and [*span])
    return plain, spans if any(spans) else None


def _parse_span(values: dict[str, Any], names: tuple[str, str]) -> list[float] | None:
    """Return start and end of a text, None if it has none. Raises BadRow."""
    bounds = [values.get(name) for name in names]
    if bounds == [None, None]:
        return None
    start, end = map(_as_seconds, bounds)
    if bounds[1] == math.inf:
        end = math.inf  # until `check_spans`
    if start is None or end is None or start >= end:
        raise BadRow(
            "columns",
            "span",
            f"{names[0]} and {names[1]} must be seconds, the first before the second (got "
            f"{str(bounds[0])[:40]} and {str(bounds[1])[:40]})",
        )
    return [start, end]


def _as_seconds(value: object) -> float | None:
    """Return a time in seconds, in CSV a text; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if abs(seconds) < MAX_TIME_S else None


def _parse_conversation(values: dict[str, Any]) -> tuple[Conversation, list[ImageRef]]:
    """Return the messages of a row, if it has any, and its media in the order of their parts.

    Without messages, audio and video follow the images. Raises BadRow.
    """
    kinds = [kind for kind, names in MEDIA_KINDS.items() if has_any(values, names)]
    has_images = has_any(values, IMAGE_COLUMNS)
    if not has_any(values, MESSAGE_COLUMNS):
        images: tuple[Any, ...] = ()
        if has_images or not kinds:
            images = _single_column(values, IMAGE_COLUMNS, "no-image")
        media = [_parse_only_medium(values, kind) for kind in kinds]
        return Conversation(), [parse_image(image) for image in images] + media
    in_columns = {"image": _as_items(_single_value(values, IMAGE_COLUMNS)) if has_images else ()}
    in_columns |= {kind: _as_items(_single_value(values, MEDIA_KINDS[kind])) for kind in kinds}
    num_given = {kind: len(items) for kind, items in in_columns.items()}
    try:
        conversation = parse_messages(_single_value(values, MESSAGE_COLUMNS), num_given)
        if tools := parse_tools(values.get("tools") or []):
            first = conversation.messages[0] | {"tools": tools}
            conversation = conversation._replace(messages=[first, *conversation.messages[1:]])
    except ValueError as error:
        if isinstance(error, BadRow):
            raise
        raise BadRow("columns", "messages", str(error)) from None
    for kind in ("image", *MEDIA_KINDS):
        num_places = conversation.media.count(PartMedium(kind))
        if num_places != num_given.get(kind, 0):
            raise BadRow(
                "columns",
                f"{kind}-count",
                f"the messages have {num_places} parts of type {kind} without a medium of their "
                f"own, and the row has {num_given.get(kind, 0)} for them"
                + "".join(f"; {each}" for each in conversation.notices),
            )
    rest = {kind: iter(items) for kind, items in in_columns.items()}
    return conversation, [
        parse_image(next(rest[kind]) if value is None else value, kind)
        for kind, value in conversation.media
    ]


def _move(image: ImageRef, folder: str) -> ImageRef:
    """Return a reference with its path relative to the source instead of a folder in it."""
    if image.file is None or image.file.startswith("/") or "://" in image.file:
        return image
    path = f"{folder}/{image.file}"
    return replace(image, name=path, file=path)


def _parse_only_medium(values: dict[str, Any], kind: str) -> ImageRef:
    """Return the audio or video of a row without messages. Raises BadRow if it has several."""
    items = _single_column(values, MEDIA_KINDS[kind], f"no-{kind}")
    if isinstance(items[0], (int, float, list)):  # samples or frames, which are refused
        return parse_image(list(items), kind)
    if len(items) > 1:
        raise BadRow(
            "columns",
            f"{kind}-count",
            f"the row has {len(items)} of {kind}; a row without messages has at most one",
        )
    return parse_image(items[0], kind)


def rename_columns(values: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Rename the columns of a source row to mmray's names.

    A mapped column replaces all columns of its kind: with text=title, a column `texts` is dropped.

    Args:
        values: Values by the column names of the source, such as {"title": "a dog"}.
        columns: Names in the source by mmray's column names, such as {"text": "title"}.

    Returns:
        The same values by mmray's names. Columns without an entry keep their name. If several
        columns have texts ({"text": "alt,synthetic"}), the value of `text` is a list of their texts
        as dicts {"text": "a dog", "column of the text": "alt"}, without missing and blank ones.
    """
    if not columns:
        return values
    several = [ours for ours in columns if len(source_columns(columns, ours)) > 1]
    if several:
        texts = _named_texts(values, source_columns(columns, several[0]))
        values = values | ({columns[several[0]]: texts} if texts else {})
    theirs = {their: value for their, value in values.items() if their in columns.values()}
    replaced = replaced_columns(columns)
    rest = {
        name: value for name, value in values.items() if name not in theirs and name not in replaced
    }
    return rest | {our: theirs[their] for our, their in columns.items() if their in theirs}


def replaced_columns(columns: Mapping[str, str]) -> set[str]:
    """Return mmray's names of the columns that mapped ones replace: all of their kinds."""
    kinds = {name for kind in _KINDS if has_any(columns, kind) for name in kind}
    return kinds | columns.keys()


def format_unused(name: str) -> str:
    """Return the notice of a row for a column that the set does not have."""
    return f"column `{name[:40]}` is not used"


def join_unused(notices: Iterable[str]) -> list[str]:
    """Return notices in order, with one for all columns that are not used."""
    matches = {text: _UNUSED.fullmatch(text) for text in notices}
    names = [match[1] for match in matches.values() if match]
    others = [text for text, match in matches.items() if not match]
    if len(names) < 2:
        return [*matches]
    more = f" and {len(names) - _MAX_SHOWN_NAMES} more" * (len(names) > _MAX_SHOWN_NAMES)
    return [f"columns {', '.join(names[:_MAX_SHOWN_NAMES])}{more} are not used", *others]


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text that are joined by commas, such as (`alt`, `synthetic`) for
    `alt,synthetic`, without spaces around them and without empty ones.
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def source_columns(columns: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Return the columns of the source for some of mmray's columns: one for each, or several of
    texts, such as (`alt`, `synthetic`).
    """
    theirs: list[str] = []
    for ours in names:
        name = columns.get(ours, ours)
        theirs += split_names(name) if ours in TEXT_COLUMNS else (name,)
    return tuple(theirs)


def has_any(values: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a row has a value in one of some columns."""
    return not values.keys().isdisjoint(names)


def is_missing(value: object) -> bool:
    """Return whether a value of the source is missing: None, or NaN as pandas has it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: object) -> bool:
    """Return whether a caption is missing or white space only."""
    return is_missing(value) or (isinstance(value, str) and not value.strip())


def _named_texts(values: dict[str, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the texts of several columns with their names, without missing and blank ones."""
    texts: list[dict[str, Any]] = []
    for name in names:
        for value in _as_items(values.get(name)):
            text = value if isinstance(value, dict) else {"text": value}
            if not is_blank(text.get("text")):
                texts.append(text | {TEXT_COLUMN: name})
    return texts


def to_utf8(text: str) -> str:
    """Escape lone surrogates, which file names and JSON may contain and UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def is_safe_path(name: str) -> bool:
    """Return whether a path stays inside the folder that it is relative to.

    False for an absolute path, a path with `..`, a URL, and a name with control characters or
    invalid UTF-8. Links are not followed, so the path need not exist.
    """
    # Called several times for each image: faster than PurePosixPath.
    leaves = name.startswith("/") or ".." in name.split("/")
    return not leaves and "://" not in name and is_valid_name(name)


def is_valid_name(text: str) -> bool:
    """Return whether a text has no control characters and can be encoded as UTF-8.

    A text from JSON may have a lone surrogate (half of a UTF-16 pair), which UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return _CONTROL.search(text) is None


def parse_image(value: object, kind: str = "image") -> ImageRef:
    """Parse one value of a column of images, audio or video.

    Args:
        value: A path, absolute or relative to the folder of the source, a URL, a data URI, encoded
            bytes, an image in base64, or a dict {"bytes": ..., "path": ...} of Hugging Face
            `datasets`, one of which may be None. An ImageRef is returned unchanged.
        kind: `image`, `audio` or `video`.

    Returns:
        An ImageRef: `name` for messages, `kind`, and where the bytes are: `data` (inline), `file`
        with `offset` and `length`, or `url`.

    Raises:
        BadRow: With stage `columns` (`decode` for an image format that is not read) and a reason.
    """
    article = "a" if kind == "video" else "an"
    if isinstance(value, ImageRef):
        return value
    name = value
    data = value
    if isinstance(value, dict):
        name = value.get("path", value.get("url"))
        data = value.get("bytes")
        if name is None and data is None:
            fields = ", ".join(map(str, value))[:80]
            raise BadRow(
                "columns",
                kind,
                f"{article} {kind} is an object with {fields}: give it as bytes, as a path or as "
                "an object with bytes or path",
            )
    if isinstance(name, str) and name.startswith(_FILE_URL):
        name = unquote(name.removeprefix(_FILE_URL))
    if isinstance(data, bytes) and data.startswith(_BASE64_BYTES):
        data = data.decode(errors="replace")
    if isinstance(data, str) and data.startswith(_DATA_URI):
        return ImageRef(f"the {kind}", data=_decode_data_uri(data), kind=kind)
    if isinstance(data, str) and _is_base64(data):
        return ImageRef(f"the {kind}", data=_decode_base64(data, f"the {kind}"), kind=kind)
    if isinstance(data, bytes):
        name = name if isinstance(name, str) and name else f"the {kind}"
        return ImageRef(name, data=data, kind=kind)
    if kind == "video" and isinstance(data, list) and data and isinstance(data[0], str):
        raise BadRow(
            "columns",
            kind,
            f"a video is a list of {len(data)} frames: write them as a video file (`ffmpeg "
            "-framerate 2 -i %d.jpg OUT.mp4`), or give them as images",
        )
    if kind == "image" and isinstance(data, list) and data and isinstance(data[0], (str, dict)):
        raise BadRow("columns", kind, f"images are lists of lists, not one list (got {data!s:.40})")
    if isinstance(data, (list, int, float)):
        file = "PNG or JPEG" if kind == "image" else "WAV, FLAC or MP4"
        raise BadRow(
            "columns",
            kind,
            f"{article} {kind} is an array of numbers (decoded?): store the encoded bytes of a "
            f"{file} file, or its path (got {str(data)[:40]})",
        )
    if isinstance(value, (list, tuple)) or not isinstance(name, str) or not name.strip():
        shown = str(name)[:80]
        raise BadRow("columns", kind, f"{article} {kind} must be a path (got {shown!r})")
    if is_url(name) or not is_valid_name(name):
        shown = redact_url(name) if "://" in name else name[:200]
        hint = ""
        if is_url(name):
            hint = " (to download images, use img2dataset, and prepare its tars)"
        raise BadRow(
            "columns", "path", f"{shown!r} is not a path inside the folder of the source{hint}"
        )
    check_suffix(name)
    return ImageRef(name, file=name, kind=kind)


def _is_base64(text: str) -> bool:
    """Return whether a text is an image in base64 and not a path, which has a dot."""
    is_long = len(text) > _MIN_BASE64_LENGTH
    return is_long and text.startswith(_BASE64_IMAGES) and "." not in text


def check_suffix(name: str) -> None:
    """Raise BadRow for a file of an image format that is not read: of a camera's raw file, a TIFF,
    only a thumbnail would be decoded.
    """
    if name.lower().endswith(UNREAD_SUFFIXES):
        suffix = PurePosixPath(name).suffix.lower()
        raise BadRow(
            "decode", "format", f"{name}: {suffix} is not read: convert it to PNG, JPEG or WebP"
        )


def _decode_data_uri(uri: str) -> bytes:
    """Return the bytes of a data URI such as `data:image/png;base64,...`. Raises BadRow."""
    header, _, text = uri.partition(",")
    if not header.endswith(";base64"):
        raise BadRow("columns", "image", f"the data URI is not base64 (it starts {uri[:40]!r})")
    return _decode_base64(text, "the data URI")


def _decode_base64(text: str, what: str) -> bytes:
    """Return the bytes of a base64 text, which may have line breaks. Raises BadRow."""
    try:
        return base64.b64decode("".join(text.split()).translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow("columns", "image", f"{what} is not base64: {error}") from None


def _single_column(
    values: dict[str, Any], columns: tuple[str, ...], missing: str
) -> tuple[Any, ...]:
    """Return the value of the only present column of these, as a tuple of at least one item."""
    if not has_any(values, columns):
        has = ", ".join(sorted(map(str, values))[:10]) or "nothing"
        hint = ""
        if missing == "no-text" and "label" in values:
            hint = "; a label gives a caption only if it is the name of a class"
        raise BadRow(
            "columns",
            missing,
            f"none of the columns {', '.join(columns)} (the row has {has}{hint})",
        )
    items = _as_items(_single_value(values, columns))
    if not items:
        column = next(column for column in columns if column in values)
        raise BadRow("columns", missing, f"{column} is an empty list")
    return items


def _single_value(values: dict[str, Any], columns: tuple[str, ...]) -> Any:
    """Return the value of the only present column of these; at least one must be present."""
    present_columns = [column for column in columns if column in values]
    if len(present_columns) > 1:
        raise BadRow(
            "columns",
            "ambiguous",
            f"both {present_columns[0]} and {present_columns[1]}: choose one, for example "
            f"--columns {present_columns[-1].removesuffix('s')}={present_columns[-1]}",
        )
    return values[present_columns[0]]


def _as_items(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def label_number(label: str) -> int | None:
    """Return the number that a text label is, also if pandas wrote it as `3.0`; None for the name
    of a class, such as `03` and `3.7`.
    """
    number = label.strip().removesuffix(".0")
    return int(number) if is_integer(number) and len(number) < _MAX_DIGITS else None


def _is_label(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
