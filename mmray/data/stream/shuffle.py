"""Shuffle shape on object stores: rows of a block, which share a request, and blocks of a window,
which are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.prepared_set import ROW_ERRORS, PreparedSet
from mmray.errors import UsageError
from mmray.storage.paths import RemotePath

if TYPE_CHECKING:
    from mmray.config import Data

# Without a cache: small blocks, 16 of them mixed, so that a stream block has all rows of a request.
# With a cache, a block is read once for its full window, so a window may be as large as the cache
# allows.
REQUEST_BYTES, MAX_ROWS, WINDOW = 512 << 10, 32, 16
CACHED_BYTES, MAX_CACHED_ROWS, MIN_CACHED_WINDOW = 4 << 20, 64, 256
# rows of an index-only set that are read to estimate the image size; one request each
SAMPLE_ROWS = 8
# of the cache for one window; two are in use at a time, and held-out rows are cached too
CACHE_FRACTION = 1 / 4


def shuffle_block_and_window(
    data: Data, sets: Sequence[PreparedSet], global_rows: int
) -> tuple[int, int]:
    """Return rows of a shuffle block and blocks of a window for these sets; (1, 1) for a full
    shuffle.
    """
    row_bytes = [size for each in sets if (size := _average_row_bytes(each))]
    is_cached = data.local_cache is not None and bool(row_bytes)
    shuffle_block, window = data.shuffle_shape
    if shuffle_block is None:  # the rows of one request, in whole record batches
        request_bytes, max_rows = (
            (CACHED_BYTES, MAX_CACHED_ROWS) if is_cached else (REQUEST_BYTES, MAX_ROWS)
        )
        batches = (
            round(min(request_bytes / size, max_rows) / RECORD_BATCH_ROWS) for size in row_bytes
        )
        shuffle_block = max((RECORD_BATCH_ROWS * max(1, count) for count in batches), default=1)
    if shuffle_block == 1 or not data.shuffle:
        return 1, 1
    if window is not None:
        return shuffle_block, window
    if not is_cached:
        return shuffle_block, WINDOW
    fitting = int(data.local_cache_gb * 1e9 * CACHE_FRACTION / (shuffle_block * max(row_bytes)))
    return shuffle_block, max(1, min(max(MIN_CACHED_WINDOW, global_rows), fitting))


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
    for row in rows[: prepared.num_rows]:
        with suppress(*ROW_ERRORS):  # damaged rows are reported when they are read
            [stored] = prepared.read_without_references(np.array([row]))
            lengths += [media.ref["length"] for media in stored.media if media.ref]
            num_read += 1
    known = [length for length in lengths if length is not None]
    # An image that is a file costs one request in any order.
    return in_set + sum(known) / num_read if known and len(known) == len(lengths) else 0.0


def with_local_cache(data: Data, prepared: PreparedSet, shuffle_block: int) -> PreparedSet:
    """Return the set with `data.local_cache` for reads from an object store. Raises UsageError."""
    folders = [prepared.folder]
    if prepared.manifest.is_index_only:
        folders.append(prepared.image_folder)
    if data.local_cache is None or all(isinstance(folder, Path) for folder in folders):
        return prepared
    # cache entries are verified by checksums, which references may not have
    if prepared.manifest.is_index_only:
        raise UsageError(
            f"data.local_cache cannot cache {prepared.folder}, which only refers to its "
            "images: prepare it "
            "without --index-only, or leave data.local_cache out."
        )
    cache = ShardCache(data.local_cache, int(data.local_cache_gb * 1e9))
    return prepared.with_cache(cache, max(shuffle_block, RECORD_BATCH_ROWS))
