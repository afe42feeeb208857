"""A shard of a prepared set being written; what it holds, and how it is read, store.py says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import orjson
import pyarrow as pa

from mmray.data.store.manifest import Shard
from mmray.data.store.prepared_set import BATCH_ROWS, SCHEMA, Row
from mmray.data.store.shards import first_batch
from mmray.storage.storage import Place


class ShardWriter:
    """A shard being written, row by row; its file is there once the `with` block has ended well, and not otherwise."""

    def __init__(self, place: Place, name: str, split: str | None = None) -> None:
        self._place, self._name, self._split = place, name, split
        self._digest, self.num_rows = hashlib.sha256(), 0
        self._batch: list[Row] = []
        self._offsets = [first_batch(SCHEMA)]

    def __enter__(self) -> ShardWriter:
        with ExitStack() as files:
            self._stream = files.enter_context(self._place.writing(self._name))
            self._writer = files.enter_context(pa.ipc.new_file(self._stream, SCHEMA))
            self._files = files.pop_all()
        return self

    def append(self, row: Row) -> None:
        """Add a row; memory holds at most one record batch."""
        self._batch.append(row)
        self.num_rows += 1
        self._digest.update(
            orjson.dumps(
                [
                    row.key,
                    row.texts,
                    row.label,
                    row.split,
                    row.language,
                    row.sha256,
                    row.boxes,
                    row.box_labels,
                    row.refs,
                    *([row.messages] if row.messages else []),
                ]
            )
        )
        if len(self._batch) == BATCH_ROWS:
            self._flush()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._batch:
            self._flush()
        self._files.__exit__(*error)

    def entry(self) -> Shard:
        """The finished file's line in the manifest."""
        size = self._place.size(self._name) or 0
        batches = " ".join(str(offset) for offset in self._offsets)
        return Shard(self._name, self._split, self.num_rows, size, self._digest.hexdigest(), batches=batches)

    def _flush(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist([vars(row) for row in self._batch], schema=SCHEMA))
        self._offsets.append(self._stream.tell())
        self._batch.clear()


def write_shard(rows: Iterable[Row], place: Place, name: str, split: str | None = None) -> Shard:
    """Write rows as the file `name` in `place` and return its manifest entry."""
    with ShardWriter(place, name, split) as shard:
        for row in rows:
            shard.append(row)
    return shard.entry()
