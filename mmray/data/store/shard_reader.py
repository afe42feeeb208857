"""Reads record batches of shards: memory-mapped on a local disk, in ranges of bytes from an object
store, with a cache on the local disk.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmray.data.store.cache import ShardCache
from mmray.data.store.shard_table import ShardTable
from mmray.data.store.stored_row import SCHEMA
from mmray.storage.paths import AnyPath, RemotePath, open_input
from mmray.storage.ranges import RangeReader, coalesce_ranges
from mmray.storage.requests import parallel_map

MAX_OPEN = 256  # memory-mapped shards; each uses a file descriptor


class ReadRequest(NamedTuple):
    """Rows to read from one record batch of a shard.

    Attributes:
        shard: Number of the shard in the table of shards.
        batch: Number of the record batch in the shard.
        block: First and last record batch of the block that a cache fetches as one; None without a
            cache.
        indices: int64 [N], the places of the rows in the result.
        rows_in_batch: int64 [N], the numbers of the rows in the record batch.
    """

    shard: int
    batch: int
    block: tuple[int, int] | None
    indices: np.ndarray
    rows_in_batch: np.ndarray


class Fetch(NamedTuple):
    """A range of bytes of a shard that is read in one request.

    Attributes:
        start: First byte.
        stop: The byte after the last.
        requests: The record batches in the range, with the rows that are wanted.
        is_block: Whether the range is a block that becomes an entry of the cache.
    """

    start: int
    stop: int
    requests: list[ReadRequest]
    is_block: bool


Consumer = Callable[[ReadRequest, pa.RecordBatch], None]


class ShardReader:
    """Reads record batches of the shards, the files of a prepared set; safe for threads, cheap to
    pickle.

    On an object store, nearby batches share a request. With a cache, a block is fetched completely
    once, and kept on the local disk.

    `for_each_record_batch(requests, consume)` calls `consume` with each ReadRequest and its
    pyarrow.RecordBatch.

    Args:
        folder: Folder of the prepared set.
        table: Its shards, with the byte offsets of their record batches.
        cache: Cache of this node for blocks from an object store; None: none.
    """

    def __init__(self, folder: AnyPath, table: ShardTable, cache: ShardCache | None) -> None:
        self._folder = folder
        self._table = table
        self._cache = cache
        self._ranges = RangeReader(folder)
        self._lock = threading.Lock()
        self._open_mapped = lru_cache(MAX_OPEN)(partial(_open_mapped, folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self._folder, self._table, self._cache)

    def for_each_record_batch(
        self,
        requests: Sequence[ReadRequest],
        consume: Consumer,
        whole_blocks: bool = True,
        refresh: bool = False,
    ) -> None:
        """Read record batches and call a function with each.

        Args:
            consume: Called with (request, record batch), a ReadRequest and the pyarrow.RecordBatch
                that it names. On an object store several threads call it.
            whole_blocks: If the block of a record batch is not in the cache, fetch all of it into
                the cache; False: read only the record batches of `requests`.

        Raises:
            OSError: A file cannot be read.
            ValueError: A shard is damaged; the message has its name.
        """
        if not isinstance(self._folder, RemotePath):
            for request in requests:
                file = self._table.file_name(request.shard)
                consume(request, self._read_mapped(file, request.batch))
            return
        fetches = list(self._plan(requests, whole_blocks))
        # Actors that start a window together then fetch different blocks of it.
        if self._cache is not None:
            random.shuffle(fetches)
        parallel_map(lambda fetch: self._read_fetched(fetch, consume, refresh), fetches)

    def fetch_blocks(self, requests: Sequence[ReadRequest]) -> None:
        """Fetch the blocks of requests into the cache, one after the other; those that are in it
        are not fetched again. Raises OSError, and ValueError for a shard that is shorter than its
        table states.
        """
        fetches = list(self._plan(requests, whole_blocks=True))
        random.shuffle(fetches)
        for fetch in fetches:
            self._fetch(fetch)

    def _plan(self, requests: Sequence[ReadRequest], whole_blocks: bool) -> Iterator[Fetch]:
        """Yield fetches of one shard each."""
        groups: dict[tuple[Any, ...], list[ReadRequest]] = {}
        for request in requests:
            groups.setdefault((request.shard, request.block), []).append(request)
        for (shard, block), group in groups.items():
            offsets = self._table.offsets(shard)
            if block is not None:
                start = int(offsets[block[0]])
                stop = int(offsets[block[1] + 1])
                fetch = Fetch(start, stop, group, is_block=True)
                if whole_blocks or self._find(fetch) is not None:
                    yield fetch
                    continue
            for start, stop, indices in coalesce_ranges(
                [(int(offsets[each.batch]), int(offsets[each.batch + 1])) for each in group]
            ):
                yield Fetch(start, stop, [group[index] for index in indices], is_block=False)

    def _find(self, fetch: Fetch) -> pa.Buffer | None:
        """Return a block if it is in the cache."""
        assert self._cache is not None, "only a set with a cache has blocks"
        return self._cache.find(self._entry_name(fetch), fetch.stop - fetch.start)

    def _entry_name(self, fetch: Fetch) -> str:
        shard = fetch.requests[0].shard
        path = self._folder / self._table.file_name(shard)
        size = self._table.num_bytes[shard]
        key = f"{path} {self._table.sha256(shard)} {size} {fetch.start} {fetch.stop}"
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    def _fetch(self, fetch: Fetch, refresh: bool = False) -> pa.Buffer:
        """Return the bytes of a fetch, of a block from the cache."""
        file = self._table.file_name(fetch.requests[0].shard)
        read = partial(self._ranges.read, file, fetch.start, fetch.stop)
        if not fetch.is_block or self._cache is None:
            return pa.py_buffer(read())
        return self._cache.get(self._entry_name(fetch), fetch.stop - fetch.start, read, refresh)

    def _read_fetched(self, fetch: Fetch, consume: Consumer, refresh: bool) -> None:
        data = self._fetch(fetch, refresh)
        shard = fetch.requests[0].shard
        offsets = self._table.offsets(shard) - fetch.start
        for request in fetch.requests:
            message = data[int(offsets[request.batch]) : int(offsets[request.batch + 1])]
            with self._name_damaged_shard(self._table.file_name(shard), request.batch):
                record_batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), SCHEMA)
                record_batch.validate(full=True)  # damaged offsets would crash the process later
            consume(request, record_batch)

    def _read_mapped(self, file: str, batch: int) -> pa.RecordBatch:
        """Return a record batch of a local shard, without a copy."""
        with self._name_damaged_shard(file, batch):
            with self._lock:
                record_batch = self._open_mapped(file).get_batch(batch)
            record_batch.validate(full=True)
            return record_batch

    @contextmanager
    def _name_damaged_shard(self, file: str, batch: int) -> Iterator[None]:
        """Convert Arrow's errors for damaged bytes to a ValueError with the file name."""
        try:
            yield
        except (OSError, EOFError, pa.ArrowException) as error:
            # Arrow's own OSError for a short file has no errno
            if isinstance(error, OSError) and error.errno:
                raise
            raise ValueError(f"{self._folder / file}, record batch {batch}: {error}") from None


def _open_mapped(folder: AnyPath, file: str) -> pa.RecordBatchFileReader:
    reader = pa.ipc.open_file(open_input(folder / file, mapped=True))
    if not reader.schema.equals(SCHEMA):
        raise pa.ArrowInvalid("it has not the schema of a shard")
    return reader
