"""Contamination check: find rows whose images are also in another prepared set or in another split of this set.

Exact matches have the same image bytes; near matches have similar perceptual hashes (image_hashes.py). Between two
splits of one set, the held-out row is kept and the training row is the leak. Ray tasks hash one shard each. Hash files
are stored in the set that is being prepared and named by the digest of the shard, so an unchanged shard is hashed once.
The driver matches the hashes.
"""

from __future__ import annotations

import hashlib
import io
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
from PIL import Image

from mmray.data.formats.rows import BadRow
from mmray.data.images.decode import BadImage, decode
from mmray.data.images.sandbox import CRASH, SandboxedDecoder
from mmray.data.images.thumbnail import encoded_thumbnail
from mmray.data.prepare.assemble import HELD_OUT, DedupResult, first_occurrence, records, shards_of
from mmray.data.prepare.image_hashes import IMAGE_HASH_DTYPE, NONE, nearest, perceptual_hash
from mmray.data.prepare.tasks import Result, contain_crashes, map_tasks
from mmray.data.store.manifest import Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.errors import DataError, UsageError
from mmray.storage.storage import Storage

if TYPE_CHECKING:
    from mmray.config import Prepare

LEAKS, HASHES_DIR = "leaks.jsonl", "hashes"
SAME_SET, EXACT = -1, -1
MAX_EXAMPLES = 12  # maximum leaks with thumbnails
_ROWS = 64  # rows per read
OnRows = Callable[[int, int], None]  # hashed rows, total rows
Notify = Callable[[str, str], None]  # message, label


@dataclass(frozen=True)
class HashJob:
    """Settings of the hash tasks."""

    out: str
    near: bool
    max_pixels: int

    def file(self, shard: Shard) -> str:
        return f"{shard.sha256[:32]}{'' if self.near else '-exact'}.npy"


@dataclass(frozen=True)
class HashedSet:
    """Shards to hash; `images_from` is the folder of the images of an index-only set."""

    address: str
    images_from: str
    shards: Sequence[Shard]

    @classmethod
    def of(cls, prepared: PreparedSet) -> HashedSet:
        manifest = prepared.manifest
        return cls(prepared.storage.address, str(manifest.source.get("address") or ""), manifest.shards)

    def rows(self) -> PreparedSet:
        """Number of rows of the shards, including dropped ones."""
        whole = tuple(replace(shard, dropped=(), split=None) for shard in self.shards)
        count = sum(shard.num_rows for shard in whole)
        source = {"address": self.images_from}
        return PreparedSet(Storage(self.address), Manifest(count, count, 0, {}, 0, {}, "", None, source, {}, whole))

    def hashes(self, job: HashJob, live: bool) -> np.ndarray:
        """Load the hashes of the rows that are not dropped (`live`), or of all rows; 97 bytes each."""
        out, parts = Storage(job.out), [np.zeros(0, IMAGE_HASH_DTYPE)]
        for shard in self.shards:
            hashes = np.load(io.BytesIO(out.read(f"{HASHES_DIR}/{job.file(shard)}")), allow_pickle=False)
            parts.append(np.delete(hashes, shard.dropped) if live and shard.dropped else hashes)
        return np.concatenate(parts)


@dataclass(frozen=True)
class LeakMatches:
    """Leaking rows in source order; all arrays are [L].

    The columns are the row, the number of the other set (SAME_SET: another split of this set), the row in that set, and
    the number of differing bits of 256 (EXACT: same bytes).
    """

    row: np.ndarray
    where: np.ndarray
    match: np.ndarray
    bits: np.ndarray


def is_enabled(settings: Prepare) -> bool:
    return bool(settings.check_contamination) or settings.drop_overlap


def validate(settings: Prepare, out: str) -> None:
    """Validate the settings before any row is read. Raises UsageError or DataError."""
    if is_enabled(settings) and settings.phash_distance >= 0 and find_spec("imagehash") is None:
        raise UsageError(
            "near-duplicate search needs the package imagehash: pip install 'mmray[leakage]', or find only exact "
            "duplicates with --phash-distance -1"
        )
    for address in settings.check_contamination:
        if Storage(address).address == Storage(out).address:
            raise UsageError(f"--check-contamination {address} is the set that is being prepared: name another one")
        PreparedSet.open(address)


def check_contamination(
    out: Storage,
    chunks: Sequence[int],
    source: str,
    found: DedupResult,
    settings: Prepare,
    on_rows: OnRows,
    notify: Notify,
) -> tuple[dict[int, str], dict[str, Any]]:
    """Write leaks.jsonl; return {row: description} of the leaking rows, and the summary for the manifest.

    Raises DataError, or ResourceError if tasks die.
    """
    others = [PreparedSet.open(address) for address in settings.check_contamination]
    own = HashedSet(out.address, source, [shard for _, record in records(out, chunks) for shard in shards_of(record)])
    sets = [own, *map(HashedSet.of, others)]
    job = HashJob(out.address, settings.phash_distance >= 0, settings.max_pixels)
    _hash_sets(sets, job, on_rows, notify)
    columns = [(record["rows"]["shard"], record["shards"]) for _, record in records(out, chunks)]
    numbers = shard_order(shard_of for shard_of, _ in columns)
    splits = [shards[number]["split"] for shard_of, shards in columns for number in shard_of]
    leaks = find_leaks(
        own.hashes(job, live=False)[numbers],
        ~found.dropped,
        splits,
        [each.hashes(job, live=True) for each in sets[1:]],
        settings.phash_distance,
    )
    rows = own.rows()
    lines = list(leak_records(leaks, rows, numbers, others))
    _write_leaks(out, leaks, lines, rows, numbers, others)
    descriptions = {int(row): _describe(line) for row, line in zip(leaks.row, lines, strict=True)}
    return descriptions, _summary(leaks, settings)


def find_leaks(
    own: np.ndarray, live: np.ndarray, splits: Sequence[str | None], others: Sequence[np.ndarray], phash_distance: int
) -> LeakMatches:
    """Find rows of `own` [N] that match a row of the sets `others` or of another split.

    Rows that are not in `live` [N] are ignored. `phash_distance` below 0 finds exact matches only. A row is reported
    once, for the first set that contains it.
    """
    where, match, bits = (np.full(len(own), NONE - 1, np.int64) for _ in range(3))

    def search(queries: np.ndarray, references: np.ndarray, hashes: np.ndarray, number: int) -> None:
        queries = queries[where[queries] < SAME_SET]
        index, differ = _matches(own[queries], hashes, phash_distance)
        hit = index != NONE
        where[queries[hit]], match[queries[hit]], bits[queries[hit]] = number, references[index[hit]], differ[hit]

    rows = np.flatnonzero(live)
    for number, hashes in enumerate(others):
        search(rows, np.arange(len(hashes)), hashes, number)
    priority = _split_priority(splits)
    for each in np.unique(priority)[1:]:
        earlier = rows[priority[rows] < each]
        search(rows[priority[rows] == each], earlier, own[earlier], SAME_SET)
    found = np.flatnonzero(where >= SAME_SET)
    return LeakMatches(found, where[found], match[found], bits[found])


def _matches(queries: np.ndarray, references: np.ndarray, phash_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matching reference of each query, or NONE, and the number of differing bits."""
    index, bits = np.full(len(queries), NONE, np.int64), np.full(len(queries), EXACT, np.int64)
    first = first_occurrence(np.concatenate([references["sha256"], queries["sha256"]]))[len(references) :]
    # A hash of zeros means that the image could not be read.
    exact = (first != NONE) & (first < len(references)) & queries["sha256"].any(axis=1)
    index[exact] = first[exact]
    if phash_distance >= 0:
        index[~exact], bits[~exact] = nearest(queries[~exact], references, phash_distance)
    return index, bits


def _split_priority(splits: Sequence[str | None]) -> np.ndarray:
    """Return the priority of each row's split: held-out splits first, training last. The later row is the leak."""
    names = {name or "train" for name in splits}
    order = sorted(names, key=lambda name: (name == "train", name not in HELD_OUT, name))
    return np.array([order.index(name or "train") for name in splits], np.int64)


def shard_order(records_shards: Iterable[Sequence[int]]) -> np.ndarray:
    """Return row numbers in shard order, from the shard of each row of each record in source order."""
    parts, start = [np.zeros(0, np.int64)], 0
    for shards in records_shards:
        numbers = np.empty(len(shards), np.int64)
        numbers[np.argsort(np.asarray(shards, np.int64), kind="stable")] = np.arange(start, start + len(shards))
        parts.append(numbers)
        start += len(shards)
    return np.concatenate(parts)


def leak_records(
    leaks: LeakMatches, own: PreparedSet, numbers: np.ndarray, others: Sequence[PreparedSet]
) -> Iterator[dict[str, Any]]:
    """Return one leaks.jsonl record for each leak; `numbers` [N] are row numbers in `own`."""
    keys = own.keys(numbers[leaks.row])
    names = [""] * len(keys)
    for number in range(SAME_SET, len(others)):
        here = np.flatnonzero(leaks.where == number)
        rows = leaks.match[here]
        found = own.keys(numbers[rows]) if number == SAME_SET else others[number].keys(rows)
        for index, key in zip(here, found, strict=True):
            names[index] = key
    for key, other, where, bits in zip(keys, names, leaks.where.tolist(), leaks.bits.tolist(), strict=True):
        address = None if where == SAME_SET else others[where].storage.address
        yield {"key": key, "set": address, "other": other, "bits": None if bits == EXACT else bits}


def _describe(line: dict[str, Any]) -> str:
    """Return the quarantine detail of a leak."""
    how = "same image as" if line["bits"] is None else f"near-duplicate ({line['bits']} of 256 bits differ) of"
    return f"{how} row {line['other']} of {line['set'] or 'a held-out split of this set'}"


def _write_leaks(
    out: Storage,
    leaks: LeakMatches,
    lines: Sequence[dict[str, Any]],
    own: PreparedSet,
    numbers: np.ndarray,
    others: Sequence[PreparedSet],
) -> None:
    """Write leaks.jsonl; some records have thumbnails of both images, alternating near and exact matches."""
    near, exact = np.flatnonzero(leaks.bits != EXACT), np.flatnonzero(leaks.bits == EXACT)
    turns = chain.from_iterable(zip_longest(near[:MAX_EXAMPLES].tolist(), exact[:MAX_EXAMPLES].tolist()))
    examples = set([number for number in turns if number is not None][:MAX_EXAMPLES])
    with out.open_output(LEAKS) as file, closing(SandboxedDecoder()) as sandbox:
        for number, line in enumerate(lines):
            if number in examples:
                where, match = int(leaks.where[number]), int(leaks.match[number])
                theirs = (own, int(numbers[match])) if where == SAME_SET else (others[where], match)
                both = ((own, int(numbers[leaks.row[number]])), theirs)
                line = line | {"thumbnails": [_thumbnail(rows, row, sandbox) for rows, row in both]}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _thumbnail(rows: PreparedSet, number: int, sandbox: SandboxedDecoder) -> str | None:
    try:
        return encoded_thumbnail(rows.read(np.array([number]))[0].image, sandbox)
    except (OSError, ValueError):
        return None


def _summary(leaks: LeakMatches, settings: Prepare) -> dict[str, Any]:
    """Return the summary for the manifest."""
    exact = int((leaks.bits == EXACT).sum())
    names = (*settings.check_contamination, "splits")
    by_set: Counter[str] = Counter(names[where] for where in leaks.where.tolist())  # SAME_SET is the last index
    return {
        "exact": exact,
        "near": len(leaks.row) - exact,
        "phash_distance": settings.phash_distance,
        "dropped": settings.drop_overlap,
        "found_in": {name: by_set[name] for name in names},
    }


def _hash_sets(sets: Sequence[HashedSet], job: HashJob, on_rows: OnRows, notify: Notify) -> None:
    """Hash the shards without a hash file; delete the hash files of shards that no longer exist."""
    out = Storage(job.out)
    out.mkdir(HASHES_DIR)
    wanted = {job.file(shard): (each, shard) for each in sets for shard in each.shards}
    existing = set(out.listdir(HASHES_DIR))
    for name in existing - wanted.keys():
        out.delete(f"{HASHES_DIR}/{name}")
    todo = [(each, shard) for name, (each, shard) in wanted.items() if name not in existing]
    items = [{"set": asdict(replace(each, shards=())), "shard": asdict(shard)} for each, shard in todo]
    done, total = 0, sum(shard.num_rows for _, shard in todo)
    on_rows(done, total)
    with closing(map_tasks(partial(_hash_task, job=job), items)) as results:
        for result in results:
            if result["crashed"]:
                notify(f"{', '.join(result['crashed'])}: the decoder crashed; only the bytes were compared", "crash")
            done += result["num_rows"]
            on_rows(done, total)


def _hash_task(item: dict[str, Any], job: HashJob) -> Result:
    shard = Shard.from_json(item["shard"])
    rows = HashedSet(**item["set"] | {"shards": [shard]})
    name = f"{rows.address}/{shard.file}"

    def work(sandboxed: bool) -> list[str]:
        with closing(SandboxedDecoder()) as sandbox:
            return hash_shard(rows, job, sandbox if sandboxed else None)

    try:
        crashed = contain_crashes(work, Storage(job.out), f"{HASHES_DIR}/{job.file(shard)}", name)
    except OSError as error:
        raise DataError(f"cannot hash {name}: {error}") from error
    return {"num_rows": shard.num_rows, "crashed": crashed}


def hash_shard(rows: HashedSet, job: HashJob, sandbox: SandboxedDecoder | None = None) -> list[str]:
    """Write the image hashes of a shard; return `key (source)` of the rows whose image crashed the decoder.

    An unreadable row matches nothing. `sandbox` decodes each image in a child process first. Raises OSError.
    """
    (shard,) = rows.shards
    hashes, crashed = np.zeros(shard.num_rows, IMAGE_HASH_DTYPE), []
    for start in range(0, shard.num_rows, _ROWS):
        stop = min(start + _ROWS, shard.num_rows)
        for number, row in enumerate(_read(rows.rows(), np.arange(start, stop)), start):
            if row is None:
                continue
            hashes["sha256"][number] = np.frombuffer(hashlib.sha256(row.image).digest()[:16], "<u8")
            if not job.near:
                continue
            try:
                if sandbox is not None:
                    sandbox.check(row.image, job.max_pixels)
                image = Image.fromarray(decode(row.image, job.max_pixels))
                hashes["phash"][number], hashes["colors"][number] = perceptual_hash(image)
                hashes["has_phash"][number] = True
            except BadImage as bad:  # exact matching still uses its bytes
                if bad.reason == CRASH:
                    crashed.append(f"{row.key} ({row.source})")
    file = io.BytesIO()
    np.save(file, hashes)
    Storage(job.out).write(f"{HASHES_DIR}/{job.file(shard)}", file.getvalue())
    return crashed


def _read(rows: PreparedSet, numbers: np.ndarray) -> list[Row | None]:
    """Read rows by number; None for a row of an index-only set whose image no longer exists.

    Raises OSError if a shard cannot be read, because its rows must not count as compared.
    """
    try:
        return list(rows.read(numbers))
    except BadRow:
        return [None] if len(numbers) == 1 else [row for number in numbers for row in _read(rows, np.array([number]))]
    except ValueError as error:
        raise OSError(str(error)) from error
