"""Interface of a source format: chunks are planned on the driver and read in the tasks that pack them.

Each class of this package reads one format. `scan` splits the source into chunks without decoding, and `read` yields
the rows of a chunk as named values with their location. A row that cannot be parsed is a BadRow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mmray.data.formats.rows import BadRow, is_valid_name
from mmray.errors import DataError
from mmray.storage.storage import Storage

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")


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
    signature: str  # digest of its bytes (text), or of name, size and time of the file


@dataclass(frozen=True)
class SourceItem:
    """A row of the source: `line` orders it in its chunk, `location` is for messages (`file:line`)."""

    line: int
    location: str
    values: dict[str, Any] | BadRow


class Source:
    """Rows of one format; cheap to construct in each task. `scan` sets `box_names` and `class_names`, if known."""

    title: str  # format name in messages
    box_names: Mapping[str, str] = MappingProxyType({})  # names of the box labels
    class_names: tuple[str, ...] = ()  # names of the labels 0, 1, ...

    def __init__(self, storage: Storage, name: str, columns: dict[str, str]) -> None:
        self.storage, self.name, self.columns = storage, name, columns

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        """Yield the chunks in order; `stops` are the chunk ends of an earlier scan. Raises DataError."""
        raise NotImplementedError

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        """Yield the rows of a chunk. Raises SourceChanged if the chunk differs from the scanned one."""
        raise NotImplementedError


def file_signature(storage: Storage, name: str) -> str:
    """Return a digest of a file's name, size and modification time, to detect changes without reading it."""
    return hashlib.sha256(repr((name, *storage.size_and_mtime(name))).encode()).hexdigest()


def check_unchanged(storage: Storage, chunk: SourceChunk) -> None:
    """Raise SourceChanged if the file differs from the scanned one by `file_signature`."""
    if file_signature(storage, chunk.file) != chunk.signature:
        raise SourceChanged(f"{chunk.file} changed while it was read: run the same command again")


def read_head(storage: Storage, name: str, size: int = 64) -> bytes:
    """Return the first bytes of a file. Raises DataError if it cannot be read."""
    path = f"{storage.address}/{name}"
    try:
        with storage.open(name) as file:
            return bytes(file.read(size))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: give the path of a source") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def list_files(storage: Storage, name: str, suffix: str) -> list[str]:
    """Return the file `name`, or without a name the sorted files of the folder with this suffix, ignoring case.

    Raises DataError for a name that is not UTF-8, because pyarrow cannot open it.
    """
    names = [name] if name else [file for file in storage.list_files() if file.lower().endswith(suffix)]
    if odd := [each for each in names if not is_valid_name(each)]:
        raise DataError(f"{storage.address}: the name {odd[0]!r} is not plain UTF-8: rename the file")
    return names
