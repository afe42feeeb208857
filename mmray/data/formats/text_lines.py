"""JSON lines, and lines of other text formats, cut into chunks of complete records with line
numbers.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mmray.data.formats.source import (
    RawRow,
    Record,
    Source,
    SourceChunk,
    changed_error,
    read_head,
)
from mmray.data.formats.splits import splits_of_paths
from mmray.data.images.formats import detect_format
from mmray.data.rows import FOLDER, BadRow, Values
from mmray.errors import DataError
from mmray.storage.paths import open_sequential
from mmray.storage.requests import iter_parallel

# Longer lines are truncated, so memory does not depend on their length.
MAX_LINE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_PART_BYTES = 64 << 20  # of an earlier scan that one thread compares
BOM = b"\xef\xbb\xbf"
_UTF16_ADVICE = "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8 {} > NEW`"
_OTHER_FORMATS = (
    (b"\x1f\x8b", "is gzip: unpack it with `gunzip {}`"),
    (b"BZh", "is bzip2: unpack it with `bunzip2 {}`"),
    (b"\xfd7zXZ", "is xz: unpack it with `unxz {}`"),
    (b"\x28\xb5\x2f\xfd", "is zstd: unpack it with `unzstd {}`"),
    (b"PK\x03\x04", "is a zip archive or a workbook: unpack it, or save the sheet as CSV in UTF-8"),
    (b"\xd0\xcf\x11\xe0", "is a workbook: save the sheet as CSV in UTF-8"),
    (b"PAR1", "is Parquet: prepare it with --format parquet"),
    (b"ARROW1", "is an Arrow file: write it as Parquet, or pass the table to `mmray.prepare`"),
    (b"\x89HDF", "is HDF5: pass its rows to `mmray.prepare` as an iterable of dicts"),
    (b"SQLite format 3", "is a database: export a table as CSV"),
    (codecs.BOM_UTF16_LE, _UTF16_ADVICE),
    (codecs.BOM_UTF16_BE, _UTF16_ADVICE),
)
CP1252_HINT = "a file of Windows is converted with `iconv -f CP1252 -t UTF-8 FILE > NEW`"


class Counts(NamedTuple):
    """Byte after a chunk, its numbers of lines and of rows, and the digest of its bytes."""

    stop: int
    num_lines: int
    num_rows: int
    digest: str


class LineReader(Iterator[bytes]):
    """Iterates the lines of a file as bytes; counts bytes and lines, and hashes them.

    A line includes its newline. The last line is returned also if it has none. The byte order mark
    at the start of the file is removed. The end of a line that is longer than MAX_LINE_BYTES (16
    MiB) is dropped.

    Args:
        file: Raw binary file (io.RawIOBase) that can seek.
        start: Byte at which the first line starts.
        stop: Byte after the last line.

    Attributes:
        offset: Position in the file after the last line that was returned, in bytes.
        num_lines: Number of lines so far that ended with a newline.
        digest: hashlib's SHA-256 object of the bytes so far; a caller may replace it.
    """

    def __init__(self, file: io.RawIOBase, start: int = 0, stop: int = sys.maxsize) -> None:
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

    def position(self) -> tuple[int, int, Any]:
        """Return the current position, for `rewind`."""
        return self.offset, self.num_lines, self.digest.copy()

    def rewind(self, position: tuple[int, int, Any]) -> None:
        """Continue from an earlier position, as if the bytes after it had not been read."""
        self.offset, self.num_lines, self.digest = position
        self._file.seek(self.offset)


class JsonlSource(Source):
    """A .jsonl file, or a folder of such files whose names define splits; images are paths relative
    to their file.

    A line is one row, a JSON object of values by column name.

    A subclass for another text format replaces `check(name)` (raises DataError for a wrong file),
    `iter_records(name, lines)` (yields the records of a file; a false value for a blank one) and
    `parse(record)` (returns values by column name).

    Attributes:
        suffixes: Suffixes of its files.
    """

    title = "JSON lines"
    reads_folder = True
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        files = [name for name in names if name.lower().endswith(cls.suffixes)]
        return len(files) > 1 and None not in splits_of_paths(files).values()

    def scan_file(self, name: str, rows_per_chunk: int, rows_before: int) -> Iterator[SourceChunk]:
        start = 0
        first_line = 1
        for chunk, num_lines in self._unchanged_chunks(name):
            yield chunk
            start = chunk.stop
            first_line += num_lines
            rows_before += chunk.num_rows or 0
        sizes = partial(self.chunk_rows, rows_per_chunk)
        with open_sequential(self.folder / name) as file:
            if type(self).iter_records is JsonlSource.iter_records:
                counts = _count_lines(file, start, rows_before, sizes)
            else:
                lines = LineReader(file, start)
                records = self.iter_records(name, lines)
                counts = _count_records(lines, records, rows_before, sizes)
            for stop, num_lines, num_rows, digest in counts:
                yield SourceChunk(0, name, start, stop, first_line, num_rows, digest)
                start = stop
                first_line += num_lines

    def _unchanged_chunks(self, name: str) -> Iterator[tuple[SourceChunk, int]]:
        """Yield the first chunks of an earlier scan that the file still has, with their numbers of
        lines. Their bytes are compared, which is faster than a scan of their lines.

        The last one is left out if it ends without a newline, because its last record may be
        continued.
        """
        earlier = [chunk for chunk in self.earlier.chunks if chunk.file == name]
        parts = [[*part] for _, part in groupby(earlier, lambda chunk: chunk.start // _PART_BYTES)]
        stop = 0
        for counts in iter_parallel(self._count_unchanged, parts):
            for chunk, num_lines in counts:
                if chunk.start != stop or num_lines is None:
                    return
                yield chunk, num_lines
                stop = chunk.stop

    def _count_unchanged(self, chunks: list[SourceChunk]) -> list[tuple[SourceChunk, int | None]]:
        """Return the number of lines of each chunk; None: the file has other bytes now, or the
        chunk ends without a newline.
        """
        counts: list[tuple[SourceChunk, int | None]] = []
        with open_sequential(self.folder / chunks[0].file) as file:
            for chunk in chunks:
                file.seek(chunk.start)
                digest = hashlib.sha256()
                num_lines = 0
                piece = b""
                for left in range(chunk.stop - chunk.start, 0, -_PIECE_BYTES):
                    piece = file.read(min(_PIECE_BYTES, left))
                    digest.update(piece)
                    num_lines += piece.count(b"\n")
                is_same = digest.hexdigest() == chunk.signature and piece.endswith(b"\n")
                counts.append((chunk, num_lines if is_same else None))
        return counts

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        line = chunk.first_line
        with open_sequential(self.folder / chunk.file) as file:
            lines = LineReader(file, chunk.start, chunk.stop)
            for record in self.iter_records(chunk.file, lines):
                if record:
                    yield f"{chunk.file}:{line}", record
                line = chunk.first_line + lines.num_lines
        if lines.digest.hexdigest() != chunk.signature:
            raise changed_error(chunk.file)

    def check(self, name: str) -> None:
        head = read_head(self.folder, name)
        for mark, advice in _OTHER_FORMATS:
            if head.startswith(mark):
                raise DataError(f"{self.folder / name} {advice.format(name)}")
        image = detect_format(head)
        if image and b"\0" in head:  # a text may also start with the letters of a format
            raise DataError(
                f"{self.folder / name} is an image ({image}): give a file of rows, or a folder"
            )

    def iter_records(self, name: str, lines: LineReader) -> Iterator[Any]:
        """Yield the records of a file: its lines, or b"" for a line of white space only.

        Args:
            lines: Iterates the lines of the file as bytes.
        """
        return (line if line.strip() else b"" for line in lines)

    def parse(self, record: Any) -> Values:
        return parse_json(record)

    def read(self, chunk: SourceChunk) -> Iterator[RawRow]:
        folder = chunk.file.rpartition("/")[0]
        for row in super().read(chunk):
            if folder and not self.name and isinstance(row.values, dict):
                row.values[FOLDER] = folder
            yield row


def _count_records(
    lines: LineReader, records: Iterator[Any], rows_before: int, sizes: Callable[[int], int]
) -> Iterator[Counts]:
    """Yield the counts of each chunk of records, whose number depends on the rows before it."""
    stop = lines.offset
    lines_before = 0
    while True:
        num_rows = sum(map(bool, islice(records, sizes(rows_before))))
        if lines.offset == stop:
            return
        stop = lines.offset
        yield Counts(stop, lines.num_lines - lines_before, num_rows, lines.digest.hexdigest())
        lines_before = lines.num_lines
        rows_before += num_rows
        lines.digest = hashlib.sha256()


def _count_lines(
    file: io.RawIOBase, start: int, rows_before: int, sizes: Callable[[int], int]
) -> Iterator[Counts]:
    """Yield the counts that `_count_records` yields of plain lines, without an object for each."""
    file.seek(start)
    stop = offset = start
    digest = hashlib.sha256()
    left = sizes(rows_before)
    num_lines = num_rows = 0
    has_text = False
    while piece := file.read(_PIECE_BYTES):
        ends, rows, has_text = _find_rows(piece, offset, has_text)
        line = position = 0
        while line < len(ends):
            last = min(line + left, len(ends))
            num_lines += last - line
            num_rows += int(rows[last] - rows[line])
            left -= last - line
            line = last
            end = int(ends[line - 1])
            digest.update(memoryview(piece)[position:end])
            position = end
            if left == 0:
                stop = offset + position
                yield Counts(stop, num_lines, num_rows, digest.hexdigest())
                rows_before += num_rows
                left = sizes(rows_before)
                digest = hashlib.sha256()
                num_lines = num_rows = 0
        digest.update(piece[position:])
        offset += len(piece)
    if offset > stop:
        yield Counts(offset, num_lines, num_rows + has_text, digest.hexdigest())


def _find_rows(piece: bytes, offset: int, has_text: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the positions after the line ends of a piece of a file, the number of rows before each
    of its lines, and whether the line that continues after it has more than white space.

    Args:
        offset: Position of the piece in the file.
        has_text: Whether its first line has text before the piece.
    """
    data = np.frombuffer(piece, np.uint8)
    ends = np.flatnonzero(data == ord("\n")) + 1
    starts = np.append(len(BOM) if offset == 0 and piece.startswith(BOM) else 0, ends)
    is_row = np.ones(len(starts), bool)
    # Lines that start with white space may have nothing else.
    for number in np.flatnonzero(data[starts[:-1]] <= ord(" ")).tolist():
        is_row[number] = bool(piece[starts[number] : ends[number]].strip())
    is_row[-1] = bool(piece[starts[-1] :].strip())
    is_row[0] |= has_text
    return ends, np.append(0, np.cumsum(is_row)), bool(is_row[-1])


def parse_json(data: bytes, strict: bool = True) -> Values:
    """Parse a JSON object, see `load_json`. Raises BadRow."""
    values = load_json(data, strict)
    if not isinstance(values, dict):
        raise BadRow("parse", "json", f"must be an object {{...}} (got {type(values).__name__})")
    return values


def load_json(data: bytes, strict: bool = True) -> Any:
    """Parse any JSON value.

    Args:
        data: Its UTF-8 bytes.
        strict: Whether infinities and repeated names are errors. NaN is always accepted. False: of
            a repeated name the last value counts.

    Raises:
        BadRow: With stage `parse` and reason `json`, `encoding` or `too-long` (over 16 MiB).
    """
    if len(data) > MAX_LINE_BYTES:
        raise BadRow("parse", "too-long", f"the line is over {MAX_LINE_BYTES} bytes")
    hooks: dict[str, Any] = (
        {"object_pairs_hook": unique_pairs, "parse_constant": _refuse_infinity} if strict else {}
    )
    text = decode_text(data, "the JSON")
    try:
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as error:
        raise BadRow("parse", "json", f"not JSON: {error}") from None


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark; the mark is removed.

    Raises:
        BadRow: With stage `parse` and reason `encoding`.
    """
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        detail = f"{name} is not UTF-8 at byte {error.start} ({CP1252_HINT})"
        raise BadRow("parse", "encoding", detail) from None


def unique_pairs(pairs: list[tuple[str, Any]]) -> Values:
    """Return the dict of a JSON object. Raises ValueError for a name that is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} is given twice"
        )
    return values


def _refuse_infinity(constant: str) -> float:
    if constant == "NaN":  # a missing number, as Python and pandas write it
        return math.nan
    raise ValueError(f"{constant} is not a JSON value")
