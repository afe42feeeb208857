"""A path on an object store, in pathlib's words: what reads and writes a run's folder is written once for both.

`folder_at` turns what a user typed into a `Path`, or into a `RemotePath` where it is an address. An object appears
under its name whole or not at all; there are no folders, no appending and no renaming (folders.py has what stands in).

What the network or the store refuses for a moment is tried again; a missing object or a refused key is told at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pyarrow import fs

from mmray.storage.storage import Storage, with_retries

CHUNK_BYTES = 8 << 20


class Stat(NamedTuple):
    """The parts of os.stat_result that an object store knows."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class RemotePath:
    """`inner` is the path below `place`; operations are those of pathlib.Path, and raise OSError as it does."""

    storage: Storage
    relative: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.storage, f"{self.relative}/{name}".strip("/"))

    def __str__(self) -> str:
        head, mark, options = self.storage.address.partition("?")
        return f"{head.rstrip('/')}/{self.relative}".rstrip("/") + mark + options

    @property
    def key(self) -> str:
        """The path as the file system of the place knows it."""
        return f"{self.storage.filesystem[1]}/{self.relative}".rstrip("/")

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.storage, self.relative.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def expanduser(self) -> RemotePath:
        return self

    def resolve(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        return bool(self._info().type == fs.FileType.Directory)

    def is_file(self) -> bool:
        return bool(self._info().type == fs.FileType.File)

    def stat(self) -> Stat:
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"there is no object {self}")
        return Stat(info.size, info.mtime.timestamp() if info.mtime is not None else 0.0)

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies here, by name. Raises FileNotFoundError where nothing does."""
        system, selector = self.storage.filesystem[0], fs.FileSelector(self.key)
        infos = with_retries(lambda: system.get_file_info(selector))
        return iter([self / name for name in sorted(info.base_name for info in infos) if name])

    def read_bytes(self) -> bytes:
        return with_retries(self._read)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Put the whole object; one that was there is replaced."""
        with_retries(lambda: self._write(data))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def download(self, file: Path) -> None:
        """Copy the object into a file of this machine."""
        with_retries(lambda: self._download(file))

    def upload(self, file: Path) -> None:
        """Put the object from a file of this machine, from its beginning at each try."""
        with_retries(lambda: self._upload(file))

    def copy(self, target: RemotePath) -> None:
        """Put another object with the same bytes, whatever their number (S3 itself copies 5 GB at most)."""
        with_retries(lambda: self._copy(target))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there as soon as something is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        if self.is_file():
            with_retries(lambda: self.storage.filesystem[0].delete_file(self.key))
        elif not missing_ok:
            raise FileNotFoundError(f"there is no object {self}")

    def _info(self) -> fs.FileInfo:
        return with_retries(lambda: self.storage.filesystem[0].get_file_info(self.key))

    def _read(self) -> bytes:
        with self.storage.filesystem[0].open_input_file(self.key) as file:
            return bytes(file.readall())

    # Not pyarrow's copy_files: it drops the error of an object's last request (pyarrow 26).

    def _download(self, file: Path) -> None:
        with self.storage.filesystem[0].open_input_stream(self.key) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _upload(self, file: Path) -> None:
        with file.open("rb") as source, self.storage.open_output(self.relative) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _copy(self, other: RemotePath) -> None:
        with (
            self.storage.filesystem[0].open_input_stream(self.key) as source,
            other.storage.open_output(other.relative) as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _write(self, data: bytes) -> None:
        with self.storage.open_output(self.relative) as stream:
            stream.write(data)


AnyPath = Path | RemotePath


def to_path(address: str | AnyPath) -> AnyPath:
    """The folder that a user names: a path, absolute, or an address (s3://bucket/prefix)."""
    if isinstance(address, RemotePath):
        return address
    if "://" in str(address):
        return RemotePath(Storage(str(address)))
    return Path(address).expanduser().resolve()


# File operations (was file_ops)
PREFIX = "mmray-on-its-way-"  # folders of this machine with what is being carried
STALE_AFTER_S = 3600.0


def write_atomic(path: AnyPath, text: str) -> None:
    """Write a file whole or not at all."""
    if isinstance(path, RemotePath):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextmanager
def open_for_upload(path: AnyPath) -> Iterator[Path]:
    """A file of this machine to write, which is at `path` when the block ends well."""
    if not isinstance(path, RemotePath):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with temp_dir() as here:
        yield here / path.name
        path.upload(here / path.name)


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """A file of this machine with what is at `path`. Raises OSError."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with temp_dir() as here:
        path.download(here / path.name)
        yield here / path.name


@contextmanager
def staged_upload(path: AnyPath, names: Sequence[str]) -> Iterator[Path]:
    """A folder of this machine for the files `names`, which are at `path` when the block ends well.

    On an object store they are put in this order, the last one only when all others are there in full length.
    """
    if not isinstance(path, RemotePath):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with temp_dir() as here:
        yield here
        *first, last = names
        for name in first:
            (path / name).upload(here / name)
        for name in first:
            there, wanted = (path / name).stat().st_size, (here / name).stat().st_size
            if there != wanted:
                raise OSError(f"{path / name} has {there:,} bytes after its upload, not {wanted:,}")
        (path / last).upload(here / last)


def remove_tree(path: AnyPath) -> None:
    """Delete a folder with all that is in it, where it is there."""
    if not isinstance(path, RemotePath):
        if path.exists():
            shutil.rmtree(path)
    elif path.is_dir():
        with_retries(lambda: path.storage.filesystem[0].delete_dir(path.key))


def move_tree(path: AnyPath, target: AnyPath) -> None:
    """Give a folder of files another name, in place of what was there; on an object store by copying it first."""
    remove_tree(target)
    if isinstance(path, RemotePath) and isinstance(target, RemotePath):
        for file in path.iterdir():
            file.copy(target / file.name)
        remove_tree(path)
    elif isinstance(path, Path) and isinstance(target, Path):
        path.rename(target)


def append_line(path: AnyPath, line: bytes) -> None:
    """Add a line to a file that several processes add to; on an object store as a part of its own, until `gather`."""
    if isinstance(path, RemotePath):
        part = f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"
        (_parts(path) / part).write_bytes(line + b"\n")
        return
    with path.open("ab") as file:
        file.write(line + b"\n")


def merge_parts(path: AnyPath) -> None:
    """Put the parts of such a file together; for the one process that leads the others."""
    if not isinstance(path, RemotePath) or not _parts(path).is_dir():
        return
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + b"".join(part.read_bytes() for part in _parts(path).iterdir()))
    remove_tree(_parts(path))


def _parts(path: RemotePath) -> RemotePath:
    return path.with_name(f"{path.name}.parts")


@contextmanager
def temp_dir() -> Iterator[Path]:
    """A folder of this machine that is gone after the block, or when a later process finds that its own is dead."""
    here = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(here, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _remove_stale(here)
        yield here
    finally:
        os.close(handle)
        shutil.rmtree(here, ignore_errors=True)


def _remove_stale(mine: Path) -> None:
    """Delete what killed processes have left: a living one holds the lock of its folder."""
    for old in mine.parent.glob(f"{PREFIX}*"):
        try:
            if time.time() - old.stat().st_mtime < STALE_AFTER_S:
                continue
            handle = os.open(old, os.O_RDONLY)
        except OSError:
            continue  # another user's, or just gone
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
