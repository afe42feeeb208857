"""A path on an object store, in pathlib's words: what reads and writes a run's folder is written once for both.

`folder_at` turns what a user typed into a `Path`, or into a `RemotePath` where it is an address. An object appears
under its name whole or not at all; there are no folders, no appending and no renaming (folders.py has what stands in).

What the network or the store refuses for a moment is tried again; a missing object or a refused key is told at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from pyarrow import fs
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from mmray.storage.storage import Place

T = TypeVar("T")
ATTEMPTS, LONGEST_WAIT_S = 5, 20.0
CHUNK_BYTES = 8 << 20
LASTING = (  # answers of S3 that another try does not change
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
)


class Stat(NamedTuple):
    """The parts of os.stat_result that an object store knows."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class RemotePath:
    """`inner` is the path below `place`; operations are those of pathlib.Path, and raise OSError as it does."""

    place: Place
    inner: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.place, f"{self.inner}/{name}".strip("/"))

    def __str__(self) -> str:
        head, mark, options = self.place.address.partition("?")
        return f"{head.rstrip('/')}/{self.inner}".rstrip("/") + mark + options

    @property
    def key(self) -> str:
        """The path as the file system of the place knows it."""
        return f"{self.place.system[1]}/{self.inner}".rstrip("/")

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.place, self.inner.rpartition("/")[0])

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
        system, selector = self.place.system[0], fs.FileSelector(self.key)
        infos = steadily(lambda: system.get_file_info(selector))
        return iter([self / name for name in sorted(info.base_name for info in infos) if name])

    def read_bytes(self) -> bytes:
        return steadily(self._read)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Put the whole object; one that was there is replaced."""
        steadily(lambda: self._write(data))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def download(self, file: Path) -> None:
        """Copy the object into a file of this machine."""
        steadily(lambda: self._download(file))

    def upload(self, file: Path) -> None:
        """Put the object from a file of this machine, from its beginning at each try."""
        steadily(lambda: self._upload(file))

    def copy(self, target: RemotePath) -> None:
        """Put another object with the same bytes, whatever their number (S3 itself copies 5 GB at most)."""
        steadily(lambda: self._copy(target))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there as soon as something is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        if self.is_file():
            steadily(lambda: self.place.system[0].delete_file(self.key))
        elif not missing_ok:
            raise FileNotFoundError(f"there is no object {self}")

    def _info(self) -> fs.FileInfo:
        return steadily(lambda: self.place.system[0].get_file_info(self.key))

    def _read(self) -> bytes:
        with self.place.system[0].open_input_file(self.key) as file:
            return bytes(file.readall())

    # Not pyarrow's copy_files: it drops the error of an object's last request (pyarrow 26).

    def _download(self, file: Path) -> None:
        with self.place.system[0].open_input_stream(self.key) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _upload(self, file: Path) -> None:
        with file.open("rb") as source, self.place.writing(self.inner) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _copy(self, other: RemotePath) -> None:
        with (
            self.place.system[0].open_input_stream(self.key) as source,
            other.place.writing(other.inner) as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _write(self, data: bytes) -> None:
        with self.place.writing(self.inner) as stream:
            stream.write(data)


Folder = Path | RemotePath


def folder_at(address: str | Folder) -> Folder:
    """The folder that a user names: a path, absolute, or an address (s3://bucket/prefix)."""
    if isinstance(address, RemotePath):
        return address
    if "://" in str(address):
        return RemotePath(Place(str(address)))
    return Path(address).expanduser().resolve()


def steadily(call: Callable[[], T]) -> T:
    """What `call` returns, tried again with growing pauses where a store fails for a moment. Raises its last error."""
    tries = Retrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S),
        reraise=True,
    )
    return tries(call)


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    return not any(answer in str(error) for answer in LASTING)
