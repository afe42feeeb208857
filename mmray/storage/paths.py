"""Paths of files on local disks and object stores, and operations that work on both.

A local path is a pathlib.Path. A path on an object store or HDFS is a RemotePath, which has the
same interface and the same errors. Reads and writes of a RemotePath are retried.

The library is pyarrow.fs. Against an S3 server on loopback (8 threads, median of 5 rounds) obstore
0.12 is faster: ranges 26 against 14 MB/s, whole files 490 against 309, writes 74 against 38. But it
has no hdfs:// and does not read AWS profile files, and the readers of Parquet and Arrow need
pyarrow, so it would be a second library with its own credentials. fsspec with s3fs is slower.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from mmray.errors import UsageError
from mmray.storage.address import CREDENTIALS_REFUSED, has_credentials, redact_url
from mmray.storage.requests import with_retries

T = TypeVar("T")
SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs")
CHUNK_BYTES = 8 << 20
TEMP_SUFFIX = ".unfinished"
JOB_DIR = "working_dir_files"  # Ray's folder for working directories of submitted jobs
_LOCAL = fs.LocalFileSystem()


@dataclass(frozen=True)
class RemotePath:
    """A path on an object store or HDFS, with the methods and errors of pathlib.Path.

    It has `name`, `parent`, `/`, `exists`, `iterdir`, `read_text`, `write_bytes`, `open`, `unlink`
    and others.

    Args:
        root: scheme and bucket or host, such as `s3://bucket`.
        key: path below the root, without percent-encoding.
        options: part of the address after the question mark, such as `region=eu-west-1`.
    """

    root: str
    key: str = ""
    options: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        """The address, which `to_path` converts back to this path."""
        key = self.key.replace("%", "%25").replace("?", "%3F")
        path = f"{self.root}/{key}" if key else self.root
        return f"{path}?{self.options}" if self.options else path

    @property
    def filesystem(self) -> fs.FileSystem:
        """The file system of pyarrow for this path; raises UsageError if this build does not have
        it.
        """
        return _open_filesystem(self.root, self.options)[0]

    @property
    def fs_path(self) -> str:
        """The path in the file system of pyarrow, such as `bucket/runs/a`."""
        prefix = _open_filesystem(self.root, self.options)[1]
        return f"{prefix}{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the path, such as `config.yaml`."""
        return (self.key or self.root).rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part of the path without its suffix, such as `config`."""
        return Path(self.name).stem

    @property
    def parent(self) -> RemotePath:
        """The path without its last part."""
        return replace(self, key=self.key.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Return the path with another last part."""
        return self.parent / name

    def exists(self) -> bool:
        """Return whether the path is an object or a folder."""
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        """Return whether the path is a folder."""
        return bool(self._info().type == fs.FileType.Directory)

    def is_file(self) -> bool:
        """Return whether the path is an object."""
        return bool(self._info().type == fs.FileType.File)

    def stat(self) -> SimpleNamespace:
        """Return `st_size`, and `st_mtime` (0 if the store has none) and `st_mtime_ns` (None) of an
        object.

        Raises:
            FileNotFoundError: There is no such object.
        """
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"{self} does not exist")
        return _to_stat(info)

    def iterdir(self) -> Iterator[RemotePath]:
        """Iterate the entries of the folder, sorted by name.

        Raises:
            FileNotFoundError: The folder does not exist.
        """
        infos = with_retries(lambda: self.filesystem.get_file_info(fs.FileSelector(self.fs_path)))
        return iter([self / name for name in sorted(info.base_name for info in infos) if name])

    def read_bytes(self) -> bytes:
        """Return the content of the object. Raises FileNotFoundError if it does not exist."""

        def read() -> bytes:
            with open_input(self) as file:
                return bytes(file.readall())

        return with_retries(read)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the content of the object as text.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Write the object with retries; an existing object is replaced."""

        def write() -> None:
            with open_output(self) as stream:
                stream.write(data)

        with_retries(write)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write the object with retries; an existing object is replaced."""
        self.write_bytes(text.encode(encoding))

    def open(self, mode: str) -> Any:
        """Open the object as a context manager."""
        return open_input(self) if mode == "rb" else open_output(self)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, because a write creates the folders that it needs."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object.

        Raises:
            FileNotFoundError: There is no such object.
        """
        try:
            with_retries(lambda: self.filesystem.delete_file(self.fs_path))
        except FileNotFoundError:
            if not missing_ok:
                raise FileNotFoundError(f"{self} does not exist") from None

    def _info(self) -> fs.FileInfo:
        return with_retries(lambda: self.filesystem.get_file_info(self.fs_path))


def _to_stat(info: fs.FileInfo) -> SimpleNamespace:
    # In whole seconds, as S3 returns them for an object; its listings have milliseconds.
    modified_ns = info.mtime_ns and info.mtime_ns // 10**9 * 10**9
    modified_s = (modified_ns or 0) / 1e9
    return SimpleNamespace(st_size=info.size, st_mtime=modified_s, st_mtime_ns=modified_ns)


AnyPath = Path | RemotePath


def to_path(address: str | AnyPath) -> AnyPath:
    """Convert user input to a path.

    Args:
        address: a local path, or a URI (`file`, `s3`, `gs`, `gcs`, `abfs`, `abfss` or `hdfs`),
            maybe with options after a question mark: `s3://bucket/runs?region=eu-west-1`. It may be
            percent-encoded.

    Returns:
        A Path for a local path or a `file` URI, absolute because another process may have another
        working directory; a RemotePath for another URI.

    Raises:
        UsageError: the scheme is unknown, or the address contains credentials.
    """
    if isinstance(address, RemotePath):
        return address
    text = str(address)
    if has_credentials(text):
        raise UsageError(f"{text.partition('?')[0].rpartition('@')[2]}: {CREDENTIALS_REFUSED}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        # Path.expanduser raises an error for a file named ~x.
        path = Path(os.path.expanduser(text))  # noqa: PTH111
        return path.resolve() if ".." in path.parts else path.absolute()
    if scheme not in SCHEMES:  # the address may come from the manifest of somebody else's set
        raise UsageError(
            f"{redact_url(text)} cannot be opened: use a local path or a URI with "
            f"{', '.join(SCHEMES)}"
        )
    location, _, options = rest.partition("?")
    authority, _, key = location.partition("/")
    if scheme == "file":
        return Path(_from_uri(f"file://{authority}/{quote(key, safe='/%')}")[1])
    return RemotePath(f"{scheme}://{authority}", unquote(key).strip("/"), options)


def check_kept(name: str, address: str | AnyPath) -> None:
    """Check that an output is not in a job's copy of the working directory, which Ray deletes.

    Raises:
        UsageError: The output is in such a copy.
    """
    path = to_path(address)
    if isinstance(path, Path) and JOB_DIR in path.absolute().parts:
        raise UsageError(
            f"{name} {address} is in a job's copy of the working directory, which Ray deletes "
            "later. Give an absolute path on a storage that every node sees, such as /shared/..."
        )


@cache
def _open_filesystem(root: str, options: str) -> tuple[fs.FileSystem, str]:
    """Return pyarrow's file system of a root and the prefix of paths in it, such as `bucket/`."""
    # Small objects then take one request, and an empty upload none.
    if root.startswith("s3://") and "allow_delayed_open" not in options:
        options = "&".join(filter(None, (options, "allow_delayed_open=true")))
    system, path = _from_uri(f"{root}/x?{options}" if options else f"{root}/x")
    return system, path.removesuffix("x")


def _from_uri(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"{uri} cannot be opened: {error}") from None


def retry_if_remote(path: AnyPath, call: Callable[[], T]) -> T:
    """Call a function; if the path is on an object store or HDFS, with retries.

    Raises:
        TransientStorageError: With the last transient error.
    """
    return with_retries(call) if isinstance(path, RemotePath) else call()


def open_input(path: AnyPath, mapped: bool = False) -> pa.NativeFile:
    """Open a file for random access.

    Raises:
        OSError: the file cannot be opened.
    """
    if isinstance(path, RemotePath):
        return with_retries(lambda: path.filesystem.open_input_file(path.fs_path))
    return pa.memory_map(str(path)) if mapped else _LOCAL.open_input_file(str(path))


def open_sequential(
    path: AnyPath, mapped: bool = False, request_bytes: int | None = None
) -> pa.NativeFile:
    """Open a file for reading from its start to its end; each read from a store is retried.

    Args:
        request_bytes: Read at least so many bytes at a time from a store.

    Raises:
        OSError: The file cannot be opened.
    """
    file = open_input(path, mapped)
    if not isinstance(path, RemotePath):
        return file
    retried = _RetriedFile(file)
    return pa.PythonFile(
        io.BufferedReader(retried, request_bytes) if request_bytes else retried, "r"
    )


class _RetriedFile(io.RawIOBase):
    """A file of an object store whose reads are retried."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file
        self._size = file.size()
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        self._offset = base + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._offset))
        data = with_retries(lambda: self._file.read_at(count, self._offset)) if count else b""
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def open_output(path: AnyPath) -> Iterator[pa.NativeFile]:
    """Return a context manager that opens a file for writing; it exists only after the block
    succeeded.

    An error in the block leaves the old file on a local disk, and no file on a store.

    Args:
        path: The file, which is replaced if it exists.
    """
    if not isinstance(path, RemotePath):
        with _replacing(path) as temporary, _LOCAL.open_output_stream(str(temporary)) as stream:
            yield stream
        return
    stream = path.filesystem.open_output_stream(path.fs_path)
    try:
        yield stream
    except BaseException:
        # pyarrow cannot abort an upload: closing it writes the partial object, so delete that.
        with suppress(OSError):
            stream.close()
            path.filesystem.delete_file(path.fs_path)
        raise
    stream.close()


def write_atomic(path: AnyPath, data: str | bytes) -> None:
    """Write a file atomically; an error leaves no partial file.

    Args:
        path: The file, which is replaced if it exists.
        data: Its content; text is encoded as UTF-8.
    """
    content = data.encode() if isinstance(data, str) else data
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with _replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden temporary file that replaces `path` if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def file_size(path: AnyPath) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    try:
        return int(path.stat().st_size)
    except FileNotFoundError:
        return None


def opened_stat(path: AnyPath) -> Any:
    """Return `stat()` of a file; of a local one after opening it, because NFS caches what `stat`
    returns.

    Raises:
        OSError: The file does not exist or cannot be opened.
    """
    if isinstance(path, RemotePath):
        return path.stat()
    with path.open("rb") as file:
        return os.fstat(file.fileno())


def list_names(folder: AnyPath) -> list[str]:
    """Return the sorted names in a folder; empty if it does not exist."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def list_sizes(folder: AnyPath) -> dict[str, int]:
    """Return the sizes of the files in a folder by name; empty if it does not exist."""
    try:
        if not isinstance(folder, RemotePath):
            with os.scandir(folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        selector = fs.FileSelector(folder.fs_path)
        infos = with_retries(lambda: folder.filesystem.get_file_info(selector))
        return {info.base_name: info.size for info in infos if info.type == fs.FileType.File}
    except FileNotFoundError:
        return {}


def list_files(folder: AnyPath) -> list[str]:
    """Return all files below a folder, also in its subfolders.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    if isinstance(folder, RemotePath):
        return sorted(list_stats(folder))
    return sorted(_walk(str(folder), ""))


def list_stats(folder: RemotePath) -> dict[str, SimpleNamespace]:
    """Return `stat()` of all objects below a folder by path, by a request for 1,000 of them.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    selector = fs.FileSelector(folder.fs_path, recursive=True)
    infos = with_retries(lambda: folder.filesystem.get_file_info(selector))
    prefix = len(folder.fs_path) + 1
    return {info.path[prefix:]: _to_stat(info) for info in infos if info.type == fs.FileType.File}


def _walk(folder: str, prefix: str, parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield regular files below a folder; pyarrow stops at the first name that is not UTF-8."""
    real = os.path.realpath(folder)
    if real in parents:  # a cycle of links
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/", (*parents, real))
            elif entry.is_file():
                yield f"{prefix}{entry.name}"


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copy a file with retries, from and to a local disk or a store.

    It is streamed, because pyarrow's copy_files drops the last error, and a copy inside S3 is
    limited to 5 GB.
    """

    def copy() -> None:
        with source.open("rb") as reader, target.open("wb") as writer:
            shutil.copyfileobj(reader, writer, CHUNK_BYTES)

    with_retries(copy)


@contextmanager
def temp_dir() -> Iterator[Path]:
    """Return a context manager with a local folder that is deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="mmray-") as name:
        yield Path(name)


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Return a context manager with a local file that has the content of a file: the file itself,
    or a download, which is deleted after the block.

    Raises:
        OSError: The file cannot be downloaded.
    """
    if not isinstance(path, RemotePath):
        yield path
        return
    with temp_dir() as folder:
        copy_file(path, folder / path.name)
        yield folder / path.name


def read_lines(file: AnyPath) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSON lines file.

    A line that is no complete JSON object is skipped, because a writer may have been killed. A
    missing file has no lines.
    """
    if not file.exists():
        return
    with local_copy(file) as here, here.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


@contextmanager
def open_for_upload(path: AnyPath) -> Iterator[Path]:
    """Return a context manager with a local file to write; for a store it is uploaded after the
    block succeeded.

    Raises:
        OSError: The upload failed.
    """
    with staged_upload(path.parent, (path.name,)) as folder:
        yield folder / path.name


@contextmanager
def staged_upload(path: AnyPath, names: Sequence[str]) -> Iterator[Path]:
    """Return a context manager with a local folder for files that are written in the block.

    On a store they are uploaded after the block succeeds.

    Args:
        path: The target folder. On a local disk it is created and returned itself.
        names: The names of the files; the last one is uploaded after all others, so that its
            existence shows a complete upload.

    Raises:
        OSError: An upload failed, or an object has another size than its file.
    """
    if not isinstance(path, RemotePath):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with temp_dir() as folder:
        yield folder
        first = names[:-1]
        last = names[-1]
        for name in first:
            copy_file(folder / name, path / name)
        for name in first:
            size = (path / name).stat().st_size
            expected = (folder / name).stat().st_size
            if size != expected:
                raise OSError(
                    f"{path / name} has {size:,} bytes after its upload, expected {expected:,}"
                )
        copy_file(folder / last, path / last)


def remove_tree(path: AnyPath) -> None:
    """Delete a folder with all its content; without effect if it does not exist."""
    if isinstance(path, RemotePath):
        if path.is_dir():
            with_retries(lambda: path.filesystem.delete_dir(path.fs_path))
    elif path.exists():
        shutil.rmtree(path)


def move_tree(path: AnyPath, target: AnyPath) -> None:
    """Rename a folder of files; on a store by copying the files.

    Args:
        path: The folder. On a store it must have no subfolders.
        target: Its new path; a folder at this path is deleted first.
    """
    remove_tree(target)
    if isinstance(path, Path):
        path.rename(str(target))
        return
    for file in path.iterdir():
        copy_file(file, target / file.name)
    remove_tree(path)
