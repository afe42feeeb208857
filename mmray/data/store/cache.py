"""A folder of this machine that keeps what was read of an object store, up to a number of bytes; processes share it.

An entry is a file under a name that says what is in it. It appears whole (it is renamed to its name), and is mapped
where it is read, so that a row costs its own bytes. The entries longest unused make room for others.
"""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from mmray.errors import UsageError
from mmray.storage.storage import TEMP_SUFFIX

LOCKS = 1024
SHARE_UNCOUNTED = 1 / 256  # of the limit, written by a process before it counts the folder again


class ShardCache:
    """Entries in `folder`, of `most_bytes` together; cheap to pickle."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder).expanduser().absolute(), most_bytes
        self._uncounted: float = most_bytes  # others may have written before
        self._told = False

    def get(self, name: str, size: int, fetch: Callable[[], bytes]) -> pa.Buffer:
        """The entry of this name, of `size` bytes, fetched where it is not there: once, whoever else wants it now.

        Raises what `fetch` raises, and UsageError where the folder cannot be made.
        """
        found = self._mapped(name, size)
        if found is not None:
            return found
        with self._alone(str(zlib.crc32(name.encode()) % LOCKS)):
            found = self._mapped(name, size)
            if found is not None:
                return found
            data = fetch()
            self._write(name, data)
        return pa.py_buffer(data)

    def drop(self, name: str) -> None:
        """Delete an entry that was found to be damaged; whoever has it mapped keeps what is mapped."""
        (self.folder / name).unlink(missing_ok=True)

    def _mapped(self, name: str, size: int) -> pa.Buffer | None:
        try:
            os.utime(self.folder / name)  # it was of use now
            found = pa.memory_map(str(self.folder / name)).read_buffer()
        except OSError:  # not there, or taken away just now
            return None
        return found if found.size == size else None

    def _write(self, name: str, data: bytes) -> None:
        unfinished = self.folder / f"{name}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(self.folder / name)
        except OSError as error:  # a full disk is no reason to end a run that can read the store
            unfinished.unlink(missing_ok=True)
            if not self._told:
                logging.getLogger(__name__).warning("data.local_cache %s takes no more: %s", self.folder, error)
            self._told = True
        self._uncounted += len(data)
        if self._uncounted > self.most_bytes * SHARE_UNCOUNTED:
            self._trim()

    def _trim(self) -> None:
        """Delete the entries longest unused, until the rest fits."""
        with self._alone("trim"):
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= self.most_bytes:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
        self._uncounted = 0

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """(last use in ns, bytes, path) of each entry, and of what killed processes left of one."""
        for file in os.scandir(self.folder):
            try:
                stat = file.stat()
            except FileNotFoundError:  # just renamed
                continue
            if file.is_file():
                yield stat.st_mtime_ns, stat.st_size, file.path

    @contextmanager
    def _alone(self, lock: str) -> Iterator[None]:
        """No other thread or process of this machine is in a block of this name; a dead one holds nothing."""
        locks = self.folder / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            handle = os.open(locks / lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"data.local_cache {self.folder} cannot be used on this node: {error}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
