"""Parquet files and the Arrow files of Hugging Face `datasets`: rows from columns, images as paths
or bytes.

Only known columns are read. A chunk is a range of rows: several small row groups, or a part of a
large one. Of a saved dataset on an object store, a chunk is a complete Arrow file.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from mmray.builtin import CHAT_COLUMNS
from mmray.data.formats.binary import BinarySource
from mmray.data.formats.listing import ImageTextPairs, is_image
from mmray.data.formats.source import Record, SourceChunk
from mmray.data.labels import class_name
from mmray.data.rows import MESSAGE_COLUMNS, BadRow, Values, is_safe_path
from mmray.errors import DataError
from mmray.storage.paths import open_sequential
from mmray.storage.requests import TransientStorageError

_ROWS_PER_BATCH = 32  # inline images held as Python bytes
# Read-ahead of a column; without a limit pyarrow reads the whole column chunk.
_BUFFER_BYTES = 4 << 20
# A reader cannot seek to a row, so n chunks read their row group (n + 1) / 2 times. With one chunk
# per row group, the million rows of a pandas row group would be one task.
MAX_CHUNKS_PER_ROW_GROUP = 16
MAX_CHUNK_BYTES = 128 << 20  # of a chunk that is larger than asked for


# The numbers of rows up to the end of each row group of a file, and the names of its classes.
FileLayout = tuple[list[int] | None, tuple[str, ...]]


class ParquetSource(BinarySource):
    """A Parquet file, or the Parquet files of a folder in sorted order.

    A subclass for another kind of files replaces `names()` (their paths, relative to the folder of
    the source), `splits(names)` (split by path; None: none), `cumulative_rows(name)` (rows up to
    the end of each row group, and the Arrow schema), `batches(name, start, stop, only)` (a range of
    rows as record batches) and `features(name, schema)` (types that Hugging Face stored, by
    column). `labels(chunk)` yields the labels of rows: numbers, or names of classes.

    Attributes:
        suffixes: Suffixes of its files.
    """

    title = "Parquet"
    reads_folder = True
    magic = b"PAR1"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        if not any(name.lower().endswith(cls.suffixes) for name in names):
            return False
        if not ImageTextPairs.matches_folder(names):
            return True
        image_folders = {PurePosixPath(name).parent for name in filter(is_image, names)}
        return not {f"{folder}.parquet" for folder in image_folders} <= set(names)

    def cumulative_rows(self, name: str) -> tuple[list[int] | None, pa.Schema]:
        """Return the numbers of rows up to the end of each row group, None if they are known only
        after reading, and the Arrow schema. Raises OSError or pyarrow.ArrowException.
        """
        with open_sequential(self.folder / name) as raw:
            file = pq.ParquetFile(raw)
            return _cumulative_rows(file), file.schema_arrow

    def batches(
        self, name: str, start: int, stop: int, only: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a range of rows of a file as record batches of at most 32 rows.

        Args:
            name: Path of the file, relative to the folder of the source.
            start: Number of the first row in the file, from 0.
            stop: Number after the last row.
            only: Names of the columns to read, which the file may lack; None: those that mmray
                reads and those of `prepare.keep`.
        """
        with open_sequential(self.folder / name) as raw:
            file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
            ends = _cumulative_rows(file)
            columns = only or self._known_columns(file.schema_arrow, name)
            first = bisect_right(ends, start)
            groups = list(range(first, bisect_left(ends, stop) + 1))
            rows = file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns)
            yield from _slice_rows(rows, start - (ends[first - 1] if first else 0), stop - start)

    def cut(
        self, checked: FileLayout, num_bytes: int, rows_per_chunk: int, rows_before: int
    ) -> Iterator[tuple[int, int, int | None]]:
        ends, class_names = checked
        self._set_class_names(class_names)
        if ends is None:
            yield 0, sys.maxsize, None
            return
        most = MAX_CHUNK_BYTES * ends[-1] // max(1, num_bytes) if ends else 0
        start = 0
        for end, following in zip(ends, [*ends[1:], None], strict=False):  # none of an empty file
            grown = self.chunk_rows(rows_per_chunk, rows_before + start)
            limit = max(rows_per_chunk, min(grown, most))
            if following is not None and following - start <= limit:
                continue
            step = max(limit, -(-(end - start) // MAX_CHUNKS_PER_ROW_GROUP))
            for first in range(start, end, step):
                stop = min(first + step, end)
                yield first, stop, stop - first
            start = end

    def check(self, name: str) -> FileLayout:
        try:
            ends, schema = self.cumulative_rows(name)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.folder / name} cannot be read as {self.title}: {error}"
            ) from None
        self._known_columns(schema, name)
        class_names: tuple[str, ...] = ()
        with suppress(ValueError, KeyError, TypeError, OSError):
            feature = self.features(name, schema)[self._label]
            if feature["_type"] == "ClassLabel":
                class_names = tuple(class_name(str(each)) for each in feature["names"])
        return ends, class_names

    def _set_class_names(self, names: tuple[str, ...]) -> None:
        """Set the names of a file. Raises DataError if another file has other ones, because its
        numbers are then those of other classes.
        """
        if names and self.class_names not in ((), names):
            lists = f"{', '.join(self.class_names)[:200]} and {', '.join(names)[:200]}"
            raise DataError(
                f"{self.folder}: files number the classes of the column {self._label} differently: "
                f"{lists}. Cast them to one ClassLabel, or prepare each as a set of its own: "
                "classes of sets are matched by name"
            )
        self.class_names = names or self.class_names

    @property
    def _label(self) -> str:
        return self.columns.names.get("label", "label")

    def features(self, name: str, schema: pa.Schema) -> dict[str, Any]:
        """Return the column types that Hugging Face `datasets` stored in a file, such as {"label":
        {"_type": "ClassLabel", "names": [...]}}.
        """
        metadata = orjson.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features: dict[str, Any] = metadata.get("info", {}).get("features", {})
        return features

    def labels(self, chunk: SourceChunk) -> Iterator[Any]:
        for batch in self.batches(chunk.file, chunk.start, chunk.stop, [self._label]):
            if batch.num_columns:  # otherwise only other files have labels
                yield from batch.column(0).drop_null().to_pylist()

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        self.check_unchanged(chunk)
        row_number = chunk.first_line
        try:
            for batch in self.batches(chunk.file, chunk.start, chunk.stop):
                for number in range(batch.num_rows):
                    yield f"{chunk.file}:{row_number}", batch.slice(number, 1)
                    row_number += 1
        except TransientStorageError:
            raise
        except (pa.ArrowException, OSError) as error:
            # The rest of the chunk is unreadable: report each row, or one if their number is
            # unknown. pyarrow also raises OSError for damaged files, but without an errno.
            is_storage_error = isinstance(error, OSError) and error.errno is not None
            reason = "unreadable" if is_storage_error else "damaged"
            last = row_number if chunk.num_rows is None else chunk.stop
            end = "the last" if chunk.num_rows is None else chunk.stop
            detail = f"rows {row_number} to {end}: {str(error)[:200]}"
            for rest in range(row_number, last + 1):
                yield f"{chunk.file}:{rest}", BadRow("read", reason, detail)
        self.check_unchanged(chunk)

    def parse(self, record: pa.RecordBatch) -> Values:
        try:
            values: Values = record.to_pylist()[0]
        except UnicodeDecodeError as error:
            raise BadRow(
                "parse", "encoding", f"a text is not UTF-8 at byte {error.start}"
            ) from None
        for name in values.keys() & self._chat_columns:
            values[name] = _drop_null_fields(values[name])
        return values

    @cached_property
    def _chat_columns(self) -> set[str]:
        return {*self.columns.of(*MESSAGE_COLUMNS, *CHAT_COLUMNS, "tools")}

    def _known_columns(self, schema: pa.Schema, name: str) -> list[str]:
        """Return the columns to read. Raises DataError if no column has images or none has text."""
        columns = self.columns
        known = [each for each in schema.names if each in columns.known or columns.keeps(each)]
        file = str(self.folder / name)
        if len(set(known)) < len(known):
            raise DataError(f"{file}: duplicate column name: {', '.join(known)}")
        columns.check_kinds(schema.names, file)
        columns.check_named(schema.names, file, bool(self.name))
        self.unread = [column for column in schema.names if column not in known]
        return known


class HFSavedSource(ParquetSource):
    """Output of `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk`.

    Read without `datasets`, which each process would import in 3.4 s, and whose `load_from_disk`
    downloads a set on an object store before the first row is read.

    Its other methods are those of ParquetSource, for Arrow files.
    """

    title = "Hugging Face datasets"
    reads_file = False
    magic = b""
    suffixes = ()

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        has_arrow = any(name.lower().endswith(".arrow") for name in names)
        return has_arrow and any(name.rpartition("/")[2] == "state.json" for name in names)

    def names(self) -> list[str]:
        states = [
            name
            for name in self.files_with_suffix("state.json")
            if f"/{name}".endswith("/state.json")
        ]
        if names := [name for state in states for name in self._files_of(state)]:
            return names
        raise DataError(
            f"{self.folder} has no state.json that names Arrow files: it is no saved dataset"
        )

    def _files_of(self, state: str) -> list[str]:
        path = self.folder / state
        try:
            values = orjson.loads(path.read_bytes())
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

    def features(self, name: str, schema: pa.Schema) -> dict[str, Any]:
        info = self.folder / f"{name.rpartition('/')[0]}/dataset_info.json".lstrip("/")
        stored: dict[str, Any] = {}
        with suppress(OSError):
            stored = orjson.loads(info.read_bytes()).get("features") or {}
        return super().features(name, schema) | stored

    def splits(self, names: list[str]) -> dict[str, str | None]:
        return {name: name.partition("/")[0] if "/" in name else None for name in names}

    def cumulative_rows(self, name: str) -> tuple[list[int] | None, pa.Schema]:
        with (
            open_sequential(self.folder / name, mapped=True) as raw,
            pa.ipc.open_stream(raw) as reader,
        ):
            if not isinstance(self.folder, Path):
                return None, reader.schema
            # The batches of a mapped file are views, so this reads their headers only.
            return list(accumulate(batch.num_rows for batch in reader)), reader.schema

    def batches(
        self, name: str, start: int, stop: int, only: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        with (
            open_sequential(self.folder / name, mapped=True) as raw,
            pa.ipc.open_stream(raw) as reader,
        ):
            columns = only or self._known_columns(reader.schema, name)
            columns = [each for each in columns if each in reader.schema.names]
            yield from _slice_rows((batch.select(columns) for batch in reader), start, stop - start)


def _cumulative_rows(file: pq.ParquetFile) -> list[int]:
    return list(
        accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    )


def _drop_null_fields(value: object) -> Any:
    """Return a value without the fields that its structs have only for other rows, such as the
    arguments of another tool.
    """
    if isinstance(value, list):
        return [*map(_drop_null_fields, value)]
    if isinstance(value, dict):
        fields = value.items()
        return {name: _drop_null_fields(each) for name, each in fields if each is not None}
    return value


def _slice_rows(
    batches: Iterable[pa.RecordBatch], start: int, count: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows start..start + count of the batches."""
    for batch in batches:
        part = batch.slice(min(start, batch.num_rows), count)
        start = max(0, start - batch.num_rows)
        count -= part.num_rows
        if part.num_rows:
            yield part
        if not count:
            return
