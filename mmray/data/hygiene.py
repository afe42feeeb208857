"""Duplicates over a whole set, found in a few sorted arrays: 16 bytes a row, whatever the rows are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

NONE = -1
HELD_OUT = ("test", "val", "valid", "validation", "dev", "eval")  # names of splits that are not trained on


def digests(hexadecimal: Sequence[str]) -> np.ndarray:
    """The first 128 bits of hex digests: uint64 [N, 2]."""
    joined = bytes.fromhex("".join(digest[:32] for digest in hexadecimal))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def text_digests(texts: Sequence[str]) -> np.ndarray:
    """128 bits of each text: uint64 [N, 2]."""
    return digests([hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts])


def first_of(values: np.ndarray) -> np.ndarray:
    """For each row of `values` [N, 2] the index of the first row that is equal to it; -1 where that is itself."""
    order = np.lexsort((values[:, 1], values[:, 0]))  # stable: of equal rows the earliest stands first
    ordered = values[order]
    begins = np.ones(len(values), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))]
    out = np.full(len(values), NONE, dtype=np.int64)
    out[order[~begins]] = first[~begins]
    return out


def find_duplicates(
    keys: np.ndarray, images: np.ndarray, rows: np.ndarray, rule: Literal["image", "row", "keep"]
) -> tuple[np.ndarray, np.ndarray]:
    """(first row with the same key [N], first row with the same content [N]); -1 where there is none.

    Arguments are digests [N, 2] in source order: of keys, of images, of images and texts. A repeated key is a fault
    whatever the rule, and such a row is no one's first.
    """
    same_key = first_of(keys)
    same_content = np.full(len(keys), NONE, dtype=np.int64)
    if rule != "keep":
        unique = np.flatnonzero(same_key == NONE)
        found = first_of((images if rule == "image" else rows)[unique])
        same_content[unique[found != NONE]] = unique[found[found != NONE]]
    return same_key, same_content
