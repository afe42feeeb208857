"""Sources whose rows are stated by a file tree or by one JSON document: written out as a listing, one row a line.

The driver writes the listing once, into the folder of the prepared set; the tasks then read their lines of it, as they
would of JSONL. A row of it names its `origin`; a caption that stands in a file of its own is read in the task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from mmray.data.formats import lines
from mmray.data.formats.jsonl import parse_json
from mmray.data.formats.lines import MAX_LINE_BYTES
from mmray.data.formats.rows import BadRow, is_plain, renamed
from mmray.data.formats.source import Chunk, Item
from mmray.data.images.files import read_file, tried
from mmray.errors import DataError
from mmray.storage.storage import Place

LISTING = "listing.jsonl"
_TOO_LONG = "bytes of a row that is too long"
Lister = Callable[[], Iterator[dict[str, Any]]]


class Listing:
    """Rows that `rows` lists; `out` is the folder the listing is in."""

    title: ClassVar[str] = "a listing"

    def __init__(self, place: Place, out: Place, columns: dict[str, str], title: str, rows: Lister) -> None:
        self.place, self.out, self.columns, self.rows = place, out, columns, rows
        self.title = title  # type: ignore[misc]  # each lister has its own

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[Chunk]:
        count = 0
        with self.out.writing(LISTING) as file:
            for row in self.rows():
                count += 1
                file.write(_line(row))
        if not count:
            raise DataError(f"{self.place.address} holds no rows of {self.title}")
        yield from lines.scan_lines(self.out, LISTING, rows_per_chunk, stops)

    def read(self, chunk: Chunk) -> Iterator[Item]:
        for line, data in lines.read_lines(self.out, chunk):
            values = parse_json(data)
            origin = values.pop("origin")
            try:
                if _TOO_LONG in values:
                    raise BadRow("parse", "too-long", f"the row has {values[_TOO_LONG]} bytes, over {MAX_LINE_BYTES}")
                yield Item(line, origin, renamed(self._with_text(values), self.columns))
            except BadRow as bad:
                yield Item(line, origin, bad)

    def _with_text(self, values: dict[str, Any]) -> dict[str, Any]:
        """Each line of the row's caption file that is not blank is a caption."""
        name = values.pop("text_file", None)
        if name is None:
            return values
        if not is_plain(name):
            raise BadRow("columns", "path", f"{name!r} is not plain UTF-8: rename the file")
        try:
            with tried(name):
                text = read_file(self.place, name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRow("parse", "encoding", f"{name} is not UTF-8 at byte {error.start}") from None
        texts = [line for line in text.splitlines() if line.strip()]
        return values | {"texts": texts or [""]}


def _line(row: dict[str, Any]) -> bytes:
    """A row as a line of the listing: in ASCII, for names may hold halves of surrogate pairs.

    Of one that is longer than a line may be, where it is and its length.
    """
    line = json.dumps(row).encode() + b"\n"
    if len(line) <= MAX_LINE_BYTES:
        return line
    return json.dumps({"origin": row["origin"], _TOO_LONG: len(line)}).encode() + b"\n"
