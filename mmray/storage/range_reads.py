"""Large reads instead of many small ones, where a request costs more than the bytes between two that are wanted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from mmray.storage.remote_path import steadily
from mmray.storage.storage import Place

T = TypeVar("T")
GAP_BYTES = 1 << 20  # about what a store sends in the time that another request takes
MOST_BYTES = 16 << 20
AT_ONCE = 8
MAX_OPEN = 4096  # no descriptor, but a request each time one is opened


class Read(NamedTuple):
    """One request: bytes start..stop of a file, and which of the wanted spans lie in them."""

    start: int
    stop: int
    spans: list[int]


def coalesced(spans: Sequence[tuple[int, int]]) -> list[Read]:
    """Few reads that hold these spans (start, stop) of a file, in any order, whole; by where they start."""
    reads: list[Read] = []
    for number in sorted(range(len(spans)), key=lambda each: spans[each]):
        start, stop = spans[number]
        last = reads[-1] if reads else None
        if last is not None and start - last.stop <= GAP_BYTES and max(stop, last.stop) - last.start <= MOST_BYTES:
            reads[-1] = Read(last.start, max(stop, last.stop), [*last.spans, number])
        else:
            reads.append(Read(start, stop, [number]))
    return reads


def together(call: Callable[[T], Any], items: Iterable[T]) -> None:
    """`call` on each item, several at once: a request waits more than it works. Raises the first error."""
    waiting = list(items)
    if len(waiting) <= 1:
        for item in waiting:
            call(item)
        return
    with ThreadPoolExecutor(min(AT_ONCE, len(waiting))) as pool:
        for _ in pool.map(call, waiting):
            pass


class RangeFiles:
    """Files of a place, of which ranges are read; threads may share it, another process opens its own."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._forget()

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of a file. Raises OSError, or ValueError where the file ends before."""
        data = bytes(steadily(lambda: self._file(file).read_at(stop - start, start)))
        if len(data) != stop - start:
            raise ValueError(f"{self._place.address}/{file} ends at byte {start + len(data)}, not at {stop} or later")
        return data

    def _file(self, file: str) -> pa.NativeFile:
        with self._lock:
            if file in self._files:
                self._files.move_to_end(file)
                return self._files[file]
        opened = self._place.open(file)  # without the lock: it is a request
        with self._lock:
            self._files[file] = opened
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)
        return opened

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, pa.NativeFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_place": self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
