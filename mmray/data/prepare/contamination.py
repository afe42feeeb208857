"""Holds a set that is being prepared against other prepared sets, and its splits against each other: prepare's part
that looks at images a second time, in Ray tasks, a shard each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import ray

from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.images.thumbnail import encoded_thumbnail
from mmray.data.prepare.assemble import HELD_OUT, DedupResult, first_occurrence, records, shards_of
from mmray.data.prepare.image_hashes import (
    HASHES_DIR,
    NONE,
    hash_file,
    hash_shard,
    load_hashes,
    missing_hashes,
    nearest,
    unfiltered_view,
)
from mmray.data.prepare.tasks import MAX_RETRIES, MAX_RETRIES_SANDBOXED, decode_item, encode_result, map_tasks
from mmray.data.store.manifest import Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage.storage import Storage

if TYPE_CHECKING:
    from mmray.config import Prepare


# Leakage: rows whose images are also in a set they are held against, or in another split of their own.
#
# Exact is the same content, near the same look (near.py). Between the splits of one set a row of a held-out split
# stays,
# and the row of training that repeats it is the leak. Runs on the driver, over the looks that tasks have left.
LEAKS = "leaks.jsonl"
SAME_SET, EXACT = -1, -1
MAX_EXAMPLES = 12  # with their pictures


@dataclass(frozen=True)
class LeakMatches:
    """Rows that leak, in source order, all [L]: row, the set it was found in (OWN: another split), the row there, and
    how many of the 256 bits differ (EXACT: the same content)."""

    row: np.ndarray
    where: np.ndarray
    twin: np.ndarray
    bits: np.ndarray


def find_leaks(
    own: np.ndarray, live: np.ndarray, splits: Sequence[str | None], others: Sequence[np.ndarray], phash_distance: int
) -> LeakMatches:
    """Leaks among LOOK records `own` [N], of which `live` [N] count, each in its split; `others` are those of sets.

    `phash_distance` below 0 compares contents alone. A row is told once, of the first set that has it.
    """
    where, twin, bits = (np.full(len(own), NONE - 1, np.int64) for _ in range(3))

    def note(queries: np.ndarray, references: np.ndarray, looks: np.ndarray, number: int) -> None:
        queries = queries[where[queries] < SAME_SET]
        index, differ = _nearest_matches(own[queries], looks, phash_distance)
        hit = index != NONE
        where[queries[hit]], twin[queries[hit]], bits[queries[hit]] = number, references[index[hit]], differ[hit]

    rows = np.flatnonzero(live)
    for number, looks in enumerate(others):
        note(rows, np.arange(len(looks)), looks, number)
    rank = _split_priority(splits)
    for each in np.unique(rank)[1:]:
        earlier = rows[rank[rows] < each]
        note(rows[rank[rows] == each], earlier, own[earlier], SAME_SET)
    found = np.flatnonzero(where >= SAME_SET)
    return LeakMatches(found, where[found], twin[found], bits[found])


def _nearest_matches(queries: np.ndarray, references: np.ndarray, phash_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """For each query the reference it repeats or NONE, and by how many bits it differs."""
    index, bits = np.full(len(queries), NONE, np.int64), np.full(len(queries), EXACT, np.int64)
    first = first_occurrence(np.concatenate([references["sha"], queries["sha"]]))[len(references) :]
    exact = (first != NONE) & (first < len(references)) & queries["sha"].any(axis=1)  # zeros: it could not be read
    index[exact] = first[exact]
    if phash_distance >= 0:
        index[~exact], bits[~exact] = nearest(queries[~exact], references, phash_distance)
    return index, bits


def _split_priority(splits: Sequence[str | None]) -> np.ndarray:
    """Of each row's split: the held-out ones first, training last; the later repeats the earlier."""
    names = {name or "train" for name in set(splits)}
    order = sorted(names, key=lambda name: (name == "train", name not in HELD_OUT, name))
    return np.array([order.index(name or "train") for name in splits], np.int64)


def leak_records(
    leaks: LeakMatches, own: PreparedSet, places: np.ndarray, others: Sequence[PreparedSet]
) -> Iterator[dict[str, Any]]:
    """A line for each leak: the row, where it was found, and how alike; `places` [N] are the rows' numbers in `own`."""
    keys = own.keys(places[leaks.row])
    names = [""] * len(keys)
    for number in range(SAME_SET, len(others)):
        here = np.flatnonzero(leaks.where == number)
        twins = leaks.twin[here]
        found = own.keys(places[twins]) if number == SAME_SET else others[number].keys(twins)
        for place, key in zip(here, found, strict=True):
            names[place] = key
    for key, other, where, bits in zip(keys, names, leaks.where.tolist(), leaks.bits.tolist(), strict=True):
        found_in = None if where == SAME_SET else others[where].storage.address
        yield {"key": key, "set": found_in, "other": other, "bits": None if bits == EXACT else bits}


def describe(line: dict[str, Any]) -> str:
    """What the quarantine says of a leak."""
    alike = "the same image" if line["bits"] is None else f"looks like it ({line['bits']} of 256 bits differ)"
    return f"{alike}: row {line['other']} of {line['set'] or 'a held-out split of this set'}"


def write_leaks(
    out: Storage,
    leaks: LeakMatches,
    lines: Sequence[dict[str, Any]],
    own: PreparedSet,
    places: np.ndarray,
    others: Sequence[PreparedSet],
) -> None:
    """Write leaks.jsonl: all of them, and some with both pictures, near ones and exact ones in turn."""
    near, exact = np.flatnonzero(leaks.bits != EXACT), np.flatnonzero(leaks.bits == EXACT)
    turns = chain.from_iterable(zip_longest(near[:MAX_EXAMPLES].tolist(), exact[:MAX_EXAMPLES].tolist()))
    shown = set([number for number in turns if number is not None][:MAX_EXAMPLES])
    with out.open_output(LEAKS) as file, closing(SandboxedDecoder()) as sandbox:
        for number, line in enumerate(lines):
            if number in shown:
                where, twin = int(leaks.where[number]), int(leaks.twin[number])
                rows, at = (own, int(places[twin])) if where == SAME_SET else (others[where], twin)
                ours = _thumbnail(own, int(places[leaks.row[number]]), sandbox)
                line = line | {"pictures": [ours, _thumbnail(rows, at, sandbox)]}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _thumbnail(rows: PreparedSet, number: int, sandbox: SandboxedDecoder) -> str | None:
    try:
        data = rows.read(np.array([number]))[0].image
    except (OSError, ValueError):
        return None
    return encoded_thumbnail(data, sandbox)


def summary(leaks: LeakMatches, addresses: Sequence[str], phash_distance: int, is_dropped: bool) -> dict[str, Any]:
    """What the manifest says."""
    exact = int((leaks.bits == EXACT).sum())
    by_set: Counter[str] = Counter(
        "splits" if where == SAME_SET else addresses[where] for where in leaks.where.tolist()
    )
    return {
        "exact": exact,
        "near": len(leaks.row) - exact,
        "phash_distance": phash_distance,
        "dropped": is_dropped,
        "found_in": {name: by_set[name] for name in (*addresses, "splits")},
    }


def source_to_shard_order(rows: Iterable[Sequence[int]], counts: Iterable[Sequence[int]]) -> np.ndarray:
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


OnRows = Callable[[int, int], None]  # rows looked at, of how many
Notify = Callable[[str, str], None]  # a sentence, and its label


@dataclass(frozen=True)
class HashJob:
    """How shards are looked at; `careful`: each image is decoded in a process of its own first."""

    out: str
    near: bool
    max_pixels: int
    sandboxed: bool = False


def validate(settings: Prepare, out: str) -> None:
    """Raises UsageError or DataError for what can be known before anything is read."""
    if is_enabled(settings) and settings.phash_distance >= 0 and find_spec("imagehash") is None:
        raise UsageError(
            "near-duplicates are looked for with the package imagehash: pip install 'mmray[leakage]', or compare "
            "contents alone with --phash-distance -1"
        )
    for address in settings.check_contamination:
        if Storage(address).address == Storage(out).address:
            raise UsageError(f"--check-contamination {address} is the set that is being prepared: name another one")
        PreparedSet.open(address)


def is_enabled(settings: Prepare) -> bool:
    return bool(settings.check_contamination) or settings.drop_overlap


def check_contamination(
    out: Storage,
    chunks: Sequence[int],
    source: str,
    findings: DedupResult,
    settings: Prepare,
    on_rows: OnRows,
    notify: Notify,
) -> tuple[dict[int, str], dict[str, Any]]:
    """Rows that leak -> what the quarantine says of them, and the manifest's summary; leaks.jsonl is written.

    Raises DataError, or ResourceError where tasks die.
    """
    others = [PreparedSet.open(address) for address in settings.check_contamination]
    own = [shard for _, record in records(out, chunks) for shard in shards_of(record)]
    shards_by = [(out.address, source, own)]
    shards_by += [(each.storage.address, _source(each.manifest), list(each.manifest.shards)) for each in others]
    near = settings.phash_distance >= 0
    _hash_shards(shards_by, HashJob(out.address, near, settings.max_pixels), on_rows, notify)
    columns = [(record["rows"]["shard"], record["shards"]) for _, record in records(out, chunks)]
    places = source_to_shard_order([a for a, _ in columns], [[each["num_rows"] for each in b] for _, b in columns])
    splits = [shards[number]["split"] for numbers, shards in columns for number in numbers]
    leaks = find_leaks(
        load_hashes(out, own, near, live=False)[places],
        ~findings.dropped,
        splits,
        [load_hashes(out, shards, near, live=True) for _, _, shards in shards_by[1:]],
        settings.phash_distance,
    )
    rows = unfiltered_view(out.address, source, own)
    lines = list(leak_records(leaks, rows, places, others))
    write_leaks(out, leaks, lines, rows, places, others)
    sentences = {int(row): describe(line) for row, line in zip(leaks.row, lines, strict=True)}
    return sentences, summary(leaks, settings.check_contamination, settings.phash_distance, settings.drop_overlap)


def _source(manifest: Manifest) -> str:
    return str(manifest.source.get("address") or "")


def _hash_shards(shards_by: list[tuple[str, str, list[Shard]]], look: HashJob, on_rows: OnRows, notify: Notify) -> None:
    out = Storage(look.out)
    out.mkdir(HASHES_DIR)
    names = {hash_file(shard, look.near).rpartition("/")[2] for _, _, shards in shards_by for shard in shards}
    for name in set(out.listdir(HASHES_DIR)) - names:  # of shards that are no more
        out.delete(f"{HASHES_DIR}/{name}")
    items = _missing_shards(shards_by, look)
    total = _rows_of(items)
    on_rows(0, total)
    try:
        _hash_all(items, look, MAX_RETRIES, total, on_rows, notify)
        return
    except ray.exceptions.RayError:
        items = _missing_shards(shards_by, look)  # one may hold an image that kills: decoded apart, it is named
    try:
        _hash_all(items, replace(look, sandboxed=True), MAX_RETRIES_SANDBOXED, total, on_rows, notify)
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"looking for leaks ended: {error}\nThe same command goes on where it was; images are not the cause (they "
            "were decoded in processes of their own): memory may be"
        ) from error


def _missing_shards(shards_by: list[tuple[str, str, list[Shard]]], look: HashJob) -> list[dict[str, Any]]:
    return [
        {"address": address, "source": source, "shard": asdict(shard)}
        for address, source, shards in shards_by
        for shard in missing_hashes(Storage(look.out), shards, look.near)
    ]


def _rows_of(items: list[dict[str, Any]]) -> int:
    return sum(item["shard"]["num_rows"] for item in items)


def _hash_all(
    items: list[dict[str, Any]], look: HashJob, retries: int, total: int, on_rows: OnRows, notify: Notify
) -> None:
    done = total - _rows_of(items)
    with closing(map_tasks(partial(_hash_batch, look=look), items, retries)) as answers:
        for answer in answers:
            if answer["fault"]:
                raise DataError(answer["fault"])
            if answer["deadly"]:
                notify(f"{answer['deadly']}: the decoder dies of the image; only its bytes were compared", "crash")
            done += int(answer["num_rows"])
            on_rows(done, total)


def _hash_batch(batch: dict[str, np.ndarray], look: HashJob) -> dict[str, np.ndarray]:
    """The Ray task: the looks of one shard."""
    item = decode_item(batch)
    shard = Shard.from_json(item["shard"])
    try:
        with closing(SandboxedDecoder()) as sandbox:
            where = (Storage(look.out), item["address"], item["source"])
            deadly = hash_shard(*where, shard, look.near, look.max_pixels, sandbox if look.sandboxed else None)
    except OSError as error:
        fault = f"{item['address']}/{shard.file} cannot be compared: {error}"
        return encode_result({"num_rows": 0, "fault": fault, "deadly": ""})
    return encode_result({"num_rows": shard.num_rows, "fault": "", "deadly": ", ".join(deadly)})
