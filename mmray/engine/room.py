"""Whether an error says that memory ran out, whoever raised it: torch, the libraries under it, Ray, or the host.

A worker asks it of what it has raised itself, a sweep also of what has come as text from another process.
"""

from __future__ import annotations

import re

NAMES = ("OutOfMemoryError", "MemoryError")
# cuBLAS, cuDNN and cuSOLVER allocate by themselves, and torch tells their statuses, as the host's end, as RuntimeError;
# the memory monitor is Ray's.
# "Unable to find an engine": torch tries each plan of a convolution, and swallows that it had no memory for them
# (pytorch#108645). Where there is another reason, smaller micro-batches meet it again, down to a single row.
SAID = re.compile(
    r"out of memory|allocate memory|not enough memory|(CUBLAS|CUDNN|CUSOLVER)\w*_ALLOC(ATION)?_FAILED"
    r"|running low on memory|memory pressure|OutOfMemoryError|MemoryError|was unable to find an engine",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or a host's memory ran out: by the error's type (torch's, Ray's, ours), or by its words."""
    named = any(kind.__name__ in NAMES for kind in type(error).__mro__)  # by name: a sweep's driver imports no torch
    return named or SAID.search(str(error)) is not None
