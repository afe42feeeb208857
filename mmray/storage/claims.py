"""Where a lease is written down: numbered claims in a folder, of which each number is got by one process alone.

For lease.py. On a file system that is a file which only its creator can create. An object store lets everybody put
anything, so there each contender puts an object of its own, looks who else did, and has the number only where nobody
else did: of two, the later one to put sees the earlier one's (a listing shows every object put before; S3 says so since
2020), so never both have it.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import Protocol

from mmray.storage.remote_path import Folder, RemotePath

LONGEST_PAUSE_S = 1.0  # of a contender that gave way to another one, until it looks again


class Claims(Protocol):
    """Numbered claims; raises OSError where the storage does."""

    def fences(self) -> list[int]: ...
    def take(self, fence: int, text: str) -> bool: ...
    def read(self, fence: int) -> str | None: ...
    def beat(self, fence: int) -> None: ...
    def modified_s(self, fence: int) -> float: ...
    def now_s(self) -> float: ...
    def rewrite(self, fence: int, text: str) -> None: ...
    def remove(self, fence: int) -> None: ...


def claims_in(folder: Folder) -> Claims:
    return ObjectClaims(folder) if isinstance(folder, RemotePath) else FileClaims(folder)


class FileClaims:
    """Claim N is the file FOLDER/N."""

    def __init__(self, folder: Path):
        self._folder = folder

    def fences(self) -> list[int]:
        """The numbers that are there."""
        try:
            return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []

    def take(self, fence: int, text: str) -> bool:
        """Whether this process is the one that got the number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / str(fence)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
        except OSError:
            path.unlink(missing_ok=True)  # or who tries again would find it taken
            raise
        if max(self.fences(), default=0) > fence:  # a slow one: others took this number and more, meanwhile
            path.unlink(missing_ok=True)
            return False
        return True

    def read(self, fence: int) -> str | None:
        """What its holder wrote; None where it is gone."""
        try:
            return (self._folder / str(fence)).read_text()
        except FileNotFoundError:
            return None

    def beat(self, fence: int) -> None:
        """Give the claim the storage's present time. Raises FileNotFoundError where it is gone."""
        handle = os.open(self._folder / str(fence), os.O_RDWR)
        try:
            os.pwrite(handle, b"{", 0)  # not utime: some network mounts keep that to themselves
        finally:
            os.close(handle)

    def modified_s(self, fence: int) -> float:
        """Time of the last beat, as the storage has it; -1, different from every beat, where it is gone."""
        try:
            handle = os.open(self._folder / str(fence), os.O_RDONLY)  # makes a network mount ask the server
        except FileNotFoundError:
            return -1.0
        try:
            return os.fstat(handle).st_mtime
        finally:
            os.close(handle)

    def now_s(self) -> float:
        """The time that the storage gives to a file written now."""
        return _written_now_s(self._folder / f".now-{socket.gethostname()}-{os.getpid()}")

    def rewrite(self, fence: int, text: str) -> None:
        """Another text for a claim of one's own, whole or not at all; nothing where it is gone."""
        mine = self._folder / str(fence)
        if mine.exists():
            temporary = self._folder / f".{mine.name}.released"
            temporary.write_text(text)
            temporary.replace(mine)

    def remove(self, fence: int) -> None:
        (self._folder / str(fence)).unlink(missing_ok=True)


class ObjectClaims:
    """Claim N is the object FOLDER/N-TOKEN, the token its holder's own."""

    def __init__(self, folder: RemotePath):
        self._folder, self._token = folder, uuid.uuid4().hex[:12]

    def fences(self) -> list[int]:
        """The numbers that are there."""
        return [int(name.partition("-")[0]) for name in self._names()]

    def take(self, fence: int, text: str) -> bool:
        """Whether this process is the one that got the number; of several at once all give way, and look again."""
        mine = self._folder / f"{fence}-{self._token}"
        mine.write_text(text)
        others = [name for name in self._names() if name != mine.name and int(name.partition("-")[0]) >= fence]
        if not others:
            return True
        mine.unlink(missing_ok=True)
        time.sleep(random.uniform(0, LONGEST_PAUSE_S))
        return False

    def read(self, fence: int) -> str | None:
        """What its holder wrote; None where it is gone."""
        path = self._path(fence)
        try:
            return None if path is None else path.read_text()
        except FileNotFoundError:
            return None

    def beat(self, fence: int) -> None:
        """Give the claim the storage's present time. Raises FileNotFoundError where it is gone.

        Where it is taken over between the look and the beat, the object comes back; its number is then not the highest,
        which is what counts.
        """
        path = self._path(fence)
        if path is None:
            raise FileNotFoundError(f"the lease {fence} in {self._folder} is gone")
        path.write_bytes(path.read_bytes())

    def modified_s(self, fence: int) -> float:
        """Time of the last beat, as the storage has it; -1, different from every beat, where it is gone."""
        path = self._path(fence)
        try:
            return -1.0 if path is None else path.stat().st_mtime
        except FileNotFoundError:
            return -1.0

    def now_s(self) -> float:
        """The time that the storage gives to an object put now."""
        return _written_now_s(self._folder / f".now-{self._token}")

    def rewrite(self, fence: int, text: str) -> None:
        """Another text for a claim of one's own; nothing where it is gone."""
        path = self._path(fence)
        if path is not None:
            path.write_text(text)

    def remove(self, fence: int) -> None:
        path = self._path(fence)
        if path is not None:
            path.unlink(missing_ok=True)

    def _path(self, fence: int) -> RemotePath | None:
        """One's own claim of this number, else anybody's."""
        names = [name for name in self._names() if name.partition("-")[0] == str(fence)]
        mine = f"{fence}-{self._token}"
        return self._folder / (mine if mine in names else names[0]) if names else None

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir() if path.name.partition("-")[0].isdecimal()]
        except FileNotFoundError:
            return []


def _written_now_s(probe: Folder) -> float:
    """The time that the storage gives to a file written now, which goes again."""
    probe.write_text("now")
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
