"""Interface of a source format: chunks are planned on the driver and read in the tasks that pack them.

Each class of this package reads one format. `scan` splits the source into chunks without decoding, and `read` yields
the rows of a chunk as named values with their location. A row that cannot be parsed is a BadRow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mmray.data.formats.rows import BadRow, is_valid_name
from mmray.errors import DataError
from mmray.storage.storage import Storage


class SourceChanged(Exception):
    """The source was modified while it was being read."""


class SourceUnreadable(Exception):
    """The storage of the source failed to return data that the scan had read."""


@dataclass(frozen=True)
class SourceChunk:
    """A part of one file: bytes (text), rows (Parquet, Arrow) or everything (tar) from start to stop."""

    index: int
    file: str
    start: int
    stop: int
    first_line: int  # number of its first line or row in the file
    num_rows: int | None  # None: only known after reading (a tar)
    sha256: str


@dataclass(frozen=True)
class SourceItem:
    """A row of the source: `line` orders it in its chunk, `origin` is its location (`file:line`)."""

    line: int
    origin: str
    values: dict[str, Any] | BadRow


class Source(Protocol):
    """Rows of one format; cheap to construct in each task."""

    title: ClassVar[str]  # format name in messages

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        """Yield the chunks in order; `stops` are the chunk ends of an earlier scan. Raises DataError."""
        ...

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        """Yield the rows of a chunk. Raises SourceChanged if the chunk differs from the scanned one."""
        ...


def file_signature(place: Storage, name: str) -> str:
    """Return a digest of a file's name, size and modification time, to detect changes without reading it."""
    return hashlib.sha256(repr((name, *place.size_and_mtime(name))).encode()).hexdigest()


def check_unchanged(place: Storage, chunk: SourceChunk) -> None:
    """Raise SourceChanged if the file differs from the scanned one by `file_signature`."""
    if file_signature(place, chunk.file) != chunk.sha256:
        raise SourceChanged(f"{chunk.file} changed while it was read: run the same command again")


def read_head(place: Storage, name: str, size: int = 64) -> bytes:
    """Return the first bytes of a file. Raises DataError if it cannot be read."""
    where = f"{place.address}/{name}"
    try:
        with place.open(name) as file:
            return bytes(file.read(size))
    except FileNotFoundError:
        raise DataError(f"there is no file {where}: give the path of a source") from None
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error}") from None


def list_files(place: Storage, name: str, suffix: str) -> list[str]:
    """Return the file `name`, or without a name the sorted files of the folder with this suffix, ignoring case.

    Raises DataError for a name that is not UTF-8, because pyarrow cannot open it.
    """
    names = [name] if name else [file for file in place.list_files() if file.lower().endswith(suffix)]
    if odd := [each for each in names if not is_valid_name(each)]:
        raise DataError(f"{place.address}: the name {odd[0]!r} is not plain UTF-8: rename the file")
    return names
