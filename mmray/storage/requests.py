"""Retries of requests to a storage, and requests in parallel threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

T = TypeVar("T")
R = TypeVar("R")
ATTEMPTS = 5
MAX_WAIT_S = 20.0
# Errors of S3 that a retry does not fix.
PERMANENT_ERRORS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
)
REFUSED_HINT = (
    "\nCheck the name of the bucket, and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE "
    "here and on the nodes of the cluster."
)
MAX_PARALLEL = 8


class TransientStorageError(OSError):
    """A storage still fails after all retries, and may work later.

    It is not retried again by an outer call.
    """


def with_retries(call: Callable[[], T]) -> T:
    """Call a function, and repeat it with exponential backoff after transient errors of a storage.

    Errors that a retry does not fix, such as FileNotFoundError, PermissionError or ACCESS_DENIED of
    S3, are raised at once.

    Args:
        call: Called without arguments, again after a failure that may be temporary.

    Raises:
        TransientStorageError: With the last transient error, after ATTEMPTS (5) calls.
        OSError: A permanent error, unchanged.
    """
    retrying = Retrying(
        retry=retry_if_exception(_is_transient),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S),
        reraise=True,
    )
    try:
        return retrying(call)
    except OSError as error:
        if _is_transient(error):
            raise TransientStorageError(*error.args) from error
        raise


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    if isinstance(error, FileNotFoundError | PermissionError | TransientStorageError):
        return False
    return not is_refused(error)


def is_refused(error: BaseException) -> bool:
    """Return whether an error says that S3 refuses a request, which a retry does not change."""
    return any(text in str(error) for text in PERMANENT_ERRORS)


def parallel_map(call: Callable[[T], Any], items: Iterable[T]) -> None:
    """Call a function with each item in MAX_PARALLEL threads, and raise the first item's error."""
    deque(iter_parallel(call, items), maxlen=0)


def iter_parallel(
    call: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Iterator[R]:
    """Yield the result of a function for each item, in the order of the items.

    Args:
        call: Called with each item, in threads.
        threads: Number of threads, MAX_PARALLEL (8) by default, which compute up to twice as many
            results ahead.

    Raises:
        Exception: The error of a call, instead of its result.
    """
    threads = threads or MAX_PARALLEL
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(call, item))
                if len(pending) == 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
