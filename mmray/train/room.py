"""Whether an error says that memory ran out, whoever raised it: torch, the libraries under it, or the host."""

from __future__ import annotations

import re

import torch

from mmray.errors import OutOfMemoryError

# cuBLAS, cuDNN and cuSOLVER allocate by themselves, and torch tells their statuses, as the host's end, as RuntimeError.
SAID = re.compile(
    r"out of memory|allocate memory|not enough memory|(CUBLAS|CUDNN|CUSOLVER)\w*_ALLOC(ATION)?_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a GPU's, or the host's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None
