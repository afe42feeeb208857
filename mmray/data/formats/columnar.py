"""Parquet files and the Arrow files that Hugging Face `datasets` saves: rows from columns, images as paths or bytes.

Only the columns that mean something to us are read. A chunk is some row groups of a Parquet file, or some record
batches of an Arrow file, so that a task reads no more than its part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mmray.data.formats.rows import COLUMNS, BadRow, is_inside, renamed
from mmray.data.formats.source import Chunk, Item, files_of, in_utf8, signature, unchanged
from mmray.data.place import Place
from mmray.errors import DataError

_ROWS_AT_ONCE = 32  # of inline images, held as Python bytes


class Parquet:
    """A Parquet file, or the Parquet files of a folder in the order of their names."""

    title: ClassVar[str] = "Parquet"
    part: ClassVar[str] = "row group"

    def __init__(self, place: Place, name: str, columns: dict[str, str]) -> None:
        self.place, self.name, self.columns = place, name, columns

    def names(self) -> list[str]:
        """The files, in order."""
        return files_of(self.place, self.name, ".parquet")

    def split_of(self, name: str) -> str | None:
        """The split that a file is of, where the layout says so."""
        return None

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[Chunk]:
        index = 0
        for name in self.names():
            try:
                sizes, schema = self.parts(name)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.place.address}/{name} cannot be read as {self.title}: {error}") from None
            self._wanted(schema, name)
            mark, start, first = signature(self.place, name), 0, 1
            for stop in range(1, len(sizes) + 1):
                rows = sum(sizes[start:stop])
                if stop == len(sizes) or rows + sizes[stop] > rows_per_chunk:
                    yield Chunk(index, name, start, stop, first, rows, mark)
                    index, start, first = index + 1, stop, first + rows

    def parts(self, name: str) -> tuple[list[int], pa.Schema]:
        """(rows of each row group, schema) from the footer alone."""
        with self.place.open(name) as raw:
            meta = pq.ParquetFile(raw).metadata
            return [
                meta.row_group(group).num_rows for group in range(meta.num_row_groups)
            ], meta.schema.to_arrow_schema()

    def batches(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """The rows of a chunk, the wanted columns of them."""
        with self.place.open(chunk.file) as raw:
            file = pq.ParquetFile(raw)
            wanted = self._wanted(file.schema_arrow, chunk.file)
            for group in range(chunk.start, chunk.stop):
                yield from file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=wanted)

    def read(self, chunk: Chunk) -> Iterator[Item]:
        unchanged(self.place, chunk, chunk.sha256)
        line, split = chunk.first_line, self.split_of(chunk.file)
        try:
            for batch in self.batches(chunk):
                for values in _rows(batch):
                    if not isinstance(values, BadRow):
                        values = renamed(values, self.columns)
                        values |= {"split": split} if split and values.get("split") is None else {}
                    yield Item(line, f"{chunk.file}:{line}", values)
                    line += 1
        except (pa.ArrowException, OSError) as error:  # the rest of the chunk cannot be had: each row is named
            for rest in range(line, chunk.first_line + (chunk.num_rows or 0)):
                fault = BadRow("read", "damaged", f"{self.part}s {chunk.start}-{chunk.stop - 1}: {str(error)[:200]}")
                yield Item(rest, f"{chunk.file}:{rest}", fault)
        unchanged(self.place, chunk, chunk.sha256)

    def _wanted(self, schema: pa.Schema, name: str) -> list[str]:
        """Names of the columns to read. Raises DataError where none of them is an image or a caption."""
        ours = {self.columns.get(column, column) for column in COLUMNS}
        wanted = [column for column in schema.names if column in ours]
        mapped = renamed(dict.fromkeys(wanted, True), self.columns)
        texts = ("text", "texts", "messages")
        for kinds, kind in ((("image", "image_path", "images"), "image"), (texts, "text")):
            if not set(kinds) & set(mapped):
                raise DataError(
                    f"{self.place.address}/{name} has the columns {', '.join(schema.names)[:300]}: none is "
                    f"`{kind}`; say which is, with --columns {kind}=NAME"
                )
        return wanted


class SavedDataset(Parquet):
    """What `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk` write; the package itself is not needed."""

    title: ClassVar[str] = "Hugging Face datasets"
    part: ClassVar[str] = "record batch"

    def names(self) -> list[str]:
        """The Arrow files that the state of each split names, in order. Raises DataError."""
        states = in_utf8(self.place, [name for name in self.place.tree() if name.rpartition("/")[2] == "state.json"])
        found = [name for state in states for name in self._named(state)]
        if not found:
            raise DataError(f"{self.place.address} has no state.json that names Arrow files: it is no saved dataset")
        return found

    def split_of(self, name: str) -> str | None:
        return name.partition("/")[0] if "/" in name else None

    def _named(self, state: str) -> list[str]:
        try:
            values = orjson.loads(self.place.read(state))
            files = [str(item["filename"]) for item in values["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.place.address}/{state} cannot be read: {error}") from None
        if values.get("_indices_data_files"):
            raise DataError(
                f"{self.place.address}/{state}: the dataset was shuffled or filtered by an index: save it again after "
                "flatten_indices()"
            )
        names = [state.removesuffix("state.json") + file for file in files]
        if not all(map(is_inside, names)):
            raise DataError(f"{self.place.address}/{state} names files outside its folder")
        return names

    def parts(self, name: str) -> tuple[list[int], pa.Schema]:
        with self.place.open(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            return [batch.num_rows for batch in reader], reader.schema

    def batches(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        with self.place.open(chunk.file, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            wanted = self._wanted(reader.schema, chunk.file)
            for number, batch in enumerate(reader):
                if number >= chunk.stop:
                    return
                if number >= chunk.start:
                    whole = batch.select(wanted)
                    yield from (whole.slice(at, _ROWS_AT_ONCE) for at in range(0, whole.num_rows, _ROWS_AT_ONCE))


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    """Rows one by one; text that is not UTF-8 costs its own row alone."""
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRow("parse", "encoding", f"a text is not UTF-8 at byte {error.start}")
