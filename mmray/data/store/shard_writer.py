"""Writes rows to Arrow IPC shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pyarrow as pa

from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.shard_table import Shard
from mmray.data.store.stored_row import SCHEMA, Row, to_stored
from mmray.storage.paths import AnyPath, open_output

MAGIC_BYTES = 8  # padded magic at the start of an Arrow IPC file
_DIGEST_COLUMNS = (
    "key",
    "texts",
    "label",
    "split",
    "language",
    "boxes",
    "box_labels",
)


class ShardWriter:
    """Writes a shard row by row; memory holds at most one record batch.

    `open_shard` creates it.

    `append(row)` takes a Row; after the last one `entry()` returns the Shard, its entry in the
    manifest.

    Args:
        name: Path of the shard in the set.
        split: Split of its rows; None: none.
        stream: The open file.
        writer: Arrow IPC writer on the stream.

    Attributes:
        num_bytes: Size of the finished file; `open_shard` sets it, so that a store is not asked.
    """

    def __init__(self, name: str, split: str | None, stream: pa.NativeFile, writer: Any) -> None:
        self.name = name
        self._split = split
        self._stream = stream
        self._writer = writer
        self._digest = hashlib.sha256()
        self._num_rows = 0
        self.num_bytes = 0
        self._batch: list[Row] = []
        self._offsets = [MAGIC_BYTES + len(SCHEMA.serialize())]

    def append(self, row: Row) -> None:
        """Add a row, and write a record batch if RECORD_BATCH_ROWS (8) rows are waiting."""
        self._batch.append(row)
        self._num_rows += 1
        values = [vars(row)[name] for name in _DIGEST_COLUMNS]
        values += [[media.kind, media.sha256, media.ref] for media in row.media]
        values += [row.messages] if row.messages else []
        values += [row.spans] if row.spans else []
        values += [row.text_columns] if row.text_columns else []
        self._digest.update(orjson.dumps(values))
        if len(self._batch) == RECORD_BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows as a record batch, if there are any."""
        if self._batch:
            columns = []
            for field in SCHEMA:
                values = [vars(row)[field.name] for row in self._batch]
                if field.name == "media":
                    values = [[vars(media) for media in each] for each in values]
                if field.name == "messages":
                    values = [to_stored(each) for each in values]
                # Most rows have no boxes, messages, ...: pa.nulls takes a tenth of the time.
                is_empty = all(value is None for value in values)
                columns.append(
                    pa.nulls(len(values), field.type) if is_empty else pa.array(values, field.type)
                )
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
            self._offsets.append(self._stream.tell())
            self._batch.clear()

    def entry(self) -> Shard:
        """Return the manifest's entry of the finished shard.

        It is a Shard with `file`, `split`, `num_rows`, `num_bytes`, `sha256` (digest of the rows)
        and `offsets` (of the record batches).
        """
        return Shard(
            self.name,
            self._split,
            self._num_rows,
            self.num_bytes,
            self._digest.hexdigest(),
            offsets=tuple(self._offsets),
        )


@contextmanager
def open_shard(folder: AnyPath, name: str, split: str | None = None) -> Iterator[ShardWriter]:
    """Context manager that opens a shard for writing; the file appears when the block ends without
    an error.
    """
    with open_output(folder / name) as stream:
        with pa.ipc.new_file(stream, SCHEMA) as writer:
            shard = ShardWriter(name, split, stream, writer)
            yield shard
            shard.flush()
        shard.num_bytes = stream.tell()
