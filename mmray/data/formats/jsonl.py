"""JSON lines: one object per line, parsed strictly.

Python's parser is used, because others reject a whole file for one bad line or return nulls for a missing column. It is
made strict: NaN and duplicate names are errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from mmray.data.formats import lines
from mmray.data.formats.rows import BadRow, rename_columns
from mmray.data.formats.source import SourceChunk, SourceItem, read_head
from mmray.errors import DataError
from mmray.storage.storage import Storage

_NOT_JSONL = (
    (b"\x1f\x8b", "is gzip: unpack it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"PAR1", "is Parquet: prepare it with --format parquet"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (b"[", "is a JSON array: write one object a line, without brackets around them (jq -c '.[]' does)"),
)


class JsonlSource:
    """A .jsonl file; images are paths relative to it."""

    title: ClassVar[str] = "JSON lines"

    def __init__(self, place: Storage, name: str, columns: dict[str, str]) -> None:
        self.place, self.name, self.columns = place, name, columns

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        check_jsonl(self.place, self.name)
        return lines.scan_lines(self.place, self.name, rows_per_chunk, stops)

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        for line, data in lines.read_lines(self.place, chunk):
            values = try_parse(data)
            if not isinstance(values, BadRow):
                values = rename_columns(values, self.columns)
            yield SourceItem(line, f"{self.name}:{line}", values)


def check_jsonl(place: Storage, name: str) -> None:
    """Raise DataError if a file is missing, empty, or clearly not JSONL."""
    head, where = read_head(place, name), f"{place.address}/{name}"
    if not head:
        raise DataError(f"{where} is empty: it must hold one JSON object a line, with `image` and `text`")
    for mark, advice in _NOT_JSONL:
        if head.removeprefix(lines.BOM).lstrip().startswith(mark):
            raise DataError(f"{where} {advice}")


def try_parse(data: bytes) -> dict[str, Any] | BadRow:
    """Return the object of a line, or the parse error as BadRow."""
    try:
        return parse_json(data)
    except BadRow as bad:
        return bad


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object without NaN and duplicate names. Raises BadRow."""
    return _load_object(data, _unique_pairs, _refuse_constant)


def parse_fields(data: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Parse these fields of a JSON object like `parse_json`; NaN in other fields is ignored. Raises BadRow."""
    values = _load_object(data, _pairs_hook, _InvalidValue)
    wanted = {name: values[name] for name in names if name in values}
    try:
        json.dumps(wanted, default=_raise_invalid)
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None
    return wanted


@dataclass(frozen=True)
class _InvalidValue:
    """Placeholder for an invalid value."""

    constant: str
    why: str = "is not a JSON value"


def _raise_invalid(wrong: _InvalidValue) -> None:
    raise ValueError(f"{wrong.constant} {wrong.why}")


def _pairs_hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        values |= {name: _InvalidValue(repr(name), "is given twice") for name, count in counts.items() if count > 1}
    return values


def _load_object(
    data: bytes, of_pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]], of_constant: Callable[[str], Any]
) -> dict[str, Any]:
    if len(data) > lines.MAX_LINE_BYTES:
        raise BadRow("parse", "too-long", f"the line is over {lines.MAX_LINE_BYTES} bytes")
    try:
        values = json.loads(data.decode(), object_pairs_hook=of_pairs, parse_constant=of_constant)
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRow("parse", "json", f"must be an object {{...}}, is {type(values).__name__}")
    return values


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")
