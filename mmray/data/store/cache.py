"""Node-local cache of byte ranges read from an object store, shared by the processes of a node,
with a size limit.

An entry is a file that is written under a temporary name and renamed, so it is always complete.
Entries are memory-mapped for reading. The least recently used entries are evicted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from mmray.errors import UsageError
from mmray.storage.paths import TEMP_SUFFIX

LOCKS = 1024
# A process lists the folder again after writing this fraction of the limit.
RECOUNT_FRACTION = 1 / 256


class ShardCache:
    """Entries in `folder` of at most `max_bytes` in total; cheap to pickle."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.max_bytes = max_bytes
        # the folder may hold entries of earlier processes
        self._bytes_since_count: float = max_bytes
        self._warned = False

    def get(
        self, name: str, size: int, fetch: Callable[[], bytes], refresh: bool = False
    ) -> pa.Buffer:
        """Return an entry; a missing one is fetched once per node.

        Args:
            name: File name of the entry.
            size: Its number of bytes; an entry of another size is fetched again.
            fetch: Reads the bytes from the object store; its errors are raised.
            refresh: Replace a damaged entry; processes that mapped it keep their mapping.

        Raises:
            UsageError: The folder cannot be created.
        """
        entry = None if refresh else self._mapped(name, size)
        if entry is None:
            with self._file_lock(str(zlib.crc32(name.encode()) % LOCKS)):
                entry = None if refresh else self._mapped(name, size)
                if entry is None:
                    data = fetch()
                    self._write(name, data)
                    entry = pa.py_buffer(data)
        return entry

    def _mapped(self, name: str, size: int) -> pa.Buffer | None:
        try:
            os.utime(self.folder / name)  # the modification time is the time of last use
            entry = pa.memory_map(str(self.folder / name)).read_buffer()
        except OSError:
            return None
        return entry if entry.size == size else None

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.folder / f"{name}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}"
        try:
            temporary.write_bytes(data)
            temporary.replace(self.folder / name)
        except OSError as error:
            # a full disk must not stop a run, because it can read from the store
            temporary.unlink(missing_ok=True)
            if not self._warned:
                logging.getLogger(__name__).warning(
                    "Cannot write to data.local_cache %s: %s", self.folder, error
                )
            self._warned = True
        self._bytes_since_count += len(data)
        if self._bytes_since_count > self.max_bytes * RECOUNT_FRACTION:
            self._evict()

    def _evict(self) -> None:
        """Delete the least recently used entries until the total is below the limit."""
        with self._file_lock("evict"):
            # last use in ns, bytes, path; also partial files
            entries: list[tuple[int, int, str]] = []
            for file in os.scandir(self.folder):
                with suppress(FileNotFoundError):  # just renamed
                    stat = file.stat()
                    entries += (
                        [(stat.st_mtime_ns, stat.st_size, file.path)] if file.is_file() else []
                    )
            total = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= self.max_bytes:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
        self._bytes_since_count = 0

    @contextmanager
    def _file_lock(self, name: str) -> Iterator[None]:
        """Exclude other threads and processes of this node; the OS releases the lock of a dead
        process.
        """
        locks = self.folder / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            handle = os.open(locks / name, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(
                f"data.local_cache {self.folder} cannot be used on this node: {error}"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
