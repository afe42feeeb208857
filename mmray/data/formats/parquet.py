"""Parquet files and the Arrow files of Hugging Face `datasets`: rows from columns, images as paths
or bytes.

Only known columns are read. A chunk is a range of rows: several small row groups, or a part of a
large one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from struct import error, unpack_from
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mmray.data.formats.rows import COLUMNS, BadRow, is_safe_path, rename_columns
from mmray.data.formats.source import Source, SourceChunk, check_unchanged, file_signature
from mmray.errors import DataError
from mmray.storage.storage import TransientStorageError, iter_parallel

_ROWS_PER_BATCH = 32  # inline images held as Python bytes
_BUFFER_BYTES = 4 << 20  # of a column; without a buffer size pyarrow reads the whole column chunk
# A reader cannot seek to a row, so n chunks read their row group (n + 1) / 2 times. With one chunk
# per row group, the million rows of a pandas row group would be one task.
MAX_CHUNKS_PER_ROW_GROUP = 16
_HEADER_BYTES = 4096  # of an Arrow message, read at once; longer ones take another request
_CONTINUATION, _RECORD_BATCH = 0xFFFFFFFF, 3


class ParquetSource(Source):
    """A Parquet file, or the Parquet files of a folder in sorted order."""

    title = "Parquet"

    def names(self) -> list[str]:
        return self.files_with_suffix(".parquet")

    def split_of(self, name: str) -> str | None:
        """Return the split of a file, if the layout defines it."""
        return None

    def cumulative_rows(self, name: str) -> tuple[list[int], pa.Schema]:
        """Return (number of rows up to the end of each row group or record batch, schema)."""
        with self.storage.open_retried(name) as raw:
            file = pq.ParquetFile(raw)
            return _cumulative_rows(file), file.schema_arrow

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the known columns of the rows start..stop of a file."""
        with self.storage.open_retried(name) as raw:
            file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
            ends, columns = _cumulative_rows(file), self._known_columns(file.schema_arrow, name)
            first = bisect_right(ends, start)
            groups = list(range(first, bisect_left(ends, stop) + 1))
            rows = file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns)
            yield from _slice_rows(rows, start - (ends[first - 1] if first else 0), stop - start)

    def scan(
        self, rows_per_chunk: int, previous_chunk_ends: Collection[int]
    ) -> Iterator[SourceChunk]:
        index, names = 0, self.names()
        for name, (ends, signature) in zip(
            names, iter_parallel(self._check_file, names), strict=True
        ):
            start = 0
            for end, following in zip(ends, [*ends[1:], None], strict=True):
                if following is not None and following - start <= rows_per_chunk:
                    continue
                step = max(rows_per_chunk, -(-(end - start) // MAX_CHUNKS_PER_ROW_GROUP))
                for first in range(start, end, step):
                    stop = min(first + step, end)
                    yield SourceChunk(index, name, first, stop, first + 1, stop - first, signature)
                    index += 1
                start = end

    def _check_file(self, name: str) -> tuple[list[int], str]:
        """Return cumulative rows and signature of a file.

        Raises DataError if it is damaged or lacks columns.
        """
        try:
            ends, schema = self.cumulative_rows(name)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.storage.address}/{name} cannot be read as {self.title}: {error}"
            ) from None
        self._known_columns(schema, name)
        return ends, file_signature(self.storage, name)

    def records(self, chunk: SourceChunk) -> Iterator[tuple[int, str, Any]]:
        check_unchanged(self.storage, chunk)
        row_number = chunk.first_line
        try:
            for batch in self.batches(chunk.file, chunk.start, chunk.stop):
                for number in range(batch.num_rows):
                    yield (
                        row_number,
                        f"{chunk.file}:{row_number}",
                        (batch.slice(number, 1), self.split_of(chunk.file)),
                    )
                    row_number += 1
        except TransientStorageError:
            raise
        except (pa.ArrowException, OSError) as error:
            # the rest of the chunk is unreadable: report each row
            # pyarrow also raises OSError for damaged files, but without an errno
            reason = (
                "unreadable"
                if isinstance(error, OSError) and error.errno is not None
                else "damaged"
            )
            detail = f"rows {row_number} to {chunk.stop}: {str(error)[:200]}"
            for rest in range(row_number, chunk.stop + 1):
                yield rest, f"{chunk.file}:{rest}", BadRow("read", reason, detail)
        check_unchanged(self.storage, chunk)

    def parse(self, record: tuple[pa.RecordBatch, str | None]) -> dict[str, Any]:
        """Convert one row, so that invalid UTF-8 affects only this row. Raises BadRow."""
        (batch, split), column = record, self.columns.get("split", "split")
        try:
            values: dict[str, Any] = batch.to_pylist()[0]
        except UnicodeDecodeError as error:
            raise BadRow(
                "parse", "encoding", f"a text is not UTF-8 at byte {error.start}"
            ) from None
        return values | {column: split} if split and values.get(column) is None else values

    def _known_columns(self, schema: pa.Schema, name: str) -> list[str]:
        """Return the columns to read. Raises DataError if no column has images or none has text."""
        names = {self.columns.get(column, column) for column in COLUMNS}
        known = [column for column in schema.names if column in names]
        if len(set(known)) < len(known):
            raise DataError(
                f"{self.storage.address}/{name}: duplicate column name: {', '.join(known)}"
            )
        renamed = rename_columns(dict.fromkeys(known, True), self.columns)
        for kind, columns in (
            ("image", ("image", "image_path", "images")),
            ("text", ("text", "texts", "messages")),
        ):
            if not renamed.keys() & columns:
                raise DataError(
                    f"{self.storage.address}/{name} has the columns "
                    f"{', '.join(schema.names)[:300]}: none is "
                    f"`{kind}`; name one with --columns {kind}=NAME"
                )
        return known


class HFSavedSource(ParquetSource):
    """Output of `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk`; does not need
    `datasets`.
    """

    title = "Hugging Face datasets"

    def names(self) -> list[str]:
        """Return the Arrow files that state.json of each split lists, in order.

        Raises DataError.
        """
        states = [
            name
            for name in self.files_with_suffix("state.json")
            if f"/{name}".endswith("/state.json")
        ]
        if names := [name for state in states for name in self._files_of(state)]:
            return names
        raise DataError(
            f"{self.storage.address} has no state.json that names Arrow files: it is "
            "no saved dataset"
        )

    def _files_of(self, state: str) -> list[str]:
        path = f"{self.storage.address}/{state}"
        try:
            values = orjson.loads(self.storage.read(state))
            names = [
                state.removesuffix("state.json") + str(item["filename"])
                for item in values["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        if values.get("_indices_data_files"):
            raise DataError(
                f"{path}: the dataset has an index of its rows: save it again after "
                "flatten_indices()"
            )
        if not all(map(is_safe_path, names)):
            raise DataError(f"{path} names files outside its folder")
        return names

    def split_of(self, name: str) -> str | None:
        return name.partition("/")[0] if "/" in name else None

    def cumulative_rows(self, name: str) -> tuple[list[int], pa.Schema]:
        with self.storage.open_retried(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            return list(accumulate(num_rows for _, num_rows in _record_batches(raw))), reader.schema

    def batches(self, name: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        with self.storage.open_retried(name, mapped=True) as raw, pa.ipc.open_stream(raw) as reader:
            columns, position = self._known_columns(reader.schema, name), raw.tell()
            for offset, num_rows in _record_batches(raw):
                position = offset
                if num_rows > start:
                    break
                start, stop = start - num_rows, stop - num_rows
            raw.seek(position)  # the reader continues there
            yield from _slice_rows((batch.select(columns) for batch in reader), start, stop - start)


def _cumulative_rows(file: pq.ParquetFile) -> list[int]:
    return list(
        accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    )


def _record_batches(file: pa.NativeFile) -> Iterator[tuple[int, int]]:
    """Yield (offset, number of rows) of the record batches of an Arrow stream whose schema was
    read.

    Reads their headers only, where pyarrow would read the rows as well. Raises ArrowInvalid if the
    file is damaged, or has dictionaries, which `datasets` does not write.
    """
    offset, size = file.tell(), file.size()
    while offset + 8 < size:
        file.seek(offset)
        data = file.read(_HEADER_BYTES)
        mark, length = unpack_from("<II", data)
        if mark == _CONTINUATION and not length:  # end mark
            return
        kind, num_rows, num_bytes = 0, 0, 8 + length
        if mark == _CONTINUATION and offset + num_bytes <= size:
            with suppress(error):
                kind, num_rows, body = _parse_header(
                    data[8:] + file.read(max(0, num_bytes - len(data)))
                )
                num_bytes += body
        if kind != _RECORD_BATCH or offset + num_bytes > size:
            raise pa.ArrowInvalid(f"no complete record batch at byte {offset}")
        yield offset, num_rows
        offset += num_bytes


def _parse_header(data: bytes) -> tuple[int, int, int]:
    """Return type, number of rows and bytes of the rows of an Arrow message. Raises struct.error.

    A header is a FlatBuffer (github.com/apache/arrow/blob/main/format/Message.fbs): tables point
    back to the offsets of their fields, and a field with offset 0, or without one, is 0.
    """

    def read(code: str, table: int, index: int = 0) -> tuple[int, int]:
        """Return value and position of a field."""
        offsets = table - unpack_from("<i", data, table)[0]
        has_field = 4 + 2 * index < unpack_from("<H", data, offsets)[0]
        position = unpack_from("<H", data, offsets + 4 + 2 * index)[0] if has_field else 0
        return (unpack_from(code, data, table + position)[0] if position else 0), table + position

    [message] = unpack_from("<I", data)
    distance, position = read("<I", message, 2)
    num_rows = read("<Q", position + distance)[0]
    return read("<B", message, 1)[0], num_rows, read("<Q", message, 3)[0]


def _slice_rows(
    batches: Iterable[pa.RecordBatch], start: int, count: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows start..start + count of the batches."""
    for batch in batches:
        part = batch.slice(min(start, batch.num_rows), count)
        start, count = max(0, start - batch.num_rows), count - part.num_rows
        if part.num_rows:
            yield part
        if not count:
            return
