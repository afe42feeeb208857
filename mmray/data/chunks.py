"""How near to each other rows come that lie together: not at all on a disk, in chunks on an object store.

What a block costs on a store, and what is left of the shuffle, is counted in tests/data/test_ranges.py and by
`python -m mmray.bench.shuffle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmray.data.local_cache import LocalCache
from mmray.data.store import BATCH_ROWS, PreparedSet
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Data

# Without a cache a block's rows must lie together by themselves: chunks of about one record batch, 16 of them mixed, so
# that a request is worth its time and none of what it brings is thrown away. With one, a chunk is read once for its
# whole window, which may then be as wide as the cache has room for.
REQUEST_BYTES, MOST_ROWS, WINDOW = 512 << 10, 32, 16
KEPT_BYTES, MOST_KEPT_ROWS, LEAST_KEPT_WINDOW = 4 << 20, 64, 256
SHARE_OF_CACHE = 1 / 4  # one window: actors stand in two at a time, and held-out rows are kept too


def chunk_and_window(data: Data, sets: Sequence[PreparedSet], global_rows: int) -> tuple[int, int]:
    """Rows of a chunk, and chunks of a window, for an order over these sets; (1, 1) for any row anywhere."""
    remote = [each for each in sets if each.place.local is None and not by_reference(each)]
    kept = data.local_cache is not None and bool(remote)
    by_bytes = max((_rows_of(each, kept) for each in remote), default=1)
    chunk = by_bytes if data.chunk == "auto" else data.chunk
    if chunk == 1 or not data.shuffle:
        return 1, 1
    if data.window != "auto":
        return chunk, data.window
    if not kept:
        return chunk, WINDOW
    chunk_bytes = chunk * max(_row_bytes(each) for each in remote)
    fitting = int(data.local_cache_gb * 1e9 * SHARE_OF_CACHE / chunk_bytes)
    return chunk, max(1, min(max(LEAST_KEPT_WINDOW, global_rows), fitting))


def _rows_of(prepared: PreparedSet, kept: bool) -> int:
    """Rows of about the bytes that a request should bring, in whole record batches."""
    wanted, most = (KEPT_BYTES, MOST_KEPT_ROWS) if kept else (REQUEST_BYTES, MOST_ROWS)
    return BATCH_ROWS * max(1, min(round(wanted / _row_bytes(prepared) / BATCH_ROWS), most // BATCH_ROWS))


def _row_bytes(prepared: PreparedSet) -> float:
    return max(1.0, prepared.num_bytes / max(1, prepared.num_rows))


def by_reference(prepared: PreparedSet) -> bool:
    """Whether the images are where the source keeps them, and not in the set."""
    return bool(prepared.manifest.settings.get("reference"))


def kept_here(data: Data, prepared: PreparedSet, chunk: int) -> PreparedSet:
    """The set, with what is read of it kept in `data.local_cache` where it is not on a disk. Raises UsageError."""
    if data.local_cache is None or prepared.place.local is not None:
        return prepared
    if by_reference(prepared):
        raise UsageError(
            f"data.local_cache keeps what a set holds, and {prepared.place.address} only refers to its images: "
            "prepare it without --reference, or leave the cache out"
        )
    return prepared.cached(LocalCache(data.local_cache, int(data.local_cache_gb * 1e9)), max(chunk, BATCH_ROWS))
