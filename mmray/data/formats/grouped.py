"""Rows of one image as one row with all of its captions (`prepare --group image`)."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from mmray.builtin import COLUMNS
from mmray.data.formats.listing import format_line, listed_bad_row, read_listing
from mmray.data.formats.source import RawRow, Record, Scan, Source, SourceChunk
from mmray.data.formats.text_lines import JsonlSource
from mmray.data.partitions import read_part, write_parts
from mmray.data.rows import (
    FOLDER,
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    MESSAGE_COLUMNS,
    NOTICES,
    BadRow,
    Values,
    has_any,
)
from mmray.errors import DataError
from mmray.storage.paths import TEMP_SUFFIX, AnyPath, file_size, list_names, open_output
from mmray.storage.requests import parallel_map

# Columns of an image; captions are joined, and ids are of rows.
_SHARED = [name for name in COLUMNS if name not in ("id", "key", "text", "texts")]
ROWS_PER_CHUNK = 1 << 16
MAX_GROUPED_ROWS = 1 << 20  # rows that are grouped at a time
CHUNKS_PER_LISTING = 16  # of the source, whose first rows of images are in one listing
_LISTING = "grouped-{:05d}.jsonl"
_LISTED = re.compile(r"grouped(-[0-9]+)?\.jsonl")  # also of an earlier version
_GROUPS = pa.schema([("order", pa.int64()), ("line", pa.large_binary())])
_SCHEMA = pa.schema([("row", pa.large_binary())])
# Calls a picklable function with each item; in tasks if they have many rows.
Run = Callable[[Callable[[Any], Any], Sequence[Any], int], Iterator[Any]]


class GroupedSource(Source):
    """Groups the rows of another source that have the same image, by its path or URL.

    Captions are joined in source order, equal ones once. Other columns are those of the first row.
    Rows of different splits are not grouped, nor are conversations. Tasks divide the rows into
    parts by hashes of their images, and group each part; others sort the groups by their first
    rows, each a range of these, and list them in a file.

    `scan` yields chunks of the grouped rows, and `read(chunk)` the rows of one as RawRow.

    Args:
        source: The source, whose images must be paths or URLs.
        run: Called with (function, items, number of rows) to call the function with each item.
    """

    def __init__(self, source: Source, run: Run) -> None:
        super().__init__(
            source.folder, source.name, {}, source.prepared_folder, source.caption_template
        )
        self._source = source
        self._run = run
        self.has_types = source.has_types

    @cached_property
    def files(self) -> dict[str, str]:
        return self._source.files

    def describe(self) -> str:
        return f"{self._source.describe()}, grouped by image"

    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        if self._is_unchanged():
            self.class_names = self.earlier.class_names
            yield from self.earlier.chunks
            return
        source = self._source
        chunks = list(source.scan(ROWS_PER_CHUNK))
        self.class_names = source.class_names
        self.ignored = source.ignored
        num_rows = sum(chunk.num_rows or 0 for chunk in chunks)
        num_parts = 1 + num_rows // MAX_GROUPED_ROWS
        folder = self.prepared_folder
        divide = partial(_divide_rows, source=source, num_parts=num_parts)
        inputs = sorted(self._run(divide, chunks, num_rows))
        names = [_LISTING.format(n) for n in range(-(-len(chunks) // CHUNKS_PER_LISTING))]
        group = partial(_group_part, folder=folder, files=inputs, num_listings=len(names))
        outputs = []
        num_groups = np.zeros(len(names), np.int64)
        for file, counts, splits in self._run(group, range(num_parts if chunks else 0), num_rows):
            outputs.append(file)
            num_groups += counts
            self.split_rows.update(splits)
        listings = []
        for number, rows_before in enumerate((num_groups.cumsum() - num_groups).tolist()):
            earlier = [chunk for chunk in self.earlier.chunks if chunk.file == names[number]]
            listings.append((number, names[number], rows_before, earlier))
        write = partial(
            _write_listing,
            folder=folder,
            files=outputs,
            rows_per_chunk=rows_per_chunk,
            grows=self.grows,
        )
        listed = sorted(self._run(write, listings, num_rows))
        for index, chunk in enumerate(chain.from_iterable(each for _, each in listed)):
            yield replace(chunk, index=index)
        stale = [each for each in list_names(folder) if _LISTED.fullmatch(each)]
        stale = [*set(stale).difference(names), *inputs, *outputs]
        parallel_map(lambda name: (folder / name).unlink(), stale)

    def _is_unchanged(self) -> bool:
        """Return whether the listings are those that a scan would write."""
        ends = {chunk.file: chunk.stop for chunk in self.earlier.chunks}
        sizes = {name: file_size(self.prepared_folder / name) for name in ends}
        return self.files == self.earlier.files != {} and sizes == ends

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        return read_listing(self.prepared_folder, chunk)

    def notices(self, parsed: Values, values: Values) -> list[str]:
        return []  # its source has added them

    def parse(self, record: Values) -> Values:
        return record


def _divide_rows(chunk: SourceChunk, source: Source, num_parts: int) -> str:
    """Task: write the rows of a chunk, divided by the hashes of their groups, to a file; return its
    name.
    """
    lines = []
    part_of = []
    for number, row in enumerate(source.read(chunk)):
        key, values = _group(row)
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
        texts = _as_list(values.pop("texts", values.pop("text", [])))
        order = (chunk.index << 32) + number
        lines.append(json.dumps([order, key, row.location, values, texts]).encode())
        part_of.append(int.from_bytes(digest, "big") % num_parts)
    file = f"rows-{chunk.index:08d}{TEMP_SUFFIX}"
    table = pa.table({"row": lines}, _SCHEMA)
    write_parts(source.prepared_folder / file, table, np.array(part_of, np.int64), num_parts)
    return file


def _group_part(
    part: int, folder: AnyPath, files: Sequence[str], num_listings: int
) -> tuple[str, np.ndarray, Counter[str]]:
    """Task: write the groups of a part to a file, divided by their listings.

    Returns:
        The name of the file, and the numbers of groups by listing and by split.
    """
    groups: dict[str, tuple[int, str, Values]] = {}  # with order and location
    captions: dict[str, dict[str, Any]] = {}  # captions by group and notation
    for row in read_part([folder / name for name in files], part)["row"]:
        order, key, location, values, texts = json.loads(row.as_py())
        name = json.dumps(key)
        _, _, first = groups.setdefault(name, (order, location, values))
        if first is not values:
            notices = [*values.get(NOTICES, ()), *_describe_differences(first, values)]
            first[NOTICES] = [*dict.fromkeys([*first.get(NOTICES, ()), *notices])]
        captions.setdefault(name, {}).update({repr(text): text for text in texts})
    splits: Counter[str] = Counter()
    lines = []
    for name, (_, location, values) in groups.items():
        if captions[name]:
            values["texts"] = [*captions[name].values()]
        if split := values.get("split"):
            splits[split] += 1
        lines.append(format_line(location, values))
    orders = np.array([order for order, _, _ in groups.values()], np.int64)
    listing_of = (orders >> 32) // CHUNKS_PER_LISTING
    file = f"groups-{part}{TEMP_SUFFIX}"
    table = pa.table({"order": orders, "line": lines}, _GROUPS)
    write_parts(folder / file, table, listing_of, num_listings)
    return file, np.bincount(listing_of, minlength=num_listings), splits


def _write_listing(
    item: tuple[int, str, int, list[SourceChunk]],
    folder: AnyPath,
    files: Sequence[str],
    rows_per_chunk: int,
    grows: bool,
) -> tuple[int, list[SourceChunk]]:
    """Task: write the groups of a listing in the order of their first rows; return its chunks.

    Args:
        item: Number and name of the listing, number of rows before it, and its earlier chunks.
    """
    number, name, rows_before, earlier = item
    groups = read_part([folder / file for file in files], number).sort_by("order")
    with open_output(folder / name) as stream:
        for line in groups["line"]:
            stream.write(line.as_buffer())
    rows = JsonlSource(folder, name, {})
    rows.grows = grows
    rows.earlier = Scan(chunks=earlier)
    return number, list(rows.scan_file(name, rows_per_chunk, rows_before))


def _group(row: RawRow) -> tuple[list[Any], Values]:
    """Return the key of the group of a row, which may be of this row only, and its values.

    Raises DataError if its image is not a path or a URL.
    """
    if isinstance(row.values, BadRow):
        return [row.location], listed_bad_row(row.values)
    images = [_as_list(row.values[name]) for name in IMAGE_COLUMNS if name in row.values]
    if not all(isinstance(image, str) for image in chain.from_iterable(images)):
        raise DataError(
            f"{row.location} has its image inside the row, and --group image compares paths "
            "and URLs: use --duplicates row instead, which keeps all rows of an image"
        )
    if not images or has_any(row.values, MESSAGE_COLUMNS):
        return [row.location], row.values
    return [row.values.get("split"), row.values.get(FOLDER), images], row.values


def _describe_differences(first: Values, values: Values) -> list[str]:
    """Return a notice for each column in which a row differs from the first one of its image."""
    kept, others_kept = (each.get(KEPT_COLUMNS, {}) for each in (first, values))
    names = [name for name in _SHARED if first.get(name) != values.get(name)]
    names += [name for name in kept | others_kept if kept.get(name) != others_kept.get(name)]
    return [
        f"rows of an image differ in `{name[:40]}`, and the first one is used" for name in names
    ]


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
