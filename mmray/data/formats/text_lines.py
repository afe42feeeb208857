"""JSON lines, and lines of other text formats, cut into chunks of complete records with line
numbers.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from mmray.data.formats.source import (
    RawRow,
    Source,
    SourceChunk,
    changed_error,
    read_head,
)
from mmray.data.formats.splits import splits_of_paths
from mmray.data.images.formats import detect_format
from mmray.data.rows import FOLDER, BadRow
from mmray.errors import DataError
from mmray.storage.paths import RemotePath, open_sequential
from mmray.storage.requests import iter_parallel

# Longer lines are truncated, so memory does not depend on their length.
MAX_LINE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
MIN_COMPARED_BYTES = 64 << 20  # of a file whose earlier chunks are compared, not scanned again
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


class _LineCounter:
    """Counts the lines of a file, as LineReader reads them, without an object for each.

    Args:
        file: Raw binary file that can seek.
        start: Byte at which the first line starts.
        stops: Sorted offsets of the file at which `skip` stops if a line ends there.

    Attributes:
        offset, num_lines, digest: As those of LineReader.
    """

    def __init__(self, file: io.RawIOBase, start: int, stops: Sequence[int]) -> None:
        file.seek(start)
        self.offset = start
        self.num_lines = 0
        self.digest = hashlib.sha256()
        self._file = file
        self._stops = np.array(stops, np.int64)
        self._piece = b""
        self._piece_start = start
        self._ends = np.zeros(0, np.int64)  # offsets in the file of the line ends in the piece
        self._rows = np.zeros(1, np.int64)  # number of rows before each line of the piece
        self._stop_lines = np.zeros(0, np.int64)  # lines of the piece after which `skip` stops
        self._next = 0  # line of the piece
        self._has_text = False  # whether the line that continues in the next piece is a row

    def skip(self, most: int) -> int:
        """Skip lines, at most `most`, and return how many have more than white space."""
        rows = 0
        while most:
            if self._next == len(self._ends):
                self._move_to(self._piece_start + len(self._piece))
                if not self._read_piece():
                    rows += self._has_text
                    self._has_text = False
                    break
                continue
            end = min(self._next + most, len(self._ends))
            stop = self._stop_lines.searchsorted(self._next)
            if is_stop := stop < len(self._stop_lines) and self._stop_lines[stop] < end:
                end = int(self._stop_lines[stop]) + 1
            rows += int(self._rows[end] - self._rows[self._next])
            self.num_lines += end - self._next
            most = 0 if is_stop else most - (end - self._next)
            self._next = end
            self._move_to(int(self._ends[end - 1]))
        return rows

    def _move_to(self, offset: int) -> None:
        start, stop = (each - self._piece_start for each in (self.offset, offset))
        self.digest.update(memoryview(self._piece)[start:stop])
        self.offset = offset

    def _read_piece(self) -> bool:
        piece = self._file.read(_PIECE_BYTES) or b""
        text = piece.removeprefix(BOM if self.offset == 0 else b"")
        data = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(data == ord("\n")) + 1
        starts = np.append(len(piece) - len(text), ends)
        is_row = np.ones(len(ends), bool)
        # Lines that start with white space may have nothing else.
        for number in np.flatnonzero(data[starts[:-1]] <= ord(" ")).tolist():
            is_row[number] = bool(piece[starts[number] : ends[number]].strip())
        has_text = bool(piece[starts[-1] :].strip())
        if len(ends):
            is_row[0] |= self._has_text
        else:
            has_text |= self._has_text
        self._has_text = has_text
        self._piece = piece
        self._piece_start = self.offset
        self._ends = ends + self.offset
        self._rows = np.append(0, np.cumsum(is_row))
        self._stop_lines = np.flatnonzero(np.isin(self._ends, self._stops))
        self._next = 0
        return bool(piece)


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

    @cached_property
    def _layouts(self) -> dict[str, Any]:
        return {}  # by file, of a subclass

    @cached_property
    def files_digest(self) -> str:
        states: list[Any] = []
        with suppress(OSError):
            if isinstance(self.folder, RemotePath):
                for name, stat in self.stats(self.names()).items():
                    states.append((name, stat.st_size, stat.st_mtime_ns))
            else:
                for name in self.names():
                    with (self.folder / name).open("rb") as file:  # NFS caches what `stat` returns
                        info = os.fstat(file.fileno())
                    times = (info.st_mtime_ns, info.st_ctime_ns)
                    states.append((name, info.st_size, *times, info.st_ino))
            if None not in chain(*states):  # a store without times
                return hashlib.sha256(repr(states).encode()).hexdigest()
        return ""

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        files = [name for name in names if name.lower().endswith(cls.suffixes)]
        return len(files) > 1 and None not in splits_of_paths(files).values()

    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        names = self.names()
        splits = self.splits(names)
        index = 0
        rows = 0
        for name in names:
            self.check(name)
            same = self._unchanged_chunks(name)
            rows_before = rows + sum(chunk.num_rows or 0 for chunk in same)
            for chunk in chain(same, self.scan_file(name, rows_per_chunk, rows_before, same)):
                yield replace(chunk, index=index, split=splits[name])
                index += 1
                rows += chunk.num_rows or 0

    def _unchanged_chunks(self, name: str) -> list[SourceChunk]:
        """Return the chunks of an earlier scan of a large file that it still has, without the last
        one, whose last record may be continued.

        Their bytes are compared, which is faster than a scan of their lines.
        """
        chunks = [chunk for chunk in self.earlier if chunk.file == name]
        if not chunks or chunks.pop().stop < MIN_COMPARED_BYTES:
            return []
        return chunks if all(iter_parallel(self._has_bytes, chunks)) else []

    def _has_bytes(self, chunk: SourceChunk) -> bool:
        digest = hashlib.sha256()
        left = chunk.stop - chunk.start
        with open_sequential(self.folder / chunk.file) as file:
            file.seek(chunk.start)
            while piece := file.read(min(_PIECE_BYTES, left)):
                digest.update(piece)
                left -= len(piece)
        return digest.hexdigest() == chunk.signature

    def scan_file(
        self, name: str, rows_per_chunk: int, rows_before: int, same: Sequence[SourceChunk] = ()
    ) -> Iterator[SourceChunk]:
        """Yield the chunks of a file after its first ones, `same`; all have the index 0.

        Args:
            rows_before: Number of rows in the chunks before these.
        """
        start = same[-1].stop if same else 0
        earlier = [chunk for chunk in self.earlier if chunk.file == name]
        first_line = earlier[len(same)].first_line if same else 1
        lines_before = first_line - 1
        ends = [chunk.stop for chunk in earlier]
        with open_sequential(self.folder / name) as file:
            lines, skip = self._open_lines(name, file, start, ends)
            while True:
                rows = skip(self.chunk_rows(rows_per_chunk, rows_before))
                if lines.offset == start:
                    return
                digest = lines.digest.hexdigest()
                yield SourceChunk(0, name, start, lines.offset, first_line, rows, digest)
                start = lines.offset
                first_line = lines_before + lines.num_lines + 1
                rows_before += rows
                lines.digest = hashlib.sha256()

    def _open_lines(
        self, name: str, file: io.RawIOBase, start: int, stops: Sequence[int]
    ) -> tuple[LineReader | _LineCounter, Callable[[int], int]]:
        """Return the lines of a file, and a function that skips some records, or those up to one of
        the offsets `stops`, and returns how many are rows.
        """
        if type(self).iter_records is JsonlSource.iter_records:
            counter = _LineCounter(file, start, stops)
            return counter, counter.skip
        lines = LineReader(file, start)
        records = self.iter_records(name, lines)
        return lines, partial(_skip_records, lines, records, {*stops})

    def records(self, chunk: SourceChunk) -> Iterator[tuple[int, str, Any]]:
        line = chunk.first_line
        with open_sequential(self.folder / chunk.file) as file:
            lines = LineReader(file, chunk.start, chunk.stop)
            for record in self.iter_records(chunk.file, lines):
                if record:
                    yield line, f"{chunk.file}:{line}", record
                line = chunk.first_line + lines.num_lines
        if lines.digest.hexdigest() != chunk.signature:
            raise changed_error(chunk.file)

    def check(self, name: str) -> None:
        """Raise DataError if a file is missing or clearly of another format.

        Args:
            name: Path of the file, relative to the folder of the source.
        """
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

    def parse(self, record: Any) -> dict[str, Any]:
        return parse_json(record)

    def read(self, chunk: SourceChunk) -> Iterator[RawRow]:
        folder = chunk.file.rpartition("/")[0]
        for row in super().read(chunk):
            if folder and not self.name and isinstance(row.values, dict):
                row.values[FOLDER] = folder
            yield row


def _skip_records(lines: LineReader, records: Iterator[Any], stops: set[int], most: int) -> int:
    rows = 0
    for number, record in enumerate(records, 1):
        rows += bool(record)
        if number == most or lines.offset in stops:
            break
    return rows


def parse_json(data: bytes, strict: bool = True) -> dict[str, Any]:
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


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
