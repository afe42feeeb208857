"""Parquet files and the Arrow files of Hugging Face `datasets`: rows from columns, images as paths or bytes.

Only known columns are read. A chunk is a range of rows: several small row groups, or a part of a large one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mmray.data.formats.rows import COLUMNS, BadRow, is_safe_path, rename_columns
from mmray.data.formats.source import Source, SourceChunk, SourceItem, check_unchanged, file_signature, list_files
from mmray.errors import DataError
from mmray.storage.storage import with_retries

T = TypeVar("T")
_ROWS_PER_BATCH = 32  # inline images held as Python bytes
_BUFFER_BYTES = 4 << 20  # of a column; without a buffer size pyarrow reads the whole column chunk
# Maximum chunks per row group. A range cannot be seeked to, so n ranges read the group (n + 1) / 2 times. Without
# ranges, the million rows of a pandas row group would be one task.
MAX_RANGES_PER_GROUP = 16


class ParquetSource(Source):
    """A Parquet file, or the Parquet files of a folder in sorted order."""

    title = "Parquet"

    def names(self) -> list[str]:
        return list_files(self.storage, self.name, ".parquet")

    def split_of(self, name: str) -> str | None:
        """Return the split of a file, if the layout defines it."""
        return None

    def group_ends(self, name: str) -> tuple[list[int], pa.Schema]:
        """Return (number of rows up to the end of each row group or record batch, schema)."""
        with self.storage.open(name) as raw:
            file = pq.ParquetFile(raw)
            return _group_ends(file), file.schema_arrow

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the known columns of the rows start..stop of a file."""
        with self.storage.open(name) as raw:
            file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
            ends, columns = _group_ends(file), self._known_columns(file.schema_arrow, name)
            first = bisect_right(ends, start)
            groups = list(range(first, bisect_left(ends, stop) + 1))
            rows = file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns)
            yield from _slice_rows(rows, start - (ends[first - 1] if first else 0), stop - start)

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        index = 0
        for name in self.names():
            try:
                ends, schema = self._retry(lambda name=name: self.group_ends(name))  # type: ignore[misc]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.storage.address}/{name} cannot be read as {self.title}: {error}") from None
            self._known_columns(schema, name)
            signature, start = file_signature(self.storage, name), 0
            for end, following in zip(ends, [*ends[1:], None], strict=True):
                if following is not None and following - start <= rows_per_chunk:
                    continue
                step = max(rows_per_chunk, -(-(end - start) // MAX_RANGES_PER_GROUP))
                for first in range(start, end, step):
                    stop = min(first + step, end)
                    yield SourceChunk(index, name, first, stop, first + 1, stop - first, signature)
                    index += 1
                start = end

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        check_unchanged(self.storage, chunk)
        line, split = chunk.first_line, self.split_of(chunk.file)
        try:
            for batch in self._read_batches(chunk):
                for values in _iter_rows(batch):
                    if not isinstance(values, BadRow):
                        values = rename_columns(values, self.columns)
                        values |= {"split": split} if split and values.get("split") is None else {}
                    yield SourceItem(line, f"{chunk.file}:{line}", values)
                    line += 1
        except (pa.ArrowException, OSError) as error:  # the rest of the chunk is unreadable: report each row
            # pyarrow also raises OSError for damaged files, but without an errno
            is_storage = isinstance(error, OSError) and (self.storage.local_path is None or error.errno is not None)
            for rest in range(line, chunk.stop + 1):
                detail = f"rows {line} to {chunk.stop}: {str(error)[:200]}"
                bad_row = BadRow("read", "unreadable" if is_storage else "damaged", detail)
                yield SourceItem(rest, f"{chunk.file}:{rest}", bad_row)
        check_unchanged(self.storage, chunk)

    def _read_batches(self, chunk: SourceChunk) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chunk; resume after the last returned row if an object store fails transiently."""
        start = chunk.start
        batches: Iterator[pa.RecordBatch] | None = None

        def next_batch() -> pa.RecordBatch | None:
            nonlocal batches
            batches = batches or self.batches(chunk.file, start, chunk.stop)
            try:
                return next(batches, None)
            except OSError:
                batches = None
                raise

        while (batch := self._retry(next_batch)) is not None:
            start += batch.num_rows
            yield batch

    def _retry(self, call: Callable[[], T]) -> T:
        """Return `call()`, retried if the source is on an object store."""
        return call() if self.storage.local_path is not None else with_retries(call)

    def _known_columns(self, schema: pa.Schema, name: str) -> list[str]:
        """Return the columns to read. Raises DataError if no column has images or none has text."""
        names = {self.columns.get(column, column) for column in COLUMNS}
        known = [column for column in schema.names if column in names]
        renamed = rename_columns(dict.fromkeys(known, True), self.columns)
        for kind, columns in (("image", ("image", "image_path", "images")), ("text", ("text", "texts", "messages"))):
            if not renamed.keys() & columns:
                raise DataError(
                    f"{self.storage.address}/{name} has the columns {', '.join(schema.names)[:300]}: none is "
                    f"`{kind}`; name one with --columns {kind}=NAME"
                )
        return known


class HFSavedSource(ParquetSource):
    """Output of `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk`; does not need `datasets`."""

    title = "Hugging Face datasets"

    def names(self) -> list[str]:
        """Return the Arrow files that state.json of each split lists, in order. Raises DataError."""
        files = list_files(self.storage, "", "state.json")
        states = [name for name in files if name.rpartition("/")[2] == "state.json"]
        if names := [name for state in states for name in self._files_of(state)]:
            return names
        raise DataError(f"{self.storage.address} has no state.json that names Arrow files: it is no saved dataset")

    def _files_of(self, state: str) -> list[str]:
        path = f"{self.storage.address}/{state}"
        try:
            values = orjson.loads(self.storage.read(state))
            names = [state.removesuffix("state.json") + str(item["filename"]) for item in values["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        if values.get("_indices_data_files"):
            hint = "save it again after flatten_indices()"
            raise DataError(f"{path}: the dataset was shuffled or filtered by an index: {hint}")
        if not all(map(is_safe_path, names)):
            raise DataError(f"{path} names files outside its folder")
        return names

    def split_of(self, name: str) -> str | None:
        return name.partition("/")[0] if "/" in name else None

    def group_ends(self, name: str) -> tuple[list[int], pa.Schema]:
        with self.storage.open(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            return list(accumulate(batch.num_rows for batch in reader)), reader.schema

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        with self.storage.open(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            columns = self._known_columns(reader.schema, name)
            yield from _slice_rows((batch.select(columns) for batch in reader), start, stop - start)


def _group_ends(file: pq.ParquetFile) -> list[int]:
    return list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))


def _slice_rows(batches: Iterable[pa.RecordBatch], start: int, count: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows start..start + count of the batches."""
    for batch in batches:
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
