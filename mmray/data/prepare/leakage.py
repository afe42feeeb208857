"""Leakage: rows whose images are also in a set they are held against, or in another split of their own.

Exact is the same content, near the same look (near.py). Between the splits of one set a row of a held-out split stays,
and the row of training that repeats it is the leak. Runs on the driver, over the looks that tasks have left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import orjson

from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.images.thumbnail import thumbnail_of
from mmray.data.prepare.hygiene import HELD_OUT, first_of
from mmray.data.prepare.near import NONE, nearest
from mmray.data.store.prepared_set import PreparedSet
from mmray.storage.storage import Place

LEAKS = "leaks.jsonl"
OWN, EXACT = -1, -1
SHOWN = 12  # with their pictures


@dataclass(frozen=True)
class Leaks:
    """Rows that leak, in source order, all [L]: row, the set it was found in (OWN: another split), the row there, and
    how many of the 256 bits differ (EXACT: the same content)."""

    row: np.ndarray
    where: np.ndarray
    twin: np.ndarray
    bits: np.ndarray


def search(
    own: np.ndarray, live: np.ndarray, splits: Sequence[str | None], others: Sequence[np.ndarray], near_bits: int
) -> Leaks:
    """Leaks among LOOK records `own` [N], of which `live` [N] count, each in its split; `others` are those of sets.

    `near_bits` below 0 compares contents alone. A row is told once, of the first set that has it.
    """
    where, twin, bits = (np.full(len(own), NONE - 1, np.int64) for _ in range(3))

    def note(queries: np.ndarray, references: np.ndarray, looks: np.ndarray, number: int) -> None:
        queries = queries[where[queries] < OWN]
        index, differ = _twins(own[queries], looks, near_bits)
        hit = index != NONE
        where[queries[hit]], twin[queries[hit]], bits[queries[hit]] = number, references[index[hit]], differ[hit]

    rows = np.flatnonzero(live)
    for number, looks in enumerate(others):
        note(rows, np.arange(len(looks)), looks, number)
    rank = _ranks(splits)
    for each in np.unique(rank)[1:]:
        earlier = rows[rank[rows] < each]
        note(rows[rank[rows] == each], earlier, own[earlier], OWN)
    found = np.flatnonzero(where >= OWN)
    return Leaks(found, where[found], twin[found], bits[found])


def _twins(queries: np.ndarray, references: np.ndarray, near_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """For each query the reference it repeats or NONE, and by how many bits it differs."""
    index, bits = np.full(len(queries), NONE, np.int64), np.full(len(queries), EXACT, np.int64)
    first = first_of(np.concatenate([references["sha"], queries["sha"]]))[len(references) :]
    exact = (first != NONE) & (first < len(references)) & queries["sha"].any(axis=1)  # zeros: it could not be read
    index[exact] = first[exact]
    if near_bits >= 0:
        index[~exact], bits[~exact] = nearest(queries[~exact], references, near_bits)
    return index, bits


def _ranks(splits: Sequence[str | None]) -> np.ndarray:
    """Of each row's split: the held-out ones first, training last; the later repeats the earlier."""
    names = {name or "train" for name in set(splits)}
    order = sorted(names, key=lambda name: (name == "train", name not in HELD_OUT, name))
    return np.array([order.index(name or "train") for name in splits], np.int64)


def told(leaks: Leaks, own: PreparedSet, places: np.ndarray, others: Sequence[PreparedSet]) -> Iterator[dict[str, Any]]:
    """A line for each leak: the row, where it was found, and how alike; `places` [N] are the rows' numbers in `own`."""
    keys = own.keys(places[leaks.row])
    names = [""] * len(keys)
    for number in range(OWN, len(others)):
        here = np.flatnonzero(leaks.where == number)
        twins = leaks.twin[here]
        found = own.keys(places[twins]) if number == OWN else others[number].keys(twins)
        for place, key in zip(here, found, strict=True):
            names[place] = key
    for key, other, where, bits in zip(keys, names, leaks.where.tolist(), leaks.bits.tolist(), strict=True):
        found_in = None if where == OWN else others[where].place.address
        yield {"key": key, "set": found_in, "other": other, "bits": None if bits == EXACT else bits}


def sentence(line: dict[str, Any]) -> str:
    """What the quarantine says of a leak."""
    alike = "the same image" if line["bits"] is None else f"looks like it ({line['bits']} of 256 bits differ)"
    return f"{alike}: row {line['other']} of {line['set'] or 'a held-out split of this set'}"


def write(
    out: Place,
    leaks: Leaks,
    lines: Sequence[dict[str, Any]],
    own: PreparedSet,
    places: np.ndarray,
    others: Sequence[PreparedSet],
) -> None:
    """Write leaks.jsonl: all of them, and some with both pictures, near ones and exact ones in turn."""
    near, exact = np.flatnonzero(leaks.bits != EXACT), np.flatnonzero(leaks.bits == EXACT)
    turns = chain.from_iterable(zip_longest(near[:SHOWN].tolist(), exact[:SHOWN].tolist()))
    shown = set([number for number in turns if number is not None][:SHOWN])
    with out.writing(LEAKS) as file, closing(SandboxedDecoder()) as sandbox:
        for number, line in enumerate(lines):
            if number in shown:
                where, twin = int(leaks.where[number]), int(leaks.twin[number])
                rows, at = (own, int(places[twin])) if where == OWN else (others[where], twin)
                ours = _picture(own, int(places[leaks.row[number]]), sandbox)
                line = line | {"pictures": [ours, _picture(rows, at, sandbox)]}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _picture(rows: PreparedSet, number: int, sandbox: SandboxedDecoder) -> str | None:
    try:
        data = rows.read(np.array([number]))[0].images[0]
    except (OSError, ValueError):
        return None
    return thumbnail_of(data, sandbox)


def summary(leaks: Leaks, addresses: Sequence[str], near_bits: int, is_dropped: bool) -> dict[str, Any]:
    """What the manifest says."""
    exact = int((leaks.bits == EXACT).sum())
    by_set: Counter[str] = Counter("splits" if where == OWN else addresses[where] for where in leaks.where.tolist())
    return {
        "exact": exact,
        "near": len(leaks.row) - exact,
        "near_bits": near_bits,
        "dropped": is_dropped,
        "found_in": {name: by_set[name] for name in (*addresses, "splits")},
    }


def in_source_order(rows: Iterable[Sequence[int]], counts: Iterable[Sequence[int]]) -> np.ndarray:
    """Numbers of the rows in shard order, for rows in source order: of each record the shard of each row, and how many
    rows each of its shards has."""
    places, start = [np.zeros(0, np.int64)], 0
    for shard_of, sizes in zip(rows, counts, strict=True):
        shards = np.asarray(shard_of, np.int64)
        begins = start + np.concatenate([[0], np.cumsum(sizes)])
        place = np.empty(len(shards), np.int64)
        for shard in range(len(sizes)):
            here = np.flatnonzero(shards == shard)
            place[here] = begins[shard] + np.arange(len(here))
        places.append(place)
        start = int(begins[-1])
    return np.concatenate(places)
