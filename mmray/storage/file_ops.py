"""What a run does to its folder beyond single files, on a file system and on an object store alike.

A library that wants a real file gets one of this machine (`written`, `fetched`, `staged`), carried to the store or from
it; on a file system it gets the file itself.
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
from pathlib import Path

from mmray.storage.remote_path import Folder, RemotePath, steadily

PREFIX = "mmray-on-its-way-"  # folders of this machine with what is being carried
LEFT_AFTER_S = 3600.0


def write_whole(path: Folder, text: str) -> None:
    """Write a file whole or not at all."""
    if isinstance(path, RemotePath):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextmanager
def written(path: Folder) -> Iterator[Path]:
    """A file of this machine to write, which is at `path` when the block ends well."""
    if not isinstance(path, RemotePath):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with on_its_way() as here:
        yield here / path.name
        path.upload(here / path.name)


@contextmanager
def fetched(path: Folder) -> Iterator[Path]:
    """A file of this machine with what is at `path`. Raises OSError."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with on_its_way() as here:
        path.download(here / path.name)
        yield here / path.name


@contextmanager
def staged(path: Folder, names: Sequence[str]) -> Iterator[Path]:
    """A folder of this machine for the files `names`, which are at `path` when the block ends well.

    On an object store they are put in this order, the last one only when all others are there in full length.
    """
    if not isinstance(path, RemotePath):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with on_its_way() as here:
        yield here
        *first, last = names
        for name in first:
            (path / name).upload(here / name)
        for name in first:
            there, wanted = (path / name).stat().st_size, (here / name).stat().st_size
            if there != wanted:
                raise OSError(f"{path / name} has {there:,} bytes after its upload, not {wanted:,}")
        (path / last).upload(here / last)


def remove_tree(path: Folder) -> None:
    """Delete a folder with all that is in it, where it is there."""
    if not isinstance(path, RemotePath):
        if path.exists():
            shutil.rmtree(path)
    elif path.is_dir():
        steadily(lambda: path.place.system[0].delete_dir(path.key))


def move_tree(path: Folder, target: Folder) -> None:
    """Give a folder of files another name, in place of what was there; on an object store by copying it first."""
    remove_tree(target)
    if isinstance(path, RemotePath) and isinstance(target, RemotePath):
        for file in path.iterdir():
            file.copy(target / file.name)
        remove_tree(path)
    elif isinstance(path, Path) and isinstance(target, Path):
        path.rename(target)


def append_line(path: Folder, line: bytes) -> None:
    """Add a line to a file that several processes add to; on an object store as a part of its own, until `gather`."""
    if isinstance(path, RemotePath):
        part = f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"
        (_parts(path) / part).write_bytes(line + b"\n")
        return
    with path.open("ab") as file:
        file.write(line + b"\n")


def gather(path: Folder) -> None:
    """Put the parts of such a file together; for the one process that leads the others."""
    if not isinstance(path, RemotePath) or not _parts(path).is_dir():
        return
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + b"".join(part.read_bytes() for part in _parts(path).iterdir()))
    remove_tree(_parts(path))


def _parts(path: RemotePath) -> RemotePath:
    return path.with_name(f"{path.name}.parts")


@contextmanager
def on_its_way() -> Iterator[Path]:
    """A folder of this machine that is gone after the block, or when a later process finds that its own is dead."""
    here = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(here, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _sweep(here)
        yield here
    finally:
        os.close(handle)
        shutil.rmtree(here, ignore_errors=True)


def _sweep(mine: Path) -> None:
    """Delete what killed processes have left: a living one holds the lock of its folder."""
    for old in mine.parent.glob(f"{PREFIX}*"):
        try:
            if time.time() - old.stat().st_mtime < LEFT_AFTER_S:
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
