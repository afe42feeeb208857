"""How near to each other rows come that lie together: not at all on a disk, in chunks on an object store.

What a block costs on a store, and what is left of the shuffle, is counted in tests/data/test_ranges.py and by
`python -m mmray.bench.shuffle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.data.store.cache import ShardCache
from mmray.data.store.prepared_set import BATCH_ROWS, ROW_ERRORS, PreparedSet
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Data

# Without a cache a block's rows must lie together by themselves: chunks of about one record batch, 16 of them mixed, so
# that a request is worth its time and none of what it brings is thrown away. With one, a chunk is read once for its
# whole window, which may then be as wide as the cache has room for.
REQUEST_BYTES, MOST_ROWS, WINDOW = 512 << 10, 32, 16
KEPT_BYTES, MOST_KEPT_ROWS, LEAST_KEPT_WINDOW = 4 << 20, 64, 256
LOOKED_AT = 8  # rows of a set by reference that say how large its images are: a request each, when a run begins
SHARE_OF_CACHE = 1 / 4  # one window: actors stand in two at a time, and held-out rows are kept too


def shuffle_block_and_window(data: Data, sets: Sequence[PreparedSet], global_rows: int) -> tuple[int, int]:
    """Rows of a chunk, and chunks of a window, for an order over these sets; (1, 1) for any row anywhere."""
    near = [near_bytes for each in sets if (near_bytes := _near_bytes(each))]
    kept = data.local_cache is not None and bool(near)
    by_bytes = max((_rows_of(row_bytes, kept) for row_bytes in near), default=1)
    chunk, window = data.shuffle_shape
    chunk = chunk or by_bytes
    if chunk == 1 or not data.shuffle:
        return 1, 1
    if window is not None:
        return chunk, window
    if not kept:
        return chunk, WINDOW
    fitting = int(data.local_cache_gb * 1e9 * SHARE_OF_CACHE / (chunk * max(near)))
    return chunk, max(1, min(max(LEAST_KEPT_WINDOW, global_rows), fitting))


def _rows_of(row_bytes: float, kept: bool) -> int:
    """Rows of about the bytes that a request should bring, in whole record batches."""
    wanted, most = (KEPT_BYTES, MOST_KEPT_ROWS) if kept else (REQUEST_BYTES, MOST_ROWS)
    return BATCH_ROWS * max(1, min(round(wanted / row_bytes / BATCH_ROWS), most // BATCH_ROWS))


def _near_bytes(prepared: PreparedSet) -> float:
    """Bytes of a row that lie on a store beside those of the next row; 0 where chunks save no request worth one."""
    in_set = max(1.0, prepared.num_bytes / max(1, prepared.num_rows)) if prepared.storage.local_path is None else 0.0
    if not is_index_only(prepared) or prepared.image_storage.local_path is not None:
        return in_set
    refs = _some_refs(prepared)
    if not refs or any(ref["length"] is None for ref in refs):
        return 0.0  # a file for each image is a request for each, whatever the order: the full shuffle is worth more
    return float(in_set + np.mean([ref["length"] for ref in refs]))


def _some_refs(prepared: PreparedSet) -> list[dict[str, Any]]:
    """Where the images are of a few rows, from all over the set."""
    rows = np.unique(np.linspace(0, max(0, prepared.num_rows - 1), LOOKED_AT).astype(np.int64))
    found: list[dict[str, Any]] = []
    for row in rows[: prepared.num_rows]:
        with suppress(*ROW_ERRORS):  # a damaged row is its own matter, when it is read
            found += [ref for ref in prepared.refs(np.array([row])) if ref]
    return found


def is_index_only(prepared: PreparedSet) -> bool:
    """Whether the images are where the source keeps them, and not in the set."""
    return bool(prepared.manifest.settings.get("index_only"))


def with_local_cache(data: Data, prepared: PreparedSet, chunk: int) -> PreparedSet:
    """The set, with what is read of it kept in `data.local_cache` where it is not on a disk. Raises UsageError."""
    storages = [prepared.storage, *([prepared.image_storage] if is_index_only(prepared) else [])]
    if data.local_cache is None or all(storage.local_path is not None for storage in storages):
        return prepared
    if is_index_only(prepared):  # an entry is named by a shard's digest, and what is referred to has none
        raise UsageError(
            f"data.local_cache keeps what a set holds, and {prepared.storage.address} only refers to its images: "
            "prepare it without --index-only, or leave the cache out"
        )
    return prepared.cached(ShardCache(data.local_cache, int(data.local_cache_gb * 1e9)), max(chunk, BATCH_ROWS))
