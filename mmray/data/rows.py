"""Columns of source rows, bad rows, and references to images, audio and video."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from mmray.data.images.formats import UNREAD_SUFFIXES
from mmray.storage.address import is_url, redact_url

Values = dict[str, Any]  # of a row, by the names of its columns
HELD_OUT_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")  # not trained on
KEPT_COLUMNS = "kept columns"  # dict of the columns of `prepare.keep`, by name
FOLDER = "folder of paths"  # of all media, in the folder of the source
NOTICES = "notices of the reader"  # list of SourceRow.notices that a format adds
_UNUSED = re.compile(r"column (`[^`]*`) is not used")  # an entry of NOTICES
_MAX_SHOWN_NAMES = 12
MORE_TEXTS = "a file has several texts or subtitles next to it, of which one is used"
_DATA_URI = "data:"
_FILE_URL = "file://"
IMAGE_COLUMNS = ("image_path", "image", "images")
MEDIA_KINDS = {"audio": ("audio", "audios"), "video": ("video", "videos")}  # columns by kind
MEDIA_COLUMNS = (*MEDIA_KINDS["audio"], *MEDIA_KINDS["video"])
SPAN_COLUMNS = ("t0_s", "t1_s")  # start and end of a text in seconds
MAX_OVERHANG_S = 0.5  # of a span: a last text may end a moment after its video
TEXT_COLUMNS = ("text", "texts")
TEXT_COLUMN = "column of the text"  # name in a text {"text": ...}, of one of several columns
MESSAGE_COLUMNS = ("messages", "conversations")
# The first characters of images in base64: JPEG, PNG, GIF, WebP, TIFF, BMP, and AVIF or JPEG 2000.
_BASE64_IMAGES = ("/9j/", "_9j_", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkq", "TU0AK", "Qk", "AAAA")
_MIN_BASE64_LENGTH = 64
_BASE64_BYTES = tuple(each.encode() for each in (*_BASE64_IMAGES, _DATA_URI))
_URL_SAFE = str.maketrans("-_", "+/")  # variant of base64 for addresses
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


def has_any(values: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a row has a value in one of some columns."""
    return not values.keys().isdisjoint(names)


def is_missing(value: object) -> bool:
    """Return whether a value of the source is missing: None, or NaN as pandas has it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: object) -> bool:
    """Return whether a caption is missing or white space only."""
    return is_missing(value) or (isinstance(value, str) and not value.strip())


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
