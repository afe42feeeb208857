"""Line-based text files: cut into chunks of complete records and read back with line numbers.

Lines are read in pieces, so memory does not depend on their length. A quoted CSV field may contain newlines; its record
ends when the field closes, after at most MAX_QUOTED_BYTES, so that a missing quote does not consume the rest of the
file. pyarrow.csv is not used: it has no line numbers for such records and cannot start inside a file.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

from mmray.data.formats.source import SourceChanged, SourceChunk
from mmray.storage.storage import Storage

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_QUOTED_BYTES = 1024 * 1024
_PIECE_BYTES = 1024 * 1024
BOM = b"\xef\xbb\xbf"


def scan_lines(
    place: Storage, name: str, rows_per_chunk: int, stops: Collection[int] = (), quoted: bool = False
) -> Iterator[SourceChunk]:
    """Yield the chunks of a text file, in order.

    A chunk ends after `rows_per_chunk` records. `stops` are the chunk ends of an earlier scan: a chunk also ends there
    if a record does, so a file that grew keeps its chunks and gets new ones.
    """
    index = start = offset = lines = records = rows = 0
    line, blank, digest, ends = 1, True, hashlib.sha256(), _RecordSplitter(quoted)
    with place.open(name) as file:
        for piece in _iter_pieces(file):
            digest.update(piece)
            text = piece.removeprefix(BOM if offset == 0 else b"")
            blank = blank and not text.strip()
            offset, lines = offset + len(piece), lines + piece.endswith(b"\n")
            if not ends.after(text):
                continue
            records, rows, blank = records + 1, rows + (not blank), True
            if records == rows_per_chunk or offset in stops:
                yield SourceChunk(index, name, start, offset, line, rows, digest.hexdigest())
                index, start, line, lines, records, rows = index + 1, offset, line + lines, 0, 0, 0
                digest = hashlib.sha256()
    if offset > start:  # the last line may have no newline
        yield SourceChunk(index, name, start, offset, line, rows + (not blank), digest.hexdigest())


def read_lines(place: Storage, chunk: SourceChunk, quoted: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, bytes) of the non-blank records of a chunk; overlong records are truncated.

    Raises SourceChanged at the end if the bytes differ from those of the scan.
    """
    digest, line, lines, kept, ends = hashlib.sha256(), chunk.first_line, 0, b"", _RecordSplitter(quoted)
    mark = BOM if chunk.start == 0 else b""
    with place.open(chunk.file) as file:
        file.seek(chunk.start)
        for piece in _iter_pieces(file, chunk.stop - chunk.start):
            digest.update(piece)
            text, mark = piece.removeprefix(mark), b""
            lines += piece.endswith(b"\n")
            if len(kept) <= MAX_LINE_BYTES:
                kept += text
            if not ends.after(text):
                continue
            if kept.strip():
                yield line, kept
            line, lines, kept = line + lines, 0, b""
    if kept.strip():
        yield line, kept
    if digest.hexdigest() != chunk.sha256:
        raise SourceChanged(f"{chunk.file} changed while it was read: run the same command again")


class _CsvState(Enum):
    """State of the CSV scan, as in Python's csv module."""

    BEGIN = "start of a field"
    PLAIN = "unquoted field, in which a quote is an ordinary character"
    QUOTED = "quoted field"
    CLOSED = "after a quote in a quoted field: its end, or the first half of a doubled quote"


class _RecordSplitter:
    """Finds record ends: newlines outside quoted fields."""

    def __init__(self, quoted: bool) -> None:
        self.quoted, self.at, self.length = quoted, _CsvState.BEGIN, 0

    def after(self, piece: bytes) -> bool:
        self.length += len(piece)
        if self.quoted:
            self.at = _advance(piece, self.at)
        if not piece.endswith(b"\n") or (self.at is _CsvState.QUOTED and self.length <= MAX_QUOTED_BYTES):
            return False
        self.at, self.length = _CsvState.BEGIN, 0
        return True


def _advance(piece: bytes, at: _CsvState) -> _CsvState:
    """Return the state after this piece of a record, starting from state `at`."""
    place = 0
    while place < len(piece):
        if at in (_CsvState.BEGIN, _CsvState.CLOSED):
            is_quote = piece.startswith(b'"', place)
            at, place = (_CsvState.QUOTED, place + 1) if is_quote else (_CsvState.PLAIN, place)
        elif at is _CsvState.QUOTED:
            found = piece.find(b'"', place)
            if found < 0:
                return at
            at, place = _CsvState.CLOSED, found + 1
        else:
            found = piece.find(b',"', place)
            if found < 0:
                return _CsvState.BEGIN if piece.endswith(b",") else at
            at, place = _CsvState.QUOTED, found + 2
    return at


def _iter_pieces(file: Any, limit: int | None = None) -> Iterator[bytes]:
    """Yield lines, very long ones in pieces; at most `limit` bytes in total."""
    buffered = io.BufferedReader(file, _PIECE_BYTES)
    left = limit
    while piece := buffered.readline(_PIECE_BYTES if left is None else min(_PIECE_BYTES, left)):
        yield piece
        left = left if left is None else left - len(piece)
