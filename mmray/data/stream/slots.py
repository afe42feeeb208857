"""Memory that the data processes of a run share with its training process: a ring of slots for
pixels.

It has no name in a file system, so nothing is left of it however the processes end, and it is not
limited by the size of /dev/shm, which is 64 MB in many containers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any

import numpy as np


class PixelSlots:
    """Memory for pixels that the processes of a run share, divided into slots that are reused in
    turn.

    `pixels` is the array uint8 [num_slots, rows, *pixel_shape]. An instance that is an argument of
    a new child process refers to the same memory there.

    Args:
        num_slots: Number of slots.
        rows: Rows of a slot.
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

    def __getstate__(self) -> tuple[Any, tuple[int, ...]]:
        return reduction.DupFd(self._file), self.pixels.shape

    def __setstate__(self, state: tuple[Any, tuple[int, ...]]) -> None:
        file, shape = state
        self._map(file.detach(), shape)

    def __del__(self) -> None:
        os.close(self._file)  # the memory is freed with its last array


def _create_file(num_bytes: int) -> int:
    """Return the descriptor of a file without a name, in memory if the system can."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mmray-pixels")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, num_bytes)
    return file
