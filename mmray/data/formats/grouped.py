"""Rows of one image as one row with all of its captions (`prepare --group image`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

from mmray.builtin import COLUMNS
from mmray.data.formats.listing import BAD_ROW, ListingSource, Rows
from mmray.data.formats.source import RawRow, Source
from mmray.data.rows import (
    FOLDER,
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    MESSAGE_COLUMNS,
    NOTICES,
    BadRow,
)
from mmray.errors import DataError

# Columns of an image; captions are joined, and ids are of rows.
_SHARED = [name for name in COLUMNS if name not in ("id", "key", "text", "texts")]


class GroupedSource(ListingSource):
    """Groups the rows of another source that have the same image, by its path or URL.

    Captions are joined in source order, equal ones once. Other columns are those of the first row.
    Rows of different splits are not grouped, nor are conversations. The driver reads the source
    once, and its memory grows with the captions.

    `scan` yields chunks of the grouped rows, and `read(chunk)` the rows of one as RawRow.

    Args:
        source: The source, whose images must be paths or URLs.

    Attributes:
        listing: Name of the file with the listed rows, in the folder of the prepared set.
    """

    listing: ClassVar[str] = "grouped.jsonl"

    def __init__(self, source: Source) -> None:
        super().__init__(
            source.folder, source.name, {}, source.prepared_folder, source.caption_template
        )
        self._source = source
        self.has_types = source.has_types

    def describe(self) -> str:
        return f"{self._source.describe()}, grouped by image"

    def list_rows(self) -> Rows:
        rows: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}  # with their locations
        captions: dict[tuple[Any, ...], dict[str, Any]] = {}  # captions by key and notation
        for row in self._read_source():
            key, values = self._group(row)
            texts = _as_list(values.pop("texts", values.pop("text", [])))
            _, first = rows.setdefault(key, (row.location, values))
            if first is not values:
                notices = [*values.get(NOTICES, ()), *_describe_differences(first, values)]
                first[NOTICES] = [*dict.fromkeys([*first.get(NOTICES, ()), *notices])]
            captions.setdefault(key, {}).update({repr(text): text for text in texts})
        self.box_names = self._source.box_names
        self.class_names = self._source.class_names
        self.ignored = self._source.ignored
        for key, (location, values) in rows.items():
            yield location, values | ({"texts": [*captions[key].values()]} if captions[key] else {})

    def _read_source(self) -> Iterator[RawRow]:
        for chunk in self._source.scan(1 << 16, ()):
            yield from self._source.read(chunk)

    def _group(self, row: RawRow) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the key of the group of a row, which may be of this row only, and its values.

        Raises DataError if its image is not a path or a URL.
        """
        if isinstance(row.values, BadRow):
            bad = row.values
            return (row.location,), {BAD_ROW: (bad.stage, bad.reason, bad.detail)}
        images = [_as_list(row.values[name]) for name in IMAGE_COLUMNS if name in row.values]
        if not all(isinstance(image, str) for image in chain.from_iterable(images)):
            raise DataError(
                f"{row.location} has its image inside the row, and --group image compares paths "
                "and URLs: use --duplicates row instead, which keeps all rows of an image"
            )
        if not images or not row.values.keys().isdisjoint(MESSAGE_COLUMNS):
            return (row.location,), row.values
        place = (row.values.get("split"), row.values.get(FOLDER))
        return (*place, repr(images)), row.values

    def _drops(self, name: str) -> bool:
        return False  # its source has counted the columns

    def parse(self, record: dict[str, Any]) -> dict[str, Any]:
        if BAD_ROW in record:
            raise BadRow(*record[BAD_ROW])
        return record


def _describe_differences(first: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Return a notice for each column in which a row differs from the first one of its image."""
    kept, others_kept = (each.get(KEPT_COLUMNS, {}) for each in (first, values))
    names = [name for name in _SHARED if first.get(name) != values.get(name)]
    names += [name for name in kept | others_kept if kept.get(name) != others_kept.get(name)]
    return [
        f"rows of an image differ in `{name[:40]}`, and the first one is used" for name in names
    ]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
