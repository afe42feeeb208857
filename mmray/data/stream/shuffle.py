"""Default shuffle of a run: full on disks and for sets that fit into the cache of a node, otherwise
in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmray.data.store.cache import AUTO, ShardCache
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.mixture import ROW_ERRORS
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import BlockShuffle
from mmray.errors import UsageError
from mmray.storage.paths import RemotePath

if TYPE_CHECKING:
    from mmray.config import Data

# Without a cache: small blocks, 16 of them mixed, so that a stream block has all rows of a request.
REQUEST_BYTES = 512 << 10
MAX_ROWS = 32
WINDOW = 16
# With a cache: blocks as large as a request should be, of at least MIN_CACHED_ROWS if these fit.
MIN_BLOCK_BYTES = 32e6
MAX_BLOCK_BYTES = 64e6
MIN_CACHED_ROWS = 1400
# The window in use and the next one are in the cache, and held-out rows.
WINDOW_FRACTION = 0.4
MIN_BLOCKS_PER_WINDOW = 8  # blocks are smaller if the cache of a node is small
# Workers of a node, at most: their lanes share its cache.
WORKERS_PER_NODE = 8
# Lanes of a worker, at most. With several, the lanes that two nodes share after the number of
# workers changed are few of their lanes.
LANES_PER_WORKER = 8
# Blocks of a lane in an epoch, at least, because two lanes read the block in which one ends.
BLOCKS_PER_LANE = 16
# Blocks of each set in a window of a lane, at least, because two windows read the block in between.
MIN_BLOCKS_OF_LANE = 4
# rows of an index-only set that are read to estimate the image size; one request each
SAMPLE_ROWS = 8


def resolve_block_shuffle(
    data: Data, sets: Sequence[PreparedSet], global_batch_size: int, num_workers: int
) -> BlockShuffle | None:
    """Return how a run shuffles the rows of its sets: by blocks of adjacent rows, or fully (None).

    With `data.shuffle_blocks auto`, sets on disks (also mounted ones) and sets that fit into the
    cache of a node (`data.local_cache`) are shuffled fully, others by blocks.

    Args:
        sets: The training sets of the run, one or those of its mixture.
        num_workers: Largest number of workers.

    Raises:
        UsageError: A set only refers to its images, so the folder `data.local_cache` cannot cache
            it.
    """
    if not data.shuffle:
        return None
    if data.shuffle_blocks != "auto":
        return None if data.block_shuffle is None else BlockShuffle(*data.block_shuffle)
    row_bytes = max(_average_row_bytes(each) for each in sets)
    if not row_bytes:
        return None
    if not all(_is_cached(data, each) for each in sets):
        rows = _in_record_batches(min(REQUEST_BYTES / row_bytes, MAX_ROWS))
        return BlockShuffle(min(num_workers, global_batch_size), rows, WINDOW)
    window_bytes = WINDOW_FRACTION * 1e9 * data.local_cache_gb
    if sum(each.num_bytes for each in sets) <= window_bytes:
        return None
    rows = cached_block_rows(row_bytes, data.local_cache_gb)
    num_nodes = -(-num_workers // WORKERS_PER_NODE)
    window_blocks = int(num_nodes * window_bytes / (rows * row_bytes))
    most_lanes = min(
        window_blocks // (MIN_BLOCKS_OF_LANE * len(sets)),
        sum(each.num_rows for each in sets) // (BLOCKS_PER_LANE * rows),
        global_batch_size,
    )
    lanes = num_workers * max(1, min(LANES_PER_WORKER, most_lanes // num_workers))
    return BlockShuffle(lanes, rows, max(1, window_blocks // lanes))


def cached_block_rows(row_bytes: float, local_cache_gb: float) -> int:
    """Return how many adjacent rows are fetched at once into the cache of a node: a multiple of
    RECORD_BATCH_ROWS, the rows of an Arrow record batch, and at least that.
    """
    preferred_bytes = min(max(MIN_BLOCK_BYTES, MIN_CACHED_ROWS * row_bytes), MAX_BLOCK_BYTES)
    max_bytes = WINDOW_FRACTION * 1e9 * local_cache_gb / MIN_BLOCKS_PER_WINDOW
    return _in_record_batches(min(preferred_bytes, max_bytes) / row_bytes)


def _in_record_batches(rows: float) -> int:
    return RECORD_BATCH_ROWS * max(1, round(rows / RECORD_BATCH_ROWS))


def _average_row_bytes(prepared: PreparedSet) -> float:
    """Return the average bytes per row of a read of adjacent rows; 0 if shuffle blocks save no
    requests.
    """
    in_set = (
        max(1.0, prepared.num_bytes / max(1, prepared.num_rows))
        if isinstance(prepared.folder, RemotePath)
        else 0.0
    )
    if not prepared.manifest.is_index_only or isinstance(prepared.image_folder, Path):
        return in_set
    rows = np.unique(np.linspace(0, max(0, prepared.num_rows - 1), SAMPLE_ROWS).astype(np.int64))
    lengths: list[int | None] = []
    num_read = 0
    for number in rows[: prepared.num_rows]:
        with suppress(*ROW_ERRORS):  # damaged rows are reported when they are read
            [row] = prepared.read_without_references(np.array([number]))
            lengths += [media.ref["length"] for media in row.media if media.ref]
            num_read += 1
    known_lengths = [length for length in lengths if length is not None]
    if not known_lengths or len(known_lengths) < len(lengths):
        return 0.0  # an image that is a file costs one request in any order
    return in_set + sum(known_lengths) / num_read


def with_local_cache(
    data: Data, prepared: PreparedSet, shuffle: BlockShuffle | None
) -> PreparedSet:
    """Return the set with the cache of `data.local_cache`, if it is on an object store.

    Args:
        shuffle: The block shuffle, whose blocks are cached at once; None: a full shuffle.

    Raises:
        UsageError: The folder is given, and the set only refers to its images.
    """
    if not _is_cached(data, prepared) or isinstance(prepared.folder, Path):
        return prepared
    max_bytes = data.local_cache_gb * 1e9
    used_bytes = min(2 * WINDOW_FRACTION * max_bytes, prepared.num_bytes)
    cache = ShardCache(str(data.local_cache), int(max_bytes), int(used_bytes))
    rows = cached_block_rows(_average_row_bytes(prepared), data.local_cache_gb)
    return prepared.with_cache(cache, rows if shuffle is None else shuffle.rows_per_block)


def _is_cached(data: Data, prepared: PreparedSet) -> bool:
    """Whether the cache can have the rows of a set, or the set is on a disk. Raises UsageError."""
    if data.local_cache is None or not prepared.manifest.is_index_only:
        return data.local_cache is not None
    if isinstance(prepared.folder, Path) and isinstance(prepared.image_folder, Path):
        return True
    # cache entries are verified by checksums, which references may not have
    if data.local_cache != AUTO:
        raise UsageError(
            f"data.local_cache cannot cache {prepared.folder}, which only refers to its "
            "images: prepare it without --index-only, or leave data.local_cache out."
        )
    return False
