"""Reads of byte ranges of files; ranges that are close together share a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mmray.storage.paths import AnyPath, open_input
from mmray.storage.requests import with_retries

# About as much as a store sends during the latency of one request.
MAX_GAP_BYTES = 1 << 20
MAX_REQUEST_BYTES = 16 << 20
# An open object uses no file descriptor, but opening it costs a request.
MAX_OPEN_OBJECTS = 4096


class ByteRange(NamedTuple):
    """A request for the bytes from `start` up to, but without, `stop` of a file; `span_indices` are
    the indices of the `spans` of `coalesce_ranges` that it contains.
    """

    start: int
    stop: int
    span_indices: list[int]


def coalesce_ranges(spans: Sequence[tuple[int, int]]) -> list[ByteRange]:
    """Merge byte ranges of a file into few requests.

    Args:
        spans: (start, stop) in bytes of each range to read, stop excluded, in any order.

    Returns:
        Requests sorted by start. Ranges at most MAX_GAP_BYTES (1 MiB) apart are merged up to
        MAX_REQUEST_BYTES (16 MiB); a longer range is one request.
    """
    ranges: list[ByteRange] = []
    for index in sorted(range(len(spans)), key=lambda each: spans[each]):
        start, stop = spans[index]
        if ranges:
            last = ranges[-1]
            merged = ByteRange(last.start, max(stop, last.stop), [*last.span_indices, index])
            is_near = start - last.stop <= MAX_GAP_BYTES
            if is_near and merged.stop - merged.start <= MAX_REQUEST_BYTES:
                ranges[-1] = merged
                continue
        ranges.append(ByteRange(start, stop, [index]))
    return ranges


class RangeReader:
    """Reads byte ranges of the files in a folder and keeps recently used ones open.

    It is thread-safe. When pickled it has only the path, and reopens the files.

    `read(name, start, stop)` returns the bytes from `start` up to, but without, `stop`.

    Args:
        folder: A folder on a local disk or a store.
    """

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self._open = lru_cache(MAX_OPEN_OBJECTS)(lambda name: open_input(folder / name))

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeReader, (self._folder,)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return a range of bytes of a file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file ends before `stop`.
        """
        data = bytes(with_retries(lambda: self._open(name).read_at(stop - start, start)))
        if len(data) != stop - start:
            raise ValueError(
                f"{self._folder / name} ends at byte {start + len(data)}, before byte {stop}"
            )
        return data
