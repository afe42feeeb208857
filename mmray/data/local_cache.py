"""A folder of this machine that keeps what was read of an object store, up to a number of bytes; processes share it.

An entry is a file under a name that says what is in it, with a checksum behind its bytes. It appears whole (it is
renamed to its name), and is left to whoever has the most use for it: the entries longest unused go first.
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

from mmray.data.place import UNFINISHED
from mmray.errors import UsageError

LOCKS = 1024
SHARE_UNCOUNTED = 1 / 256  # of the limit, written by a process before it counts the folder again
SUM_BYTES = 4


class LocalCache:
    """Entries in `folder`, of `most_bytes` together; cheap to pickle."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder).expanduser().absolute(), most_bytes
        self._uncounted: float = most_bytes  # others may have written before
        self._told = False

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """The entry of this name, fetched where it is not there or damaged: once, whoever else wants it now.

        Raises what `fetch` raises, and UsageError where the folder cannot be made.
        """
        data = self._read(name)
        if data is not None:
            return data
        with self._alone(str(zlib.crc32(name.encode()) % LOCKS)):
            data = self._read(name)
            if data is None:
                data = fetch()
                self._write(name, data)
        return data

    def _read(self, name: str) -> bytes | None:
        try:
            os.utime(self.folder / name)  # it was of use now
            data = (self.folder / name).read_bytes()
        except OSError:  # not there, taken away just now, or on a bad sector
            return None
        good = zlib.crc32(data[:-SUM_BYTES]).to_bytes(SUM_BYTES, "little") == data[-SUM_BYTES:]
        return data[:-SUM_BYTES] if good else None

    def _write(self, name: str, data: bytes) -> None:
        unfinished = self.folder / f"{name}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
        try:
            with unfinished.open("wb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(SUM_BYTES, "little"))
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
