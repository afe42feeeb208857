"""JSON lines, CSV (RFC 4180) and TSV (tabs, no quoting), cut into chunks of complete records with line numbers.

The parsers are Python's, made strict: others have no line numbers for records with quoted newlines, cannot start
inside a file, and reject a whole file for one bad line.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

from mmray.data.formats.rows import BadRow, rename_columns
from mmray.data.formats.source import Source, SourceChanged, SourceChunk, SourceItem, read_head
from mmray.errors import DataError
from mmray.storage.storage import Storage

MAX_LINE_BYTES = 16 * 1024 * 1024  # longer lines are truncated, so memory does not depend on their length
MAX_FIELD_BYTES = 1024 * 1024  # of a CSV, so that a missing quote does not consume the rest of the file
_PIECE_BYTES = 1024 * 1024
BOM = b"\xef\xbb\xbf"
_LIST_COLUMNS = ("images", "texts", "boxes", "box_labels", "messages")  # JSON lists in a field of a CSV
_NOT_JSONL = (
    (b"\x1f\x8b", "is gzip: unpack it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"PAR1", "is Parquet: prepare it with --format parquet"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (b"[", "is a JSON array: write one object a line, without brackets around them (jq -c '.[]' does)"),
)


class LineReader(Iterator[bytes]):
    """Lines of a file from `start` to `stop`, without the byte order mark; counts bytes and lines, and hashes them."""

    def __init__(self, file: Any, start: int = 0, stop: int = sys.maxsize) -> None:
        file.seek(start)
        self._file, self._stop = io.BufferedReader(file, _PIECE_BYTES), stop
        self.offset, self.num_lines, self.digest = start, 0, hashlib.sha256()

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


RecordIterator = Callable[[LineReader], Iterator[Any]]  # yields records of lines; a blank record is empty
NumberedRecords = Iterator[tuple[int, Any]]


def line_records(lines: LineReader) -> Iterator[bytes]:
    """Yield each line as a record."""
    return (line if line.strip() else b"" for line in lines)


def scan_lines(
    storage: Storage,
    name: str,
    rows_per_chunk: int,
    stops: Collection[int] = (),
    iter_records: RecordIterator = line_records,
) -> Iterator[SourceChunk]:
    """Yield the chunks of a text file, in order.

    A chunk ends after `rows_per_chunk` records. `stops` are the chunk ends of an earlier scan: a chunk also ends there
    if a record does, so a file that grew keeps its chunks and gets new ones.
    """
    index = start = records = rows = 0
    first_line = 1
    with storage.open(name) as file:
        lines = LineReader(file)
        for record in iter_records(lines):
            records, rows = records + 1, rows + bool(record)
            if records == rows_per_chunk or lines.offset in stops:
                yield SourceChunk(index, name, start, lines.offset, first_line, rows, lines.digest.hexdigest())
                index, start, first_line, records, rows = index + 1, lines.offset, lines.num_lines + 1, 0, 0
                lines.digest = hashlib.sha256()
        if lines.offset > start:
            yield SourceChunk(index, name, start, lines.offset, first_line, rows, lines.digest.hexdigest())


def read_lines(storage: Storage, chunk: SourceChunk, iter_records: RecordIterator = line_records) -> NumberedRecords:
    """Yield (line number, record) of the non-blank records of a chunk.

    Raises SourceChanged at the end if the bytes differ from those of the scan.
    """
    line = chunk.first_line
    with storage.open(chunk.file) as file:
        lines = LineReader(file, chunk.start, chunk.stop)
        for record in iter_records(lines):
            if record:
                yield line, record
            line = chunk.first_line + lines.num_lines
    if lines.digest.hexdigest() != chunk.signature:
        raise SourceChanged(f"{chunk.file} changed while it was read: run the same command again")


class JsonlSource(Source):
    """A .jsonl file; images are paths relative to it."""

    title = "JSON lines"

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        self.check()
        return scan_lines(self.storage, self.name, rows_per_chunk, stops, self.iter_records)

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        for line, record in read_lines(self.storage, chunk, self.iter_records):
            try:
                values: dict[str, Any] | BadRow = self.parse(record)
            except BadRow as bad:
                values = bad
            yield SourceItem(line, f"{self.name}:{line}", values)

    def check(self) -> None:
        """Raise DataError if the file is missing, empty, or clearly of another format."""
        head, path = read_head(self.storage, self.name), f"{self.storage.address}/{self.name}"
        if not head:
            raise DataError(f"{path} is empty: it must hold one JSON object a line, with `image` and `text`")
        for mark, advice in _NOT_JSONL:
            if head.removeprefix(BOM).lstrip().startswith(mark):
                raise DataError(f"{path} {advice}")

    def iter_records(self, lines: LineReader) -> Iterator[Any]:
        return line_records(lines)

    def parse(self, record: Any) -> dict[str, Any]:
        """Return the values of a record. Raises BadRow."""
        return rename_columns(parse_json(record), self.columns)


class CsvSource(JsonlSource):
    """A .csv file; images are paths relative to it."""

    title = "CSV"
    dialect: ClassVar[dict[str, Any]] = {"strict": True}

    def check(self) -> None:
        if not self._names:
            raise DataError(f"{self.storage.address}/{self.name} has no line of column names")

    def iter_records(self, lines: LineReader) -> Iterator[list[str] | BadRow]:
        """Yield the fields of each record, each UTF-8 byte as one character; the header is empty."""
        _, header_end = self._header
        return ([] if lines.offset <= header_end else record for record in self._iter_fields(lines))

    def _iter_fields(self, lines: LineReader) -> Iterator[list[str] | BadRow]:
        """Yield the fields of each record, each UTF-8 byte as one character, or a BadRow."""
        csv.field_size_limit(MAX_FIELD_BYTES)
        rows = csv.reader((line.decode("latin-1") for line in lines), **self.dialect)
        while True:
            try:
                fields = next(rows, None)
            except csv.Error as error:
                yield BadRow(
                    "parse", "csv", f"not {self.title}: {error} (quote fields with a newline or a carriage return)"
                )
                continue
            if fields is None:
                return
            yield fields if len(fields) > 1 or "".join(fields).strip() else []

    @cached_property
    def _header(self) -> tuple[list[str] | BadRow, int]:
        """The first non-blank record, and the byte offset of its end."""
        read_head(self.storage, self.name)
        with self.storage.open(self.name) as file:
            lines = LineReader(file)
            return next((record for record in self._iter_fields(lines) if record), []), lines.offset

    @cached_property
    def _names(self) -> list[str]:
        path = f"{self.storage.address}/{self.name}"
        try:
            names = [name.strip() for name in _decode_fields(self._header[0])]
        except BadRow as bad:
            raise DataError(f"{path}: the line of column names: {bad.detail}") from None
        if len(set(names)) < len(names):
            raise DataError(f"{path}: duplicate column name: {', '.join(names)[:200]}")
        return names

    def parse(self, record: list[str] | BadRow) -> dict[str, Any]:
        fields, names = _decode_fields(record), self._names
        if len(fields) != len(names):
            raise BadRow("parse", "columns", f"{len(fields)} fields, the first line names {len(names)}")
        values: dict[str, Any] = rename_columns(dict(zip(names, fields, strict=True)), self.columns)
        values = {name: text for name, text in values.items() if text != ""}
        for name in values.keys() & _LIST_COLUMNS:
            values[name] = parse_json(b'{"list": %s}' % values[name].encode())["list"]
        if "label" in values:
            with suppress(ValueError):  # parse_row rejects a text
                values["label"] = int(values["label"])
        return values


class TsvSource(CsvSource):
    """A .tsv file: tabs, no quoting; images are paths relative to it."""

    title = "TSV"
    dialect: ClassVar[dict[str, Any]] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}


def _decode_fields(record: list[str] | BadRow) -> list[str]:
    if isinstance(record, BadRow):
        raise record
    try:
        return [field.encode("latin-1").decode() for field in record]
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of a field") from None


def parse_json(data: bytes, names: Collection[str] | None = None) -> dict[str, Any]:
    """Parse a JSON object without NaN and repeated names. Raises BadRow.

    With `names`, only these fields are returned and checked for NaN.
    """
    if len(data) > MAX_LINE_BYTES:
        raise BadRow("parse", "too-long", f"the line is over {MAX_LINE_BYTES} bytes")
    try:
        if names is None:
            values = json.loads(data.decode(), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
        else:
            values = json.loads(data.decode())
        if not isinstance(values, dict):
            raise ValueError(f"must be an object {{...}}, is {type(values).__name__}")
        if names is not None:
            values = {name: values[name] for name in names if name in values}
            json.dumps(values, allow_nan=False)
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None
    return values


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")
