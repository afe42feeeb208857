"""Contamination check: find rows whose images are also in another prepared set or in another split
of this set.

Exact matches have the same image bytes; near matches have similar perceptual hashes. Between two
splits of one set, the training row counts as contaminated. Hashes of both sets are stored in the
set that is being prepared, so an unchanged shard is hashed once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from PIL import Image

from mmray.data.images.decode import BadImage, decode
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.prepare.assemble import NO_ROW, PackedRows, first_occurrence
from mmray.data.prepare.map_shards import map_shards
from mmray.data.prepare.tasks import run_with_crash_limit
from mmray.data.rows import HELD_OUT_SPLITS, BadRow
from mmray.data.store.manifest import Manifest, shard_fields
from mmray.data.store.mixture import read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_values import COLUMNS_DIR, update_index
from mmray.errors import DataError, UsageError
from mmray.storage.paths import AnyPath, open_output, to_path

if TYPE_CHECKING:
    from mmray.config import Prepare

LEAKS = "leaks.jsonl"
HASHES = "image-hashes"  # column of the hashes of the images of a row, also of other sets
EXACT = -1
PHASH_DISTANCE = 7  # bits of 256: images whose hashes differ in more are different images
MAX_EXAMPLES = 12  # maximum rows with thumbnails
CELLS = 4
# Levels of 255, mean over the cells. JPEG with quality 30 changes them by 2.
MAX_COLOR_DISTANCE = 4.0
_STORED_HASH: list[Any] = [
    ("sha256", "<u8", 2),
    ("phash", "<u8", 4),
    ("colors", "u1", 3 * CELLS * CELLS),
    ("has_phash", "?"),
]
_STORED_HASH_DTYPE = np.dtype(_STORED_HASH)
# `image` is the number in the row.
IMAGE_HASH_DTYPE = np.dtype([*_STORED_HASH, ("row", "<i8"), ("image", "<i4")])
READ_BATCH_ROWS = 64
PAIRS_PER_COMPARISON = 1 << 20


class ContaminatedRow(NamedTuple):
    """A contaminated row, and the row that it matches with one of its images.

    Attributes:
        row: Number of the row in the set that is being prepared, from 0, without its duplicates.
        key: Its key (name).
        image: Index of the matching image in the `media` of the row.
        other: The set that has the other row; the set that is being prepared for another split.
        match: Number of the other row in that set, from 0.
        match_key: Its key.
        match_image: Index of the image in the `media` of the other row.
        hamming_distance: How many of the 256 bits of the perceptual hashes differ; EXACT (-1): the
            images have the same bytes.
    """

    row: int
    key: str
    image: int
    other: PreparedSet
    match: int
    match_key: str
    match_image: int
    hamming_distance: int


def is_enabled(settings: Prepare) -> bool:
    """Return whether the settings request a contamination check (for rows that are also in another
    set or split).

    They do with `check_contamination` or `drop_overlap`.
    """
    return bool(settings.check_contamination) or settings.drop_overlap


def validate(settings: Prepare, out: str) -> None:
    """Check the settings of the contamination check (rows that are also in another set) in advance.

    Args:
        settings: The `prepare` section; `check_contamination` names the sets to compare with.
        out: Address of the set that will be written.

    Raises:
        UsageError: A package is missing, images are not read, or `check_contamination` names `out`
            itself.
        DataError: `check_contamination` names a folder that is not a prepared set, or a set whose
            images were not read.
    """
    if not is_enabled(settings):
        return
    if find_spec("imagehash") is None:
        raise UsageError(
            "--check-contamination and --drop-overlap need the package imagehash: "
            "pip install 'mmray[leakage]'"
        )
    if settings.index_only and settings.check == "none":
        raise UsageError(
            "--check-contamination and --drop-overlap compare images, and --index-only with "
            "--check none does not read them: use --check header"
        )
    for address in settings.check_contamination:
        if to_path(address) == to_path(out):
            raise UsageError(
                f"--check-contamination {address} is the set that is being prepared: "
                "name another one"
            )
        if not PreparedSet.open(address).manifest.has_image_checksums:
            raise DataError(
                f"--check-contamination {address}: this set was prepared with --index-only --check "
                "none, so its images may have changed: prepare it with --check header"
            )


def check_contamination(
    out: AnyPath,
    packed: PackedRows,
    image_folder: str,
    is_duplicate: np.ndarray,
    settings: Prepare,
    on_rows: Callable[[int, int], None],
) -> tuple[dict[int, str], dict[str, Any]]:
    """Find rows whose images are also in another set or split, and write them to leaks.jsonl.

    Args:
        out: Folder of the set that is being prepared.
        packed: Its N rows, with digests, splits and shards.
        image_folder: Folder of the source, which has the images if the set only refers to them
            (index-only).
        is_duplicate: Whether each row is dropped as a duplicate and not compared, bool [N].
        settings: The `prepare` section; `check_contamination` names the sets to compare with.
        on_rows: Called with (done, total): numbers of rows of a set that are hashed so far and that
            are to hash.

    Returns:
        A sentence about each contaminated row, by its number among the N; and the summary for the
        manifest: `exact` and `near` (numbers of rows), `phash_distance` (7, the most of 256 bits in
        which hashes of a near match differ), `dropped` (whether the rows are left out,
        `prepare.drop_overlap`) and `found_in`, the number of rows by address of the other set, and
        by `splits` for other splits of this set.

    Raises:
        DataError: A set cannot be read.
        ResourceError: Tasks die.
    """
    own = PreparedSet(
        out,
        Manifest(
            num_read=len(packed.keys),
            num_quarantined=packed.num_bad,
            reasons={},
            tokenizer=None,
            source={"address": image_folder},
            settings=settings.model_dump(mode="json"),
            **shard_fields(packed.without(is_duplicate)),
        ),
    )
    others = {address: PreparedSet.open(address) for address in settings.check_contamination}
    sets = [own, *others.values()]
    update_index(out, HASHES, {shard.key for prepared in sets for shard in prepared.shards})
    hashes = [_load_hashes(out, prepared, settings.max_pixels, on_rows) for prepared in sets]
    contaminated = _find_contaminated_rows(sets, hashes)
    _write_leaks(out, own, contaminated)
    numbers = packed.by_shard[~is_duplicate[packed.by_shard]]  # by the number of a row in `own`
    names = {id(prepared): address for address, prepared in others.items()}
    by_set = Counter(names.get(id(each.other), "splits") for each in contaminated)
    exact = sum(each.hamming_distance == EXACT for each in contaminated)
    descriptions = {int(numbers[each.row]): _describe(each, own) for each in contaminated}
    return descriptions, {
        "exact": exact,
        "near": len(contaminated) - exact,
        "phash_distance": PHASH_DISTANCE,
        "dropped": settings.drop_overlap,
        "found_in": {name: by_set[name] for name in (*others, "splits")},
    }


def _load_hashes(
    out: AnyPath, prepared: PreparedSet, max_pixels: int, on_rows: Callable[[int, int], None]
) -> np.ndarray:
    """Return the hashes of the images of a set, with the number of their row; 109 bytes each."""
    compute = partial(_hash_rows, out=str(out), max_pixels=max_pixels)
    values = map_shards(prepared, {HASHES: "hashes"}, compute, on_rows, out)
    shards = [shard for shard in prepared.shards if shard.num_kept]
    columns = values.read([shard.key for shard in shards], [HASHES])
    parts = [np.zeros(0, IMAGE_HASH_DTYPE)]
    start = 0
    for shard, column in zip(shards, columns, strict=True):
        kept = np.delete(np.arange(shard.num_rows), shard.dropped)
        of_rows = column[HASHES].take(pa.array(kept))
        counts = of_rows.value_lengths().to_numpy()
        hashes = np.zeros(counts.sum(), IMAGE_HASH_DTYPE)
        if hashes.size:
            stored = np.frombuffer(of_rows.flatten().buffers()[1], _STORED_HASH_DTYPE, len(hashes))
            for name in _STORED_HASH_DTYPE.names or ():
                hashes[name] = stored[name]
        hashes["row"] = start + np.repeat(np.arange(len(kept)), counts)
        hashes["image"] = np.arange(len(hashes)) - np.repeat(np.cumsum(counts) - counts, counts)
        parts.append(hashes)
        start += shard.num_kept
    return np.concatenate(parts)


def _find_contaminated_rows(
    sets: Sequence[PreparedSet], hashes: Sequence[np.ndarray]
) -> list[ContaminatedRow]:
    """Return the rows of the first set with an image that is in another set or in another split.

    A row is reported once, for the first set that has one of its images.

    Args:
        sets: The set that is being prepared, and the others.
        hashes: Digest and perceptual hash of each image of these sets (IMAGE_HASH_DTYPE).
    """
    own = sets[0]
    is_found = np.zeros(own.num_rows, bool)
    # Held-out splits first, training last: the later row counts as contaminated.
    splits = [shard.split or "train" for shard in own.shards]
    names = sorted(
        set(splits), key=lambda name: (name == "train", name not in HELD_OUT_SPLITS, name)
    )
    num_kept = [shard.num_kept for shard in own.shards]
    priority = np.repeat([names.index(name) for name in splits], num_kept)[hashes[0]["row"]]
    # Each search: the set to search in, images to search for, and images to search in.
    searches = [(other, hashes[0], images) for other, images in zip(sets, hashes, strict=True)][1:]
    searches += [
        (own, hashes[0][priority == each], hashes[0][priority < each])
        for each in range(1, len(names))
    ]
    contaminated: list[ContaminatedRow] = []
    for other, queries, references in searches:
        queries = queries[~is_found[queries["row"]]]
        index, distances = _matches(queries, references)
        hits = np.flatnonzero(index != NO_ROW)
        hits = hits[np.unique(queries["row"][hits], return_index=True)[1]]
        hit_queries = queries[hits]
        matches = references[index[hits]]
        is_found[hit_queries["row"]] = True
        contaminated += map(
            ContaminatedRow,
            hit_queries["row"].tolist(),
            own.keys(hit_queries["row"]),
            hit_queries["image"].tolist(),
            repeat(other),
            matches["row"].tolist(),
            other.keys(matches["row"]),
            matches["image"].tolist(),
            distances[hits].tolist(),
        )
    return sorted(contaminated, key=lambda each: each.row)


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
        count: Number of bands, 1 to 256; bit i of a hash is in band i modulo `count`.

    Returns:
        uint64 [count, N], the first up to 64 bits of each band; unused bits are 0.
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
        queries: N records of IMAGE_HASH_DTYPE, a structured dtype with a record per image: `sha256`
            (first 128 bits, uint64 [2]), `phash` (uint64 [4]), `colors` (means of 4 x 4 cells,
            uint8 [48]), `has_phash` (bool, False: only the digest is known), `row` and `image` (its
            number in the row).
        references: Such records to search in.
        max_distance: Maximum Hamming distance in bits.

    Returns:
        Index in `references` and Hamming distance in bits of each query, both int64 [N]; NO_ROW
        (-1) in both for a query without a match.
    """
    query_rows, query_numbers = _distinct(queries)
    reference_rows, _ = _distinct(references)
    query_bands = lsh_bands(queries["phash"][query_rows], max_distance + 1)
    reference_bands = lsh_bands(references["phash"][reference_rows], max_distance + 1)
    # Query, Hamming distance and reference of each match.
    best_matches = [np.zeros((3, 0), np.int64)]
    for query_band, reference_band in zip(query_bands, reference_bands, strict=True):
        for query, candidate in _candidate_pairs(query_band, reference_band):
            left = queries[query_rows[query]]
            right = references[reference_rows[candidate]]
            distance = np.bitwise_count(left["phash"] ^ right["phash"]).sum(axis=1).astype(np.int64)
            colors = np.abs(left["colors"].astype(np.int16) - right["colors"]).mean(axis=1)
            near = (distance <= max_distance) & (colors <= MAX_COLOR_DISTANCE)
            matches = np.stack([query, distance, reference_rows[candidate]])[:, near]
            # Of a thousand similar frames of a video, a million pairs match.
            best_matches.append(_best_matches(matches))
    query, distance, reference = _best_matches(np.concatenate(best_matches, axis=1))
    best = np.full((2, len(query_rows)), NO_ROW, np.int64)
    best[:, query] = [distance, reference]
    out = np.full((2, len(queries)), NO_ROW, np.int64)
    out[:, queries["has_phash"]] = best[:, query_numbers]
    return out[1], out[0]


def _best_matches(matches: np.ndarray) -> np.ndarray:
    """Return the nearest match of each query, and the first reference of equal distances.

    Columns of `matches` int64 [3, P] are query, distance and reference of a pair.
    """
    ordered = matches[:, np.lexsort(matches[::-1])]
    _, first = np.unique(ordered[0], return_index=True)
    return ordered[:, first]


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


def _describe(row: ContaminatedRow, own: PreparedSet) -> str:
    """Return a sentence for the quarantine."""
    how = f"near-duplicate ({row.hamming_distance} of 256 bits differ) of"
    if row.hamming_distance == EXACT:
        how = "same image as"
    place = "another split of this set" if row.other is own else str(row.other.folder)
    return f"{how} row {row.match_key} of {place}"


def _write_leaks(out: AnyPath, own: PreparedSet, contaminated: Sequence[ContaminatedRow]) -> None:
    """Write leaks.jsonl. Some records, of near and of exact matches, have thumbnails of both
    images.
    """
    exact = [each for each in contaminated if each.hamming_distance == EXACT]
    near = [each for each in contaminated if each.hamming_distance != EXACT]
    examples = {each.row for each in [*near[: MAX_EXAMPLES // 2], *exact][:MAX_EXAMPLES]}
    with open_output(out / LEAKS) as file, closing(SubprocessDecoder()) as subprocess_decoder:
        for each in contaminated:
            line: dict[str, Any] = {
                "key": each.key,
                "set": None if each.other is own else str(each.other.folder),
                "other": each.match_key,
                "bits": None if each.hamming_distance == EXACT else each.hamming_distance,
            }
            if each.row in examples:
                line["thumbnails"] = [
                    _thumbnail(own, each.row, each.image, subprocess_decoder),
                    _thumbnail(each.other, each.match, each.match_image, subprocess_decoder),
                ]
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _thumbnail(
    prepared: PreparedSet, row: int, image: int, subprocess_decoder: SubprocessDecoder
) -> str | None:
    """Return a thumbnail of an image of a row; None if it cannot be read."""
    with suppress(OSError, ValueError):
        [stored] = prepared.read(np.array([row]))
        return subprocess_decoder.thumbnail(stored.media[image].data)
    return None


def _hash_image(
    data: bytes, max_pixels: int, subprocess_decoder: SubprocessDecoder | None
) -> bytes:
    """Return the record of an image, of _STORED_HASH_DTYPE; of one that cannot be decoded it has
    only the digest of its bytes, for exact matches.
    """
    [entry] = np.zeros(1, _STORED_HASH_DTYPE)
    entry["sha256"] = np.frombuffer(hashlib.sha256(data).digest()[:16], "<u8")
    with suppress(BadImage):
        if subprocess_decoder is not None:
            subprocess_decoder.check(data, max_pixels)
        image = Image.fromarray(decode(data, max_pixels))
        entry["phash"], entry["colors"] = perceptual_hash(image)
        entry["has_phash"] = True
    return entry.tobytes()


def _hash_rows(prepared: PreparedSet, out: str, max_pixels: int) -> dict[str, pa.Array]:
    """Return the image hashes of the rows of a shard. An unreadable row matches nothing."""
    [shard] = prepared.shards
    name = str(prepared.folder / shard.file)

    def hash_rows(subprocess_decoder: SubprocessDecoder | None) -> dict[str, pa.Array]:
        hashes: list[list[bytes]] = []
        for start in range(0, prepared.num_rows, READ_BATCH_ROWS):
            numbers = np.arange(start, min(start + READ_BATCH_ROWS, prepared.num_rows))
            rows = read_each(prepared, numbers, (BadRow,))
            for row in rows:
                media = () if isinstance(row, Exception) else row.media
                hashes.append(
                    [_hash_image(each.data, max_pixels, subprocess_decoder) for each in media]
                )
        return {HASHES: pa.array(hashes, pa.list_(pa.binary(_STORED_HASH_DTYPE.itemsize)))}

    try:
        return run_with_crash_limit(
            hash_rows, to_path(out), f"{COLUMNS_DIR}/{HASHES}/{shard.key}", name
        )
    except (OSError, ValueError) as error:  # rows of a damaged shard must not count as compared
        raise DataError(f"cannot hash {name}: {error}") from error
