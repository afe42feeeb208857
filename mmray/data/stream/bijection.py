"""Keyed bijections of 0..size-1: what a shuffle is made of when nothing of it may be stored.

`permute` moves a number anywhere; `chunked` keeps rows that lie together at rest within reach of each other, so that
few large reads fetch them. Both are exact for any size, and O(1) in memory for an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(value: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, any shape (the finaliser of splitmix64; Steele, Lea, Flood 2014)."""
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Keyed bijection of 0..size-1: uint64 `index` and `key` of one shape in, uint64 of that shape out.

    A Feistel network over Z_a x Z_b with a*b >= size, walked along its cycle until it lands below size.
    """
    return _walk(lambda inside, keys: _feistel(inside, size, keys), index, size, key)


def chunked(index: np.ndarray, size: int, key: np.ndarray, chunk: int, window: int) -> np.ndarray:
    """Keyed bijection of 0..size-1 that takes all of `window` chunks of `chunk` neighbours before it takes others.

    The chunks come in any order, and inside a window of `window` to 2 * window - 1 of them (all, where there are no
    more) the rows do. The last chunk may be ragged: what it lacks is walked over, so that fewer than `chunk` rows come
    outside their window. A chunk of 1 is `permute` itself.
    """
    if chunk == 1:
        return permute(index, size, key)
    chunk = min(chunk, size)  # or most of the walk would be outside
    chunks = -(-size // chunk)

    def both(inside: np.ndarray, keys: np.ndarray) -> np.ndarray:
        slot, row = np.divmod(within_windows(inside, chunks, keys, window, chunk), np.uint64(chunk))
        return permute(slot, chunks, keys) * np.uint64(chunk) + row

    return _walk(both, index, size, key)


def within_windows(index: np.ndarray, units: int, key: np.ndarray, window: int, unit: int = 1) -> np.ndarray:
    """Keyed bijection of 0..units*unit-1 that leaves a number in its window, of `window` units at least."""
    windows = max(1, units // window)
    length, longer = divmod(units, windows)  # so many windows are one unit longer
    edge = longer * (length + 1) * unit
    out = np.empty_like(index)
    for first, size, here in ((0, (length + 1) * unit, index < edge), (edge, length * unit, index >= edge)):
        number, inside = np.divmod(index[here] - np.uint64(first), np.uint64(size))
        salt = mix(key[here] ^ mix(number + np.uint64(first)))
        out[here] = permute(inside, size, salt) + number * np.uint64(size) + np.uint64(first)
    return out


def _walk(
    bijection: Callable[[np.ndarray, np.ndarray], np.ndarray], index: np.ndarray, size: int, key: np.ndarray
) -> np.ndarray:
    """A bijection of more numbers as one of 0..size-1: again from where it lands, until that is below size.

    Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    out = bijection(index, key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = bijection(out[outside], key[outside])
        outside = outside[out[outside] >= size]
    return out


def _feistel(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    a: Any = np.uint64(int(np.ceil(np.sqrt(size))))
    b: Any = np.uint64(-(-size // int(a)))
    left, right = index // b, index % b
    for turn in range(_ROUNDS):
        salt = key + np.uint64(turn)
        if turn % 2:
            right = (right + mix(left ^ mix(salt)) % b) % b
        else:
            left = (left + mix(right ^ mix(salt)) % a) % a
    return left * b + right
