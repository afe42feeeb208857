"""Every error a user can meet, each with the exit code that scripts and schedulers read.

Exit codes: 0 good, 2 usage, 3 training failed, 4 resources that cannot be had, 5 data over its error budget,
130 interrupted. A message says what was wrong, the value, where it stood, and what to do next.
"""

from __future__ import annotations

import re

INTERRUPTED = 130


class MmrayError(Exception):
    """Base of all errors that are told to a user without a traceback."""

    exit_code = 1


class AtOnce(KeyboardInterrupt):
    """Who asks twice for an end waits for nothing that can be done without: no report, no tracker."""


class UsageError(MmrayError):
    """A command, a setting or a file name that cannot be meant."""

    exit_code = 2


class TrainingError(MmrayError):
    """Training started and could not be brought to its end."""

    exit_code = 3


class StorageError(TrainingError):
    """The storage did not take a checkpoint, or does not answer; what is complete there is as it was."""


class OutOfMemoryError(TrainingError):
    """A worker's device had no room for a step. `micro`: rows of a micro-batch that may fit; 0: none is smaller."""

    def __init__(self, message: str, micro: int = 0):
        super().__init__(message, micro)
        self.micro = micro

    def __str__(self) -> str:
        return str(self.args[0])


class ResourceError(MmrayError):
    """The cluster (or this machine) cannot give what the run asks for."""

    exit_code = 4


class DataError(MmrayError):
    """The data cannot be used, or more of it is bad than the budget allows."""

    exit_code = 5


OOM_TYPES = ("OutOfMemoryError", "MemoryError")
# cuBLAS, cuDNN and cuSOLVER report failed allocations as RuntimeError with their own status names.
# "unable to find an engine": torch tries each plan of a convolution and hides that all ran out of memory
# (pytorch#108645).
OOM_TEXT = re.compile(
    r"out of memory|allocate memory|not enough memory|(CUBLAS|CUDNN|CUSOLVER)\w*_ALLOC(ATION)?_FAILED"
    r"|running low on memory|memory pressure|OutOfMemoryError|MemoryError|was unable to find an engine",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether host or device memory ran out, by the error's type (torch's, Ray's, ours) or its text."""
    named = any(kind.__name__ in OOM_TYPES for kind in type(error).__mro__)  # by name, so that torch is not imported
    return named or OOM_TEXT.search(str(error)) is not None
