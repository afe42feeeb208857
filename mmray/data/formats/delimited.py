"""CSV and TSV: the delimiter, the names of the columns and the quoting are found in the first line.

The parser is Python's, made strict: others have no line numbers for records with quoted newlines,
cannot start inside a file, and reject a whole file for one bad line.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from mmray.data.formats.source import Record, SourceChunk
from mmray.data.formats.text_lines import CP1252_HINT, JsonlSource, LineReader, load_json
from mmray.data.images.formats import IMAGE_SUFFIXES
from mmray.data.media.formats import AUDIO_SUFFIXES, VIDEO_SUFFIXES
from mmray.data.rows import (
    IMAGE_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    NOTICES,
    BadRow,
    Values,
)
from mmray.errors import DataError
from mmray.storage.paths import open_sequential

# Limit of a field of a CSV, so that a missing quote does not consume the rest of the file.
MAX_FIELD_BYTES = 1024 * 1024
DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
# JSON lists in a field of a CSV
_LIST_COLUMNS = (
    "images",
    "audios",
    "videos",
    "texts",
    *MESSAGE_COLUMNS,
    "history",
)
_NO_HEADER = "; if its first line is a row, number them: --columns image=1 text=2"
_UTF16_ZEROS = {"UTF-16LE": slice(1, None, 2), "UTF-16BE": slice(0, None, 2)}
_NUM_ZEROS = 8
_SEPARATOR_LINE = re.compile(rb'"?sep=(\\t|.)"?\s*', re.I)  # a line that Excel writes
# an image, also one with the number of its caption (Flickr8k), or an address
_IMAGE = rf".*({'|'.join(map(re.escape, IMAGE_SUFFIXES))})"
_CLIP = rf".*({'|'.join(map(re.escape, (*AUDIO_SUFFIXES, *VIDEO_SUFFIXES)))})"
_DATA = re.compile(rf"(\w+://.*|{_IMAGE}(#\d+)?|{_CLIP})", re.I)
_NUMBERED_IMAGE = re.compile(rf"({_IMAGE})#\d+", re.I)


_QUOTES = (
    "a text that starts with a quote keeps it, as .tsv has no quoting (if it has, name the file "
    ".csv)"
)

# Lines of a field with as many fields as there are columns, above which they are rows, whatever
# is in them.
_MAX_ROW_LINES = 10


class _Layout(NamedTuple):
    """Columns of a file and how it is written; its rows start at the byte `start`."""

    names: list[str]
    start: int
    dialect: dict[str, Any]

    @property
    def delimiter(self) -> str:
        return DELIMITERS.get(self.dialect["delimiter"], repr(self.dialect["delimiter"]))


class CsvSource(JsonlSource):
    """A .csv file with commas, tabs, semicolons or bars; images are paths relative to it.

    The first line has the names of the columns.

    Attributes:
        suffixes: Suffixes of its files.
        delimiter: Character between two fields, unless another one is found in the first line.
    """

    title = "CSV"
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    has_types = False
    delimiter: ClassVar[str] = ","

    @cached_property
    def _layouts(self) -> dict[str, _Layout]:
        return {}  # by file

    def check(self, name: str) -> None:
        super().check(name)
        layout = self._layout(name)
        file = f"{self.folder / name} ({self.describe()})"
        self.columns.check_kinds(layout.names, file, _NO_HEADER)
        self.columns.check_named(layout.names, file, bool(self.name))

    def describe(self) -> str:
        return f"{self.title} with the delimiter {self._layout(next(iter(self.stats))).delimiter}"

    def iter_records(self, name: str, lines: LineReader) -> Iterator[list[str] | BadRow]:
        layout = self._layout(name)
        return (
            [] if lines.offset <= layout.start else record
            for record in self._read_fields(lines, layout.dialect, layout.names)
        )

    def _read_fields(
        self, lines: LineReader, dialect: dict[str, Any], names: Sequence[str] = ()
    ) -> Iterator[list[str] | BadRow]:
        csv.field_size_limit(MAX_FIELD_BYTES)
        record_lines = _RecordLines(lines)
        records = csv.reader(record_lines, **dialect)
        while True:
            record_lines.num_read = 0
            try:
                fields = next(records)
                if record_lines.num_read == 1 or not self._contains_rows(fields, dialect, names):
                    is_row = any(fields[1:]) or bool(fields and fields[0].strip())
                    yield fields if is_row else []  # a spreadsheet may end with rows of delimiters
                    continue
                problem = "a field contains rows, and ends"
            except StopIteration:
                return
            except csv.Error as error:
                problem = str(error).partition(" - ")[0]  # after it, Python's advice to programmers
            hint = "quote fields with a newline or a carriage return; within quotes, "
            if record_lines.num_read > 1:
                later = record_lines.num_read - 1
                problem += f" {later:,} lines after a quote opens in this line"
                hint = "the other lines are read as rows; "
                record_lines.rewind()
            hint += 'write a quote twice "", not with a backslash'
            yield BadRow("parse", "csv", f"not {self.title}: {problem} ({hint})")

    def _contains_rows(
        self, fields: Sequence[str], dialect: dict[str, Any], names: Sequence[str]
    ) -> bool:
        """Return whether lines within the fields of a record are rows, which a stray quote has
        joined to it.
        """
        theirs = self.columns.of(*IMAGE_COLUMNS, *MEDIA_COLUMNS)
        media = [number for number, name in enumerate(names) if name in theirs]
        for lines in (field.splitlines() for field in fields if "\n" in field):
            num_rows = 0
            for line in lines:
                values: list[str] = []
                with suppress(csv.Error):
                    values = next(csv.reader([line], **dialect), [])
                if len(values) < 2 or len(values) != len(names):
                    continue
                if any(
                    _DATA.fullmatch(values[number].strip())
                    and ("://" in values[number]) == ("://" in fields[number])
                    for number in media
                    if number < len(fields)
                ):
                    return True
                num_rows += 1
            if num_rows > max(_MAX_ROW_LINES, len(lines) // 2):
                return True
        return False

    def _layout(self, name: str) -> _Layout:
        """Return the columns and the dialect of a file. Raises DataError."""
        if name not in self._layouts:
            self._layouts[name] = self._read_layout(name)
        return self._layouts[name]

    def _read_layout(self, name: str) -> _Layout:
        path = self.folder / name
        with open_sequential(path) as file:
            lines = LineReader(file)
            start = lines.position()
            first = next(filter(bytes.strip, lines), b"")
            separator = _SEPARATOR_LINE.fullmatch(first)
            if separator:
                start = lines.position()
                first = next(filter(bytes.strip, lines), b"")
            _check_line_ends(first, str(path))
            text = first.decode(errors="replace")
            delimiter = self._find_delimiter(text)
            if separator:
                delimiter = separator[1].decode("latin-1").replace("\\t", "\t")
            dialect = self._dialect(delimiter, text)
            lines.rewind(start)
            records = self._read_fields(lines, dialect)
            record = next((each for each in records if each), [])
        if not record:
            raise DataError(
                f"{path} is empty: its first line must name the columns, such as image,text"
            )
        try:
            names = [name.strip() for name in _checked_fields(record)]
        except BadRow as bad:
            raise DataError(f"{path}: the line of column names: {bad.detail}") from None
        theirs = self.columns.mapped
        numbers = [str(number) for number in range(1, len(names) + 1)]
        if theirs and theirs <= set(numbers) and not theirs & set(names):
            return _Layout(numbers, start[0], dialect)
        names = [name or number for name, number in zip(names, numbers, strict=True)]
        self._check_names(names, str(path))
        return _Layout(names, lines.offset, dialect)

    def _find_delimiter(self, line: str) -> str:
        """Return the delimiter with which most fields of the first line are known columns,
        otherwise that of the format, otherwise the one with most fields.
        """

        def rank(delimiter: str) -> tuple[int, bool, int]:
            fields = next(csv.reader([line], delimiter=delimiter), [])
            is_default = delimiter == self.delimiter and len(fields) > 1
            num_known = sum(field.strip() in self.columns.known for field in fields)
            return num_known, is_default, len(fields)

        return max((self.delimiter, *DELIMITERS), key=rank)

    def _dialect(self, delimiter: str, line: str) -> dict[str, Any]:
        """Return the options of `csv.reader`; a header `image, text` has spaces to skip."""
        return {
            "delimiter": delimiter,
            "strict": True,
            "skipinitialspace": f"{delimiter} " in line,
        }

    def _check_names(self, names: list[str], file: str) -> None:
        """Raise DataError if a name is repeated, or the first line has no names but a row."""
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise DataError(
                f"{file}: duplicate column name `{name}`: {', '.join(names)[:200]}; rename one"
            )
        if self.columns.known.isdisjoint(names):
            data = [number for number, name in enumerate(names, 1) if _DATA.fullmatch(name)]
            if data:
                others = [number for number in range(1, len(names) + 1) if number not in data]
                # the longest field, not the number of a row
                text = max(others, key=lambda number: len(names[number - 1]), default=data[0])
                raise DataError(
                    f"{file}: the first line has no names of columns but a row "
                    f"({', '.join(names)[:200]}). Number the columns: "
                    f"--columns image={data[0]} text={text}"
                )

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        layout = self._layout(chunk.file)
        for location, record in super().records(chunk):
            yield location, (layout, record)

    def parse(self, record: tuple[_Layout, list[str] | BadRow]) -> Values:
        layout, fields_or_error = record
        names = layout.names
        fields = _checked_fields(fields_or_error)
        if not any(fields[len(names) :]):  # a line may end in a delimiter
            fields = fields[: len(names)]
        if len(fields) != len(names):
            hint = (
                f" (a field that contains the delimiter, {layout.delimiter}, needs quotes)"
                if len(fields) > len(names)
                else ""
            )
            raise BadRow(
                "parse", "columns", f"{len(fields)} fields, but {len(names)} columns{hint}"
            )
        values: Values = {
            column: field for column, field in zip(names, fields, strict=True) if field != ""
        }
        for theirs in self.columns.of(*_LIST_COLUMNS):
            if theirs in values:
                values[theirs] = _parse_list(values[theirs])
        for theirs in self.columns.of("image", "image_path"):
            if numbered := _NUMBERED_IMAGE.fullmatch(values.get(theirs, "")):
                values[theirs] = numbered[1]
        if "quoting" in layout.dialect and any(field.startswith('"') for field in fields):
            values[NOTICES] = [_QUOTES]
        return values


class TsvSource(CsvSource):
    """A .tsv file: tabs, no quoting; images are paths relative to it.

    The first line has the names of the columns.

    Attributes:
        suffixes: Suffixes of its files.
        delimiter: Character between two fields, unless another one is found in the first line.
    """

    title = "TSV"
    suffixes: ClassVar[tuple[str, ...]] = (".tsv",)
    delimiter: ClassVar[str] = "\t"

    def _dialect(self, delimiter: str, line: str) -> dict[str, Any]:
        if delimiter == "\t":
            return {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        return super()._dialect(delimiter, line)


class _RecordLines(Iterator[str]):
    """Lines as texts, which can be read again from the second one of a record."""

    def __init__(self, lines: LineReader) -> None:
        self.num_read = 0  # of the record; its reader sets it to 0
        self._lines = lines
        self._second = lines.position()

    def __next__(self) -> str:
        if self.num_read == 1:
            self._second = self._lines.position()
        self.num_read += 1
        return next(self._lines).decode(errors="surrogateescape")

    def rewind(self) -> None:
        """Continue with the second line of the record."""
        self._lines.rewind(self._second)


def _check_line_ends(line: bytes, file: str) -> None:
    """Raise DataError for text of which Python's csv gives no useful error."""
    if b"\0" in line:
        # ASCII characters have their zeros in the second or in the first byte
        encoding = next(
            (name for name, zeros in _UTF16_ZEROS.items() if not any(line[zeros][:_NUM_ZEROS])), ""
        )
        problem = "has zero bytes: it is no text"
        if encoding and b"\0\0" not in line:
            problem = (
                f"has zero bytes, as {encoding} without a byte order mark has: convert it with "
                f"`iconv -f {encoding} -t UTF-8 FILE > NEW`"
            )
        raise DataError(f"{file} {problem}")
    if b"\r" in line.rstrip(b"\r\n"):
        raise DataError(
            f"{file}: lines end with a carriage return only (old Macs): convert them with "
            "`tr '\\r' '\\n' < FILE > NEW`"
        )


def _parse_list(text: str) -> Any:
    """Return the list of a field: JSON, or Python's notation, which pandas writes.

    Raises BadRow.
    """
    try:
        return load_json(text.encode())
    except BadRow:
        if not text.startswith("["):
            detail = f'not JSON: a list is written as ["a", "b"] (got {text[:80]!r})'
            raise BadRow("parse", "json", detail) from None
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
            if not _has_adjacent_texts(text):
                return value
        raise


def _has_adjacent_texts(text: str) -> bool:
    """Return whether texts in a Python literal have no comma between them: they would be joined."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in pairwise(kinds)


def _checked_fields(record: list[str] | BadRow) -> list[str]:
    """Return the fields of a record. Raises BadRow for bytes that are not UTF-8."""
    if isinstance(record, BadRow):
        raise record
    for field in record:
        try:
            field.encode()
        except UnicodeEncodeError as error:
            start = len(field[: error.start].encode())
            detail = (
                f"not UTF-8 at byte {start} of a field (byte {ord(field[error.start]) & 0xFF:#x}; "
                f"{CP1252_HINT})"
            )
            raise BadRow("parse", "encoding", detail) from None
    return record
