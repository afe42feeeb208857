"""Node-local cache of byte ranges read from an object store, shared by the processes of a node,
with a size limit.

An entry is a file that is written under a temporary name and renamed, so it is always complete.
Entries are memory-mapped for reading. The least recently used entries are evicted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmray.errors import UsageError
from mmray.storage.paths import TEMP_SUFFIX

LOCKS = 1024
# A process lists the folder again after writing this fraction of the limit.
RECOUNT_FRACTION = 1 / 256


AUTO = "auto"  # a folder in the temporary folder of the node
MAX_TABLE_BYTES = 4 << 30


def auto_folder() -> Path:
    """Create the folder of this user for cached files of object stores, and return its path.

    It is `mmray-cache-UID` in the temporary folder of the node.

    Raises:
        OSError: It cannot be created, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"mmray-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Another user may have created the folder, and would choose what this process reads.
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def node_cache() -> ShardCache:
    """Return the cache of this node for tables of shards, of at most 4 GiB. Raises UsageError."""
    try:
        return ShardCache(str(auto_folder() / "tables"), MAX_TABLE_BYTES)
    except OSError as error:
        raise UsageError(f"the temporary folder of this node cannot be used: {error}") from None


class ShardCache:
    """Files of an object store, cached in a folder of the local disk; cheap to pickle.

    `get(name, size, fetch)` returns the bytes of an entry as a pyarrow.Buffer; an entry that is
    missing is fetched with `fetch()`. `find(name, size)` returns None for a missing one.

    Args:
        folder: A folder of each node, or `auto` for one in its temporary folder.
        max_bytes: Limit of all entries in the folder, also those of other sets. Above it the least
            recently used ones are deleted.
        used_bytes: How many bytes of entries a run uses at a time. The disk must have room for
            them.
    """

    def __init__(self, folder: str, max_bytes: int, used_bytes: int = 0) -> None:
        self._address = folder
        self.max_bytes = max_bytes
        self._used_bytes = used_bytes
        # the folder may hold entries of earlier processes
        self._bytes_since_count: float = max_bytes
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, (self._address, self.max_bytes, self._used_bytes)

    @cached_property
    def folder(self) -> Path:
        """The folder of the entries on this node; reading it creates the folder.

        Raises:
            UsageError: It cannot be used, or the disk has no room for the constructor's
                `used_bytes`.
        """
        try:
            is_auto = self._address == AUTO
            folder = auto_folder() if is_auto else Path(self._address).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free + sum(size for _, size, _ in _entries(folder))
        except OSError as error:
            raise self._unusable(error) from None
        if free < self._used_bytes:
            raise UsageError(
                f"data.local_cache {folder} needs {self._used_bytes / 1e9:.1f} GB, and the disk "
                f"has {free / 1e9:.1f} GB: name a folder on a larger disk with "
                "--data.local-cache, or lower --data.local-cache-gb"
            )
        return folder

    def get(
        self, name: str, size: int, fetch: Callable[[], bytes], refresh: bool = False
    ) -> pa.Buffer:
        """Return the bytes of an entry; the first process of a node that needs it fetches it.

        Args:
            size: Its size in bytes; an entry of another size is fetched again.
            refresh: Replace the entry, because it is damaged.
        """
        entry = None if refresh else self.find(name, size)
        if entry is None:
            with self._file_lock(str(zlib.crc32(name.encode()) % LOCKS)):
                entry = None if refresh else self.find(name, size)
                if entry is None:
                    data = fetch()
                    self._write(name, data)
                    entry = pa.py_buffer(data)
        return entry

    def find(self, name: str, size: int) -> pa.Buffer | None:
        """Return the memory-mapped bytes of an entry, None if there is none of this size; it is
        then the most recently used one.
        """
        try:
            os.utime(self.folder / name)  # the modification time is the time of last use
            entry = pa.memory_map(str(self.folder / name)).read_buffer()
        except OSError:
            return None
        return entry if entry.size == size else None

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            f"data.local_cache {self._address} cannot be used on this node: {error}. Name another "
            "folder with --data.local-cache, or `None` for no cache"
        )

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
            entries = _entries(self.folder)
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
            # The system deletes old files in temporary folders.
            locks.mkdir(parents=True, exist_ok=True)
            handle = os.open(locks / name, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _entries(folder: Path) -> list[tuple[int, int, str]]:
    """Return (last use in ns, bytes, path) of the entries in a folder, also of partial files."""
    entries = []
    for file in os.scandir(folder):
        with suppress(FileNotFoundError):  # just renamed or deleted
            if file.is_file():
                stat = file.stat()
                entries.append((stat.st_mtime_ns, stat.st_size, file.path))
    return entries
