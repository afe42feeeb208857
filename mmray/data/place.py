"""A folder on a disk or an object store, with the few operations that sources and prepared sets need.

Everything is addressed by a name inside the folder, so that a set can be copied or moved whole. A file written here is
there entirely or not at all: under another name first on a file system, and an object store shows only whole objects.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Place:
    """`address` is a local path or a URI that pyarrow knows (s3://bucket/prefix, gs://..., hdfs://...)."""

    address: str

    def __post_init__(self) -> None:
        if "://" not in self.address:  # another process may stand in another folder
            object.__setattr__(self, "address", str(Path(self.address).expanduser().absolute()))

    @classmethod
    def split(cls, address: str) -> tuple[Place, str]:
        """The folder a file is in, and the file's name there; options of a URI (`?endpoint_override=`) stay."""
        head, mark, options = address.partition("?") if "://" in address else (address, "", "")
        folder, _, name = head.rpartition("/")
        return cls((folder or ("/" if head.startswith("/") else ".")) + mark + options), name

    @cached_property
    def _system(self) -> tuple[fs.FileSystem, str]:
        if "://" in self.address:
            system, root = fs.FileSystem.from_uri(self.address)
            return system, root.rstrip("/")
        return fs.LocalFileSystem(), self.address

    @property
    def local(self) -> Path | None:
        """The folder as a path, where it is on a file system of this machine."""
        system, root = self._system
        return Path(root) if isinstance(system, fs.LocalFileSystem) else None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        system, root = self._system
        info = system.get_file_info(f"{root}/{name}")
        return info.size if info.type == fs.FileType.File else None

    def info(self, name: str) -> tuple[int | None, int | None]:
        """(bytes, time of change in ns) of a file, None where the store does not say. Raises FileNotFoundError."""
        system, root = self._system
        info = system.get_file_info(f"{root}/{name}")
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"there is no file {self.address}/{name}")
        return info.size, info.mtime_ns

    def is_folder(self, name: str = "") -> bool:
        system, root = self._system
        return bool(system.get_file_info(f"{root}/{name}".rstrip("/")).type == fs.FileType.Directory)

    def tree(self, folder: str = "") -> list[str]:
        """Names of all files below a folder, sorted, relative to this place."""
        system, root = self._system
        infos = system.get_file_info(fs.FileSelector(f"{root}/{folder}".rstrip("/"), recursive=True))
        return sorted(info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files in a folder, sorted; none where there is no folder."""
        system, root = self._system
        selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True)
        return sorted(info.base_name for info in system.get_file_info(selector))

    def make(self, folder: str = "") -> None:
        """Create a folder and those above it."""
        system, root = self._system
        system.create_dir(f"{root}/{folder}".rstrip("/"), recursive=True)

    def open(self, name: str, mapped: bool = False) -> pa.NativeFile:
        """A file for random access, on a local disk mapped into memory if asked for.

        Map only what nobody changes: a mapped file that is cut short ends the process that reads it.
        """
        system, root = self._system
        if mapped and isinstance(system, fs.LocalFileSystem):
            return pa.memory_map(f"{root}/{name}")
        return system.open_input_file(f"{root}/{name}")

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.open(name) as file:
            return bytes(file.readall())

    @contextmanager
    def writing(self, name: str) -> Iterator[pa.NativeFile]:
        """A file to write; it appears under its name when the block ends well, and not otherwise."""
        system, root = self._system
        target = f"{root}/{name}"
        if not isinstance(system, fs.LocalFileSystem):
            with system.open_output_stream(target) as stream:
                yield stream
            return
        unfinished = f"{target}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
        try:
            with system.open_output_stream(unfinished) as stream:
                yield stream
            system.move(unfinished, target)
        finally:
            Path(unfinished).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as stream:
            stream.write(data)

    def delete(self, name: str) -> None:
        """Delete a file."""
        system, root = self._system
        system.delete_file(f"{root}/{name}")
