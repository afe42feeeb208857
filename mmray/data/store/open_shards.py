"""The shard files a prepared set has open: a bounded number, shared by threads, reopened in another process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from mmray.data.store.manifest import Shard
from mmray.storage.storage import Place

MAX_OPEN = 256  # each holds a file descriptor, and a process has about a thousand


class Wanted(NamedTuple):
    """A record batch of a shard, and the first and last of those that are worth keeping with it."""

    shard: Shard
    batch: int
    first: int
    last: int


class OpenShards:
    """Record batches of Arrow IPC files in a folder; the files least recently used are closed."""

    def __init__(self, place: Place, schema: pa.Schema) -> None:
        self._place, self._schema = place, schema
        self._forget()

    def each(self, wanted: Sequence[Wanted], use: Callable[[int, pa.RecordBatch], bool]) -> None:
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
            if isinstance(error, OSError) and (error.errno or self._place.local is None):
                raise
            raise ValueError(f"{self._place.address}/{file}, record batch {index}: {error}") from None

    def _reader(self, file: str) -> tuple[threading.Lock, pa.RecordBatchFileReader]:
        with self._lock:
            if file not in self._readers:
                reader = pa.ipc.open_file(self._place.open(file, mapped=True))
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
        return {"_place": self._place, "_schema": self._schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
