"""WebDataset tars: files with the same base name form one row. A tar is read in a single pass and
never extracted.

The base name ends at the first dot, the rest is the extension: `a.jpg` is the image of `a`, and
`a.0.jpg`, `a.1.jpg` are its images by number; `a.mask.png` is not an image of it. `a.wav` is its
audio, `a.mp4` its video, and `a.srt` its texts with their spans. A large tar is cut into chunks,
whose tasks search their first header block by block. Special files, paths that leave the folder and
truncated members are reported with the member name.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import BinaryIO

from mmray.builtin import CHAT_COLUMNS
from mmray.data.formats.binary import BinarySource
from mmray.data.formats.source import (
    RawRow,
    Record,
    SourceChunk,
    is_about_the_data,
    is_hidden,
    read_head,
)
from mmray.data.formats.splits import split_of_file
from mmray.data.formats.text_lines import decode_text, parse_json
from mmray.data.images.formats import IMAGE_SUFFIXES
from mmray.data.images.read import MAX_IMAGE_BYTES
from mmray.data.labels import class_name, label_number
from mmray.data.media.formats import SUBTITLE_SUFFIXES, media_kind
from mmray.data.media.subtitles import parse_subtitles
from mmray.data.rows import (
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    MORE_TEXTS,
    NOTICES,
    SPAN_COLUMNS,
    BadRow,
    ImageRef,
    Values,
    check_suffix,
    format_unused,
    has_any,
    is_safe_path,
)
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, open_sequential

TarMember = ImageRef  # has `data`; also used for texts and JSON
Sample = dict[str, TarMember | BadRow]  # members by extension; a bad one rejects its sample
_TEXT_COLUMNS = ("text", "texts", "caption")
_OTHER_COLUMNS = (
    *("label", "split", *SPAN_COLUMNS),
    *MESSAGE_COLUMNS,
    *CHAT_COLUMNS,
)
_TEXT_EXTENSIONS = {"txt", *(suffix.removeprefix(".") for suffix in SUBTITLE_SUFFIXES)}
_USED_EXTENSIONS = {"json", "cls", *_TEXT_EXTENSIONS}
_NUMBER = re.compile(r"[0-9]{1,4}")  # number of one of several images in a sample
_BUFFER_BYTES = 4 * 1024 * 1024
_BLOCK = 512
_CHUNK_BYTES = 64 << 20
_MAX_COMPARED_SAMPLES = 100_000  # names compared to find samples whose files are not adjacent
_NO_MEDIA = "a sample of a tar has no image, audio or video"
# Names of the classes 0, 1, ..., one a line, next to the tars.
_CLASS_FILES = ("classnames.txt", "classes.txt")
_TYPE_FILE = "dataset_type.txt"  # of CLIP_benchmark


class WebDatasetSource(BinarySource):
    """A tar, or the tars of a folder in sorted order.

    A row is a sample: adjacent members with the same name up to the first dot, such as 0001.jpg and
    0001.txt. A chunk is a tar, or the samples of a large one that start in a range of bytes.
    """

    title = "WebDataset"
    row_needs = (
        "an image and a text next to each other in one tar, with the same folder and the same name "
        "up to the first dot, such as a/0.jpg and a/0.txt; or 0.cls, and classnames.txt next to "
        "the tar"
    )
    reads_folder = True
    magic = b"ustar"
    magic_offset = 257
    suffixes = (".tar", ".tar.gz", ".tgz")

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        return any(name.lower().endswith(cls.suffixes) for name in names)

    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        yield from super().scan(rows_per_chunk)
        self.class_names = self._listed_classes

    def check(self, name: str) -> None:
        if read_head(self.folder, name).startswith(b"\x1f\x8b"):
            raise DataError(f"{self.folder / name} is gzip: unpack it first with `gunzip {name}`")

    def cut(
        self, checked: None, num_bytes: int, rows_per_chunk: int, rows_before: int
    ) -> Iterator[tuple[int, int, int | None]]:
        num_blocks = num_bytes // _BLOCK
        count = max(1, num_bytes // _CHUNK_BYTES)
        starts = [_BLOCK * (num_blocks * number // count) for number in range(count)]
        for start, stop in pairwise([*starts, num_bytes]):
            yield start, stop, None

    @cached_property
    def _listed_classes(self) -> tuple[str, ...]:
        """The names of the classes 0, 1, ... in a file next to the tars; () without one."""
        for path in (self.folder / each for each in _CLASS_FILES):
            if path.is_file():
                lines = path.read_bytes().decode("utf-8-sig").splitlines()
                return tuple(class_name(line) for line in lines if line.strip())
        return ()

    @cached_property
    def _is_retrieval(self) -> bool:
        """Whether each line of a text is a caption, as in CLIP_benchmark's sets for retrieval."""
        path = self.folder / _TYPE_FILE
        return path.is_file() and path.read_text().strip().lower() == "retrieval"

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        extensions: dict[str, set[str]] = {}  # extensions in earlier samples, by their name
        for stem, sample in _group_samples(_iter_members(self.folder, chunk)):
            before = extensions.get(stem)
            if before is not None and before.isdisjoint(sample):
                raise DataError(
                    f"{self.folder / chunk.file}: the files of the sample {stem} are not adjacent "
                    f"(.{min(before)} and, after other samples, .{min(sample)}). Sort the tar: "
                    "`mkdir t && tar -xf OLD -C t && tar --sort=name -cf NEW -C t .`"
                )
            if not stem:  # damage, which may divide a sample
                extensions.clear()
            if len(extensions) < _MAX_COMPARED_SAMPLES:
                extensions[stem] = {*sample}
            bad = next((each for each in sample.values() if isinstance(each, BadRow)), None)
            yield f"{chunk.file}/{stem}", bad or sample
        self.check_unchanged(chunk)

    def read(self, chunk: SourceChunk) -> Iterator[RawRow]:
        for row in super().read(chunk):
            folder = row.location.removeprefix(f"{chunk.file}/").rpartition("/")[0]
            split = split_of_file(f"{folder}/")
            if split and not isinstance(row.values, BadRow):
                row.values.setdefault("split", split)
            yield row

    def parse(self, members: dict[str, TarMember]) -> Values:
        values: Values = {}
        kept: Values = {}
        parsed: Values = {}
        if "json" in members:
            mapped_names = self.columns.names.keys() - {"image", "images"}
            mapped = set(self.columns.of(*mapped_names))
            has_text = has_any(members, _TEXT_EXTENSIONS) or has_any(
                self.columns.names, _TEXT_COLUMNS
            )
            used = mapped.union(_OTHER_COLUMNS, () if has_text else _TEXT_COLUMNS)
            parsed = parse_json(members["json"].data or b"", strict=False)
            kept = {name: value for name, value in parsed.items() if self.columns.keeps(name)}
            values = {name: value for name, value in parsed.items() if name in used}
            if "caption" in values and "caption" not in mapped:
                caption = values.pop("caption")
                values = values if "texts" in values else {"text": caption} | values
        if "txt" in members:
            values["text"] = text = decode_text(members["txt"].data or b"", "the txt")
            if self._is_retrieval:
                values["texts"] = [line for line in text.splitlines() if line.strip()]
                del values["text"]
        if "cls" in members:
            values["label"] = text = decode_text(members["cls"].data or b"", "the cls")
            number = label_number(text)
            if number is not None and self._listed_classes:  # not the name of a class, as `1` is
                values["label"] = number
        notices: list[str] = []
        for extension, member in members.items():
            if f".{extension}" in SUBTITLE_SUFFIXES:
                if values.pop("text", None) or "texts" in values:
                    notices.append(MORE_TEXTS)
                text = decode_text(member.data or b"", member.name)
                values["texts"] = parse_subtitles(text, member.name, notices)
            kind = None if "." in extension else media_kind(f".{extension}")
            if kind is not None and kind in values:
                raise BadRow("columns", f"{kind}-count", f"it has several files of {kind}")
            if kind is not None:
                values[kind] = replace(member, kind=kind)
        for extension in members:
            check_suffix(f"KEY.{extension}")
        if images := _image_members(members):
            values["images"] = images
        elif not has_any(values, MEDIA_COLUMNS):
            if others := [each for each in members if each.endswith(IMAGE_SUFFIXES)]:
                detail = (
                    f"it has {', '.join(others)[:200]}; its images are the members named up to the "
                    "first dot, as KEY.jpg or KEY.0.jpg, KEY.1.jpg"
                )
                raise BadRow("columns", "no-image", detail)
            notices.append(_NO_MEDIA)
        notices += [
            format_unused(name)
            for name, value in parsed.items()
            if value is not None and name not in kept and not _is_used(name, value, values)
        ]
        notices += [
            f"the member `.{extension[:40]}` of a sample is not used"
            for extension, member in members.items()
            if extension not in _USED_EXTENSIONS and member not in images
            if "." in extension or media_kind(f".{extension}") is None
        ]
        return kept | values | ({NOTICES: notices} if notices else {})


def _is_used(name: str, value: object, values: Values) -> bool:
    """Return whether a field of the JSON is in the values of a row: itself, or as its text."""
    if value is values.get(name):
        return True
    ours = "text" if name in _TEXT_COLUMNS else name
    return str(value).strip() == str(values.get(ours, "")).strip()


def _image_members(members: dict[str, TarMember]) -> list[TarMember]:
    """Return the images of a sample: those without a number, then the others by number."""
    numbered: list[tuple[int, TarMember]] = []
    for extension, member in members.items():
        number, _, suffix = extension.rpartition(".")
        if f".{suffix}" in IMAGE_SUFFIXES and (not number or _NUMBER.fullmatch(number)):
            numbered.append((int(number) if number else -1, member))
    return [member for _, member in sorted(numbered, key=itemgetter(0))]


def _iter_members(folder: AnyPath, chunk: SourceChunk) -> Iterator[tuple[str, TarMember | BadRow]]:
    """Yield the members of the samples of a chunk with their bytes in one pass.

    Other tars may follow the end mark of the first one. Where bytes are neither members nor an end
    mark, because the tar is damaged or truncated, a BadRow is between the members.

    Raises DataError if a member in which the chunk ends contains a header: the task of the next
    chunk would take it for one of the tar.
    """
    last = "its beginning"
    name = chunk.file
    with open_sequential(folder / name) as raw:
        file = io.BufferedReader(raw, _BUFFER_BYTES)
        size = raw.size()
        first = _find_header(file, chunk.start, chunk.stop) if chunk.start else 0
        # Without a header its bytes are those of a member of a chunk before.
        start, stop = _Limit(name, chunk.start), _Limit(name, chunk.stop)
        while first is not None:
            end = first
            file.seek(first)
            with (
                suppress(tarfile.TarError, EOFError),
                tarfile.open(fileobj=file, mode="r:") as tar,
            ):
                for member in tar:
                    end = tar.offset
                    if chunk.stop < size and stop.passes(file, member, end):
                        return
                    if start.passes(file, member, end) and not member.isdir():
                        last = member.name
                        yield last, _read_member(name, tar, member)
                    # otherwise tarfile keeps all members in memory
                    tar.members.clear()  # type: ignore[attr-defined]
            first = _find_header(file, end + _BLOCK, size)
            # otherwise the chunk before has the error
            if start.is_passed and not _is_end_mark(file, end, size if first is None else first):
                detail = f"the tar is truncated or damaged after {last}, at byte {end}"
                yield "", BadRow("read", "truncated", detail)


def _is_end_mark(file: BinaryIO, start: int, stop: int) -> bool:
    """Return whether a range of a tar is at least one block of zeros."""
    file.seek(start)
    pieces = iter(lambda: file.read(min(_BUFFER_BYTES, stop - file.tell())), b"")
    return start + _BLOCK <= stop and not any(map(any, pieces))


class _Limit:
    """Which members of a tar are behind the end of a chunk, where the samples of the next start.

    Both chunks find the same: the first header at or after the byte may lack that of a long name,
    so its member and the sample of the next one are of the chunk before.
    """

    def __init__(self, tar_name: str, byte: int) -> None:
        self.is_passed = byte == 0
        self._tar_name = tar_name
        self._byte = byte
        self._has_first = False
        self._stem: str | None = None

    def passes(self, file: BinaryIO, member: tarfile.TarInfo, end: int) -> bool:
        """Return whether the next member of the tar is behind the limit.

        Args:
            end: Byte where its data ends, with padding.
        """
        if self.is_passed or end <= self._byte:
            return self.is_passed
        stem = None if member.isdir() else _stem_and_extension(member.name)[0]
        if not self._has_first:
            self._has_first = member.offset >= self._byte or self._cuts(file, member, end)
        elif stem is not None:
            self._stem = self._stem or stem
            self.is_passed = stem != self._stem
        return self.is_passed

    def _cuts(self, file: BinaryIO, member: tarfile.TarInfo, end: int) -> bool:
        """Return whether the limit is between two headers of a member.

        Raises DataError if the next chunk would read another member from the header after it: the
        header is in the data, or one before the limit has the size.
        """
        header = _find_header(file, self._byte, end)
        if header is None:
            return False
        file.seek(header)
        with suppress(tarfile.TarError), tarfile.open(fileobj=file, mode="r:") as tar:
            if tar.offset == end:
                return True
        raise DataError(
            f"{self._tar_name}: the member {member.name[:200]!r} contains a tar, or has over 8 "
            "GiB, and a tar as large is read in parts. Compress or unpack the inner tar"
        )


def _find_header(file: BinaryIO, start: int, stop: int) -> int | None:
    """Return the byte of the first header of a member in a range of a tar, which starts with a
    block; None: it has none.
    """
    file.seek(start)
    for offset in range(start, stop, _BLOCK):
        block = file.read(_BLOCK)
        if not block:
            break
        if block[148:149] in b" 01234567":  # of a checksum; others need no exception
            with suppress(tarfile.HeaderError):
                tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
                return offset
    return None


def _read_member(file: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> TarMember | BadRow:
    if not member.isreg() or member.issparse():
        return BadRow(
            "read",
            "not-regular-file",
            f"member {member.name[:200]!r} is a link, a device, a named pipe or sparse (`tar -S`)",
        )
    if not is_safe_path(member.name):
        return BadRow(
            "columns", "path", f"member {member.name[:200]!r} is not a path inside a folder"
        )
    if member.size > MAX_IMAGE_BYTES:
        return BadRow(
            "read", "too-large", f"{member.name} has {member.size} bytes, over {MAX_IMAGE_BYTES}"
        )
    data = tar.extractfile(member).read()  # type: ignore[union-attr]  # not None for a regular file
    if len(data) < member.size:
        return BadRow(
            "read", "truncated", f"{member.name} has {len(data)} of its {member.size} bytes"
        )
    return TarMember(member.name, file, member.offset_data, member.size, data)


def _group_samples(
    tar_members: Iterator[tuple[str, TarMember | BadRow]],
) -> Iterator[tuple[str, Sample]]:
    """Group consecutive members by base name; a repeat starts a new sample, so one is rejected for
    a duplicate id.
    """
    current = None
    members = {}
    for name, member in tar_members:
        stem, extension = _stem_and_extension(name)
        if stem is None:
            continue
        if current is not None and (stem != current or extension in members):
            yield current, members
            members = {}
        current = stem
        members[extension] = member
    if current is not None:
        yield current, members


def _stem_and_extension(name: str) -> tuple[str | None, str]:
    """Return the name of the sample of a member, and the extension; None: of no sample."""
    path = name.removeprefix("./")
    if is_hidden(path) or is_about_the_data(path):
        return None, ""
    folder, _, base = path.rpartition("/")
    first, _, extension = base.partition(".")
    return f"{folder}/{first}".lstrip("/"), extension.lower()
