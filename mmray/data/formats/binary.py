"""Base of the formats whose files are written once: Parquet, Arrow, tar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from mmray.data.formats.source import Source, SourceChunk, changed_error


class BinarySource(Source):
    """Base of the formats whose files are written once: a chunk has a digest of the name, size and
    modification time of its file.

    A subclass implements `cut(checked, num_bytes, rows_per_chunk, rows_before)`, which yields
    start, stop and number of rows of each chunk of a file from what `check` returned.
    """

    cut: Callable[[Any, int, int, int], Iterator[tuple[int, int, int | None]]]

    def scan_file(self, name: str, rows_per_chunk: int, rows_before: int) -> Iterator[SourceChunk]:
        stat = self.stats[name]
        parts = self.cut(self._checked[name], stat.st_size, rows_per_chunk, rows_before)
        for start, stop, num_rows in parts:
            line = 1 if num_rows is None else start + 1
            yield SourceChunk(0, name, start, stop, line, num_rows, _signature(name, stat))

    def check_unchanged(self, chunk: SourceChunk) -> None:
        """Raise DataError if the file of a chunk changed after it was scanned."""
        if _signature(chunk.file, (self.folder / chunk.file).stat()) != chunk.signature:
            raise changed_error(chunk.file)


def _signature(name: str, stat: Any) -> str:
    return hashlib.sha256(repr((name, stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()
