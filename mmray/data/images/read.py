"""Read the image files that rows refer to, from the folder of the source and the folders that the
user names (`prepare.root`).

An invalid file raises BadRow, which quarantines its row. A failing disk raises OSError, and an
object store that still fails after retries TransientStorageError.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

from mmray.data.rows import BadRow, ImageRef, is_safe_path
from mmray.storage.address import redact_url
from mmray.storage.paths import (
    AnyPath,
    RemotePath,
    open_input,
    open_sequential,
    retry_if_remote,
    to_path,
)
from mmray.storage.ranges import ByteRange, RangeReader, coalesce_ranges
from mmray.storage.requests import TransientStorageError, parallel_map

MAX_IMAGE_BYTES = 256 * 1024 * 1024
Roots = Sequence[str]  # folders in which files are read, too; also behind symbolic links
_MAX_COMPARED_NAMES = 100_000  # names of a folder that are compared, to explain a missing file
_BAD_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP)  # the name cannot belong to a file


def read_image(folder: AnyPath, image: ImageRef, roots: Roots = ()) -> bytes:
    """Return the encoded bytes of an image; fewer than `image.length` if the file ends before.

    Raises:
        BadRow: With stage `read`, if the file does not exist, is outside the folder, is not a
            regular file or is over 256 MiB.
        OSError: The disk or the object store fails.
    """
    if image.data is not None:
        return image.data
    _check_reference(image)
    if image.root is not None:
        folder = to_path(image.root)
    if image.length is None:
        return read_file(folder, str(image.file), roots)
    if isinstance(folder, Path):
        _check_regular_file(folder, str(image.file), roots)
    with open_sequential(folder / str(image.file)) as file:
        file.seek(image.offset)
        return bytes(file.read(image.length))


def read_images(folder: AnyPath, images: Sequence[ImageRef], reader: RangeReader) -> list[bytes]:
    """Return the encoded bytes of several images, in the same order.

    On an object store, neighboring byte ranges of a file share a request, and requests run in
    parallel.

    Args:
        images: References without URLs.
        reader: Reads byte ranges of files in the folder if that is on an object store. It keeps
            files open, so reusing it saves requests.

    Raises:
        BadRow: With stage `read`, if an image does not exist or its reference is invalid.
        OSError: The disk or the object store fails.
        ValueError: A file on an object store ends before the byte range.
    """
    if isinstance(folder, Path):
        return [read_image(folder, image) for image in images]
    out = [b""] * len(images)
    full_files = [number for number, image in enumerate(images) if image.length is None]
    numbers_of: dict[str, list[int]] = {}
    for number, image in enumerate(images):
        if image.length is not None:
            _check_reference(image)
            numbers_of.setdefault(str(image.file), []).append(number)
    reads = []
    for file, numbers in numbers_of.items():
        spans = [
            (images[number].offset, images[number].offset + (images[number].length or 0))
            for number in numbers
        ]
        reads += [(file, read, spans, numbers) for read in coalesce_ranges(spans)]

    def read_full(number: int) -> None:
        out[number] = read_image(folder, images[number])

    def read_range(job: tuple[str, ByteRange, list[tuple[int, int]], list[int]]) -> None:
        file, read, spans, numbers = job
        data = reader.read(file, read.start, read.stop)
        for index in read.span_indices:
            start, stop = spans[index]
            out[numbers[index]] = data[start - read.start : stop - read.start]

    parallel_map(read_full, full_files)
    parallel_map(read_range, reads)
    return out


def read_file(folder: AnyPath, name: str, roots: Roots = ()) -> bytes:
    """Return the bytes of a file in the folder of the source.

    A local file whose name differs only in the Unicode normalization (NFC or NFD) is found.

    Args:
        name: Path of the file, relative to the folder.
        roots: Folders to which symbolic links out of `folder` are followed.

    Raises:
        BadRow: With stage `read` and reason `missing-image`, `too-large` (over 256 MiB), `path`,
            `not-regular-file` or `unreadable`.
        OSError: The disk or the object store fails.
    """

    def read() -> bytes:
        with open_input(folder / name) as file:  # reports its size without another request
            if (size := file.size()) > MAX_IMAGE_BYTES:
                raise BadRow(
                    "read", "too-large", f"{name} has {size} bytes, over {MAX_IMAGE_BYTES}"
                )
            return bytes(file.readall())

    try:
        if isinstance(folder, Path):
            name = _find_normalized(folder, name)
            _check_regular_file(folder, name, roots)
        return retry_if_remote(folder, read)
    except (FileNotFoundError, NotADirectoryError):
        hint = _hint_at_missing(folder, name) if isinstance(folder, Path) else ""
        raise BadRow("read", "missing-image", f"there is no file {name}{hint}") from None
    except OSError as error:
        if error.errno not in _BAD_NAME_ERRNOS:
            raise
        raise BadRow("read", "unreadable", f"{name}: {error}") from None


def _hint_at_missing(folder: Path, name: str) -> str:
    """Return what may be wrong with the path of a missing file, with the name that exists."""
    slashed = name.replace("\\", "/")
    if slashed != name and is_safe_path(slashed):
        reason = f"and {slashed} exists" if (folder / slashed).is_file() else "as on Windows"
        return f"; the path has backslashes, {reason}: write it with /"
    parent, slash, base = name.strip().rpartition("/")
    names, folders = _list_folder(folder / parent)
    if existing := names.get(_simplify(base)):
        return f"; {parent}{slash}{existing} exists: write its name exactly so"
    for each in folders:
        if (folder / parent / each / base).is_file():
            hint = "write it so" if parent else f"--root {folder / each} also reads files there"
            return f"; {parent}{slash}{each}/{base} exists: {hint}"
    return ""


def _simplify(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


@lru_cache(maxsize=64)
def _list_folder(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the names in a folder by their simplified ones, with and without suffix, and its
    folders; at most 100,000 entries, none if it does not exist.
    """
    names: dict[str, str] = {}
    folders: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MAX_COMPARED_NAMES):
            simplified = _simplify(entry.name)
            names.setdefault(simplified, entry.name)
            names.setdefault(simplified.rpartition(".")[0], entry.name)
            if entry.is_dir():
                folders.append(entry.name)
    return names, folders


def _check_reference(image: ImageRef) -> None:
    """Raise BadRow if the reference leaves the folder of the source, because a set may be from an
    untrusted one.
    """
    if not is_safe_path(str(image.file)):
        raise BadRow(
            "read",
            "path",
            f"{str(image.file)[:200]!r} is not a path inside the folder of the source",
        )
    if (
        not isinstance(image.offset, int)
        or image.offset < 0
        or not 0 <= (image.length or 0) <= MAX_IMAGE_BYTES
    ):
        what = f"{image.length} bytes from byte {image.offset}"
        raise BadRow(
            "read",
            "path",
            f"{image.file}: {what} is not a byte range of at most {MAX_IMAGE_BYTES} bytes",
        )


@contextmanager
def os_error_as_bad_row(name: str) -> Iterator[None]:
    """Context manager that converts an OSError to a BadRow (`read`, `unreadable`).

    A TransientStorageError is not about this file: it would reject all the following rows.
    """
    try:
        yield
    except TransientStorageError:
        raise
    except OSError as error:
        raise BadRow("read", "unreadable", f"{name}: {error}") from None


def stat_signature(folder: AnyPath, name: str) -> tuple[str, int | None, int | None]:
    """Return values that show later whether a file was changed: its name, size in bytes and
    modification time in ns. The latter are None for a file that cannot be found or is on an object
    store.
    """
    with suppress(OSError):
        if isinstance(folder, Path):
            # Called for each image of the set: faster than Path.stat.
            info = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118
            return (name, info.st_size, info.st_mtime_ns)
    return (name, None, None)


def locate_file(folder: AnyPath, image: ImageRef, roots: Roots = ()) -> ImageRef:
    """Return a reference whose file is relative to the folder of the source, or to one of `roots`.

    Args:
        image: From `parse_image`; its file may be an absolute path, an address on an object store,
            or a path with `..`.
        roots: Further folders in which files may be; their symbolic links are not followed here.
            A relative name that the folder of the source does not have is searched in them.

    Raises:
        BadRow: With stage `columns` and reason `path`, if the file is in none of the folders.
    """
    file = image.file
    if file is None:
        return image
    if is_safe_path(file):
        if roots and isinstance(folder, Path) and not (folder / file).is_file():
            for each in roots:
                if "://" not in each and Path(each, file).is_file():
                    return replace(image, root=each)
        return image
    paths = [file]
    if "://" not in file and isinstance(folder, Path):
        path = os.path.normpath(folder / file)
        parent, name = os.path.split(path)
        paths = [path, os.path.join(_real_path(parent), name)]  # noqa: PTH118
    for base in (folder, *map(to_path, roots)):
        for prefix in _prefixes(base):
            for path in paths:
                relative = path.removeprefix(prefix)
                if relative != path and is_safe_path(relative):
                    root = None if base is folder else str(base)
                    return replace(image, file=relative, root=root)
    shown = redact_url(paths[0]) if "://" in file else paths[0][:200]
    hint = f"--root {shown.rpartition('/')[0] or '/'} reads files of that folder"
    if isinstance(folder, Path) and not os.path.exists(paths[0]):  # noqa: PTH110
        tails = (file.split("/", count)[-1] for count in range(1, file.count("/") + 1))
        moved = next((tail for tail in tails if tail and (folder / tail).is_file()), None)
        hint = hint if moved is None else f"{moved} exists: write it relative to {folder}"
    raise BadRow("columns", "path", f"{shown} is outside the folder of the source; {hint}")


def is_inside(path: AnyPath, folders: Sequence[AnyPath]) -> bool:
    """Return whether a folder is one of some folders, or in one of them."""
    options = path.options if isinstance(path, RemotePath) else ""
    prefixes = [
        _prefixes(folder)[-1]
        for folder in folders
        if (folder.options if isinstance(folder, RemotePath) else "") == options
    ]
    return _prefixes(path)[-1].startswith(tuple(prefixes))


_real_path = lru_cache(maxsize=1024)(os.path.realpath)


@lru_cache
def _prefixes(folder: AnyPath) -> tuple[str, ...]:
    """Return how paths of files in a folder start: as it is written, and at last without links."""
    if isinstance(folder, RemotePath):
        return (f"{folder.root}/{folder.key}".rstrip("/") + "/",)
    return tuple(f"{each}".rstrip("/") + "/" for each in (folder, os.path.realpath(folder)))


def _find_normalized(folder: Path, name: str) -> str:
    """Return the name, or its composed or decomposed form (NFC, NFD) if only that exists."""
    if name.isascii() or os.path.exists(f"{folder}/{name}"):  # noqa: PTH110 - for each image
        return name
    forms = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next((form for form in forms if (folder / form).exists()), name)


def _check_regular_file(folder: Path, name: str, roots: Roots) -> None:
    """Raise BadRow if a local file is a link that is not followed, or no regular file."""
    parent, _, base = f"{folder}/{name}".rpartition("/")
    real = f"{_real_path(parent)}/{base}"
    if os.path.islink(real):  # noqa: PTH114 - for each image
        real = os.path.realpath(real)
    if not real.startswith(_prefixes(folder)[-1]) and not any(
        real.startswith(_prefixes(to_path(root))[-1]) for root in roots
    ):
        raise BadRow(
            "read",
            "path",
            f"{name} is a symbolic link to {real}, outside the folder of the source; --root "
            f"{os.path.dirname(real)} reads files of that folder",  # noqa: PTH120
        )
    if not stat.S_ISREG(os.stat(real).st_mode):  # noqa: PTH116
        raise BadRow("read", "not-regular-file", f"{name} is not a regular file")
