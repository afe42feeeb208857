"""Images that look alike: a perceptual hash and coarse colours of each, and the search for the nearest in another set.

The hash is the 256-bit pHash of the library `imagehash` (signs of a discrete cosine transform; Zauner 2010): robust to
size and compression, blind to colour, which is why 4 x 4 mean colours stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

BITS, CELLS = 256, 4
LOOK = np.dtype([("sha", "<u8", 2), ("hash", "<u8", 4), ("colours", "u1", 3 * CELLS * CELLS), ("seen", "?")])
COLOUR_LEVELS = 4.0  # of 255, mean over the cells: JPEG of quality 30 moves them by 2
_PAIRS = 1 << 20  # compared at a time
NONE = -1


def look_of(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """(hash uint64 [4], mean colours uint8 [48]) of an RGB image."""
    import imagehash  # an extra: only who asks for near-duplicates needs it

    signs = imagehash.phash(image, hash_size=16).hash.ravel()
    colours = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.uint8).ravel()
    return np.packbits(signs, bitorder="little").view("<u8"), colours


def bands(hashes: np.ndarray, count: int) -> np.ndarray:
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
    theirs = bands(references["hash"][known], most_bits + 1)
    for band, ours in enumerate(bands(queries["hash"][asked], most_bits + 1)):
        for query, reference in _pairs(ours, theirs[band]):
            _keep_best(queries[asked[query]], references[known[reference]], query, known[reference], best, found)
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


def _pairs(ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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


def _keep_best(
    ours: np.ndarray, theirs: np.ndarray, query: np.ndarray, row: np.ndarray, best: np.ndarray, found: np.ndarray
) -> None:
    """Note in `best` and `found` the pairs of like colours that are nearer than what stands there."""
    distance = np.bitwise_count(ours["hash"] ^ theirs["hash"]).sum(axis=1).astype(np.int64)
    apart = np.abs(ours["colours"].astype(np.int16) - theirs["colours"]).mean(axis=1)
    distance[apart > COLOUR_LEVELS] = BITS + 1
    order = np.lexsort((row, distance, query))
    query, row, distance = query[order], row[order], distance[order]
    head = np.ones(len(query), bool)
    head[1:] = query[1:] != query[:-1]
    query, row, distance = query[head], row[head], distance[head]
    better = (distance < best[query]) | ((distance == best[query]) & (row < found[query]))
    best[query[better]], found[query[better]] = distance[better], row[better]
