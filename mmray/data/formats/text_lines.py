"""JSON lines, CSV (RFC 4180) and TSV (tabs, no quoting), cut into chunks of complete records with
line numbers.

The parsers are Python's, made strict: others have no line numbers for records with quoted newlines,
cannot start inside a file, and reject a whole file for one bad line.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

from mmray.data.formats.source import Source, SourceChunk, changed_error, read_head
from mmray.data.rows import MESSAGE_COLUMNS, BadRow
from mmray.errors import DataError
from mmray.storage.paths import open_sequential

# Longer lines are truncated, so memory does not depend on their length.
MAX_LINE_BYTES = 16 * 1024 * 1024
# Limit of a field of a CSV, so that a missing quote does not consume the rest of the file.
MAX_FIELD_BYTES = 1024 * 1024
_PIECE_BYTES = 1024 * 1024
BOM = b"\xef\xbb\xbf"
# JSON lists in a field of a CSV
_LIST_COLUMNS = ("images", "texts", "boxes", "box_labels", *MESSAGE_COLUMNS)
_OTHER_FORMATS = (
    (b"\x1f\x8b", "is gzip: unpack it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"PAR1", "is Parquet: prepare it with --format parquet"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (
        b"[",
        "is a JSON array: write one object a line, without brackets around them (jq -c '.[]' does)",
    ),
)


class LineReader(Iterator[bytes]):
    """Lines of a file from `start` to `stop`, without the byte order mark; counts bytes and lines,
    and hashes them.
    """

    def __init__(self, file: Any, start: int = 0, stop: int = sys.maxsize) -> None:
        file.seek(start)
        self._file = io.BufferedReader(file, _PIECE_BYTES)
        self._stop = stop
        self.offset = start
        self.num_lines = 0
        self.digest = hashlib.sha256()

    def __next__(self) -> bytes:
        line = b""
        while piece := self._file.readline(min(_PIECE_BYTES, self._stop - self.offset)):
            self.digest.update(piece)
            if len(line) <= MAX_LINE_BYTES:
                line += piece.removeprefix(BOM if self.offset == 0 else b"")
            self.offset += len(piece)
            if piece.endswith(b"\n"):
                self.num_lines += 1
                break
        if not line:
            raise StopIteration
        return line


class JsonlSource(Source):
    """A .jsonl file; images are paths relative to it."""

    title = "JSON lines"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def scan(
        self, rows_per_chunk: int, previous_chunk_ends: Collection[int]
    ) -> Iterator[SourceChunk]:
        """Yield chunks of `rows_per_chunk` records, or up to a previous end: a file that grew keeps
        its chunks.
        """
        self.check()
        index = start = records = rows = 0
        first_line = 1
        with open_sequential(self.folder / self.name) as file:
            lines = LineReader(file)
            for record in self.iter_records(lines):
                records += 1
                rows += bool(record)
                if records == rows_per_chunk or lines.offset in previous_chunk_ends:
                    yield SourceChunk(
                        index,
                        self.name,
                        start,
                        lines.offset,
                        first_line,
                        rows,
                        lines.digest.hexdigest(),
                    )
                    index += 1
                    start = lines.offset
                    first_line = lines.num_lines + 1
                    records = 0
                    rows = 0
                    lines.digest = hashlib.sha256()
            if lines.offset > start:
                yield SourceChunk(
                    index,
                    self.name,
                    start,
                    lines.offset,
                    first_line,
                    rows,
                    lines.digest.hexdigest(),
                )

    def records(self, chunk: SourceChunk) -> Iterator[tuple[int, str, Any]]:
        line = chunk.first_line
        with open_sequential(self.folder / self.name) as file:
            lines = LineReader(file, chunk.start, chunk.stop)
            for record in self.iter_records(lines):
                if record:
                    yield line, f"{self.name}:{line}", record
                line = chunk.first_line + lines.num_lines
        if lines.digest.hexdigest() != chunk.signature:
            raise changed_error(chunk.file)

    def check(self) -> None:
        """Raise DataError if the file is missing or clearly of another format."""
        head = read_head(self.folder, self.name)
        path = self.folder / self.name
        for mark, advice in _OTHER_FORMATS:
            if head.removeprefix(BOM).lstrip().startswith(mark):
                raise DataError(f"{path} {advice}")

    def iter_records(self, lines: LineReader) -> Iterator[Any]:
        """Yield the records of lines; a blank record is empty."""
        return (line if line.strip() else b"" for line in lines)

    def parse(self, record: Any) -> dict[str, Any]:
        return parse_json(record)


class CsvSource(JsonlSource):
    """A .csv file; images are paths relative to it."""

    title = "CSV"
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    dialect: ClassVar[dict[str, Any]] = {"strict": True}

    def iter_records(self, lines: LineReader) -> Iterator[list[str] | BadRow]:
        """Yield the fields of each record, each UTF-8 byte as one character; the header is
        empty.
        """
        return (
            [] if lines.offset <= self._header[1] else record for record in self._read_fields(lines)
        )

    def _read_fields(self, lines: LineReader) -> Iterator[list[str] | BadRow]:
        csv.field_size_limit(MAX_FIELD_BYTES)
        rows = csv.reader((line.decode("latin-1") for line in lines), **self.dialect)
        while True:
            try:
                fields = next(rows)
                yield fields if len(fields) > 1 or "".join(fields).strip() else []
            except StopIteration:
                return
            except csv.Error as error:
                problem = str(error).partition(" - ")[0]  # after it, Python's advice to programmers
                detail = (
                    f"not {self.title}: {problem} (quote fields with a newline or a carriage "
                    "return)"
                )
                yield BadRow("parse", "csv", detail)

    @cached_property
    def _header(self) -> tuple[list[str], int]:
        """Column names, and the byte offset of the end of their record. Raises DataError."""
        path = self.folder / self.name
        with open_sequential(path) as file:
            lines = LineReader(file)
            record = next((record for record in self._read_fields(lines) if record), [])
        if not record:
            raise DataError(
                f"{path} is empty: its first line must name the columns, such as image,text"
            )
        try:
            names = [name.strip() for name in _decode_fields(record)]
        except BadRow as bad:
            raise DataError(f"{path}: the line of column names: {bad.detail}") from None
        if len(set(names)) < len(names):
            raise DataError(f"{path}: duplicate column name: {', '.join(names)[:200]}")
        return names, lines.offset

    def parse(self, record: list[str] | BadRow) -> dict[str, Any]:
        fields = _decode_fields(record)
        names, _ = self._header
        if len(fields) != len(names):
            raise BadRow(
                "parse", "columns", f"{len(fields)} fields, the first line names {len(names)}"
            )
        values: dict[str, Any] = {
            name: field for name, field in zip(names, fields, strict=True) if field != ""
        }
        for column in _LIST_COLUMNS:
            if (name := self.columns.get(column, column)) in values:
                values[name] = load_json(values[name].encode())
        if (name := self.columns.get("label", "label")) in values:
            with suppress(ValueError):  # parse_row rejects a text
                values[name] = int(values[name])
        return values


class TsvSource(CsvSource):
    """A .tsv file: tabs, no quoting; images are paths relative to it."""

    title = "TSV"
    suffixes: ClassVar[tuple[str, ...]] = (".tsv",)
    dialect: ClassVar[dict[str, Any]] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}


def _decode_fields(record: list[str] | BadRow) -> list[str]:
    if isinstance(record, BadRow):
        raise record
    try:
        return [field.encode("latin-1").decode() for field in record]
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of a field") from None


def parse_json(data: bytes, strict: bool = True) -> dict[str, Any]:
    """Parse a JSON object; if `strict`, without NaN and repeated names. Raises BadRow."""
    values = load_json(data, strict)
    if not isinstance(values, dict):
        raise BadRow("parse", "json", f"must be an object {{...}} (got {type(values).__name__})")
    return values


def load_json(data: bytes, strict: bool = True) -> Any:
    """Parse any JSON value, like `parse_json`. Raises BadRow."""
    if len(data) > MAX_LINE_BYTES:
        raise BadRow("parse", "too-long", f"the line is over {MAX_LINE_BYTES} bytes")
    hooks: dict[str, Any] = (
        {"object_pairs_hook": _unique_pairs, "parse_constant": _refuse_constant} if strict else {}
    )
    try:
        return json.loads(data.decode(), **hooks)
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} is given twice"
        )
    return values


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")
