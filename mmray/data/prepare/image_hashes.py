"""Perceptual image hashes, and nearest-neighbour search between two sets.

The hash is the 256-bit pHash of the library `imagehash` (signs of a discrete cosine transform; Zauner 2010). It is
robust to size and compression but ignores colour, so 4 x 4 mean colours are stored as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

BITS, CELLS = 256, 4
IMAGE_HASH_DTYPE = np.dtype(
    [("sha256", "<u8", 2), ("phash", "<u8", 4), ("colors", "u1", 3 * CELLS * CELLS), ("has_phash", "?")]
)
MAX_COLOR_DISTANCE = 4.0  # of 255, mean over the cells; JPEG with quality 30 changes them by 2
NONE = -1
_PAIRS = 1 << 20  # pairs per comparison


def perceptual_hash(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return (pHash uint64 [4], mean colours uint8 [48]) of an RGB image."""
    import imagehash  # optional dependency, needed only for near-duplicate search

    signs = imagehash.phash(image, hash_size=16).hash.ravel()
    colors = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.uint8).ravel()
    return np.packbits(signs, bitorder="little").view("<u8"), colors


def lsh_bands(hashes: np.ndarray, count: int) -> np.ndarray:
    """Split the bits of uint64 hashes [N, 4] into bands, each mixed to one number: uint64 [count, N].

    Hashes that differ in fewer than `count` bits have at least one equal band (pigeonhole principle).
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1, bitorder="little")
    out = np.zeros((count, len(hashes)), np.uint64)
    for band in range(count):
        packed = np.packbits(bits[:, band::count], axis=1)
        words = np.zeros((len(hashes), -(-packed.shape[1] // 8) * 8), np.uint8)
        words[:, : packed.shape[1]] = packed
        for word in words.view("<u8").T:
            out[band] = out[band] * np.uint64(0x9E3779B97F4A7C15) + word  # a collision only costs a comparison
    return out


def nearest(queries: np.ndarray, references: np.ndarray, max_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest reference of each query: (index int64 [N], differing bits int64 [N]); NONE without a match.

    Arguments are IMAGE_HASH_DTYPE records. A match differs in at most `max_bits` of 256 bits, and in colour by at most
    MAX_COLOR_DISTANCE; ties go to the first. The search is exact: with max_bits + 1 bands, any two such hashes have an
    equal band. Duplicates are compared once, so a thousand blank pages cost as much as one.
    """
    index, bits = np.full(len(queries), NONE, np.int64), np.full(len(queries), NONE, np.int64)
    ours, group = _unique(queries)
    theirs, _ = _unique(references)
    if not len(ours) or not len(theirs):
        return index, bits
    best, match = np.full(len(ours), BITS + 1, np.int64), np.full(len(ours), NONE, np.int64)
    bands = (
        lsh_bands(records["phash"][rows], max_bits + 1) for records, rows in ((queries, ours), (references, theirs))
    )
    for our_band, their_band in zip(*bands, strict=True):
        for query, place in _candidate_pairs(our_band, their_band):
            reference = theirs[place]
            _update_nearest(_distance(queries[ours[query]], references[reference]), query, reference, best, match)
    match[best > max_bits] = NONE
    rows = np.flatnonzero(queries["has_phash"])
    hit = match[group] != NONE
    index[rows[hit]], bits[rows[hit]] = match[group][hit], best[group][hit]
    return index, bits


def _unique(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first record of each distinct hash, and the hash number of each hashed record."""
    rows = np.flatnonzero(records["has_phash"])
    if not len(rows):
        return rows, rows
    packed = np.concatenate([records["phash"][rows].view(np.uint8), records["colors"][rows]], axis=1)
    _, first, group = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return rows[first], group.ravel()


def _candidate_pairs(ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield indices (query [P], reference [P]) of equal numbers, about _PAIRS at a time."""
    order = np.argsort(theirs, kind="stable")
    first = np.searchsorted(theirs[order], ours, "left")
    counts = np.searchsorted(theirs[order], ours, "right") - first
    ends = np.cumsum(counts)
    start = 0
    while start < len(ours):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
        size = counts[start:stop]
        query = np.repeat(np.arange(start, stop), size)
        within = np.arange(len(query)) - np.repeat(np.cumsum(size) - size, size)
        yield query, order[first[query] + within]
        start = stop


def _distance(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the differing bits of pairs [P] of records; BITS + 1 if the colours differ."""
    bits = np.bitwise_count(ours["phash"] ^ theirs["phash"]).sum(axis=1).astype(np.int64)
    colors = np.abs(ours["colors"].astype(np.int16) - theirs["colors"]).mean(axis=1)
    return np.where(colors > MAX_COLOR_DISTANCE, BITS + 1, bits)


def _update_nearest(
    distance: np.ndarray, query: np.ndarray, reference: np.ndarray, best: np.ndarray, match: np.ndarray
) -> None:
    """Update `best` and `match` with the pairs that are nearer; ties go to the smaller index."""
    order = np.lexsort((reference, distance, query))
    query, first = np.unique(query[order], return_index=True)
    distance, reference = distance[order][first], reference[order][first]
    better = (distance < best[query]) | ((distance == best[query]) & (reference < match[query]))
    best[query[better]], match[query[better]] = distance[better], reference[better]
