"""Shards on an object store: the record batches of a block in few range reads, whose places the manifest says."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pyarrow as pa

from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import Shard
from mmray.storage.storage import RangeReader, Storage, coalesce_ranges, parallel_map, with_retries

# The shard files a prepared set has open: a bounded number, shared by threads, reopened in another process.
MAX_OPEN = 256  # each holds a file descriptor, and a process has about a thousand


class BatchRequest(NamedTuple):
    """A record batch of a shard, and the first and last of those that are worth keeping with it."""

    shard: Shard
    batch: int
    first: int
    last: int


class OpenShards:
    """Record batches of Arrow IPC files in a folder; the files least recently used are closed."""

    def __init__(self, storage: Storage, schema: pa.Schema) -> None:
        self._storage, self._schema = storage, schema
        self._forget()

    def each(self, wanted: Sequence[BatchRequest], use: Callable[[int, pa.RecordBatch], bool]) -> None:
        """Call `use` with the number of each wanted record batch, and it. Raises as `batch` does."""
        for number, one in enumerate(wanted):
            use(number, self.batch(one.shard.file, one.batch))

    def batch(self, file: str, index: int) -> pa.RecordBatch:
        """A record batch, on a local disk without a copy.

        Raises OSError where the disk or the store does not give it, ValueError naming the file where it is damaged.
        """
        try:
            lock, reader = self._reader(file)
            with lock:
                records = reader.get_batch(index)
            records.validate(full=True)  # damaged offsets would end the process, not raise
            return records
        except (OSError, pa.ArrowException) as error:
            # Of a file that ends too soon Arrow makes an OSError as well, but one without a number.
            if isinstance(error, OSError) and (error.errno or self._storage.local_path is None):
                raise
            raise ValueError(f"{self._storage.address}/{file}, record batch {index}: {error}") from None

    def _reader(self, file: str) -> tuple[threading.Lock, pa.RecordBatchFileReader]:
        with self._lock:
            if file not in self._readers:
                reader = pa.ipc.open_file(self._storage.open(file, mapped=True))
                if list(reader.schema) != list(self._schema)[: len(reader.schema)]:  # an older set lacks the newest
                    raise pa.ArrowInvalid("its columns are not those of a shard")
                self._readers[file] = (threading.Lock(), reader)
                if len(self._readers) > MAX_OPEN:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(file)
            return self._readers[file]

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, tuple[threading.Lock, pa.RecordBatchFileReader]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_storage": self._storage, "_schema": self._schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


MAGIC_BYTES = 8  # what an Arrow IPC file begins with, padded

Use = Callable[[int, pa.RecordBatch], bool]


def first_batch_offset(schema: pa.Schema) -> int:
    """The byte at which the first record batch of a file of this schema begins."""
    return MAGIC_BYTES + len(schema.serialize())


class RemoteShards:
    """What OpenShards is for a disk; with a cache, chunks are read whole and kept on this machine."""

    def __init__(self, storage: Storage, schema: pa.Schema, cache: ShardCache | None) -> None:
        self._storage, self._schema, self._cache = storage, schema, cache
        self._files, self._without_index = RangeReader(storage), OpenShards(storage, schema)

    def each(self, wanted: Sequence[BatchRequest], use: Use) -> None:
        """Call `use` with the number of each wanted record batch, and it, from several threads.

        `use` answers whether the rows are those that were checked; where they are not and came from the cache, it is
        called once more, with what the store has.

        Raises OSError, or ValueError naming the file where it is damaged.
        """
        jobs: list[Callable[[], None]] = []
        files: dict[str, list[int]] = {}
        for number, one in enumerate(wanted):
            files.setdefault(one.shard.file, []).append(number)
        for numbers in files.values():
            chosen = {number: wanted[number] for number in numbers}
            shard = chosen[numbers[0]].shard
            if not shard.batches:
                jobs.append(partial(self._one_by_one, chosen, use))
            elif self._cache is not None:
                jobs += self._kept(self._cache, shard, chosen, use)
            else:
                jobs += self._read(shard, chosen, use)
        if self._cache is not None:  # so that actors that begin a window together fetch each its own part of it
            random.shuffle(jobs)
        parallel_map(lambda job: job(), jobs)

    def _one_by_one(self, wanted: dict[int, BatchRequest], use: Use) -> None:
        for number, one in wanted.items():
            use(number, with_retries(partial(self._without_index.batch, one.shard.file, one.batch)))

    def _read(self, shard: Shard, wanted: dict[int, BatchRequest], use: Use) -> list[Callable[[], None]]:
        """Jobs that each make one request."""
        offsets, numbers = shard.offsets, list(wanted)
        spans = [(int(offsets[wanted[n].batch]), int(offsets[wanted[n].batch + 1])) for n in numbers]

        def job(start: int, stop: int, inside: list[int]) -> None:
            data = self._files.read(shard.file, start, stop)
            for each in inside:
                number = numbers[each]
                use(number, self._decoded(shard, wanted[number].batch, data, start))

        return [partial(job, *read) for read in coalesce_ranges(spans)]

    def _kept(
        self, cache: ShardCache, shard: Shard, wanted: dict[int, BatchRequest], use: Use
    ) -> list[Callable[[], None]]:
        """Jobs that each take a chunk's record batches from the cache, or fetch them into it in one request."""
        offsets = shard.offsets
        chunks: dict[tuple[int, int], list[int]] = {}
        for number, one in wanted.items():
            chunks.setdefault((one.first, one.last), []).append(number)

        def job(first: int, last: int, numbers: list[int]) -> None:
            start, stop = int(offsets[first]), int(offsets[last + 1])
            name = f"{self._storage.address}/{shard.file} {shard.sha256} {shard.num_bytes} {start} {stop}"
            entry = hashlib.sha256(name.encode()).hexdigest()[:32]

            def used() -> bool:
                data = cache.get(entry, stop - start, lambda: self._files.read(shard.file, start, stop))
                answers = [use(n, self._decoded(shard, wanted[n].batch, data, start)) for n in numbers]
                return all(answers)

            try:
                good = used()
            except ValueError:
                good = False
            if not good:  # damaged here, or on the store as well, which `use` then gets
                cache.drop(entry)
                used()

        return [partial(job, *chunk, numbers) for chunk, numbers in chunks.items()]

    def _decoded(self, shard: Shard, batch: int, data: bytes | pa.Buffer, start: int) -> pa.RecordBatch:
        """A record batch from the bytes that were read from `start` on, without a copy."""
        offsets: Any = shard.offsets - start
        try:
            schema = _schema_that_begins(self._schema, int(shard.offsets[0]))
            message = pa.ipc.read_message(pa.py_buffer(data)[int(offsets[batch]) : int(offsets[batch + 1])])
            records = pa.ipc.read_record_batch(message, schema)
            records.validate(full=True)  # damaged offsets would end the process, not raise
            return records
        except (OSError, EOFError, pa.ArrowException) as error:
            raise ValueError(f"{self._storage.address}/{shard.file}, record batch {batch}: {error}") from None


@lru_cache
def _schema_that_begins(schema: pa.Schema, first: int) -> pa.Schema:
    """The columns of a shard whose first record batch begins at this byte: an older set lacks the newest."""
    for count in range(len(schema), 0, -1):
        older = pa.schema(list(schema)[:count])
        if first_batch_offset(older) == first:
            return older
    raise pa.ArrowInvalid("its columns are not those of a shard")
