"""Rows listed from a file tree or document: class folders, image-text pairs, parallel lists, COCO."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import PurePosixPath
from typing import Any, ClassVar

from mmray.data.formats import lines
from mmray.data.formats.jsonl import parse_json
from mmray.data.formats.lines import MAX_LINE_BYTES
from mmray.data.formats.rows import BadRow, is_valid_name, rename_columns
from mmray.data.formats.source import SourceChunk, SourceItem
from mmray.data.images.read import quarantine_os_errors, read_file
from mmray.errors import DataError
from mmray.storage.storage import Storage

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
SPLITS = ("train", "test", "val", "valid", "validation", "dev")


def class_rows(place: Storage, template: str) -> Iterator[dict[str, Any]]:
    """Yield rows of FOLDER/CLASS/image or FOLDER/SPLIT/CLASS/image, with a caption and the class as label."""
    names = [name for name in place.list_files() if is_image(name)]
    at = _class_depth(names)
    labels = {name: label for label, name in enumerate(_classes(names))}
    for name in names:
        parts = PurePosixPath(name).parts
        row: dict[str, Any] = {"origin": name, "id": name, "image": name}
        if len(parts) > at + 1:  # an image outside the class folders has no caption, so it is quarantined
            row |= {"text": template.replace("{}", humanize(parts[at])), "label": labels[parts[at]]}
        yield row | ({"split": parts[0]} if at else {})


def class_names(place: Storage) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ... of `class_rows`, as valid UTF-8."""
    classes = _classes([name for name in place.list_files() if is_image(name)])
    return tuple(humanize(name).encode(errors="backslashreplace").decode() for name in classes)


def _classes(images: list[str]) -> list[str]:
    at = _class_depth(images)
    return sorted({PurePosixPath(name).parts[at] for name in images if len(PurePosixPath(name).parts) > at + 1})


def _class_depth(images: list[str]) -> int:
    """Return the index of the class in the parts of a path."""
    return int(has_split_folders(images))


def pair_rows(place: Storage) -> Iterator[dict[str, Any]]:
    """Pair a/b.jpg with a/b.txt; an image or a text without its counterpart is an incomplete row."""
    images: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name in place.list_files():
        stem, suffix = str(PurePosixPath(name).with_suffix("")), PurePosixPath(name).suffix.lower()
        if suffix in IMAGES:
            images.setdefault(stem, []).append(name)
        elif suffix == ".txt":
            texts[stem] = name
    for stem in sorted(images.keys() | texts.keys()):
        row = {"text_file": texts[stem]} if stem in texts else {}
        for name in images.get(stem, []):
            yield {"origin": name, "id": name, "image": name} | row
        if stem not in images:
            yield {"origin": texts[stem], "id": texts[stem]} | row


def list_rows(place: Storage, images: str, captions: str) -> Iterator[dict[str, Any]]:
    """Pair line n of the image list with line n of the caption list. Raises DataError if the lengths differ."""
    paths, texts = _read_lines(place, images), _read_lines(place, captions)
    if len(paths) != len(texts):
        raise DataError(
            f"{place.address}: {images} has {len(paths):,} lines, {captions} {len(texts):,}: make them equal"
        )
    for number, (path, text) in enumerate(zip(paths, texts, strict=True), 1):
        yield {"origin": f"{images}:{number}", "image": path, "text": text}


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES)


def has_split_folders(names: list[str]) -> bool:
    """Return whether every image is in SPLIT/CLASS/ with a known split name."""
    return bool(names) and all(len(name.split("/")) > 2 and name.split("/")[0] in SPLITS for name in names)


def humanize(name: str) -> str:
    """Convert a folder name to words."""
    return name.replace("_", " ")


def _read_lines(place: Storage, name: str) -> list[str]:
    """Read the lines of a text file; invalid UTF-8 becomes surrogates, which later quarantine the row."""
    try:
        text = place.read(name).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise DataError(f"{place.address}/{name} cannot be read: {error}") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


# The driver writes the rows once, as JSON lines, to the folder of the prepared set; each task reads its part.
LISTING = "listing.jsonl"
_TOO_LONG = "bytes of a row that is too long"
Lister = Callable[[], Iterator[dict[str, Any]]]


class ListingSource:
    """Rows produced by `rows`; `out` is the folder of the listing."""

    title: ClassVar[str] = "a listing"

    def __init__(self, place: Storage, out: Storage, columns: dict[str, str], title: str, rows: Lister) -> None:
        self.place, self.out, self.columns, self.rows = place, out, columns, rows
        self.title = title  # type: ignore[misc]  # depends on the lister

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        count = 0
        with self.out.open_output(LISTING) as file:
            for row in self.rows():
                count += 1
                file.write(_encode_row(row))
        if not count:
            raise DataError(f"{self.place.address} holds no rows of {self.title}")
        yield from lines.scan_lines(self.out, LISTING, rows_per_chunk, stops)

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        for line, data in lines.read_lines(self.out, chunk):
            values = parse_json(data)
            origin = values.pop("origin")
            try:
                if _TOO_LONG in values:
                    raise BadRow("parse", "too-long", f"the row has {values[_TOO_LONG]} bytes, over {MAX_LINE_BYTES}")
                yield SourceItem(line, origin, rename_columns(self._with_text(values), self.columns))
            except BadRow as bad:
                yield SourceItem(line, origin, bad)

    def _with_text(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add each non-blank line of the row's caption file as a caption."""
        name = values.pop("text_file", None)
        if name is None:
            return values
        if not is_valid_name(name):
            raise BadRow("columns", "path", f"{name!r} is not plain UTF-8: rename the file")
        try:
            with quarantine_os_errors(name):
                text = read_file(self.place, name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRow("parse", "encoding", f"{name} is not UTF-8 at byte {error.start}") from None
        texts = [line for line in text.splitlines() if line.strip()]
        return values | {"texts": texts or [""]}


def _encode_row(row: dict[str, Any]) -> bytes:
    """Encode a row as an ASCII line of the listing, because names may contain lone surrogates.

    An overlong row is replaced by its origin and length.
    """
    line = json.dumps(row).encode() + b"\n"
    if len(line) <= MAX_LINE_BYTES:
        return line
    return json.dumps({"origin": row["origin"], _TOO_LONG: len(line)}).encode() + b"\n"
