"""CSV (RFC 4180) and TSV (tabs, no quoting) with a header line."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from mmray.data.formats import lines
from mmray.data.formats.jsonl import parse_json
from mmray.data.formats.rows import BadRow, rename_columns
from mmray.data.formats.source import SourceChunk, SourceItem, read_head
from mmray.errors import DataError
from mmray.storage.storage import Storage

_INTEGERS = ("label",)
_LISTS = ("images", "texts", "boxes", "box_labels", "messages")  # JSON lists in a field


class CsvSource:
    """A .csv file; images are paths relative to it."""

    title: ClassVar[str] = "CSV"
    quoted: ClassVar[bool] = True

    def __init__(self, place: Storage, name: str, columns: dict[str, str]) -> None:
        self.place, self.name, self.columns = place, name, columns

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        if not self._header[1]:
            raise DataError(f"{self.place.address}/{self.name} has no line of column names")
        has_names = False
        for chunk in lines.scan_lines(self.place, self.name, rows_per_chunk, stops, self.quoted):
            if chunk.num_rows and not has_names:
                has_names, chunk = True, replace(chunk, num_rows=chunk.num_rows - 1)
            yield chunk

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        names_line, names = self._header
        for line, data in lines.read_lines(self.place, chunk, self.quoted):
            if line != names_line:
                yield SourceItem(line, f"{self.name}:{line}", self._values(names, data))

    def split(self, text: str) -> list[str]:
        """Split a record into fields. Raises csv.Error."""
        csv.field_size_limit(lines.MAX_LINE_BYTES)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]  # \r\r\n ends one line
        if len(rows) > 1:
            raise csv.Error(
                f"a carriage return cuts it into {len(rows)} records: quote the field, or end lines with \\n"
            )
        return rows[0] if rows else []

    @cached_property
    def _header(self) -> tuple[int, list[str]]:
        """Return (line, column names) of the first non-blank record."""
        read_head(self.place, self.name)
        whole = SourceChunk(0, self.name, 0, self.place.size(self.name) or 0, 1, None, "")
        line, data = next(lines.read_lines(self.place, whole, self.quoted), (0, b"")) if whole.stop else (0, b"")
        try:
            names = [name.strip() for name in self.split(data.decode())]
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{self.place.address}/{self.name}: the line of column names: {error}") from None
        if len(set(names)) < len(names):
            raise DataError(f"{self.place.address}/{self.name}: duplicate column name: {', '.join(names)[:200]}")
        return line, names

    def _values(self, names: list[str], data: bytes) -> dict[str, Any] | BadRow:
        if len(data) > lines.MAX_LINE_BYTES:
            return BadRow("parse", "too-long", f"the line is over {lines.MAX_LINE_BYTES} bytes")
        try:
            fields = self.split(data.decode())
        except UnicodeDecodeError as error:
            return BadRow("parse", "encoding", f"not UTF-8 at byte {error.start} of the line")
        except csv.Error as error:
            return BadRow("parse", "csv", f"not {self.title}: {error}")
        if len(fields) != len(names):
            return BadRow("parse", "columns", f"{len(fields)} fields, the first line names {len(names)}")
        try:
            return convert_fields(rename_columns(dict(zip(names, fields, strict=True)), self.columns))
        except BadRow as bad:
            return bad


class TsvSource(CsvSource):
    """A .tsv file: tabs, no quoting; images are paths relative to it."""

    title: ClassVar[str] = "TSV"
    quoted: ClassVar[bool] = False

    def split(self, text: str) -> list[str]:
        return text.rstrip("\r\n").split("\t")


def convert_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Convert text fields to typed values; empty fields are dropped. Raises BadRow."""
    out: dict[str, Any] = {}
    for name, text in values.items():
        if text == "":
            continue
        try:
            out[name] = int(text) if name in _INTEGERS else text
        except ValueError:
            raise BadRow(
                "columns", "label", f"label must be an integer (number your classes), is {text[:40]!r}"
            ) from None
        if name in _LISTS:
            out[name] = parse_json(b'{"list": %s}' % text.encode())["list"]
    return out
