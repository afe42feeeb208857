"""How busy the machine is, looked at when a line is logged: CPU and memory of the host, and the GPU where NVML is."""

from __future__ import annotations

import ctypes
import sys

# Memory that a process on a CPU has freed stays with it: the kernel hands out pages anew far slower than it is used.
#
# glibc takes each large tensor from the kernel and gives it back at once. A step needs the same sizes as the one
# before,
# so that each of its pages is cleared and mapped again: a tenth to a fifth of a step in a virtual machine.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


MOST_BYTES = 2**31 - 1  # both are C's int


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed for what comes next; whether there was one that heard."""
    if not sys.platform.startswith("linux"):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, or one that does nothing
    return tell is not None and all(tell(what, MOST_BYTES) for what in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
