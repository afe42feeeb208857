"""SHA256SUMS: the file that makes a folder count, written last, when all else is on disk, and verified before use.

For checkpoint.py; in the form that `sha256sum -c SHA256SUMS` reads.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from mmray.storage.paths import AnyPath, local_copy

SUMS = "SHA256SUMS"


def write_checksums(path: Path, names: tuple[str, ...], elsewhere: dict[str, str] | None = None) -> None:
    """Put the files `names` of a folder on disk, then their sums, then the name of the sums, in this order.

    `elsewhere` has the sums of files that others have put on disk: name to digest.
    """
    known = (elsewhere or {}) | {name: sha256(path / name) for name in names}
    lines = [f"{digest}  {name}\n" for name, digest in known.items()]
    for name in names:
        _sync(path / name)
    _sync(path)
    temporary = path / f".{SUMS}"
    temporary.write_text("".join(lines))
    _sync(temporary)
    temporary.rename(path / SUMS)
    _sync(path)
    _sync(path.parent)


def find_fault(path: AnyPath, whole: Callable[[Collection[str]], bool]) -> str | None:
    """What is wrong with a sealed folder, in words; None when every byte is as it was. Raises OSError.

    `whole` says whether files of these names are a folder in full.
    """
    if not (path / SUMS).exists():
        return f"it was not written to its end (no {SUMS})"
    expected = dict(_sums(path))
    if not whole(expected):
        return f"its {SUMS} is damaged"
    for name, digest in expected.items():
        if not (path / name).exists():
            return f"{name} is missing"
        if sha256(path / name) != digest:
            return f"{name} is not as it was written ({(path / name).stat().st_size:,} bytes now)"
    return None


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # some network mounts: files only
            raise
    finally:
        os.close(handle)


def sha256(file: AnyPath) -> str:
    """The digest of a file, as `sha256sum` says it."""
    with local_copy(file) as here, here.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sums(path: AnyPath) -> Iterator[tuple[str, str]]:
    """(name, digest) of the lines of SHA256SUMS; a line of another form is left out."""
    for line in (path / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) == 64:
            yield name, digest
