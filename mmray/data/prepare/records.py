"""Records of packed chunks in the Arrow files of `parts/`.

The record of a chunk is a record batch with a row for each row of the source, and a summary in the
metadata of the file. A task writes a file with its record. `fold` joins many of them to one file,
so a rerun reads few files, and of these the summaries only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.formats.source import SourceChunk
from mmray.data.labels import renumber
from mmray.data.prepare.tasks import Item, Result, map_tasks
from mmray.data.store.manifest import CHUNK_RECORDS
from mmray.data.store.shard_table import Shard, pack_rows
from mmray.storage.paths import AnyPath, list_names, open_output, open_sequential
from mmray.storage.requests import iter_parallel

# Columns of a record. Good rows have a shard, whose index is that in the record; others have a
# reason. `files` is JSON.
SCHEMA = pa.schema(
    [
        ("location", pa.string()),
        ("key", pa.string()),
        ("shard", pa.int32()),
        ("position", pa.int32()),  # in the shard
        ("kinds", pa.string()),
        ("key_digest", pa.binary(16)),  # of split and key, because keys are unique in a split
        ("image_digest", pa.binary(16)),  # of a conversation with its messages
        ("row_digest", pa.binary(16)),  # of images and captions
        ("text_digest", pa.binary(16)),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("files", pa.string()),  # name, size and time of each file of a medium
    ]
)
INDEX = f"{CHUNK_RECORDS}/index-"  # start of the paths of the files that `fold` writes
MAX_ROWS = 1 << 19  # of a set for whose rows the driver does the work of tasks
MAX_FOLDED = 1000  # records of such a file
FOLD_BYTES = 256 << 20  # its size
REQUEST_BYTES = 4 << 20  # read from a store at a time, because a batch has a part for each column
_SUMMARIES = b"records"
_NOT_STORED: dict[str, Any] = {"dropped": b"", "labels": ()}


Fold = tuple[str, list["Record"]]  # a file and its records


@dataclass
class Record:
    """Summary of a packed chunk.

    Attributes:
        job: `digest()` of the PrepareJob that packed it.
        class_names: Names of the labels 0, 1, ... in its shards: of the set when it was packed.
        num_rows: Number of its rows, including the bad ones.
        reasons: Number of bad rows by reason.
        stages: The stages in which they failed.
        counts: [index of the shard, kinds of media, number of good rows].
        columns: Types of the kept columns by name.
        columns_file: The file that has them, or None.
        notices: By text of SourceRow.notices [number of rows, location of the first].
        has_files: Whether the column `files` has the signatures of files.
        file: File of the record in the folder of the set.
        batch: Its number in this file.
    """

    job: str
    chunk: SourceChunk
    class_names: list[str]
    shards: list[Shard]
    num_rows: int
    reasons: dict[str, int]
    stages: list[str]
    counts: list[tuple[int, str, int]]
    columns: dict[str, str | None]
    columns_file: str | None
    notices: dict[str, tuple[int, str]]
    has_files: bool
    file: str = ""
    batch: int = 0

    @property
    def num_bad(self) -> int:
        """Number of rows that cannot be used."""
        return sum(self.reasons.values())


def record_path(index: int) -> str:
    """Return the path of the record that a task writes, relative to the folder of the set."""
    return f"{CHUNK_RECORDS}/chunk-{index:05d}.arrow"


def write_records(
    out: AnyPath, file: str, records: Sequence[Record], batches: Iterable[pa.RecordBatch]
) -> None:
    """Write a file of records, which appears when it is complete."""
    # `bytes` are those of `dropped`, which are not read again.
    summaries = orjson.dumps(records, default=bytes.hex, option=orjson.OPT_SERIALIZE_NUMPY)
    schema = SCHEMA.with_metadata({_SUMMARIES: summaries})
    with open_output(out / file) as stream, pa.ipc.new_file(stream, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_summaries(out: AnyPath, file: str) -> list[Record]:
    """Return the records of a file; none if it does not exist or is damaged."""
    try:
        with open_records(out, file) as reader:
            values = orjson.loads(reader.schema.metadata[_SUMMARIES])
            if len(values) != reader.num_record_batches:
                return []
            return [_to_record(each, file, batch) for batch, each in enumerate(values)]
    except (FileNotFoundError, pa.ArrowInvalid, ValueError, KeyError, TypeError):
        return []


def _to_record(values: dict[str, Any], file: str, batch: int) -> Record:
    # An array, because a large set has millions of offsets.
    shards = [
        Shard(**each | _NOT_STORED | {"offsets": np.array(each["offsets"], np.int64)})
        for each in values["shards"]
    ]
    values |= {"shards": shards, "chunk": SourceChunk(**values["chunk"])}
    values |= {"file": file, "batch": batch}
    return Record(**{each.name: values[each.name] for each in fields(Record)})


@contextmanager
def open_records(
    out: AnyPath, file: str, columns: Collection[str] = ()
) -> Iterator[pa.RecordBatchFileReader]:
    """Open a file of records, with all or some columns."""
    fields = [SCHEMA.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    with (
        open_sequential(out / file, mapped=True, request_bytes=REQUEST_BYTES) as source,
        pa.ipc.open_file(source, options=options) as reader,
    ):
        yield reader


def read_records(out: AnyPath, job: str) -> dict[int, Record]:
    """Return the latest record of each chunk by its index.

    Args:
        job: `digest()` of the PrepareJob; records of others are left out.
    """
    names = list_names(out / CHUNK_RECORDS)
    files = [f"{CHUNK_RECORDS}/{name}" for name in names if name.endswith(".arrow")]
    # Files of tasks are later than those that were folded, whose names are in order.
    files.sort(key=lambda file: not file.startswith(INDEX))
    return {
        record.chunk.index: record
        for records in iter_parallel(partial(read_summaries, out), files)
        for record in records
        if record.job == job
    }


def plan_folds(records: Sequence[Record], sizes: dict[str, int]) -> list[Fold]:
    """Return the records of each file that `fold` writes: those of the files of tasks, and of small
    files of earlier folds.

    Updates `file` and `batch` of `records` to those after the work; the result has the old ones.

    Args:
        records: The current record of each chunk, in order.
        sizes: Size of each file in `parts/` by name.
    """
    counts = Counter(record.file for record in records)
    folded = [file for file in counts if file.startswith(INDEX)]
    if len(folded) == len(counts):
        return []
    generation = 1 + max((int(file[len(INDEX) :][:6]) for file in folded), default=0)
    groups: list[list[Record]] = []
    num_bytes = 0.0
    for record in records:
        size = sizes.get(record.file.rpartition("/")[2], 0)
        if record.file in folded and size > FOLD_BYTES // 2:
            continue
        num_bytes += size / counts[record.file]
        if not groups or len(groups[-1]) == MAX_FOLDED or num_bytes > FOLD_BYTES:
            groups.append([])
            num_bytes = 0.0
        groups[-1].append(record)
    folds = []
    for group in groups:
        keys = repr([(record.chunk, [shard.key for shard in record.shards]) for record in group])
        digest = hashlib.sha256(keys.encode()).hexdigest()
        file = f"{INDEX}{generation:06d}-{digest[:8]}.arrow"
        folds.append((file, [replace(record) for record in group]))
        for batch, record in enumerate(group):
            record.file = file
            record.batch = batch
    return folds


def fold(item: Fold, out: AnyPath) -> None:
    """Task: write the records of a fold to one file."""
    file, records = item

    def read(of_file: Sequence[Record]) -> list[pa.RecordBatch]:
        with open_records(out, of_file[0].file) as reader:
            return [reader.get_batch(record.batch) for record in of_file]

    by_file = [list(group) for _, group in groupby(records, attrgetter("file"))]
    write_records(out, file, records, chain.from_iterable(iter_parallel(read, by_file)))


def map_rows(
    work: Callable[[Item], Result], items: Sequence[Item], num_rows: int, most: int = MAX_ROWS
) -> Iterator[Result]:
    """Call a picklable function with each item, in tasks if they have more than `most` rows."""
    return map(work, items) if num_rows <= most else map_tasks(work, items)


@dataclass(frozen=True)
class PackedRows:
    """The rows of all chunks in source order, without their values.

    A row has the number `starts[n] + index` if it is row `index` of the record n, also a bad row.

    Attributes:
        records: The record of each chunk, in source order.
        class_names: Names of the classes of the set, of which each record may know some.
    """

    out: AnyPath
    records: Sequence[Record]
    class_names: tuple[str, ...] = ()

    @cached_property
    def starts(self) -> np.ndarray:
        """Number of the first row of each record, and of all rows, int64."""
        return np.cumsum([0, *(record.num_rows for record in self.records)])

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards of all records, with the classes of their labels."""
        shards = []
        for record in self.records:
            labels = renumber(tuple(record.class_names), self.class_names) or ()
            shards += [replace(shard, labels=labels) for shard in record.shards]
        return shards

    @cached_property
    def first_shards(self) -> np.ndarray:
        """Number of the first shard of each record, and of all shards, int64."""
        return np.cumsum([0, *(len(record.shards) for record in self.records)])

    @property
    def num_rows(self) -> int:
        """Number of rows, including bad ones."""
        return int(self.starts[-1])

    @property
    def num_bad(self) -> int:
        """Number of bad rows."""
        return sum(record.num_bad for record in self.records)

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Call a picklable function with each item: in tasks if the set is large."""
        return map_rows(work, items, self.num_rows)

    def by_file(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the files of the records, with the numbers of those that they have."""
        numbers: dict[str, list[int]] = {}
        for number, record in enumerate(self.records):
            numbers.setdefault(record.file, []).append(number)
        return iter(numbers.items())

    def without(self, dropped: pa.Table) -> list[Shard]:
        """Return the shards without some rows. If one with remaining rows has a split, those
        without one get `train`.

        Args:
            dropped: Rows from `select`.
        """
        shards = np.asarray(dropped["shard"])
        positions = np.asarray(dropped["position"])
        order = np.lexsort((positions, shards))
        ends = np.searchsorted(shards[order], np.arange(len(self.shards) + 1))
        left = [
            replace(shard, dropped=pack_rows(positions[order[start:end]], shard.num_rows))
            for shard, start, end in zip(self.shards, ends, ends[1:], strict=False)
        ]
        if any(shard.split for shard in left if shard.num_kept):
            left = [replace(shard, split=shard.split or "train") for shard in left]
        return left

    def select(self, rows: np.ndarray | None = None) -> pa.Table:
        """Return values of rows: of some by their sorted numbers, otherwise of the bad ones.

        Returns:
            The columns of a record without digests, and `row` (its number); `shard` is the index
            in `shards`. Sorted by `row`.
        """
        ends = np.searchsorted([] if rows is None else rows, self.starts)
        items: list[_Selection] = []
        for file, numbers in self.by_file():
            parts = []
            for number in numbers:
                start = int(self.starts[number])
                indices = None if rows is None else rows[ends[number] : ends[number + 1]] - start
                batch = self.records[number].batch
                if self.records[number].num_bad if indices is None else len(indices):
                    parts.append((batch, start, int(self.first_shards[number]), indices))
            if parts:
                items.append((file, parts))
        tables = self.map(partial(_select_rows, out=self.out), items)
        return pa.concat_tables([_SELECTED.empty_table(), *tables]).sort_by("row")

    def row_numbers(self, shards: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of rows by their shards and positions in them, int64."""

        rows = np.zeros(len(shards), np.int64)
        records = np.searchsorted(self.first_shards, shards, side="right") - 1
        for number in np.unique(records).tolist():
            record = self.records[number]
            with open_records(self.out, record.file, ["shard"]) as reader:
                shard_of = reader.get_batch(record.batch)["shard"].fill_null(-1).to_numpy()
            for index in np.flatnonzero(records == number).tolist():
                in_shard = np.flatnonzero(shard_of == shards[index] - self.first_shards[number])
                rows[index] = self.starts[number] + in_shard[positions[index]]
        return rows


_SELECTED_COLUMNS = [name for name in SCHEMA.names if "digest" not in name and name != "files"]
_SELECTED = pa.schema([("row", pa.int64()), *map(SCHEMA.field, _SELECTED_COLUMNS)])
# A file, and of each record in it the batch, the first row and shard, and the indices of rows.
_Selection = tuple[str, list[tuple[int, int, int, np.ndarray | None]]]


def _select_rows(item: _Selection, out: AnyPath) -> pa.Table:
    """Task: the work of `PackedRows.select` on the records of a file."""
    from pyarrow import compute as pc  # as above

    file, parts = item
    batches = []
    with open_records(out, file, _SELECTED_COLUMNS) as reader:
        for number, start, first_shard, rows in parts:
            batch = reader.get_batch(number)
            if rows is None:
                rows = np.flatnonzero(batch["shard"].is_null())
            batch = batch.take(pa.array(rows))
            shard = pc.add(batch["shard"], pa.scalar(first_shard, pa.int32()))
            columns = {name: batch[name] for name in _SELECTED_COLUMNS}
            columns |= {"row": pa.array(rows + start), "shard": shard}
            batches.append(pa.RecordBatch.from_pydict(columns, _SELECTED))
    return pa.Table.from_batches(batches)
