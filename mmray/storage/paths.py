"""Paths on object stores with the interface of pathlib.Path, with atomic writes and retries."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from pyarrow import fs

from mmray.storage.storage import Storage, with_retries

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class RemotePath:
    """The path `relative` in `storage`, with the methods and errors of pathlib.Path."""

    storage: Storage
    relative: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.storage, f"{self.relative}/{name}".strip("/"))

    def __str__(self) -> str:
        head, separator, options = self.storage.address.partition("?")
        return f"{head.rstrip('/')}/{self.relative}".rstrip("/") + separator + options

    @property
    def fs_path(self) -> str:
        """The path in the file system of the storage: bucket and key."""
        return self.storage.fs_path(self.relative)

    @property
    def name(self) -> str:
        return PurePosixPath(self.fs_path).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.fs_path).stem

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.storage, self.relative.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def expanduser(self) -> RemotePath:
        return self

    resolve = expanduser

    def exists(self) -> bool:
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        return bool(self._info().type == fs.FileType.Directory)

    def is_file(self) -> bool:
        return bool(self._info().type == fs.FileType.File)

    def stat(self) -> SimpleNamespace:
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"{self} does not exist")
        return SimpleNamespace(
            st_size=info.size, st_mtime=info.mtime.timestamp() if info.mtime else 0.0
        )

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield entries sorted by name. Raises FileNotFoundError if there are none."""
        system, selector = self.storage.filesystem[0], fs.FileSelector(self.fs_path)
        infos = with_retries(lambda: system.get_file_info(selector))
        return iter([self / name for name in sorted(info.base_name for info in infos) if name])

    def read_bytes(self) -> bytes:
        return self.storage.read(self.relative)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        self.storage.write(self.relative, data)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def open(self, mode: str) -> Any:
        """Open the object, `rb` or `wb`, as a context manager."""
        return (
            self.storage.open(self.relative)
            if mode == "rb"
            else self.storage.open_output(self.relative)
        )

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, because stores have no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        if self.is_file():
            self.storage.delete(self.relative)
        elif not missing_ok:
            raise FileNotFoundError(f"{self} does not exist")

    def _info(self) -> fs.FileInfo:
        return with_retries(lambda: self.storage.filesystem[0].get_file_info(self.fs_path))


AnyPath = Path | RemotePath


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copy with retries, as streams: pyarrow's copy_files drops the last error, and S3's copies are
    limited to 5 GB.
    """

    def copy() -> None:
        with source.open("rb") as reader, target.open("wb") as writer:
            shutil.copyfileobj(reader, writer, CHUNK_BYTES)

    with_retries(copy)


def to_path(address: str | AnyPath) -> AnyPath:
    """Convert user input to a path: absolute if local (`file://` too), a RemotePath for
    s3://bucket/prefix.
    """
    if isinstance(address, RemotePath):
        return address
    storage = Storage(str(address))
    return RemotePath(storage) if "://" in storage.address else Path(storage.address).resolve()


def write_atomic(path: AnyPath, text: str) -> None:
    """Write a file atomically; an error leaves no partial file."""
    if isinstance(path, RemotePath):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_for_upload(path: AnyPath) -> Iterator[Path]:
    """Yield a local file to write; it is uploaded to `path` after the block succeeds."""
    with staged_upload(path.parent, (path.name,)) as folder:
        yield folder / path.name


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Yield a local file with the content of `path`. Raises OSError."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with temp_dir() as folder:
        copy_file(path, folder / path.name)
        yield folder / path.name


@contextmanager
def staged_upload(path: AnyPath, names: Sequence[str]) -> Iterator[Path]:
    """Yield a local folder for the files `names`; on an object store the last is uploaded after all
    others.
    """
    if not isinstance(path, RemotePath):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with temp_dir() as folder:
        yield folder
        *first, last = names
        for name in first:
            copy_file(folder / name, path / name)
        for name in first:
            size, expected = (path / name).stat().st_size, (folder / name).stat().st_size
            if size != expected:
                raise OSError(
                    f"{path / name} has {size:,} bytes after its upload, expected {expected:,}"
                )
        copy_file(folder / last, path / last)


def remove_tree(path: AnyPath) -> None:
    """Delete a folder and its files if it exists."""
    if not isinstance(path, RemotePath):
        if path.exists():
            shutil.rmtree(path)
    elif path.is_dir():
        path.storage.delete_tree(path.relative)


def move_tree(path: AnyPath, target: AnyPath) -> None:
    """Rename a folder of files, replacing `target`; on an object store by copying."""
    if isinstance(path, RemotePath) != isinstance(target, RemotePath):
        raise ValueError(
            f"cannot move {path} to {target}: both must be on a disk or both on an object store"
        )
    remove_tree(target)
    if isinstance(path, RemotePath) and isinstance(target, RemotePath):
        for file in path.iterdir():
            copy_file(file, target / file.name)
        remove_tree(path)
    elif isinstance(path, Path) and isinstance(target, Path):
        path.rename(target)


def append_line(path: AnyPath, line: bytes) -> None:
    """Append a line to a file with several writers; on an object store as an object until they are
    merged.
    """
    if isinstance(path, RemotePath):
        (_line_folder(path) / f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}").write_bytes(
            line + b"\n"
        )
    else:
        with path.open("ab") as file:
            file.write(line + b"\n")


def merge_appended_lines(path: AnyPath) -> None:
    """Merge the objects that `append_line` wrote on a store into the file; call it from one process
    only.
    """
    if not isinstance(path, RemotePath) or not _line_folder(path).is_dir():
        return
    before = path.read_bytes() if path.exists() else b""
    lines, known = (
        [each.read_bytes() for each in _line_folder(path).iterdir()],
        set(before.splitlines(keepends=True)),
    )
    # known: from a failed deletion
    path.write_bytes(before + b"".join(line for line in lines if line not in known))
    remove_tree(_line_folder(path))


def _line_folder(path: RemotePath) -> RemotePath:
    return path.with_name(f"{path.name}.parts")


@contextmanager
def temp_dir() -> Iterator[Path]:
    """Yield a local folder that is deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="mmray-") as name:
        yield Path(name)
