"""Errors reported to users, each with an exit code, and findings of `mmray doctor`.

Exit codes: 0 success, 1 unexpected error, 2 usage, 3 training failed, 4 resources not available, 5
data missing, unusable or over the bad-row limit, 130 interrupted. A message has the problem, the
value, its location, and what to do next.
"""

from __future__ import annotations

import difflib
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

INTERRUPTED = 130
Level = Literal["ok", "warning", "error"]
Log = Callable[[str, str], None]  # receives a message for the user: its text, and a label


def require_positive(**numbers: float | None) -> None:
    """Raise UsageError for an argument that is given (not None) and not above 0."""
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise UsageError(f"--{name.replace('_', '-')}: must be above 0 (got {number})")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean `clip`?`` if a known name is similar, otherwise all known names."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"


@contextmanager
def only_errors(name: str) -> Iterator[None]:
    """Scope in which the logger of a package logs only errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or of an empty one the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class MmrayError(Exception):
    """Base of errors that are printed without a traceback.

    Attributes:
        exit_code: Exit status of the command: 1, or another one of a subclass, such as 2 of
            UsageError.
    """

    exit_code = 1

    def __str__(self) -> str:
        # the others are fields of a subclass, kept when it is pickled
        return str(self.args[0]) if self.args else ""


class ForceExit(KeyboardInterrupt):
    """Raised by a second Ctrl-C, to exit immediately, without report and trackers."""


class UsageError(MmrayError):
    """A command, setting, argument or path is invalid; exit code 2."""

    exit_code = 2


class TrainingError(MmrayError):
    """Training or evaluation failed after it started; exit code 3."""

    exit_code = 3


class StorageError(TrainingError):
    """A checkpoint could not be written or storage does not respond; complete checkpoints are
    intact. Exit code 3.
    """


def os_reason(error: BaseException) -> str:
    """Return the text of an error; of an OSError without the path that its text repeats."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class OutOfMemoryError(TrainingError):
    """A worker ran out of memory.

    Args:
        message: The message for the user.
        retry_shape: The BatchShape (with a smaller micro-batch) to restart with; None: a restart
            does not help.
    """

    def __init__(self, message: str, retry_shape: Any = None):
        super().__init__(message, retry_shape)
        self.retry_shape = retry_shape


class DeviceError(TrainingError):
    """A GPU, its memory or its link failed.

    Args:
        message: The message for the user.
        node: ID of the node of the GPU in Ray; empty for this machine.
    """

    def __init__(self, message: str, node: str = ""):
        super().__init__(message, node)
        self.node = node

    @classmethod
    def from_error(cls, error: BaseException, where: str, node: str = "") -> DeviceError:
        """Return a DeviceError for an error on a node (ID in Ray), with its traceback as note."""
        failed = cls(f"{first_line(error)} ({where})", node)
        failed.add_note("".join(traceback.format_exception(error)))
        return failed


class ResourceError(MmrayError):
    """The cluster or this machine cannot provide the requested resources; exit code 4."""

    exit_code = 4


class DataError(MmrayError):
    """The data cannot be used, or has more bad rows than `prepare.max_bad_fraction` or a run (16)
    allows; exit code 5.
    """

    exit_code = 5


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Args:
        level: `ok`, `warning` or `error`.
        name: Name of the check, such as `shared memory`.
        observed: What was found, such as `/dev/shm has 0.1 GiB`.
        fix: Remedy for a warning or an error; empty if `ok`.
    """

    level: Level
    name: str
    observed: str
    fix: str = ""


OOM_TYPES = ("OutOfMemoryError", "MemoryError")
# cuBLAS, cuDNN and cuSOLVER report failed allocations as RuntimeError with their own status names.
OOM_TEXT = re.compile(
    r"out of memory|allocate memory|not enough memory|running low on memory|memory pressure"
    r"|(CUBLAS|CUDNN|CUSOLVER)\w*_ALLOC(ATION)?_FAILED|OutOfMemoryError|MemoryError",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory of the host or of a device ran out.

    An error counts if its class or a base class is named OutOfMemoryError or MemoryError, as in
    torch, Ray and mmray. Its message counts if it contains a phrase such as `out of memory`. The
    cause of the error is not inspected.
    """
    # by name, so that torch is not imported
    named = any(kind.__name__ in OOM_TYPES for kind in type(error).__mro__)
    return named or OOM_TEXT.search(str(error)) is not None


DEVICE_TEXT = re.compile(
    r"uncorrectable (ECC|NVLink) error|\bXid\b|NVLink error|fallen off the bus|GPU is lost"
    r"|unhandled cuda error|ncclUnhandledCudaError|No CUDA GPUs are available|CUDA unknown error",
    re.IGNORECASE,
)
# Messages of torch and NCCL.
CUDA_ERROR = re.compile(r"(?:CUDA (?:driver )?error: |Cuda failure (?:\d+ )?')(.*)")
# A bug in a kernel or a wrong call raises these on a sound GPU; they would recur on every node.
CODE_ERROR = re.compile(
    r"device-side assert triggered|illegal (memory access|instruction)|misaligned address|invalid "
    r"|no kernel image|not (permitted|supported|ready)|initialization error|too many resources"
    r"|captur",
    re.IGNORECASE,
)


def is_device_error(error: BaseException) -> bool:
    """Return whether an error means that a GPU or its link failed.

    Only the message is inspected, because a worker's error may be quoted by another one. It counts
    if it contains a phrase of the driver or of NCCL, such as `uncorrectable ECC error`, or a CUDA
    error such as `unspecified launch failure`. CUDA errors that name a lack of memory or a bug,
    such as `illegal memory access`, do not count.
    """
    cuda_errors = CUDA_ERROR.findall(str(error))
    if is_out_of_memory(error) or any(CODE_ERROR.search(text) for text in cuda_errors):
        return False
    return bool(cuda_errors) or DEVICE_TEXT.search(str(error)) is not None
