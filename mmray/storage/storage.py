"""Files in a folder of a local disk or an object store (pyarrow.fs), by relative name; local writes
are atomic.
"""

from __future__ import annotations

import io
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from mmray.errors import UsageError
from mmray.storage.address import CREDENTIALS_REFUSED, has_credentials, redact_url

T = TypeVar("T")
R = TypeVar("R")
SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs")
TEMP_SUFFIX = ".unfinished"
ATTEMPTS, MAX_WAIT_S = 5, 20.0
PERMANENT_ERRORS = (  # S3 errors that a retry does not fix
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN_ID"),
    *("NO_SUCH_BUCKET", "SIGNATURE_DOES_NOT_MATCH"),
)
MAX_GAP_BYTES = 1 << 20  # about as much as a store sends during the latency of one request
MAX_REQUEST_BYTES = 16 << 20
MAX_PARALLEL = 8
MAX_OPEN_OBJECTS = 4096  # of a RangeReader; uses no file descriptors, but opening costs a request


@dataclass(frozen=True)
class Storage:
    """A folder: a local path, or a URI whose scheme is in SCHEMES.

    Raises UsageError for another address.
    """

    address: str

    def __post_init__(self) -> None:
        if has_credentials(self.address):
            raise UsageError(
                f"{self.address.partition('?')[0].rpartition('@')[2]}: {CREDENTIALS_REFUSED}"
            )
        scheme, separator, _ = self.address.partition("://")
        if not separator:  # absolute, because another process may have another working directory
            path = os.path.expanduser(self.address)  # noqa: PTH111 - Path's raises for a file named ~x
            object.__setattr__(self, "address", str(Path(path).absolute()))
        elif scheme not in SCHEMES:  # the address may come from the manifest of somebody else's set
            raise UsageError(
                f"{redact_url(self.address)} cannot be opened: use a local path or a URI with "
                f"{', '.join(SCHEMES)}"
            )
        elif scheme == "file":
            object.__setattr__(self, "address", open_filesystem(self.address)[1])

    @classmethod
    def split(cls, address: str) -> tuple[Storage, str]:
        """Split a path into the folder and the file name;

        URI options (`?endpoint_override=`) stay with the folder.
        """
        head, separator, options = address.partition("?") if "://" in address else (address, "", "")
        folder, _, name = head.rpartition("/")
        if folder.endswith(":/"):  # a bucket without a path
            folder, name = head, ""
        return cls((folder or ("/" if head.startswith("/") else ".")) + separator + options), name

    @cached_property
    def filesystem(self) -> tuple[fs.FileSystem, str]:
        """File system and the folder's path in it. Raises UsageError for an unsupported address."""
        system, root = open_filesystem(self.address)
        return system, root.rstrip("/") if "://" in self.address else root

    @cached_property
    def local_path(self) -> Path | None:
        """The folder as a path, or None if it is not on a local file system."""
        system, root = self.filesystem
        return Path(root) if isinstance(system, fs.LocalFileSystem) else None

    @cached_property
    def real_prefix(self) -> str:
        """Prefix of the real path of every file inside this local folder."""
        return os.path.realpath(str(self.local_path)).rstrip("/") + "/"

    def fs_path(self, name: str) -> str:
        """The path of a file or folder in the file system: on an object store, bucket and key."""
        return f"{self.filesystem[1]}/{name}".rstrip("/")

    def retried(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, on an object store with retries."""
        return call() if self.local_path is not None else with_retries(call)

    def _info(self, name: str) -> fs.FileInfo:
        return self.retried(lambda: self.filesystem[0].get_file_info(self.fs_path(name)))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        info = self._info(name)
        return info.size if info.type == fs.FileType.File else None

    def size_and_mtime(self, name: str) -> tuple[int | None, int | None]:
        """Return size in bytes and mtime (ns);

        None for what the store does not have. Raises FileNotFoundError.
        """
        info = self._info(name)
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"{self.address}/{name} does not exist")
        return info.size, info.mtime_ns

    def is_dir(self, name: str = "") -> bool:
        return bool(self._info(name).type == fs.FileType.Directory)

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder, sorted, relative to this storage."""
        if self.local_path is not None:
            return sorted(_walk(self.fs_path(folder), f"{folder}/".lstrip("/")))
        system, root = self.filesystem
        selector = fs.FileSelector(self.fs_path(folder), recursive=True)
        infos = with_retries(lambda: system.get_file_info(selector))
        return sorted(
            info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File
        )

    def listdir(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        if self.local_path is not None:
            path = self.local_path / folder
            return sorted(os.listdir(path)) if path.exists() else []  # noqa: PTH208 - names only
        selector = fs.FileSelector(self.fs_path(folder), allow_not_found=True)
        infos = with_retries(lambda: self.filesystem[0].get_file_info(selector))
        return sorted(info.base_name for info in infos)

    def mkdir(self, folder: str = "") -> None:
        """Create a folder and its parents."""
        self.retried(lambda: self.filesystem[0].create_dir(self.fs_path(folder), recursive=True))

    def open(self, name: str, mapped: bool = False) -> pa.NativeFile:
        """Open for random access; memory-map only files that never change: truncating them kills
        readers.
        """
        if mapped and self.local_path is not None:
            return pa.memory_map(self.fs_path(name))
        return self.retried(lambda: self.filesystem[0].open_input_file(self.fs_path(name)))

    def open_retried(self, name: str, mapped: bool = False) -> pa.NativeFile:
        """Open for sequential reads; on an object store each read is retried.

        Raises TransientStorageError.
        """
        file = self.open(name, mapped)
        return file if self.local_path is not None else pa.PythonFile(_RetriedFile(file), mode="r")

    def read(self, name: str) -> bytes:
        """Return all bytes of a file."""

        def read() -> bytes:
            with self.open(name) as file:
                return bytes(file.readall())

        return self.retried(read)

    @contextmanager
    def open_output(self, name: str) -> Iterator[pa.NativeFile]:
        """Open a file for writing; it appears if the block succeeds.

        On a store, an error also deletes the old one.
        """
        system, target = self.filesystem[0], self.fs_path(name)
        if isinstance(system, fs.LocalFileSystem):
            temporary = f"{target}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}"
            try:
                with system.open_output_stream(temporary) as stream:
                    yield stream
                system.move(temporary, target)
            finally:
                Path(temporary).unlink(missing_ok=True)
            return
        stream = system.open_output_stream(target)
        try:
            yield stream
        except BaseException:
            # pyarrow cannot abort an upload: closing it writes the partial object, so delete that
            with suppress(OSError):
                stream.close()
                system.delete_file(target)
            raise
        stream.close()

    def write(self, name: str, data: bytes) -> None:
        """Write a complete file; atomic on a local disk."""

        def write() -> None:
            with self.open_output(name) as stream:
                stream.write(data)

        self.retried(write)

    def delete(self, name: str) -> None:
        """Delete a file."""
        self.retried(lambda: self.filesystem[0].delete_file(self.fs_path(name)))

    def delete_tree(self, folder: str) -> None:
        """Delete a folder and all its files."""
        self.retried(lambda: self.filesystem[0].delete_dir(self.fs_path(folder)))


def open_filesystem(address: str) -> tuple[fs.FileSystem, str]:
    """Return file system and path of the address of a Storage.

    Raises UsageError if it cannot be opened.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return fs.LocalFileSystem(), address
    path, separator, options = rest.partition("?")
    authority, slash, path = path.partition("/")
    # user input may contain spaces
    uri = f"{scheme}://{authority}{slash}{quote(path, safe='/%')}{separator}{options}"
    # small objects in one request, no request for empty uploads
    if scheme == "s3" and "allow_delayed_open" not in uri:
        uri += f"{'&' if separator else '?'}allow_delayed_open=true"
    try:
        system, root = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"{address} cannot be opened: {error}") from None
    return system, root


def _walk(folder: str, prefix: str, parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield regular files below a folder; pyarrow's selector stops at the first name that is not
    UTF-8.
    """
    real = os.path.realpath(folder)
    if real in parents:  # a cycle of links
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/", (*parents, real))
            elif entry.is_file():
                yield f"{prefix}{entry.name}"


class TransientStorageError(OSError):
    """A storage still fails after all retries, and may work later.

    It is not retried again by an outer call.
    """


def with_retries(call: Callable[[], T]) -> T:
    """Return the result of `call`, retried with exponential backoff on transient errors.

    Raises TransientStorageError with the last of them, or a permanent error unchanged.
    """

    def is_transient(error: BaseException) -> bool:
        permanent = isinstance(error, FileNotFoundError | PermissionError | TransientStorageError)
        return (
            isinstance(error, OSError)
            and not permanent
            and not any(text in str(error) for text in PERMANENT_ERRORS)
        )

    stop, wait = (
        stop_after_attempt(ATTEMPTS),
        wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S),
    )
    try:
        return Retrying(retry=retry_if_exception(is_transient), stop=stop, wait=wait, reraise=True)(
            call
        )
    except OSError as error:
        if is_transient(error):
            raise TransientStorageError(*error.args) from error
        raise


class _RetriedFile(io.RawIOBase):
    """A file of an object store whose reads are retried."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self._size, self._offset = file, file.size(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        )
        return self._offset

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._offset))
        data = with_retries(lambda: self._file.read_at(count, self._offset)) if count else b""
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def parallel_map(call: Callable[[T], Any], items: Iterable[T]) -> None:
    """Run `call` on each item in MAX_PARALLEL threads. Raises the first error."""
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:  # starts as many threads as it has items
        list(pool.map(call, items))


def iter_parallel(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the result of `call` for each item, in order;

    MAX_PARALLEL threads compute a few ahead.
    """
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        try:
            for item in items:
                pending.append(pool.submit(call, item))
                if len(pending) == 4 * MAX_PARALLEL:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class ByteRange(NamedTuple):
    """One request for bytes start..stop of a file, and the indices of the spans in it."""

    start: int
    stop: int
    span_indices: list[int]


def coalesce_ranges(spans: Sequence[tuple[int, int]]) -> list[ByteRange]:
    """Merge spans (start, stop) of a file, in any order, into few requests, sorted by start."""
    ranges: list[ByteRange] = []
    for index in sorted(range(len(spans)), key=lambda each: spans[each]):
        start, stop = spans[index]
        last = ranges[-1] if ranges else None
        if (
            last
            and start - last.stop <= MAX_GAP_BYTES
            and max(stop, last.stop) - last.start <= MAX_REQUEST_BYTES
        ):
            ranges[-1] = ByteRange(last.start, max(stop, last.stop), [*last.span_indices, index])
        else:
            ranges.append(ByteRange(start, stop, [index]))
    return ranges


class RangeReader:
    """Reads ranges of files of a storage and keeps the last MAX_OPEN open; thread-safe, cheap to
    pickle.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._open = storage, lru_cache(MAX_OPEN_OBJECTS)(storage.open)

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeReader, (self._storage,)

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Return the bytes start..stop of a file.

        Raises OSError, or ValueError if the file is shorter.
        """
        data = bytes(with_retries(lambda: self._open(file).read_at(stop - start, start)))
        if len(data) != stop - start:
            raise ValueError(
                f"{self._storage.address}/{file} ends at byte {start + len(data)}, "
                f"before byte {stop}"
            )
        return data
