"""Contamination check: find rows whose images are also in another prepared set or in another split
of this set.

Exact matches have the same image bytes; near matches have similar perceptual hashes. Between two
splits of one set, the training row counts as contaminated. Ray tasks hash one shard each. Hash
files are stored in the set that is being prepared and named by the digest of the shard, so an
unchanged shard is hashed once. If an index-only set was prepared without a check, the digest covers
no images. Such a set is hashed each time, and the source is part of the name.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from PIL import Image

from mmray.data.images.decode import BadImage, decode
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.prepare.assemble import NO_ROW, DedupResult, PackedRows, first_occurrence
from mmray.data.prepare.tasks import Result, map_tasks, run_with_crash_limit
from mmray.data.rows import HELD_OUT_SPLITS, BadRow
from mmray.data.store.manifest import Manifest
from mmray.data.store.mixture import read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard
from mmray.errors import DataError, UsageError
from mmray.storage.paths import AnyPath, list_names, open_output, to_path, write_atomic
from mmray.storage.requests import iter_parallel, parallel_map

if TYPE_CHECKING:
    from mmray.config import Prepare

LEAKS = "leaks.jsonl"
HASHES_DIR = "hashes"
SAME_SET = -1
EXACT = -1
PHASH_DISTANCE = 7  # of 256 bits: images whose hashes differ in more are different images
MAX_EXAMPLES = 12  # maximum rows with thumbnails
CELLS = 4
MAX_COLOR_DISTANCE = 4.0  # of 255, mean over the cells; JPEG with quality 30 changes them by 2
IMAGE_HASH_DTYPE = np.dtype(
    [
        ("sha256", "<u8", 2),
        ("phash", "<u8", 4),
        ("colors", "u1", 3 * CELLS * CELLS),
        ("has_phash", "?"),
        ("row", "<i8"),
        ("image", "<i4"),  # number in the row
    ]
)
READ_BATCH_ROWS = 64
PAIRS_PER_COMPARISON = 1 << 20
# a match is differing bits << 48 | row, so that the smallest is the nearest and then the first
_ROW_BITS = 48
_NO_MATCH = np.iinfo(np.int64).max


class ContaminatedRow(NamedTuple):
    """A contaminated row, and the row that it matches with one of its images.

    Attributes:
        row: Number of the row in this set.
        set_index: Index of the other set; SAME_SET: another split of this set.
        match: Number of the matching row in that set.
        hamming_distance: How many of the 256 bits of the perceptual hashes differ; EXACT: the
            images have the same bytes.
        image: Number of the matching image in the row.
        match_image: Number of the image in the other row that it matches.
    """

    row: int
    set_index: int
    match: int
    hamming_distance: int
    image: int
    match_image: int


def is_enabled(settings: Prepare) -> bool:
    """Return whether the settings request a contamination check (rows that are also in another
    set).
    """
    return bool(settings.check_contamination) or settings.drop_overlap


def validate(settings: Prepare, out: str) -> None:
    """Check the settings of the contamination check (rows that are also in another set) in advance.

    Args:
        settings: The `prepare` section; `check_contamination` names the sets to compare with.
        out: Address of the set that will be written.

    Raises:
        UsageError: A package is missing, or `check_contamination` names `out` itself.
        DataError: `check_contamination` names a folder that is not a prepared set.
    """
    if is_enabled(settings) and find_spec("imagehash") is None:
        raise UsageError(
            "--check-contamination and --drop-overlap need the package imagehash: "
            "pip install 'mmray[leakage]'"
        )
    for address in settings.check_contamination:
        if to_path(address) == to_path(out):
            raise UsageError(
                f"--check-contamination {address} is the set that is being prepared: "
                "name another one"
            )
        PreparedSet.open(address)


def check_contamination(
    out: AnyPath,
    packed: PackedRows,
    image_folder: str,
    dedup: DedupResult,
    settings: Prepare,
    on_rows: Callable[[int, int], None],
) -> tuple[dict[int, str], dict[str, Any]]:
    """Find rows whose images are also in another set or split, and write them to leaks.jsonl.

    Args:
        out: Folder of the set that is being prepared.
        packed: Its rows, with digests, splits and shards.
        image_folder: Folder of the source, which has the images if the set only refers to them
            (index-only).
        dedup: Rows that are dropped as duplicates and are not compared.
        settings: The `prepare` section; `check_contamination` names the sets to compare with.
        on_rows: Called with the number of rows hashed so far and the number to hash.

    Returns:
        A description for each contaminated row by its number, and the summary for the manifest:
        `exact` and `near` (numbers of rows), `phash_distance`, `dropped` and `found_in` (number of
        rows by set, and by `splits` for other splits of this set).

    Raises:
        DataError: A set cannot be read.
        ResourceError: Tasks die.
    """
    others = [PreparedSet.open(address) for address in settings.check_contamination]
    shard_row_of = np.argsort(packed.by_shard)  # row in the shards of each row of the source
    checks = {"index_only": settings.index_only, "check": settings.check}
    own = _undeduplicated_set(str(out), image_folder, packed.shards, checks)
    _hash_shards(out, [own, *others], settings, on_rows)
    own_hashes = _load_hashes(out, own)
    own_hashes["row"] = packed.by_shard[own_hashes["row"]]
    own_hashes = own_hashes[np.argsort(own_hashes["row"], kind="stable")]
    other_hashes = [_load_hashes(out, each) for each in others]
    contaminated = find_contaminated_rows(own_hashes, ~dedup.dropped, packed, other_hashes)
    exact = sum(each.hamming_distance == EXACT for each in contaminated)
    names = (*settings.check_contamination, "splits")
    by_set = Counter(names[each.set_index] for each in contaminated)  # SAME_SET is the last index
    return _write_leaks(out, contaminated, shard_row_of, [*others, own]), {
        "exact": exact,
        "near": len(contaminated) - exact,
        "phash_distance": PHASH_DISTANCE,
        "dropped": settings.drop_overlap,
        "found_in": {name: by_set[name] for name in names},
    }


def _undeduplicated_set(
    address: str, image_folder: str, shards: Sequence[Shard], settings: dict[str, Any]
) -> PreparedSet:
    """Return all rows of these shards, including dropped ones."""
    full_shards = tuple(replace(shard, dropped=(), split=None) for shard in shards)
    count = sum(shard.num_rows for shard in full_shards)
    source = {"address": image_folder}
    return PreparedSet(
        to_path(address), Manifest(count, count, 0, {}, {}, "", None, source, settings, full_shards)
    )


def _hash_file(prepared: PreparedSet, shard: Shard) -> str:
    """Return the hash file of a shard of the set, also named by the source if the digest covers no
    images.
    """
    digest = shard.sha256
    if not prepared.manifest.has_image_checksums:
        digest = hashlib.sha256(
            f"{prepared.manifest.source['address']} {digest}".encode()
        ).hexdigest()
    return f"{HASHES_DIR}/{digest[:32]}.npy"


def _load_hashes(out: AnyPath, prepared: PreparedSet) -> np.ndarray:
    """Return the hashes of the images of a set, with the number of their row; 109 bytes each."""

    def load(shard: Shard) -> np.ndarray:
        data = (out / _hash_file(prepared, shard)).read_bytes()
        hashes: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        hashes = hashes[~np.isin(hashes["row"], shard.dropped)]
        hashes["row"] -= np.searchsorted(np.array(shard.dropped, np.int64), hashes["row"])
        return hashes

    parts = [np.zeros(0, IMAGE_HASH_DTYPE)]
    start = 0
    shards = prepared.manifest.shards
    for shard, hashes in zip(shards, iter_parallel(load, shards), strict=True):
        hashes["row"] += start
        start += shard.num_kept
        parts.append(hashes)
    return np.concatenate(parts)


def find_contaminated_rows(
    own: np.ndarray,
    kept: np.ndarray,
    packed: PackedRows,
    others: Sequence[np.ndarray],
) -> list[ContaminatedRow]:
    """Return the rows with an image that is in another set or in another split, in source order.

    A row is reported once, for the first set that contains one of its images.

    Args:
        own: Digest and perceptual hash of each image of the rows (records of IMAGE_HASH_DTYPE), in
            source order.
        kept: Whether each row is compared, bool [N].
        packed: The N rows, of which the split is read.
        others: The same records of the images of each other set.

    Returns:
        For each such row its number, the set or split and the row that it matches, the Hamming
        distance of the perceptual hashes (EXACT if the images have the same bytes), and which of
        their images match.
    """
    is_contaminated = np.zeros(len(kept), bool)
    # Held-out splits first, training last: the later row counts as contaminated.
    splits = [shard.split or "train" for shard in packed.shards]
    names = sorted(
        set(splits), key=lambda name: (name == "train", name not in HELD_OUT_SPLITS, name)
    )
    priority = np.array([names.index(name) for name in splits], np.int64)[packed.shard_of]
    own = own[kept[own["row"]]]
    own_priority = priority[own["row"]]
    # Each search: set index, images to search for, and images to search in.
    searches = [(number, own, hashes) for number, hashes in enumerate(others)]
    searches += [
        (SAME_SET, own[own_priority == each], own[own_priority < each])
        for each in range(1, len(names))
    ]
    contaminated: list[ContaminatedRow] = []
    for set_index, queries, references in searches:
        queries = queries[~is_contaminated[queries["row"]]]
        index, distances = _matches(queries, references)
        hits = np.flatnonzero(index != NO_ROW)
        hits = hits[np.unique(queries["row"][hits], return_index=True)[1]]
        is_contaminated[queries["row"][hits]] = True
        matches = references[index[hits]]
        contaminated += map(
            ContaminatedRow,
            queries["row"][hits].tolist(),
            repeat(set_index),
            matches["row"].tolist(),
            distances[hits].tolist(),
            queries["image"][hits].tolist(),
            matches["image"].tolist(),
        )
    return sorted(contaminated)


def _matches(queries: np.ndarray, references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the matching reference of each query, or NO_ROW, and the Hamming distance (EXACT: same
    bytes).
    """
    index = np.full(len(queries), NO_ROW, np.int64)
    distances = np.full(len(queries), EXACT, np.int64)
    first = first_occurrence(np.concatenate([references["sha256"], queries["sha256"]]))[
        len(references) :
    ]
    exact = (first != NO_ROW) & (first < len(references))
    index[exact] = first[exact]
    near_index, near_distances = nearest(queries[~exact], references, PHASH_DISTANCE)
    index[~exact] = near_index
    distances[~exact] = near_distances
    return index, distances


def perceptual_hash(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of an image that changes little with its size and compression.

    The 256-bit pHash (signs of a discrete cosine transform; Zauner 2010) ignores color, so mean
    colors are added.

    Args:
        image: RGB image of any size.

    Returns:
        pHash uint64 [4], and the mean colors of 4 x 4 cells, uint8 [48].
    """
    import imagehash  # optional dependency, needed only for near-duplicate search

    signs = imagehash.phash(image, hash_size=16).hash.ravel()
    colors = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.uint8).ravel()
    return np.packbits(signs, bitorder="little").view("<u8"), colors


def lsh_bands(hashes: np.ndarray, count: int) -> np.ndarray:
    """Divide hashes into bands of bits, to find candidates of similar hashes (locality-sensitive
    hashing).

    Hashes that differ in fewer than `count` bits have at least one equal band (pigeonhole
    principle).

    Args:
        hashes: 256-bit hashes, uint64 [N, 4].
        count: Number of bands.

    Returns:
        Up to 64 bits of each band, uint64 [count, N].
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1, bitorder="little")
    out = np.zeros((count, len(hashes)), np.uint64)
    for band in range(count):
        packed = np.packbits(bits[:, band::count][:, :64], axis=1)
        out[band] = np.pad(packed, ((0, 0), (0, 8 - packed.shape[1]))).view("<u8")[:, 0]
    return out


def nearest(
    queries: np.ndarray, references: np.ndarray, max_distance: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest reference image of each query image, by perceptual hash.

    A match differs in at most `max_distance` of 256 bits, and in color by at most
    MAX_COLOR_DISTANCE (4 of 255); ties go to the first. The search is exact: with max_distance + 1
    bands, any two such hashes have an equal band. Duplicates are compared once, so a thousand blank
    pages cost as much as one.

    Args:
        queries: N records of IMAGE_HASH_DTYPE (digest and perceptual hash of an image).
        references: Such records to search in.
        max_distance: Maximum Hamming distance in bits.

    Returns:
        Index in `references` and Hamming distance of each query, both int64 [N]; NO_ROW (-1) in
        both for a query without a match.
    """
    index = np.full(len(queries), NO_ROW, np.int64)
    distances = np.full(len(queries), NO_ROW, np.int64)
    (query_rows, group), (reference_rows, _) = _distinct(queries), _distinct(references)
    if not len(query_rows) or not len(reference_rows):
        return index, distances
    best = np.full(len(query_rows), _NO_MATCH, np.int64)
    query_bands = lsh_bands(queries["phash"][query_rows], max_distance + 1)
    reference_bands = lsh_bands(references["phash"][reference_rows], max_distance + 1)
    for query_band, reference_band in zip(query_bands, reference_bands, strict=True):
        for query, candidate in _candidate_pairs(query_band, reference_band):
            left = queries[query_rows[query]]
            right = references[reference_rows[candidate]]
            distance = np.bitwise_count(left["phash"] ^ right["phash"]).sum(axis=1).astype(np.int64)
            colors = np.abs(left["colors"].astype(np.int16) - right["colors"]).mean(axis=1)
            near = (distance <= max_distance) & (colors <= MAX_COLOR_DISTANCE)
            np.minimum.at(
                best, query[near], distance[near] << _ROW_BITS | reference_rows[candidate[near]]
            )
    match = best[group]
    rows = np.flatnonzero(queries["has_phash"])[match != _NO_MATCH]
    match = match[match != _NO_MATCH]
    index[rows] = match & ((1 << _ROW_BITS) - 1)
    distances[rows] = match >> _ROW_BITS
    return index, distances


def _distinct(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first record of each distinct hash, and the hash number of each
    hashed record.
    """
    rows = np.flatnonzero(hashes["has_phash"])
    if not len(rows):
        return rows, rows
    packed = np.concatenate([hashes["phash"][rows].view(np.uint8), hashes["colors"][rows]], axis=1)
    _, first, group = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return rows[first], group.ravel()


def _candidate_pairs(
    queries: np.ndarray, references: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield indices (query [P], reference [P]) of equal numbers, about PAIRS_PER_COMPARISON at a
    time.
    """
    order = np.argsort(references, kind="stable")
    first = np.searchsorted(references[order], queries, "left")
    counts = np.searchsorted(references[order], queries, "right") - first
    ends = np.cumsum(counts)
    start = 0
    while start < len(queries):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + PAIRS_PER_COMPARISON, "right")))
        size = counts[start:stop]
        query = np.repeat(np.arange(start, stop), size)
        within = np.arange(len(query)) - np.repeat(np.cumsum(size) - size, size)
        yield query, order[first[query] + within]
        start = stop


def _write_leaks(
    out: AnyPath,
    contaminated: Sequence[ContaminatedRow],
    shard_row_of: np.ndarray,
    sets: Sequence[PreparedSet],
) -> dict[int, str]:
    """Write leaks.jsonl; return {row: description}. `sets` ends with this set, which has row n at
    `shard_row_of[n]`.

    Some records, of near and of exact matches, have thumbnails of both images.
    """
    rows = shard_row_of[np.array([each.row for each in contaminated], np.int64)]
    matches = np.array([each.match for each in contaminated], np.int64)
    set_of = np.array([each.set_index for each in contaminated], np.int64)
    keys = sets[-1].keys(rows)
    match_keys: dict[int, str] = {}
    matches[set_of == SAME_SET] = shard_row_of[matches[set_of == SAME_SET]]
    for number in np.unique(set_of):
        in_set = np.flatnonzero(set_of == number)
        match_keys.update(zip(in_set.tolist(), sets[number].keys(matches[in_set]), strict=True))
    exact = [number for number, each in enumerate(contaminated) if each.hamming_distance == EXACT]
    near = [number for number, each in enumerate(contaminated) if each.hamming_distance != EXACT]
    examples = set([*near[: MAX_EXAMPLES // 2], *exact][:MAX_EXAMPLES])
    descriptions = {}
    with open_output(out / LEAKS) as file, closing(SubprocessDecoder()) as subprocess_decoder:
        for number, each in enumerate(contaminated):
            other = None if each.set_index == SAME_SET else str(sets[each.set_index].folder)
            bits = None if each.hamming_distance == EXACT else each.hamming_distance
            line: dict[str, Any] = {
                "key": keys[number],
                "set": other,
                "other": match_keys[number],
                "bits": bits,
            }
            how = (
                "same image as"
                if bits is None
                else (f"near-duplicate ({bits} of 256 bits differ) of")
            )
            descriptions[each.row] = (
                f"{how} row {match_keys[number]} of {other or 'another split of this set'}"
            )
            if number in examples:
                line["thumbnails"] = [None, None]
                for index, (prepared, row, image) in enumerate(
                    (
                        (sets[-1], rows, each.image),
                        (sets[each.set_index], matches, each.match_image),
                    )
                ):
                    with suppress(OSError, ValueError):
                        [stored] = prepared.read(row[[number]])
                        data = stored.media[image].data
                        line["thumbnails"][index] = subprocess_decoder.thumbnail(data)
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    return descriptions


def _hash_shards(
    out: AnyPath,
    sets: Sequence[PreparedSet],
    settings: Prepare,
    on_rows: Callable[[int, int], None],
) -> None:
    """Hash the shards without a hash file; delete the hash files of shards that no longer exist."""
    (out / HASHES_DIR).mkdir(parents=True, exist_ok=True)
    wanted = {
        _hash_file(each, shard): (each, shard) for each in sets for shard in each.manifest.shards
    }
    existing = {f"{HASHES_DIR}/{name}" for name in list_names(out / HASHES_DIR)}
    parallel_map(lambda file: (out / file).unlink(), existing - wanted.keys())
    job: dict[str, Any] = {
        "out": str(out),
        "max_pixels": settings.max_pixels,
    }
    items = [
        job
        | {
            "file": file,
            "set": str(each.folder),
            "image_folder": each.manifest.source.get("address") or "",
        }
        | {"shard": asdict(shard)}
        for file, (each, shard) in wanted.items()
        if file not in existing or not each.manifest.has_image_checksums
    ]
    done = 0
    total = sum(item["shard"]["num_rows"] for item in items)
    on_rows(done, total)
    with closing(map_tasks(_hash_task, items)) as results:
        for result in results:
            done += result["num_rows"]
            on_rows(done, total)


def _hash_task(item: dict[str, Any]) -> Result:
    """Ray task: write the image hashes of a shard. An unreadable row matches nothing."""
    shard = Shard.from_json(item["shard"])
    out = to_path(item["out"])
    prepared = _undeduplicated_set(item["set"], item["image_folder"], [shard], {})
    name = str(prepared.folder / shard.file)

    def hash_rows(subprocess_decoder: SubprocessDecoder | None) -> None:
        parts = [np.zeros(0, IMAGE_HASH_DTYPE)]
        for start in range(0, shard.num_rows, READ_BATCH_ROWS):
            numbers = np.arange(start, min(start + READ_BATCH_ROWS, shard.num_rows))
            rows = read_each(prepared, numbers, (BadRow,))
            for number, row in zip(numbers.tolist(), rows, strict=True):
                if isinstance(row, Exception):
                    continue
                hashes = np.zeros(len(row.media), IMAGE_HASH_DTYPE)
                hashes["row"] = number
                hashes["image"] = np.arange(len(row.media))
                for entry, media in zip(hashes, row.media, strict=True):
                    sha256 = hashlib.sha256(media.data).digest()
                    entry["sha256"] = np.frombuffer(sha256[:16], "<u8")
                    with suppress(BadImage):  # exact matching still uses its bytes
                        if subprocess_decoder is not None:
                            subprocess_decoder.check(media.data, item["max_pixels"])
                        image = Image.fromarray(decode(media.data, item["max_pixels"]))
                        entry["phash"], entry["colors"] = perceptual_hash(image)
                        entry["has_phash"] = True
                parts.append(hashes)
        hashes = np.concatenate(parts)
        file = io.BytesIO()
        np.save(file, hashes)
        write_atomic(out / item["file"], file.getvalue())

    try:
        run_with_crash_limit(hash_rows, out, item["file"], name)
    except (OSError, ValueError) as error:  # rows of a damaged shard must not count as compared
        raise DataError(f"cannot hash {name}: {error}") from error
    return {"num_rows": shard.num_rows}
