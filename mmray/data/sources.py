"""Where rows come from: a JSONL file and the images it names, read strictly and in chunks.

`scan` cuts the file into chunks of whole lines on the driver; `read_lines` and `read_image` run in the tasks that pack
them. What is wrong with the whole file is a DataError, what is wrong with one image a BadRow.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from mmray.data.jsonl import MAX_LINE_BYTES, BadRow
from mmray.data.place import Place
from mmray.errors import DataError

MAX_IMAGE_BYTES = 256 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_NOT_JSONL = (
    (b"\x1f\x8b", "is gzip: unpack it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"PAR1", "is Parquet: write it as one JSON object a line"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (b"[", "is a JSON array: write one object a line, without brackets around them"),
)


class SourceChanged(Exception):
    """The source was rewritten while it was being read."""


@dataclass(frozen=True)
class Chunk:
    """Whole lines of the source: bytes start..stop, of which `num_rows` lines are not blank."""

    index: int
    start: int
    stop: int
    first_line: int  # counted from 1
    num_rows: int
    sha256: str


def check_jsonl(place: Place, name: str) -> None:
    """Raises DataError for a file that is missing, empty, or plainly not JSONL."""
    where = f"{place.address}/{name}"
    try:
        with place.open(name) as file:
            head = file.read(64)
    except FileNotFoundError:
        raise DataError(f"there is no file {where}: give the path of a .jsonl file") from None
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error}") from None
    if not head:
        raise DataError(f"{where} is empty: it must hold one JSON object a line, with `image` and `text`")
    for mark, advice in _NOT_JSONL:
        if head.removeprefix(_BOM).lstrip().startswith(mark):
            raise DataError(f"{where} {advice}")


def scan(place: Place, name: str, rows_per_chunk: int, stops: Collection[int] = ()) -> Iterator[Chunk]:
    """The chunks of a JSONL file, in order; memory holds one piece of a line.

    A chunk ends after `rows_per_chunk` lines, and at each offset of `stops` that is the end of a line: where the chunks
    of an earlier pass ended, so that a file that grew has the same chunks and then new ones.
    """
    index = start = offset = lines = rows = 0
    line, blank, digest = 1, True, hashlib.sha256()
    with place.open(name) as file:
        for piece in _pieces(file):
            digest.update(piece)
            blank = blank and not piece.removeprefix(_BOM if offset == 0 else b"").strip()
            offset += len(piece)
            if piece.endswith(b"\n"):
                lines, rows, blank = lines + 1, rows + (not blank), True
            if lines and piece.endswith(b"\n") and (lines == rows_per_chunk or offset in stops):
                yield Chunk(index, start, offset, line, rows, digest.hexdigest())
                index, start, line, lines, rows, digest = index + 1, offset, line + lines, 0, 0, hashlib.sha256()
    if offset > start:  # the last line may lack its newline
        yield Chunk(index, start, offset, line, rows + (not blank), digest.hexdigest())


def read_lines(place: Place, name: str, chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of the lines of a chunk that are not blank; of an endless line only the beginning.

    Raises SourceChanged at the end where the bytes are not those that were scanned.
    """
    digest, line, kept = hashlib.sha256(), chunk.first_line, b""
    with place.open(name) as file:
        file.seek(chunk.start)
        for piece in _pieces(file, chunk.stop - chunk.start):
            digest.update(piece)
            if len(kept) <= MAX_LINE_BYTES:
                kept += piece
            if piece.endswith(b"\n"):
                if line == 1:
                    kept = kept.removeprefix(_BOM)
                if kept.strip():
                    yield line, kept
                line, kept = line + 1, b""
    if kept.removeprefix(_BOM if line == 1 else b"").strip():
        yield line, kept.removeprefix(_BOM if line == 1 else b"")
    if digest.hexdigest() != chunk.sha256:
        raise SourceChanged(f"{name} changed while it was read: run the same command again")


def read_image(place: Place, name: str) -> bytes:
    """The bytes of an image file in the source's folder. Raises BadRow (stage `read`)."""
    try:
        if place.local is not None:
            _check_inside(str(place.local), name)
        size = place.size(name)
        if size is not None and size > MAX_IMAGE_BYTES:
            raise BadRow("read", "too-large", f"{name} has {size} bytes, over {MAX_IMAGE_BYTES}")
        return place.read(name)
    except (FileNotFoundError, NotADirectoryError):
        raise BadRow("read", "missing-image", f"there is no file {name}") from None
    except OSError as error:
        raise BadRow("read", "unreadable", f"{name}: {error}") from None


def stamp(place: Place, name: str) -> tuple[str, int | None, int | None]:
    """(name, size, time of change) by which a changed image is noticed; without the last two where there is no file
    or no file system."""
    try:
        if place.local is None:
            return (name, None, None)
        info = os.stat(f"{place.local}/{name}")  # noqa: PTH116 - once for each image of the set
        return (name, info.st_size, info.st_mtime_ns)
    except OSError:
        return (name, None, None)


def _pieces(file: Any, limit: int | None = None) -> Iterator[bytes]:
    """Lines, the very long ones in pieces; `limit` bytes in all."""
    buffered = io.BufferedReader(file, _PIECE_BYTES)
    left = limit
    while piece := buffered.readline(_PIECE_BYTES if left is None else min(_PIECE_BYTES, left)):
        yield piece
        left = left if left is None else left - len(piece)


def _check_inside(root: str, name: str) -> None:
    """Refuse what leaves the folder through a link, and what is no regular file (a pipe would never end)."""
    real, inside = os.path.realpath(f"{root}/{name}"), os.path.realpath(root)
    if not real.startswith(inside.rstrip("/") + "/"):
        raise BadRow("read", "path", f"{name} is a link that leaves the folder of the source")
    if not stat.S_ISREG(os.stat(real).st_mode):  # noqa: PTH116 - once for each image of the set
        raise BadRow("read", "not-a-file", f"{name} is not a regular file")
