"""Shard reader: record batches of Arrow IPC shards, memory-mapped on a local disk, by range reads on an object store.

The manifest has the byte offsets of the record batches, so a store needs no request for an index. Nearby batches share
a request. With a cache, complete shuffle blocks are fetched once and kept on the local disk.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import Shard
from mmray.storage.storage import RangeReader, Storage, coalesce_ranges, parallel_map

MAX_OPEN = 256  # memory-mapped shards; each uses a file descriptor
MAGIC_BYTES = 8  # padded magic at the start of an Arrow IPC file


def first_batch_offset(schema: pa.Schema) -> int:
    """Return the byte offset of the first record batch in a file with this schema."""
    return MAGIC_BYTES + len(schema.serialize())


class BatchRequest(NamedTuple):
    """Rows of one record batch: their indices in the result, and their numbers in the batch.

    `first` and `last` are the record batches of the block to cache it with.
    """

    shard: Shard
    batch: int
    first: int
    last: int
    indices: np.ndarray
    inside: np.ndarray


Consumer = Callable[[BatchRequest, pa.RecordBatch], bool]


class ShardReader:
    """Reads record batches of the shards in a storage; safe for threads, cheap to pickle."""

    def __init__(self, storage: Storage, schema: pa.Schema, cache: ShardCache | None = None) -> None:
        self._storage, self._schema, self._cache = storage, schema, cache
        self._ranges, self._lock = RangeReader(storage), threading.Lock()
        self._mapped: OrderedDict[str, tuple[threading.Lock, pa.RecordBatchFileReader]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self._storage, self._schema, self._cache)

    def for_each_batch(self, requests: Sequence[BatchRequest], consume: Consumer) -> None:
        """Call `consume` with each request and its record batch; on a store from several threads.

        `consume` returns whether the rows match their checksums. If rows from the cache do not, the entry is fetched
        again and `consume` is called once more.

        Raises OSError, or ValueError with the file name if a shard is damaged.
        """
        if self._storage.local_path is not None:
            for request in requests:
                consume(request, self._read_mapped(request.shard.file, request.batch))
            return
        fetches = list(self._plan(requests))
        if self._cache is not None:  # so that actors that start a window together fetch different parts of it
            random.shuffle(fetches)
        parallel_map(lambda fetch: self._fetch(*fetch, consume), fetches)

    def _plan(self, requests: Sequence[BatchRequest]) -> Iterator[tuple[int, int, list[BatchRequest]]]:
        """Yield byte range and requests of each fetch; a fetch is of one shard."""
        groups: dict[tuple[Any, ...], list[BatchRequest]] = {}
        for request in requests:
            block = (request.first, request.last) if self._cache is not None else ()
            groups.setdefault((request.shard.file, *block), []).append(request)
        for group in groups.values():
            offsets = group[0].shard.offsets
            if self._cache is not None:
                yield offsets[group[0].first], offsets[group[0].last + 1], group
                continue
            spans = [(offsets[request.batch], offsets[request.batch + 1]) for request in group]
            for start, stop, inside in coalesce_ranges(spans):
                yield start, stop, [group[index] for index in inside]

    def _fetch(self, start: int, stop: int, requests: list[BatchRequest], consume: Consumer) -> None:
        shard = requests[0].shard
        read = partial(self._ranges.read, shard.file, start, stop)

        def decode(data: bytes | pa.Buffer) -> bool:
            intact = [consume(request, self._decode(shard, request.batch, data, start)) for request in requests]
            return all(intact)

        if self._cache is None:
            decode(read())
            return
        key = f"{self._storage.address}/{shard.file} {shard.sha256} {shard.num_bytes} {start} {stop}"
        entry = hashlib.sha256(key.encode()).hexdigest()[:32]
        try:
            is_intact = decode(self._cache.get(entry, stop - start, read))
        except ValueError:
            is_intact = False
        if not is_intact:  # damaged in the cache or in the store; the caller gets the bytes of the store
            self._cache.invalidate(entry)
            decode(self._cache.get(entry, stop - start, read))

    def _decode(self, shard: Shard, batch: int, data: bytes | pa.Buffer, start: int) -> pa.RecordBatch:
        """Return a record batch of a shard from the bytes read at `start`, without a copy."""
        first, last = (offset - start for offset in shard.offsets[batch : batch + 2])
        try:
            records = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)[first:last]), self._schema)
            records.validate(full=True)  # damaged offsets would crash the process later
            return records
        except (OSError, EOFError, pa.ArrowException) as error:
            raise self._damaged(shard.file, batch, error) from None

    def _read_mapped(self, file: str, batch: int) -> pa.RecordBatch:
        """Return a record batch of a local shard, without a copy."""
        try:
            lock, reader = self._open_mapped(file)
            with lock:
                records = reader.get_batch(batch)
            records.validate(full=True)  # damaged offsets would crash the process later
            return records
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.errno:  # Arrow's own OSError for a short file has no errno
                raise
            raise self._damaged(file, batch, error) from None

    def _open_mapped(self, file: str) -> tuple[threading.Lock, pa.RecordBatchFileReader]:
        with self._lock:
            if file not in self._mapped:
                reader = pa.ipc.open_file(self._storage.open(file, mapped=True))
                if not reader.schema.equals(self._schema):
                    raise pa.ArrowInvalid("its columns are not those of a shard")
                self._mapped[file] = (threading.Lock(), reader)
                if len(self._mapped) > MAX_OPEN:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(file)
            return self._mapped[file]

    def _damaged(self, file: str, batch: int, error: BaseException) -> ValueError:
        return ValueError(f"{self._storage.address}/{file}, record batch {batch}: {error}")
