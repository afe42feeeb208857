"""How the images of a prepared set look: a file of LOOK records for each of its shards, made once, in tasks.

They are kept in `looks/` of the set that is being prepared, also those of the sets it is held against, which may be
nobody's to write to. A shard is named by the digest of its rows: one that has not changed is not looked at again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from PIL import Image

from mmray.data.formats.rows import BadRow
from mmray.data.images.decode import BadImage, decode
from mmray.data.images.sandbox import CRASH, SandboxedDecoder
from mmray.data.store.manifest import Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.storage.storage import Storage

# Images that look alike: a perceptual hash and coarse colours of each, and the search for the nearest in another set.
#
# The hash is the 256-bit pHash of the library `imagehash` (signs of a discrete cosine transform; Zauner 2010): robust
# to
# size and compression, blind to colour, which is why 4 x 4 mean colours stand beside it.
BITS, CELLS = 256, 4
IMAGE_HASH_DTYPE = np.dtype(
    [("sha", "<u8", 2), ("hash", "<u8", 4), ("colours", "u1", 3 * CELLS * CELLS), ("seen", "?")]
)
MAX_COLOR_DISTANCE = 4.0  # of 255, mean over the cells: JPEG of quality 30 moves them by 2
_PAIRS = 1 << 20  # compared at a time
NONE = -1


def perceptual_hash(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """(hash uint64 [4], mean colours uint8 [48]) of an RGB image."""
    import imagehash  # an extra: only who asks for near-duplicates needs it

    signs = imagehash.phash(image, hash_size=16).hash.ravel()
    colours = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.uint8).ravel()
    return np.packbits(signs, bitorder="little").view("<u8"), colours


def lsh_bands(hashes: np.ndarray, count: int) -> np.ndarray:
    """Bits of uint64 hashes [N, 4] dealt to `count` bands in turn, each mixed to one number: uint64 [count, N].

    Hashes that differ in fewer than `count` bits agree in a whole band, for each bit can spoil but one (pigeonhole).
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1, bitorder="little")
    out = np.empty((count, len(hashes)), np.uint64)
    for band in range(count):
        packed = np.packbits(bits[:, band::count], axis=1)
        whole = np.zeros((len(hashes), -(-packed.shape[1] // 8) * 8), np.uint8)
        whole[:, : packed.shape[1]] = packed
        key = np.zeros(len(hashes), np.uint64)
        for word in whole.view("<u8").T:
            key = key * np.uint64(0x9E3779B97F4A7C15) + word  # a collision costs a comparison, never an answer
        out[band] = key
    return out


def nearest(queries: np.ndarray, references: np.ndarray, most_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The reference that looks most like each query: (index int64 [N], bits that differ int64 [N]); NONE without one.

    Both are LOOK records. Alike is: at most `most_bits` of 256 differ, and the colours by COLOUR_LEVELS on average; of
    equals the first. Nothing alike is missed: with most_bits + 1 bands, two such hashes share a band. Time is
    O((N + M) log M) a band and the pairs that share one, N x M / 2^32 of unlike images at 7 bits; never all pairs.
    Equal looks are searched once, so a thousand blank pages cost as much as one.
    """
    index, bits = np.full(len(queries), NONE, np.int64), np.full(len(queries), NONE, np.int64)
    asked, known = np.flatnonzero(queries["seen"]), np.flatnonzero(references["seen"])
    if not len(asked) or not len(known):
        return index, bits
    known, _ = _unique(references, known)
    asked, asks = _unique(queries, asked)
    best = np.full(len(asked), BITS + 1, np.int64)
    found = np.full(len(asked), NONE, np.int64)
    theirs = lsh_bands(references["hash"][known], most_bits + 1)
    for band, ours in enumerate(lsh_bands(queries["hash"][asked], most_bits + 1)):
        for query, reference in _candidate_pairs(ours, theirs[band]):
            _update_nearest(queries[asked[query]], references[known[reference]], query, known[reference], best, found)
    alike = best <= most_bits
    hit = asks != NONE
    hit[hit] = alike[asks[hit]]
    index[hit], bits[hit] = found[asks[hit]], best[asks[hit]]
    return index, bits


def _unique(looks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first of each kind of look among `rows`, for every look its kind or NONE)."""
    packed = np.concatenate([looks["hash"][rows].view(np.uint8), looks["colours"][rows]], axis=1)
    _, first, kind = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    kinds = np.full(len(looks), NONE, np.int64)
    kinds[rows] = kind.ravel()
    return rows[first], kinds


def _candidate_pairs(ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places (query [P], reference [P]) of equal numbers, some _PAIRS at a time."""
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    first = np.searchsorted(ordered, ours, "left")
    counts = np.searchsorted(ordered, ours, "right") - first
    ends = np.cumsum(counts)
    start = 0
    while start < len(ours):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
        here = counts[start:stop]
        query = np.repeat(np.arange(start, stop), here)
        within = np.arange(len(query)) - np.repeat(np.cumsum(here) - here, here)
        yield query, order[first[query] + within]
        start = stop


def _update_nearest(
    ours: np.ndarray, theirs: np.ndarray, query: np.ndarray, row: np.ndarray, best: np.ndarray, found: np.ndarray
) -> None:
    """Note in `best` and `found` the pairs of like colours that are nearer than what stands there."""
    distance = np.bitwise_count(ours["hash"] ^ theirs["hash"]).sum(axis=1).astype(np.int64)
    apart = np.abs(ours["colours"].astype(np.int16) - theirs["colours"]).mean(axis=1)
    distance[apart > MAX_COLOR_DISTANCE] = BITS + 1
    order = np.lexsort((row, distance, query))
    query, row, distance = query[order], row[order], distance[order]
    head = np.ones(len(query), bool)
    head[1:] = query[1:] != query[:-1]
    query, row, distance = query[head], row[head], distance[head]
    better = (distance < best[query]) | ((distance == best[query]) & (row < found[query]))
    best[query[better]], found[query[better]] = distance[better], row[better]


HASHES_DIR = "looks"
_ROWS = 64  # read at a time


def hash_file(shard: Shard, near: bool) -> str:
    return f"{HASHES_DIR}/{shard.sha256[:32]}{'' if near else '-exact'}.npy"


def missing_hashes(out: Storage, shards: Iterable[Shard], near: bool) -> list[Shard]:
    """Shards that were not looked at yet."""
    there = set(out.listdir(HASHES_DIR))
    return [shard for shard in shards if hash_file(shard, near).rpartition("/")[2] not in there]


def unfiltered_view(address: str, source: str, shards: Iterable[Shard]) -> PreparedSet:
    """Every row of these shards, also those that do not count; `source` is where a set by reference has its images."""
    whole = tuple(replace(shard, dropped=(), split=None) for shard in shards)
    num_rows = sum(shard.num_rows for shard in whole)
    return PreparedSet(
        Storage(address), Manifest(num_rows, num_rows, 0, {}, 0, {}, "", None, {"address": source}, {}, whole)
    )


def hash_shard(
    out: Storage,
    address: str,
    source: str,
    shard: Shard,
    near: bool,
    max_pixels: int,
    sandbox: SandboxedDecoder | None = None,
) -> list[str]:
    """Write the looks of a shard; a row that cannot be read has none, and is like no other. Raises OSError.

    With a `sandbox`, images are tried in its child first; the rows whose image killed it are told, as `key (source)`.
    """
    rows = unfiltered_view(address, source, [shard])
    looks, deadly = np.zeros(shard.num_rows, IMAGE_HASH_DTYPE), []
    for start in range(0, shard.num_rows, _ROWS):
        for place, row in enumerate(_read(rows, np.arange(start, min(start + _ROWS, shard.num_rows))), start):
            if row is None:
                continue
            looks["sha"][place] = np.frombuffer(hashlib.sha256(row.image).digest()[:16], "<u8")
            if near:
                try:
                    if sandbox is not None:
                        sandbox.check(row.image, max_pixels)
                    looks["hash"][place], looks["colours"][place] = perceptual_hash(decode(row.image, max_pixels))
                    looks["seen"][place] = True
                except BadImage as bad:  # its content is compared all the same
                    if bad.reason == CRASH:
                        deadly.append(f"{row.key} ({row.source})")
    file = io.BytesIO()
    np.save(file, looks)
    out.write(hash_file(shard, near), file.getvalue())
    return deadly


def _read(rows: PreparedSet, numbers: np.ndarray) -> list[Row | None]:
    """The rows of these numbers; None for one whose image is gone from where a set by reference has it.

    Raises OSError where a shard cannot be read: what nobody saw must not count as seen.
    """
    try:
        return list(rows.read(numbers))
    except BadRow:
        return [None] if len(numbers) == 1 else [row for number in numbers for row in _read(rows, np.array([number]))]
    except ValueError as error:
        raise OSError(str(error)) from error


def load_hashes(out: Storage, shards: Iterable[Shard], near: bool, live: bool) -> np.ndarray:
    """LOOK records of these shards, of the rows that count (`live`) or of all: 97 bytes a row."""
    parts = [np.zeros(0, IMAGE_HASH_DTYPE)]
    for shard in shards:
        looks = np.load(io.BytesIO(out.read(hash_file(shard, near))), allow_pickle=False)
        parts.append(np.delete(looks, shard.dropped) if live and shard.dropped else looks)
    return np.concatenate(parts)
