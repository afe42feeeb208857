"""WebDataset tars: files with the same base name form one row. A tar is read in a single pass and never extracted.

The base name ends at the first dot and the rest is the kind: `a.jpg` is the image of `a`, `a.mask.png` is not. A tar is
one chunk, so one task reads it sequentially; img2dataset splits its output in the same way. Special files, paths that
leave the folder and truncated members are reported with the member name.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, ClassVar

from mmray.data.formats.jsonl import parse_fields
from mmray.data.formats.rows import BadRow, ImageRef, is_safe_path, rename_columns
from mmray.data.formats.source import SourceChunk, SourceItem, check_unchanged, file_signature, list_files, read_head
from mmray.data.images.read import MAX_IMAGE_BYTES
from mmray.errors import DataError
from mmray.storage.storage import Storage

IMAGES = ("jpg", "jpeg", "png", "webp", "gif")
_TEXTS = ("text", "texts", "caption")
_FROM_JSON = (*_TEXTS, "label", "split", "language", "boxes", "box_labels", "messages")
_SUFFIX = re.compile(r"\.tar/", re.IGNORECASE)
_BUFFER_BYTES = 4 * 1024 * 1024
_BLOCK = 512


class WebDatasetSource:
    """A tar, or the tars of a folder in sorted order."""

    title: ClassVar[str] = "WebDataset"

    def __init__(self, place: Storage, name: str, columns: dict[str, str]) -> None:
        self.place, self.name, self.columns = place, name, columns

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        for index, name in enumerate(list_files(self.place, self.name, ".tar")):
            if read_head(self.place, name).startswith(b"\x1f\x8b"):
                raise DataError(f"{self.place.address}/{name} is gzip: unpack it to a plain tar first")
            size = self.place.size(name) or 0
            yield SourceChunk(index, name, 0, size, 1, None, file_signature(self.place, name))

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        place = _TarMembers(self.place, chunk.file)
        for number, (stem, parts) in enumerate(_group_samples(place), 1):
            origin = f"{chunk.file}/{stem}"
            yield SourceItem(number, origin, parts if isinstance(parts, BadRow) else self._values(origin, parts))
        check_unchanged(self.place, chunk, chunk.sha256)

    def _values(self, origin: str, parts: dict[str, ImageRef]) -> dict[str, Any] | BadRow:
        key = _SUFFIX.sub("/", origin, count=1)
        try:
            values = rename_columns(_sample_fields(parts, self.columns), self.columns)
        except BadRow as bad:
            bad.key = key
            return bad
        if found := [parts[kind] for kind in parts if kind in IMAGES]:
            values["images"] = found
        elif others := [kind for kind in parts if kind.rpartition(".")[2] in IMAGES]:
            detail = f"it has {', '.join(others)[:200]}; its image is the part named up to the first dot, as KEY.jpg"
            return BadRow("columns", "no-image", detail, key)
        return {"id": key} | values


def _sample_fields(parts: dict[str, ImageRef], columns: dict[str, str]) -> dict[str, Any]:
    """Return caption, label and other columns from the txt, cls and json of a sample; the txt has precedence.

    `columns` maps our names to those of the json. Invalid json values that are not used do not reject the sample.
    """
    values: dict[str, Any] = {}
    if "json" in parts:
        mapped = {their for our, their in columns.items() if our not in ("image", "images")}  # images are tar members
        stated = {"label"} if "cls" in parts else set()
        stated |= set(_TEXTS) if "txt" in parts or {"text", "texts"} & set(columns) else set()
        values = parse_fields(parts["json"].data or b"", {*_FROM_JSON} - stated | mapped)
        if "caption" in values and "caption" not in mapped:
            caption = values.pop("caption")
            values = {"text": caption} | values if "texts" not in values else values
    try:
        if "txt" in parts:
            values["text"] = (parts["txt"].data or b"").decode()
        if "cls" in parts:
            values["label"] = int((parts["cls"].data or b"").decode())
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"the txt is not UTF-8 at byte {error.start}") from None
    except ValueError:
        raise BadRow("columns", "label", "the cls is not an integer (number your classes)") from None
    return values


class _TarMembers:
    """Yield the members of a tar with their bytes in one pass; a BadRow is last if the tar is truncated."""

    def __init__(self, place: Storage, name: str) -> None:
        self.place, self.name = place, name

    def __iter__(self) -> Iterator[tuple[str, ImageRef | BadRow]]:
        with self.place.open(self.name) as raw:
            file = io.BufferedReader(raw, _BUFFER_BYTES)
            last = "its beginning"
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        if member.isdir():
                            continue
                        last = member.name
                        yield member.name, self._member(tar, member)
                    end = tar.offset
                file.seek(end)
                if file.read(_BLOCK) != bytes(_BLOCK):
                    yield "", BadRow("read", "truncated", f"the tar breaks off or is damaged after {last}, byte {end}")
                elif any(piece.strip(b"\0") for piece in iter(partial(file.read, _BUFFER_BYTES), b"")):
                    told = f"the tar ends after {last}, byte {end}, more data follows (another tar?) and is not read"
                    yield "", BadRow("read", "truncated", told)
            except (tarfile.TarError, EOFError) as error:
                yield "", BadRow("read", "truncated", f"the tar breaks off or is damaged after {last}: {error}")

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> ImageRef | BadRow:
        if not member.isreg() or member.issparse():
            return BadRow("read", "not-regular-file", f"member {member.name[:200]!r} is a link, a device or a pipe")
        if not is_safe_path(member.name):
            return BadRow("columns", "path", f"member {member.name[:200]!r} is not a path inside a folder")
        if member.size > MAX_IMAGE_BYTES:
            return BadRow("read", "too-large", f"{member.name} has {member.size} bytes, over {MAX_IMAGE_BYTES}")
        data = tar.extractfile(member).read()  # type: ignore[union-attr]  # not None for a regular file
        if len(data) < member.size:
            return BadRow("read", "truncated", f"{member.name} has {len(data)} of its {member.size} bytes")
        tar.members.clear()  # type: ignore[attr-defined]  # otherwise tarfile keeps all members in memory
        return ImageRef(member.name, self.name, member.offset_data, member.size, data)


def _group_samples(members: _TarMembers) -> Iterator[tuple[str, dict[str, ImageRef] | BadRow]]:
    """Group consecutive members with the same base name; a bad member rejects its sample.

    A repeated member starts a new sample, so no data is lost silently: one of both is rejected for its duplicate id.
    """
    stem: str | None = None
    kinds: set[str] = set()
    parts: dict[str, ImageRef] = {}
    bad: BadRow | None = None
    for name, member in members:
        folder, _, base = name.removeprefix("./").rpartition("/")
        first, _, kind = base.partition(".")
        here = f"{folder}/{first}".lstrip("/")
        if here != stem or kind.lower() in kinds:
            if stem is not None:
                yield stem, bad or parts
            stem, kinds, parts, bad = here, set(), {}, None
        kinds.add(kind.lower())
        if isinstance(member, BadRow):
            bad = member
        else:
            parts[kind.lower()] = member
    if stem is not None:
        yield stem, bad or parts
