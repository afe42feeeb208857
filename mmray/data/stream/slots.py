"""Memory that the data processes of a rank share with its training process: slots for the pixels
of blocks.

It has no name in a file system, so nothing is left of it however the processes end, and it is not
limited by the size of /dev/shm, which is 64 MB in many containers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from functools import lru_cache
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np

from mmray.machine import HAS_MEMFD


class PixelSlots:
    """Memory for pixels that the processes of a run share, divided into slots for the rows of a
    block.

    `pixels` is the array uint8 [num_slots, rows, *pixel_shape]. An instance that is an argument of
    a new child process refers to the same memory there.

    Args:
        pixel_shape: Shape of the pixels of a row, (3, S, S).
    """

    def __init__(self, num_slots: int, rows: int, pixel_shape: tuple[int, ...]) -> None:
        shape = (num_slots, rows, *pixel_shape)
        file = _create_file(int(np.prod(shape)))
        self._map(file, shape)

    def _map(self, file: int, shape: tuple[int, ...]) -> None:
        self._file = file
        memory = mmap.mmap(file, int(np.prod(shape)))
        self.pixels = np.frombuffer(memory, np.uint8).reshape(shape)

    @property
    def path(self) -> str:
        """File of the memory, which other processes of this user and machine can open."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def inode(self) -> int:
        """Inode number of the file at `path`."""
        return os.fstat(self._file).st_ino

    def __getstate__(self) -> tuple[Any, tuple[int, ...]]:
        return reduction.DupFd(self._file), self.pixels.shape

    def __setstate__(self, state: tuple[Any, tuple[int, ...]]) -> None:
        file, shape = state
        self._map(file.detach(), shape)

    def __del__(self) -> None:
        os.close(self._file)  # the memory is freed with its last array


class LentSlot(NamedTuple):
    """A slot of shared memory that another process of the same node may write to until it returns
    its result.

    Attributes:
        path: File of the shared memory, under `/proc` of the process that created it.
        inode: Inode number of that file, which `open` checks: in another container the path may be
            another file.
        shape: Shape of all slots: (slots, rows, *shape of the pixels of a row).
        number: Number of the slot.
    """

    path: str
    inode: int
    shape: tuple[int, ...]
    number: int

    def open(self) -> np.ndarray:
        """Return the memory of the slot, uint8 [rows, *shape of the pixels of a row].

        Raises:
            OSError: This process may not open it, or has no folder `/proc`.
        """
        pixels: np.ndarray = _open_slots(self.path, self.inode, self.shape)[self.number]
        return pixels


class SlotPool:
    """Slots of shared memory that a rank lends to the processes of its node that decode for it.

    Memory is used from the first write to a slot on, and those that were used last are lent first.
    """

    def __init__(self, num_slots: int, rows: int, pixel_shape: tuple[int, ...]) -> None:
        self._slots = PixelSlots(num_slots, rows, pixel_shape)
        self._free = list(reversed(range(num_slots)))

    def lend(self) -> LentSlot | None:
        """Return a free slot; None if all are in use.

        If the process is lost, the slot is not lent again, because it may still write to it.
        """
        if not self._free:
            return None
        slots = self._slots
        return LentSlot(slots.path, slots.inode, slots.pixels.shape, self._free.pop())

    def receive(self, slot: LentSlot, num_rows: int) -> np.ndarray:
        """Return the pixels that a process has written to a slot, without a copy.

        The slot is lent again when neither this array nor a part of it is used.
        """
        pixels = self._slots.pixels[slot.number]
        # Its parts refer to this array, because it owns its memory.
        owner = np.frombuffer(memoryview(pixels).cast("B"), np.uint8)
        weakref.finalize(owner, self.release, slot).atexit = False
        return owner.reshape(pixels.shape)[:num_rows]

    def release(self, slot: LentSlot) -> None:
        """Let a slot be lent again, without reading it."""
        self._free.append(slot.number)


@lru_cache(1)
def _open_slots(path: str, inode: int, shape: tuple[int, ...]) -> np.ndarray:
    file = os.open(path, os.O_RDWR)
    try:
        if os.fstat(file).st_ino != inode:
            raise FileNotFoundError(f"{path} is the file of another process")
        memory = mmap.mmap(file, int(np.prod(shape)))
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def _create_file(num_bytes: int) -> int:
    """Return the descriptor of a file without a name, in memory if the system can."""
    if HAS_MEMFD:
        file = os.memfd_create("mmray-pixels")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, num_bytes)
    return file
