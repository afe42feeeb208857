"""The processes of `bench loader`: consumers of a stream or of a DataLoader, and readers without either. Ray actors.

Each method runs one window and answers with arrivals. What is consumed is thrown away: the loader alone is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from mmray.bench.loader_arms import Textbook, Tuned, loader
from mmray.bench.timing import SKIP, Arrival
from mmray.data.images.decode import decode
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.collate import steps_of
from mmray.data.stream.order import Plan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import blocks_of

CHUNK_ROWS = 32  # of the arms without batches: a clock's tick


@ray.remote(num_cpus=0)
class Consumer:
    """One process. A window ends `window_s` seconds after its first arrivals, which do not count."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank

    def stream(self, iterator: Any, plan: Plan) -> list[Arrival]:
        """mmray's stream to its end, cut into the micro-batches that a training worker gets."""
        return list(_blocks(blocks_of(iterator), plan))

    def loader(self, world: int, dataset: Textbook | Tuned, batch: int, workers: int, window_s: float) -> list[Arrival]:
        """A DataLoader of `workers` processes."""
        return collect(_batches(loader(dataset, self.rank, world, batch, workers)), window_s)

    def reader(self, world: int, reader: RowReader, plan: Plan, window_s: float) -> list[Arrival]:
        """The stream's own reading, decoding and tokenising in this process, without Ray Data: what it could be."""
        return collect(_read(reader, plan, self.rank, world), window_s)

    def decode(self, world: int, files: list[tuple[str, str]], window_s: float) -> list[Arrival]:
        """Image bytes to pixels and nothing else: the limit."""
        return collect(_decoded(files[self.rank :: world]), window_s)

    def raw(self, world: int, prepared: PreparedSet, window_s: float) -> list[Arrival]:
        """The bytes of a set's images where they lie, read once in the order of the set."""
        return collect(_read_raw(prepared, self.rank, world), window_s)

    def copied_bytes_per_s(self, num_bytes: int) -> float | None:
        """Bandwidth from pinned host memory to this machine's device; None where there is none."""
        if not torch.cuda.is_available():
            return None
        host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        device.copy_(host, non_blocking=True)  # the first one also sets the device up
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(8):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return 8 * num_bytes / (time.perf_counter() - began_s)


def collect(arrivals: Iterable[Arrival], window_s: float) -> list[Arrival]:
    """Arrivals until `window_s` seconds after the last of those that do not count."""
    seen: list[Arrival] = []
    for arrival in arrivals:
        seen.append(arrival)
        if len(seen) > SKIP + 1 and arrival.at_s - seen[SKIP].at_s >= window_s:
            break
    return seen


def _blocks(blocks: Iterable[dict[str, np.ndarray]], plan: Plan) -> Iterator[Arrival]:
    for block in blocks:
        now_s = time.time()
        for _ in steps_of([block], plan):
            pass
        epoch = int(block["pos"].max()) // plan.num_rows
        yield Arrival(now_s, int(block["valid"].sum()), epoch)


def _batches(batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Arrival]:
    for batch in batches:
        yield Arrival(time.time(), len(batch["image"]))


def _read(reader: RowReader, plan: Plan, rank: int, world: int) -> Iterator[Arrival]:
    for start in range(rank * CHUNK_ROWS, plan.steps * plan.global_rows, world * CHUNK_ROWS):
        block = reader.block(plan, np.arange(start, start + CHUNK_ROWS))
        yield Arrival(time.time(), int(block["valid"].sum()))


def _decoded(files: list[tuple[str, str]]) -> Iterator[Arrival]:
    encoded = [Path(name).read_bytes() for name, _ in files]
    while True:
        for start in range(0, len(encoded), CHUNK_ROWS):
            chunk = encoded[start : start + CHUNK_ROWS]
            for data in chunk:
                decode(data)
            yield Arrival(time.time(), len(chunk))


def _read_raw(prepared: PreparedSet, rank: int, world: int) -> Iterator[Arrival]:
    yield Arrival(time.time(), 0)  # the clock's start: a small set may have no more than one other
    for start in range(rank * CHUNK_ROWS, prepared.num_rows, world * CHUNK_ROWS):
        rows = prepared.read(np.arange(start, min(start + CHUNK_ROWS, prepared.num_rows)))
        yield Arrival(time.time(), len(rows), num_bytes=sum(len(image) for row in rows for image in row.images))


def forget_cached(prepared: PreparedSet) -> bool:
    """Have the system drop what it holds of a set's shards in memory; False where it cannot be told to."""
    root = prepared.place.local
    if root is None or not hasattr(os, "posix_fadvise") or prepared.manifest.settings.get("reference"):
        return False
    for shard in prepared.manifest.shards:
        with (root / shard.file).open("rb") as file:
            os.fdatasync(file.fileno())  # what is not yet on the disk would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
