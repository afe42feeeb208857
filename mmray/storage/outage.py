"""Waiting for a storage that has vanished: unmounted, stale, read-only or full."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mmray.errors import StorageError, os_reason
from mmray.storage.paths import AnyPath
from mmray.storage.requests import is_refused

T = TypeVar("T")
RETRY_EVERY_S = 10.0
LOG_EVERY_S = 60.0
# Longest wait of a command whose steps are done or whose workers are down.
LIMIT_S = 3600.0


class Outage:
    """Logs that a folder cannot be used: at once, then each minute, and when it can be used again.

    Args:
        log: Called with a line.
        meanwhile: What the command does while the storage is away.
    """

    def __init__(self, folder: AnyPath, log: Callable[[str], None], meanwhile: str) -> None:
        self._folder = folder
        self._log = log
        self._meanwhile = meanwhile
        self._start_s: float | None = None
        self._next_log_s = 0.0

    def failed(self, error: BaseException) -> None:
        """Record a failed access."""
        now_s = time.monotonic()
        if self._start_s is None:
            self._start_s = now_s
        elif now_s < self._next_log_s:
            return
        self._next_log_s = now_s + LOG_EVERY_S
        cause = _cause(error)
        reason = os_reason(cause)
        self._log(
            f"{self._folder} cannot be used on {socket.gethostname()} for "
            f"{now_s - self._start_s:.0f} s: {reason}; {self._meanwhile}"
        )

    def ended(self) -> None:
        """Record a successful access."""
        if self._start_s is not None:
            duration_s = time.monotonic() - self._start_s
            self._start_s = None
            self._log(
                f"{self._folder} can be used again on {socket.gethostname()} after "
                f"{duration_s:.0f} s"
            )


def retry_until_back(
    call: Callable[[], T],
    outage: Outage,
    cancelled: threading.Event | None = None,
    on_retry: Callable[[], None] = lambda: None,
) -> T:
    """Call a function every 10 s until its storage can be used, for at most an hour.

    The number of calls is fixed, so ranks that save together give up together.

    Args:
        call: Raises an OSError, or a StorageError that it caused, if the storage fails.
        cancelled: Set by another thread to raise the next error instead of a retry.
        on_retry: Called without arguments before each further call.

    Raises:
        OSError: The last error, or one that does not end by itself, such as a missing permission.
        StorageError: The same, if the function raises StorageErrors.
    """
    cancelled = cancelled or threading.Event()
    for _ in range(math.ceil(LIMIT_S / RETRY_EVERY_S)):
        try:
            result = call()
        except (OSError, StorageError) as error:
            if not is_outage(error):
                raise
            outage.failed(error)
            if cancelled.wait(RETRY_EVERY_S):
                raise
            on_retry()
        else:
            outage.ended()
            return result
    return call()


def is_outage(error: BaseException) -> bool:
    """Return whether an error of a storage may end by itself, or when somebody mounts or frees it;
    not for missing permissions.
    """
    cause = _cause(error)
    is_permanent = "Permission denied" in str(cause) or is_refused(cause)
    return isinstance(error, OSError | StorageError) and not is_permanent


def _cause(error: BaseException) -> BaseException:
    """Return the error that caused another one, such as the OSError behind a StorageError."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
