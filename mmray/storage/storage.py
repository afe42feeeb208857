"""A folder on a disk or an object store, with the few operations that sources and prepared sets need.

Everything is addressed by a name inside the folder, so that a set can be copied or moved whole. A file written here is
there entirely or not at all: under another name first on a file system, and an object store shows only whole objects
(one whose writer fails is deleted).
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from mmray.errors import UsageError
from mmray.storage.address import CREDENTIALS_REFUSED, has_credentials

T = TypeVar("T")
TEMP_SUFFIX = ".unfinished"
ATTEMPTS, MAX_WAIT_S = 5, 20.0
PERMANENT_ERRORS = (  # answers of S3 that another try does not change
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
)
MAX_GAP_BYTES = 1 << 20  # about what a store sends in the time that another request takes
MAX_REQUEST_BYTES = 16 << 20
MAX_PARALLEL = 8
MAX_OPEN = 4096  # no descriptor, but a request each time one is opened


@dataclass(frozen=True)
class Storage:
    """`address` is a local path or a URI that pyarrow knows (s3://bucket/prefix, gs://..., hdfs://...)."""

    address: str

    def __post_init__(self) -> None:
        if has_credentials(self.address):
            raise UsageError(f"{self.address.partition('?')[0].rpartition('@')[2]}: {CREDENTIALS_REFUSED}")
        if "://" not in self.address:  # another process may stand in another folder
            object.__setattr__(self, "address", str(Path(self.address).expanduser().absolute()))

    @classmethod
    def split(cls, address: str) -> tuple[Storage, str]:
        """The folder a file is in, and the file's name there; options of a URI (`?endpoint_override=`) stay."""
        head, mark, options = address.partition("?") if "://" in address else (address, "", "")
        folder, _, name = head.rpartition("/")
        return cls((folder or ("/" if head.startswith("/") else ".")) + mark + options), name

    @cached_property
    def filesystem(self) -> tuple[fs.FileSystem, str]:
        """The file system and the folder's path there. Raises UsageError for an address that nothing serves."""
        if "://" not in self.address:
            return fs.LocalFileSystem(), self.address
        try:
            system, root = fs.FileSystem.from_uri(_with_delayed_open(_quote_uri(self.address)))
        except pa.ArrowInvalid as error:
            system, root = _by_fsspec(self.address, error)
        return system, root.rstrip("/")

    @cached_property
    def local_path(self) -> Path | None:
        """The folder as a path, where it is on a file system of this machine."""
        system, root = self.filesystem
        return Path(root) if isinstance(system, fs.LocalFileSystem) else None

    @cached_property
    def real_prefix(self) -> str:
        """What the path of a file begins with that lies in this local folder, all links followed."""
        return os.path.realpath(str(self.local_path)).rstrip("/") + "/"

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        system, root = self.filesystem
        info = system.get_file_info(f"{root}/{name}")
        return info.size if info.type == fs.FileType.File else None

    def size_and_mtime(self, name: str) -> tuple[int | None, int | None]:
        """(bytes, time of change in ns) of a file, None where the store does not say. Raises FileNotFoundError."""
        system, root = self.filesystem
        info = system.get_file_info(f"{root}/{name}")
        if info.type != fs.FileType.File:
            raise FileNotFoundError(f"there is no file {self.address}/{name}")
        return info.size, info.mtime_ns

    def is_dir(self, name: str = "") -> bool:
        system, root = self.filesystem
        return bool(system.get_file_info(f"{root}/{name}".rstrip("/")).type == fs.FileType.Directory)

    def list_files(self, folder: str = "") -> list[str]:
        """Names of all files below a folder, sorted, relative to this place."""
        system, root = self.filesystem
        if self.local_path is not None:
            return sorted(_walk(f"{root}/{folder}".rstrip("/"), f"{folder}/".lstrip("/")))
        infos = system.get_file_info(fs.FileSelector(f"{root}/{folder}".rstrip("/"), recursive=True))
        return sorted(info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File)

    def listdir(self, folder: str = "") -> list[str]:
        """Names of the files in a folder, sorted; none where there is no folder."""
        system, root = self.filesystem
        if self.local_path is not None:
            path = self.local_path / folder
            return sorted(os.listdir(path)) if path.exists() else []  # noqa: PTH208 - names alone
        selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True)
        return sorted(info.base_name for info in system.get_file_info(selector))

    def mkdir(self, folder: str = "") -> None:
        """Create a folder and those above it."""
        system, root = self.filesystem
        system.create_dir(f"{root}/{folder}".rstrip("/"), recursive=True)

    def open(self, name: str, mapped: bool = False) -> pa.NativeFile:
        """A file for random access, on a local disk mapped into memory if asked for.

        Map only what nobody changes: a mapped file that is cut short ends the process that reads it.
        """
        system, root = self.filesystem
        if mapped and isinstance(system, fs.LocalFileSystem):
            return pa.memory_map(f"{root}/{name}")
        return system.open_input_file(f"{root}/{name}")

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.open(name) as file:
            return bytes(file.readall())

    @contextmanager
    def open_output(self, name: str) -> Iterator[pa.NativeFile]:
        """A file to write; it appears under its name when the block ends well, and not otherwise."""
        system, root = self.filesystem
        target = f"{root}/{name}"
        if not isinstance(system, fs.LocalFileSystem):
            with _object(system, target) as stream:
                yield stream
            return
        unfinished = f"{target}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}"
        try:
            with system.open_output_stream(unfinished) as stream:
                yield stream
            system.move(unfinished, target)
        finally:
            Path(unfinished).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.open_output(name) as stream:
            stream.write(data)

    def delete(self, name: str) -> None:
        """Delete a file."""
        system, root = self.filesystem
        system.delete_file(f"{root}/{name}")


def _walk(folder: str, before: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Regular files below a local folder, `before` in front of their names; links are followed, but not in a circle.

    By the system's own listing: pyarrow's ends at the first name that is not UTF-8.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{before}{entry.name}/", (*above, real))
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


def _quote_uri(address: str) -> str:
    """A URI as it is written: what a person typed may have spaces and letters beyond ASCII in its path."""
    scheme, _, rest = address.partition("://")
    whole, mark, options = rest.partition("?")
    authority, slash, path = whole.partition("/")
    return f"{scheme}://{authority}{slash}{quote(path, safe='/%')}{mark}{options}"


def _with_delayed_open(address: str) -> str:
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


def with_retries(call: Callable[[], T]) -> T:
    """What `call` returns, tried again with growing pauses where a store fails for a moment. Raises its last error."""
    tries = Retrying(
        retry=retry_if_exception(_is_transient),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S),
        reraise=True,
    )
    return tries(call)


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    return not any(answer in str(error) for answer in PERMANENT_ERRORS)


class ByteRange(NamedTuple):
    """One request: bytes start..stop of a file, and which of the wanted spans lie in them."""

    start: int
    stop: int
    spans: list[int]


def coalesce_ranges(spans: Sequence[tuple[int, int]]) -> list[ByteRange]:
    """Few reads that hold these spans (start, stop) of a file, in any order, whole; by where they start."""
    reads: list[ByteRange] = []
    for number in sorted(range(len(spans)), key=lambda each: spans[each]):
        start, stop = spans[number]
        last = reads[-1] if reads else None
        if (
            last is not None
            and start - last.stop <= MAX_GAP_BYTES
            and max(stop, last.stop) - last.start <= MAX_REQUEST_BYTES
        ):
            reads[-1] = ByteRange(last.start, max(stop, last.stop), [*last.spans, number])
        else:
            reads.append(ByteRange(start, stop, [number]))
    return reads


def parallel_map(call: Callable[[T], Any], items: Iterable[T]) -> None:
    """`call` on each item, several at once: a request waits more than it works. Raises the first error."""
    waiting = list(items)
    if len(waiting) <= 1:
        for item in waiting:
            call(item)
        return
    with ThreadPoolExecutor(min(MAX_PARALLEL, len(waiting))) as pool:
        for _ in pool.map(call, waiting):
            pass


class RangeReader:
    """Files of a place, of which ranges are read; threads may share it, another process opens its own."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._forget()

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of a file. Raises OSError, or ValueError where the file ends before."""
        data = bytes(with_retries(lambda: self._file(file).read_at(stop - start, start)))
        if len(data) != stop - start:
            raise ValueError(f"{self._storage.address}/{file} ends at byte {start + len(data)}, not at {stop} or later")
        return data

    def _file(self, file: str) -> pa.NativeFile:
        with self._lock:
            if file in self._files:
                self._files.move_to_end(file)
                return self._files[file]
        opened = self._storage.open(file)  # without the lock: it is a request
        with self._lock:
            self._files[file] = opened
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)
        return opened

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, pa.NativeFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_storage": self._storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
