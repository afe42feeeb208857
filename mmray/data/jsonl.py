"""One line of a JSONL source to a row, strictly: what is not plainly meant is a fault of that row.

Python's parser, because others fail a whole file for one bad line or turn a missing column into silent nulls; made
strict, because it lets NaN and repeated names through.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

MAX_LINE_BYTES = 16 * 1024 * 1024
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_IMAGE_COLUMNS = ("image_path", "image", "images")
_TEXT_COLUMNS = ("text", "texts")


class BadRow(ValueError):
    """A row that goes to quarantine: at which stage, for which reason (a short word), and a sentence."""

    def __init__(self, stage: str, reason: str, detail: str, key: str | None = None) -> None:
        super().__init__(f"{stage} {reason}: {detail}")
        self.stage, self.reason, self.detail, self.key = stage, reason, detail, key


@dataclass(frozen=True)
class RawRow:
    """A row as the source states it; `images` are names in the source's folder."""

    key: str
    images: tuple[str, ...]
    texts: tuple[Any, ...]
    label: int | None
    split: str | None
    language: str | None


def parse_line(data: bytes, source: str) -> RawRow:
    """A row from one line. `source` (file:line) is its key where it states none. Raises BadRow."""
    values = _parse_json(data)
    key = _key(values, source)
    try:
        return RawRow(
            key=key,
            images=_images(values),
            texts=_texts(values),
            label=_label(values),
            split=_name(values, "split"),
            language=_name(values, "language"),
        )
    except BadRow as bad:
        bad.key = key
        raise


def _parse_json(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_LINE_BYTES:
        raise BadRow("parse", "too-long", f"the line is over {MAX_LINE_BYTES} bytes")
    try:
        values = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRow("parse", "json", f"must be an object {{...}}, is {type(values).__name__}")
    return {name: value for name, value in values.items() if value is not None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _key(values: dict[str, Any], source: str) -> str:
    key = values.get("id", values.get("key", source))
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise BadRow("columns", "key", f"id must be text or an integer, is {type(key).__name__}")
    key = str(key)
    if not key.strip() or len(key) > 1024 or not _is_plain(key):
        raise BadRow("columns", "key", f"id must be 1 to 1024 characters without controls, is {key[:40]!r}")
    return key


def _images(values: dict[str, Any]) -> tuple[str, ...]:
    names = _one_of(values, _IMAGE_COLUMNS, "no-image")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise BadRow("columns", "image", f"an image must be a path, is {str(name)[:80]!r}")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "://" in name or not _is_plain(name):
            raise BadRow("columns", "path", f"{name[:200]!r} is not a path inside the folder of the source")
    return names


def _texts(values: dict[str, Any]) -> tuple[Any, ...]:
    return _one_of(values, _TEXT_COLUMNS, "no-text")


def _one_of(values: dict[str, Any], columns: tuple[str, ...], missing: str) -> tuple[Any, ...]:
    """The value of the one column of these that is there, as a tuple of at least one item."""
    given = [column for column in columns if column in values]
    if not given:
        has = ", ".join(sorted(values)[:10]) or "nothing"
        raise BadRow("columns", missing, f"none of the columns {', '.join(columns)} (the row has {has})")
    if len(given) > 1:
        raise BadRow("columns", "ambiguous", f"both {given[0]} and {given[1]}: give one")
    value = values[given[0]]
    items = tuple(value) if isinstance(value, list) else (value,)
    if not items:
        raise BadRow("columns", missing, f"{given[0]} is an empty list")
    return items


def _label(values: dict[str, Any]) -> int | None:
    label = values.get("label")
    if label is not None and (isinstance(label, bool) or not isinstance(label, int) or abs(label) >= 2**63):
        raise BadRow("columns", "label", f"label must be an integer (number your classes), is {str(label)[:40]!r}")
    return label


def _name(values: dict[str, Any], column: str) -> str | None:
    """A split or a language: a short plain word, as it becomes part of a file name."""
    name = values.get(column)
    if name is not None and not (isinstance(name, str) and _WORD.fullmatch(name)):
        raise BadRow("columns", column, f"{column} must be a word of letters, digits, . _ -, is {str(name)[:40]!r}")
    return name


def _is_plain(text: str) -> bool:
    """Without control characters, and possible in UTF-8 (JSON can spell half a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return _CONTROL.search(text) is None
