"""A folder on a disk or an object store, with the few operations that sources and prepared sets need.

Everything is addressed by a name inside the folder, so that a set can be copied or moved whole. A file written here is
there entirely or not at all: under another name first on a file system, and an object store shows only whole objects
(one whose writer fails is deleted).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from mmray.errors import UsageError
from mmray.storage.address import NO_CREDENTIALS, holds_credentials

UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Place:
    """`address` is a local path or a URI that pyarrow knows (s3://bucket/prefix, gs://..., hdfs://...)."""

    address: str

    def __post_init__(self) -> None:
        if holds_credentials(self.address):
            raise UsageError(f"{self.address.partition('?')[0].rpartition('@')[2]}: {NO_CREDENTIALS}")
        if "://" not in self.address:  # another process may stand in another folder
            object.__setattr__(self, "address", str(Path(self.address).expanduser().absolute()))

    @classmethod
    def split(cls, address: str) -> tuple[Place, str]:
        """The folder a file is in, and the file's name there; options of a URI (`?endpoint_override=`) stay."""
        head, mark, options = address.partition("?") if "://" in address else (address, "", "")
        folder, _, name = head.rpartition("/")
        return cls((folder or ("/" if head.startswith("/") else ".")) + mark + options), name

    @cached_property
    def system(self) -> tuple[fs.FileSystem, str]:
        """The file system and the folder's path there. Raises UsageError for an address that nothing serves."""
        if "://" not in self.address:
            return fs.LocalFileSystem(), self.address
        try:
            system, root = fs.FileSystem.from_uri(_in_one_request(_quoted(self.address)))
        except pa.ArrowInvalid as error:
            system, root = _by_fsspec(self.address, error)
        return system, root.rstrip("/")

    @cached_property
    def local(self) -> Path | None:
        """The folder as a path, where it is on a file system of this machine."""
        system, root = self.system
        return Path(root) if isinstance(system, fs.LocalFileSystem) else None

    @cached_property
    def inside(self) -> str:
        """What the path of a file begins with that lies in this local folder, all links followed."""
        return os.path.realpath(str(self.local)).rstrip("/") + "/"

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        system, root = self.system
        info = system.get_file_info(f"{root}/{name}")
        return info.size if info.type == fs.FileType.File else None

    def info(self, name: str) -> tuple[int | None, int | None]:
        """(bytes, time of change in ns) of a file, None where the store does not say. Raises FileNotFoundError."""
        system, root = self.system
        info = system.get_file_info(f"{root}/{name}")
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"there is no file {self.address}/{name}")
        return info.size, info.mtime_ns

    def is_folder(self, name: str = "") -> bool:
        system, root = self.system
        return bool(system.get_file_info(f"{root}/{name}".rstrip("/")).type == fs.FileType.Directory)

    def tree(self, folder: str = "") -> list[str]:
        """Names of all files below a folder, sorted, relative to this place."""
        system, root = self.system
        if self.local is not None:
            return sorted(_files_below(f"{root}/{folder}".rstrip("/"), f"{folder}/".lstrip("/")))
        infos = system.get_file_info(fs.FileSelector(f"{root}/{folder}".rstrip("/"), recursive=True))
        return sorted(info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files in a folder, sorted; none where there is no folder."""
        system, root = self.system
        if self.local is not None:
            path = self.local / folder
            return sorted(os.listdir(path)) if path.exists() else []  # noqa: PTH208 - names alone
        selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True)
        return sorted(info.base_name for info in system.get_file_info(selector))

    def make(self, folder: str = "") -> None:
        """Create a folder and those above it."""
        system, root = self.system
        system.create_dir(f"{root}/{folder}".rstrip("/"), recursive=True)

    def open(self, name: str, mapped: bool = False) -> pa.NativeFile:
        """A file for random access, on a local disk mapped into memory if asked for.

        Map only what nobody changes: a mapped file that is cut short ends the process that reads it.
        """
        system, root = self.system
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
        system, root = self.system
        target = f"{root}/{name}"
        if not isinstance(system, fs.LocalFileSystem):
            with _object(system, target) as stream:
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
        system, root = self.system
        system.delete_file(f"{root}/{name}")


def _files_below(folder: str, before: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Regular files below a local folder, `before` in front of their names; links are followed, but not in a circle.

    By the system's own listing: pyarrow's ends at the first name that is not UTF-8.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files_below(entry.path, f"{before}{entry.name}/", (*above, real))
            elif entry.is_file():
                yield f"{before}{entry.name}"


@contextmanager
def _object(system: fs.FileSystem, path: str) -> Iterator[pa.NativeFile]:
    """An object to write, deleted where the block fails: pyarrow cannot abandon one, closing it puts what there is."""
    stream = system.open_output_stream(path)
    try:
        yield stream
    except BaseException:
        with suppress(OSError):  # where the store does not take it, what was there before stays
            stream.close()
            system.delete_file(path)
        raise
    stream.close()


def _quoted(address: str) -> str:
    """A URI as it is written: what a person typed may have spaces and letters beyond ASCII in its path."""
    scheme, _, rest = address.partition("://")
    whole, mark, options = rest.partition("?")
    authority, slash, path = whole.partition("/")
    return f"{scheme}://{authority}{slash}{quote(path, safe='/%')}{mark}{options}"


def _in_one_request(address: str) -> str:
    """Small objects of S3 go out in one request, and nothing is begun on the store before there is something to put."""
    if not address.startswith("s3://") or "allow_delayed_open" in address:
        return address
    return f"{address}{'&' if '?' in address else '?'}allow_delayed_open=true"


def _by_fsspec(address: str, refused: Exception) -> tuple[fs.FileSystem, str]:
    """What pyarrow does not know itself: fsspec's own schemes, and those of packages that are installed for it."""
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{address} cannot be opened: {refused}; fsspec: {error}") from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), root
