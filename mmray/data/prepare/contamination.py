"""Contamination check: find rows whose images are also in another prepared set or in another split
of this set.

Exact matches have the same image bytes; near matches have similar perceptual hashes. Between two
splits of one set, the training row counts as contaminated. Hashes of both sets are stored in the
set that is being prepared, so an unchanged shard is hashed once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from PIL import Image

from mmray.data.images.decode import BadImage, decode
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import to_pillow
from mmray.data.prepare.duplicates import NO_ROW
from mmray.data.prepare.map_shards import MAX_FILES, map_shards, row_batches
from mmray.data.prepare.tasks import map_tasks, run_with_crash_limit
from mmray.data.rows import HELD_OUT_SPLITS, BadRow
from mmray.data.store.mixture import read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_values import COLUMNS_DIR, RowValues, update_index
from mmray.data.store.shard_table import Shard
from mmray.errors import DataError, UsageError
from mmray.storage.paths import AnyPath, open_output, to_path

if TYPE_CHECKING:
    from mmray.config import Prepare

LEAKS = "leaks.jsonl"
HASHES = "image-hashes"  # column of the hashes of the images of a row, also of other sets
EXACT = -1
PHASH_DISTANCE = 7  # bits of 256: images whose hashes differ in more are different images
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
IMAGE_HASH_DTYPE = np.dtype([*_STORED_HASH, ("row", "<i8")])
QUERIES_PER_COMPARISON = 64  # of a thousand similar frames of a video, a million pairs match
_NumberedShards = tuple[tuple[Shard, int], ...]  # with the number of the first row of each


class ContaminatedRow(NamedTuple):
    """A contaminated row, and the row that it matches with one of its images.

    Attributes:
        row: Number of the row in the set that is being prepared, without its duplicates.
        other: Number of the set that has the other row; 0: another split of the set that is being
            prepared.
        match: Number of the other row in that set.
        hamming_distance: How many of the 256 bits of the perceptual hashes differ; EXACT (-1): the
            images have the same bytes.
        key: Key of the row.
        match_key: Key of the other row.
    """

    row: int
    other: int
    match: int
    hamming_distance: int
    key: str
    match_key: str


def is_enabled(settings: Prepare) -> bool:
    """Return whether the settings request a contamination check."""
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
    if not is_enabled(settings):
        return
    if find_spec("imagehash") is None or find_spec("faiss") is None:
        raise UsageError(
            "--check-contamination and --drop-overlap need the packages imagehash and faiss: "
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
    own: PreparedSet, settings: Prepare, on_rows: Callable[[int, int], None]
) -> tuple[dict[int, str], dict[str, Any]]:
    """Find rows whose images are also in another set or split, and write them to leaks.jsonl.

    Args:
        own: The set that is being prepared, without its duplicates.
        settings: The `prepare` section; `check_contamination` names the sets to compare with.
        on_rows: Called with (done, total): numbers of rows of a set that are hashed so far and that
            are to hash.

    Returns:
        A sentence about each contaminated row, by its number in `own`; and the summary for the
        manifest: `exact` and `near` (numbers of rows), `phash_distance` (7, the most of 256 bits in
        which hashes of a near match differ), `dropped` (whether the rows are left out,
        `prepare.drop_overlap`) and `found_in`, the number of rows by address of the other set, and
        by `splits` for other splits of this set.

    Raises:
        DataError: A set cannot be read.
        ResourceError: Tasks die.
    """
    out = own.folder
    sets = [own, *map(PreparedSet.open, settings.check_contamination)]
    names = ["splits", *settings.check_contamination]
    update_index(out, HASHES, {shard.key for prepared in sets for shard in prepared.shards})
    compute = partial(_hash_rows, out=out, max_pixels=settings.max_pixels)
    for prepared in sets:
        values = map_shards(prepared, {HASHES: "hashes"}, compute, on_rows, out)
    contaminated = _find_contaminated_rows(values, sets)
    _write_leaks(out, sets, contaminated)
    by_set = Counter(names[each.other] for each in contaminated)
    exact = sum(each.hamming_distance == EXACT for each in contaminated)
    descriptions = {each.row: _describe(each, sets) for each in contaminated}
    return descriptions, {
        "exact": exact,
        "near": len(contaminated) - exact,
        "phash_distance": PHASH_DISTANCE,
        "dropped": settings.drop_overlap,
        "found_in": {name: by_set[name] for name in (*names[1:], "splits")},
    }


def _find_contaminated_rows(
    values: RowValues, sets: Sequence[PreparedSet]
) -> list[ContaminatedRow]:
    """Return the rows of the first set with an image that is in another set or in another split.

    A row is reported once, for the first set that has one of its images. Tasks search for the rows
    of a shard each, so only rows that are found come back.

    Args:
        values: The hashes of the images of these sets.
        sets: The set that is being prepared, and the others.
    """
    numbered = [_with_first_rows(prepared) for prepared in sets]
    # Held-out splits first, training last: the later row counts as contaminated.
    names = sorted(
        {_split(shard) for shard in sets[0].shards},
        key=lambda name: (name == "train", name not in HELD_OUT_SPLITS, name),
    )
    references = {}
    for place, name in enumerate(names):
        earlier = tuple(each for each in numbered[0] if _split(each[0]) in names[:place])
        references[name] = [*enumerate(numbered[1:], 1), (0, earlier)]
    work = partial(_search_task, values=values, references=references, max_distance=PHASH_DISTANCE)
    size = max(1, -(-len(numbered[0]) // MAX_FILES))
    items = [numbered[0][start : start + size] for start in range(0, len(numbered[0]), size)]
    with closing(map_tasks(work, items)) as results:
        hits = np.concatenate([np.zeros((0, 4), np.int64), *results])
    hits = hits[np.argsort(hits[:, 0])]
    match_keys = np.empty(len(hits), object)
    for number, prepared in enumerate(sets):
        is_in_set = hits[:, 1] == number
        match_keys[is_in_set] = prepared.keys(hits[is_in_set, 2])
    keys = sets[0].keys(hits[:, 0])
    return [
        ContaminatedRow._make([*hit, key, match_key])
        for hit, key, match_key in zip(hits.tolist(), keys, match_keys, strict=True)
    ]


def _split(shard: Shard) -> str:
    return shard.split or "train"


def _with_first_rows(prepared: PreparedSet) -> _NumberedShards:
    shards = [shard for shard in prepared.shards if shard.num_kept]
    ends = accumulate(shard.num_kept for shard in shards)
    return tuple((shard, end - shard.num_kept) for shard, end in zip(shards, ends, strict=True))


# Indices of this process, by the images in them and the distance.
_INDICES: dict[tuple[_NumberedShards, int], ImageIndex] = {}


def _search_task(
    shards: _NumberedShards,
    values: RowValues,
    references: dict[str, list[tuple[int, _NumberedShards]]],
    max_distance: int,
) -> np.ndarray:
    """Ray task: search for the images of some shards in other sets and splits.

    Args:
        shards: The shards, with the number of the first row of each.
        references: By split of a shard, the number of each set to search in, and its shards.

    Returns:
        int64 [hits, 4]: row, number of the set, row in it, Hamming distance.
    """
    hits = [np.zeros((0, 4), np.int64)]
    for (shard, _), queries in zip(shards, _read_hashes(values, shards), strict=True):
        for number, others in references[_split(shard)]:
            key = (others, max_distance)
            if key not in _INDICES:
                parts = _read_hashes(values, others)
                images = np.concatenate([np.zeros(0, IMAGE_HASH_DTYPE), *parts])
                _INDICES[key] = ImageIndex(images, max_distance)
            index = _INDICES[key]
            match, distances = index.search(queries)
            found = np.flatnonzero(match != NO_ROW)
            found = found[np.unique(queries["row"][found], return_index=True)[1]]
            rows = queries["row"][found]
            matched_rows = index.images["row"][match[found]]
            fields = [rows, np.full(len(rows), number), matched_rows, distances[found]]
            hits.append(np.stack(fields, axis=1))
            queries = queries[~np.isin(queries["row"], rows)]
    return np.concatenate(hits)


def _read_hashes(
    values: RowValues, shards: Sequence[tuple[Shard, int]]
) -> Generator[np.ndarray, None, None]:
    """Yield the hashes of the images of each shard (IMAGE_HASH_DTYPE, 105 bytes an image).

    Args:
        shards: The shards, with the number of the first row of each.
    """
    columns = values.read([shard.key for shard, _ in shards], [HASHES])
    for (shard, first_row), column in zip(shards, columns, strict=True):
        of_rows = column[HASHES].take(pa.array(shard.kept))
        counts = of_rows.value_lengths().to_numpy()
        hashes = np.zeros(counts.sum(), IMAGE_HASH_DTYPE)
        if hashes.size:
            stored = np.frombuffer(of_rows.flatten().buffers()[1], _STORED_HASH_DTYPE, len(hashes))
            hashes[[*(_STORED_HASH_DTYPE.names or ())]] = stored
        hashes["row"] = first_row + np.repeat(np.arange(len(of_rows)), counts)
        yield hashes


class ImageIndex:
    """Finds images with the same bytes or similar perceptual hashes.

    A near match differs in at most `max_distance` of 256 bits, and in color by at most
    MAX_COLOR_DISTANCE (4 of 255). The search is exact: with max_distance + 1 bands of bits, two
    such hashes have an equal band. Equal images are compared once, so a thousand blank pages cost
    as much as one.

    Args:
        images: Records of IMAGE_HASH_DTYPE to search in.
        max_distance: Maximum Hamming distance in bits.
    """

    def __init__(self, images: np.ndarray, max_distance: int) -> None:
        import faiss  # optional dependency

        self.images = images
        self._max_distance = max_distance
        self._digests, self._first = np.unique(_digests(images), return_index=True)
        hashed = np.flatnonzero(images["has_phash"])
        phashes = _phash_bytes(images[hashed])
        packed = np.concatenate([phashes, images["colors"][hashed]], axis=1)
        first = np.unique(packed, axis=0, return_index=True)[1]
        self._hashed = hashed[first]
        num_bands = max_distance + 1
        self._index = faiss.IndexBinaryMultiHash(256, num_bands, 256 // num_bands)
        self._index.add(phashes[first])

    def search(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first image with the same bytes, otherwise the nearest one, of each query.

        Args:
            queries: N records of IMAGE_HASH_DTYPE.

        Returns:
            Index in `images` and Hamming distance in bits (EXACT: same bytes), both int64 [N];
            NO_ROW (-1) and EXACT for a query without a match. Ties go to the first image.
        """
        index = np.full(len(queries), NO_ROW, np.int64)
        distances = np.full(len(queries), EXACT, np.int64)
        if not len(self.images):
            return index, distances
        digests = _digests(queries)
        position = np.searchsorted(self._digests, digests)
        position = np.minimum(position, len(self._digests) - 1)
        exact = self._digests[position] == digests
        index[exact] = self._first[position[exact]]
        near = np.flatnonzero(~exact & queries["has_phash"])
        for start in range(0, len(near), QUERIES_PER_COMPARISON):
            chosen = near[start : start + QUERIES_PER_COMPARISON]
            query, image, bits = self._near_matches(queries[chosen])
            index[chosen[query]] = image
            distances[chosen[query]] = bits
        return index, distances

    def _near_matches(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queries that have a near match, its index in `images` and its distance."""
        limits, bits, found = self._index.range_search(
            _phash_bytes(queries), self._max_distance + 1
        )
        sizes: np.ndarray = np.diff(limits).astype(np.int64)
        query = np.repeat(np.arange(len(queries)), sizes)
        image = self._hashed[found]
        colors = self.images["colors"][image].astype(np.int16) - queries["colors"][query]
        is_near = np.abs(colors).mean(axis=1) <= MAX_COLOR_DISTANCE
        order = np.lexsort((image, bits, query))
        order = order[is_near[order]]
        best = order[np.unique(query[order], return_index=True)[1]]
        return query[best], image[best], bits[best]


def _digests(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images["sha256"]).view("S16")[:, 0]


def _phash_bytes(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images["phash"]).view(np.uint8)


def perceptual_hash(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return pHash uint64 [4] (Zauner 2010) and mean colors of 4 x 4 cells uint8 [48] of an image.

    pHash ignores colors. Both change little with the size and compression of an image.
    """
    import imagehash  # optional dependency, needed only for near-duplicate search

    signs = imagehash.phash(image, hash_size=16).hash.ravel()
    colors = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.uint8).ravel()
    return np.packbits(signs, bitorder="little").view("<u8"), colors


def _describe(row: ContaminatedRow, sets: Sequence[PreparedSet]) -> str:
    """Return a sentence for the quarantine."""
    how = f"near-duplicate ({row.hamming_distance} of 256 bits differ) of"
    if row.hamming_distance == EXACT:
        how = "same image as"
    place = sets[row.other].folder if row.other else "another split of this set"
    return f"{how} row {row.match_key} of {place}"


def _write_leaks(
    out: AnyPath, sets: Sequence[PreparedSet], contaminated: Sequence[ContaminatedRow]
) -> None:
    with open_output(out / LEAKS) as file:
        for each in contaminated:
            line = {
                "key": each.key,
                "set": str(sets[each.other].folder) if each.other else None,
                "other": each.match_key,
                "bits": None if each.hamming_distance == EXACT else each.hamming_distance,
            }
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


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
        image = to_pillow(decode(data, max_pixels))
        entry["phash"], entry["colors"] = perceptual_hash(image)
        entry["has_phash"] = True
    return entry.tobytes()


def _hash_rows(prepared: PreparedSet, out: AnyPath, max_pixels: int) -> dict[str, pa.Array]:
    """Return the image hashes of the rows of a shard. An unreadable row matches nothing."""
    [shard] = prepared.shards
    name = str(prepared.folder / shard.file)

    def hash_rows(subprocess_decoder: SubprocessDecoder | None) -> dict[str, pa.Array]:
        hashes: list[list[bytes]] = []
        for numbers in row_batches(prepared):
            for row in read_each(prepared, numbers, (BadRow,)):
                media = () if isinstance(row, Exception) else row.media
                hashes.append(
                    [_hash_image(each.data, max_pixels, subprocess_decoder) for each in media]
                )
        return {HASHES: pa.array(hashes, pa.list_(pa.binary(_STORED_HASH_DTYPE.itemsize)))}

    try:
        return run_with_crash_limit(hash_rows, out, f"{COLUMNS_DIR}/{HASHES}/{shard.key}", name)
    except (OSError, ValueError) as error:  # rows of a damaged shard must not count as compared
        raise DataError(f"cannot hash {name}: {error}") from error
