"""Parquet files and the Arrow files of Hugging Face `datasets`: rows from columns, images as paths or bytes.

Only known columns are read. A chunk is a number of row groups (Parquet) or record batches (Arrow); a larger group is
split into ranges of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mmray.data.formats.rows import COLUMNS, BadRow, is_safe_path, rename_columns
from mmray.data.formats.source import (
    SourceChunk,
    SourceItem,
    check_file_names,
    check_unchanged,
    file_signature,
    list_files,
)
from mmray.errors import DataError
from mmray.storage.storage import Storage, with_retries

T = TypeVar("T")
_ROWS_AT_ONCE = 32  # inline images held as Python bytes
_BUFFER_BYTES = 4 << 20  # of a column; without a buffer size pyarrow reads the whole column chunk
# Maximum chunks per row group. A range cannot be seeked to, so n ranges read the group (n + 1) / 2 times. Without
# ranges, the million rows of a pandas row group would be one task.
MOST_PARTS = 16


class ParquetSource:
    """A Parquet file, or the Parquet files of a folder in sorted order."""

    title: ClassVar[str] = "Parquet"
    part: ClassVar[str] = "row group"

    def __init__(self, place: Storage, name: str, columns: dict[str, str]) -> None:
        self.place, self.name, self.columns = place, name, columns

    def names(self) -> list[str]:
        return list_files(self.place, self.name, ".parquet")

    def split_of(self, name: str) -> str | None:
        """Return the split of a file, if the layout defines it."""
        return None

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        index = 0
        for name in self.names():
            try:
                sizes, schema = self._steadily(lambda name=name: self.parts(name))  # type: ignore[misc]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.place.address}/{name} cannot be read as {self.title}: {error}") from None
            self._wanted(schema, name)
            mark, start, first = file_signature(self.place, name), 0, 1
            for stop in range(1, len(sizes) + 1):
                rows = sum(sizes[start:stop])
                if stop < len(sizes) and rows + sizes[stop] <= rows_per_chunk:
                    continue
                most = max(rows_per_chunk, -(-rows // MOST_PARTS))
                for at in range(0, rows, most):
                    part = min(most, rows - at)
                    yield SourceChunk(index, name, start, stop, first, part, mark)
                    index, first = index + 1, first + part
                start = stop

    def parts(self, name: str) -> tuple[list[int], pa.Schema]:
        """Return (rows of each row group, schema), from the footer only."""
        with self.place.open(name) as raw:
            meta = pq.ParquetFile(raw).metadata
            return [
                meta.row_group(group).num_rows for group in range(meta.num_row_groups)
            ], meta.schema.to_arrow_schema()

    def batches(self, chunk: SourceChunk, had: int) -> Iterator[pa.RecordBatch]:
        """Yield the requested columns of a chunk, without its first `had` rows."""
        with self.place.open(chunk.file) as raw:
            file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
            wanted, meta = self._wanted(file.schema_arrow, chunk.file), file.metadata
            above = sum(meta.row_group(group).num_rows for group in range(chunk.start))
            groups = range(chunk.start, chunk.stop)
            rows = (
                batch
                for group in groups
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=wanted)
            )
            yield from _slice_batches(rows, *_rows_of_chunk(chunk, above, had))

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        check_unchanged(self.place, chunk, chunk.sha256)
        line, split = chunk.first_line, self.split_of(chunk.file)
        try:
            for batch in self._all_batches(chunk):
                for values in _iter_rows(batch):
                    if not isinstance(values, BadRow):
                        values = rename_columns(values, self.columns)
                        values |= {"split": split} if split and values.get("split") is None else {}
                    yield SourceItem(line, f"{chunk.file}:{line}", values)
                    line += 1
        except (pa.ArrowException, OSError) as error:  # the rest of the chunk is unreadable: report each row
            reason = "unreadable" if self._is_of_storage(error) else "damaged"
            for rest in range(line, chunk.first_line + (chunk.num_rows or 0)):
                fault = BadRow("read", reason, f"{self.part}s {chunk.start}-{chunk.stop - 1}: {str(error)[:200]}")
                yield SourceItem(rest, f"{chunk.file}:{rest}", fault)
        check_unchanged(self.place, chunk, chunk.sha256)

    def _all_batches(self, chunk: SourceChunk) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chunk; resume after the last returned row if an object store fails transiently."""
        had, batches = 0, self.batches(chunk, 0)

        def following() -> pa.RecordBatch | None:
            nonlocal batches
            try:
                return next(batches, None)
            except OSError:
                batches = self.batches(chunk, had)
                raise

        while (batch := self._steadily(following)) is not None:
            had += batch.num_rows
            yield batch

    def _steadily(self, call: Callable[[], T]) -> T:
        """Return `call()`, retried if the source is on an object store."""
        return call() if self.place.local_path is not None else with_retries(call)

    def _is_of_storage(self, error: Exception) -> bool:
        """Return whether a storage failure caused the error, so that a retry may succeed.

        pyarrow also raises OSError for damaged files, but without an errno.
        """
        return isinstance(error, OSError) and (self.place.local_path is None or error.errno is not None)

    def _wanted(self, schema: pa.Schema, name: str) -> list[str]:
        """Return the columns to read. Raises DataError if no column has images or none has text."""
        ours = {self.columns.get(column, column) for column in COLUMNS}
        wanted = [column for column in schema.names if column in ours]
        mapped = rename_columns(dict.fromkeys(wanted, True), self.columns)
        texts = ("text", "texts", "messages")
        for kinds, kind in ((("image", "image_path", "images"), "image"), (texts, "text")):
            if not set(kinds) & set(mapped):
                raise DataError(
                    f"{self.place.address}/{name} has the columns {', '.join(schema.names)[:300]}: none is "
                    f"`{kind}`; name one with --columns {kind}=NAME"
                )
        return wanted


class HFSavedSource(ParquetSource):
    """Output of `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk`; does not need `datasets`."""

    title: ClassVar[str] = "Hugging Face datasets"
    part: ClassVar[str] = "record batch"

    def names(self) -> list[str]:
        """Return the Arrow files that state.json of each split lists, in order. Raises DataError."""
        states = check_file_names(
            self.place,
            [name for name in self.place.list_files() if name.rpartition("/")[2] == "state.json"],
        )
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
        if not all(map(is_safe_path, names)):
            raise DataError(f"{self.place.address}/{state} names files outside its folder")
        return names

    def parts(self, name: str) -> tuple[list[int], pa.Schema]:
        with self.place.open(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            return [batch.num_rows for batch in reader], reader.schema

    def batches(self, chunk: SourceChunk, had: int) -> Iterator[pa.RecordBatch]:
        with self.place.open(chunk.file, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            wanted = self._wanted(reader.schema, chunk.file)
            above = sum(reader.read_next_batch().num_rows for _ in range(chunk.start))
            for batch in _slice_batches(reader, *_rows_of_chunk(chunk, above, had)):
                whole = batch.select(wanted)
                yield from (whole.slice(at, _ROWS_AT_ONCE) for at in range(0, whole.num_rows, _ROWS_AT_ONCE))


def _rows_of_chunk(chunk: SourceChunk, above: int, had: int) -> tuple[int, int]:
    """Return (rows to skip, rows to take) in the parts of a chunk.

    `above` is the number of rows before these parts in the file, `had` the number of rows already returned.
    """
    return chunk.first_line - 1 - above + had, (chunk.num_rows or 0) - had


def _slice_batches(batches: Iterable[pa.RecordBatch], start: int, count: int) -> Iterator[pa.RecordBatch]:
    """Return the rows start..start + count of the batches."""
    for batch in batches if count else ():
        part = batch.slice(min(start, batch.num_rows), count)
        start, count = max(0, start - batch.num_rows), count - part.num_rows
        if part.num_rows:
            yield part
        if not count:
            return


def _iter_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    """Yield rows one by one, so that invalid UTF-8 affects only its own row."""
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRow("parse", "encoding", f"a text is not UTF-8 at byte {error.start}")
