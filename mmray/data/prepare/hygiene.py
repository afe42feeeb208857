"""Duplicates over a whole set, found in a few sorted arrays: 16 bytes a row, whatever the rows are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

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


class Duplicates(NamedTuple):
    """For each row the one that stays with the same key, the same content, the same captions: int64 [N], -1 where none
    does."""

    same_key: np.ndarray
    same_content: np.ndarray
    same_text: np.ndarray


def find_duplicates(
    keys: np.ndarray,
    images: np.ndarray,
    rows: np.ndarray,
    texts: np.ndarray,
    rule: Literal["image", "row", "text", "keep"],
    held_out: np.ndarray,
) -> Duplicates:
    """The rows that repeat another, each for one reason.

    Arguments are digests [N, 2] in source order: of keys, of images, of images and captions, of captions; and which
    rows are of a held-out split, bool [N]. Of equal rows a held-out one stays, so that what is measured on stays as it
    is, else the earliest. A repeated key is a fault whatever the rule, and such a row is no one's first.
    """
    same_key = first_of(keys)
    same_content, same_text = (np.full(len(keys), NONE, dtype=np.int64) for _ in range(2))
    unique = np.flatnonzero(same_key == NONE)
    unique = unique[np.argsort(~held_out[unique], kind="stable")]
    if rule == "text":
        for target, found in zip((same_content, same_text), _first_kept(images[unique], texts[unique]), strict=True):
            target[unique[found != NONE]] = unique[found[found != NONE]]
    elif rule != "keep":
        found = first_of((images if rule == "image" else rows)[unique])
        same_content[unique[found != NONE]] = unique[found[found != NONE]]
    return Duplicates(same_key, same_content, same_text)


def _first_kept(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each row the kept row before it with the same images, else the one with the same captions; -1 where none is.

    Row by row: one that went for its captions must not take along another that has its image, nor the other way.
    """
    groups = [np.where(first == NONE, np.arange(len(first)), first) for first in (first_of(images), first_of(texts))]
    out, kept = ([np.full(len(group), NONE, dtype=np.int64) for group in groups] for _ in range(2))
    shared = [np.bincount(group, minlength=len(group))[group] > 1 for group in groups]
    for row in np.flatnonzero(shared[0] | shared[1]).tolist():
        firsts = [int(holder[group[row]]) for holder, group in zip(kept, groups, strict=True)]
        same = next((each for each, first in enumerate(firsts) if first != NONE), None)
        if same is not None:
            out[same][row] = firsts[same]
        else:
            for holder, group in zip(kept, groups, strict=True):
                holder[group[row]] = row
    return tuple(out)
