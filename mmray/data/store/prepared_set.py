"""The prepared set: checked rows at rest in Arrow IPC shards, read back one by one in any order.

A shard holds rows of one split in record batches of 8: small enough that a single random row costs one small read,
large enough that the file's index stays short (36,000 rows/s of 66 KB from a mapped file). A set is a folder with
shards and a manifest; which rows there are, and in which order, the manifest alone says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from mmray.data.formats.rows import ImageRef
from mmray.data.images.read import read_images
from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import MANIFEST, PARTS, TOKENIZER, Manifest, Shard, fingerprint, read_manifest
from mmray.data.store.shards import BatchRequest, OpenShards, RemoteShards
from mmray.data.stream.order import MixtureComponent
from mmray.errors import DataError
from mmray.storage.storage import RangeReader, Storage

BATCH_ROWS = 8
ROW_ERRORS = (FileNotFoundError, ValueError)  # any other error of a store says nothing of the row that was asked for
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.binary(), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        ("label", pa.int64()),
        ("split", pa.string()),
        ("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        ("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        ("box_labels", pa.list_(pa.int64())),
        ("ref", pa.struct([("file", pa.string()), ("offset", pa.int64()), ("length", pa.int64())])),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)


T = TypeVar("T")


@dataclass
class Row:
    """One sample at rest: encoded images, captions, and where it came from (`file:line`)."""

    key: str
    image: bytes  # encoded; empty in a set by reference until it is read
    texts: list[str]
    label: int | None = None
    split: str | None = None
    language: str | None = None
    source: str = ""
    sha256: str = ""  # of the images as they are kept
    boxes: list[list[float]] | None = None  # of the first image: left, top, right, bottom in fractions of its sides
    box_labels: list[int] | None = None
    ref: dict[str, Any] | None = None  # of a set by reference: file, offset, length in the source's folder
    messages: list[dict[str, str]] | None = None  # a conversation about the image: role and content of each turn

    @property
    def is_intact(self) -> bool:
        """Whether the images are, byte for byte, those that were checked (a damaged JPEG often decodes).

        A reference that was not checked has no checksum, and is taken as it is.
        """
        return (not self.sha256 and self.ref is not None) or self.sha256 == hashlib.sha256(self.image).hexdigest()


def key_id(key: str) -> int:
    """A row's key as a signed 64-bit number, the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


class _Group(NamedTuple):
    """Rows asked for that are in one record batch: their places in the answer, their numbers in the batch."""

    shard: Shard
    wanted: BatchRequest
    indices: np.ndarray
    inside: np.ndarray


class PreparedSet:
    """The rows of a prepared set, or of one split of it, numbered from 0 in source order.

    Cheap to pickle: another process gets the manifest as it was read here (so both see the same rows even where the set
    has grown since) and opens shards as it needs them. Threads may share one.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        split: str | None = None,
        cache: ShardCache | None = None,
        chunk: int = BATCH_ROWS,
    ) -> None:
        self.storage, self.manifest, self.split = storage, manifest, split
        self._shards = [shard for shard in manifest.shards if split is None or shard.split == split]
        self._starts = np.concatenate([[0], np.cumsum([shard.num_live for shard in self._shards])]).astype(np.int64)
        is_local = storage.local_path is not None
        self._files = OpenShards(storage, SCHEMA) if is_local else RemoteShards(storage, SCHEMA, cache)
        self._chunk = chunk if cache is not None and not is_local else 0

    @classmethod
    def open(cls, path: str, split: str | None = None) -> PreparedSet:
        """The whole set, or one split; a set without splits answers any split with all of its rows.

        `path` is a folder or a URI. Raises DataError where there is no finished set or no such split.
        """
        storage = Storage(str(path))
        manifest = read_manifest(storage)
        if manifest is None:
            raise DataError(_not_a_set(storage))
        if storage.local_path is not None:  # offsets serve range reads only, and are most of a pickled manifest
            manifest = replace(manifest, shards=tuple(replace(shard, batches="") for shard in manifest.shards))
        if split is None or not manifest.splits:
            return cls(storage, manifest)
        if split not in manifest.splits:
            known = ", ".join(f"{name} ({rows:,} rows)" for name, rows in manifest.splits.items())
            raise DataError(f"{path} has no split `{split}`; it has {known}")
        return cls(storage, manifest, split)

    def cached(self, cache: ShardCache, chunk: int) -> PreparedSet:
        """The same set, of which whole chunks of so many rows are kept in `cache` where it is not on a disk."""
        return PreparedSet(self.storage, self.manifest, self.split, cache, chunk)

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards, from which the mean size of a row follows."""
        return sum(shard.num_bytes for shard in self._shards)

    @property
    def splits(self) -> dict[str, int]:
        """Rows of each split of the whole set; empty where no row has one."""
        return self.manifest.splits

    def has_split(self, name: str | None = None) -> bool:
        """Whether the whole set has this split (without a name: has splits at all)."""
        return bool(self.splits) if name is None else name in self.splits

    @property
    def fingerprint(self) -> str:
        """Hex digest of these rows in this order."""
        return fingerprint(self._shards)

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows of the whole set."""
        return frozenset(self.manifest.languages)

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer trained on this set's captions, where one was."""
        return self.storage.read(TOKENIZER).decode() if self.manifest.tokenizer else None

    def read(self, rows: np.ndarray) -> list[Row]:
        """The rows of these numbers (int64 [N], any order, repeats allowed), in the order asked for.

        Raises IndexError for a number outside the set, OSError or ValueError (naming the shard) where a file is gone or
        damaged.
        """
        found = self._each(rows, lambda records, shard: [Row(**each) for each in _to_pylist(records, shard)])
        return self._with_images(found)

    @cached_property
    def _referred(self) -> tuple[Storage, RangeReader]:
        """Where the images of a set by reference are, with the files that blocks before have opened there."""
        return self.image_storage, RangeReader(self.image_storage)

    @property
    def image_storage(self) -> Storage:
        """Where the images of a set by reference are."""
        return Storage(self.manifest.source["address"])

    def _with_images(self, rows: list[Row]) -> list[Row]:
        """The rows with the images that they only refer to. Raises OSError or ValueError."""
        pictures = [ImageRef(ref["file"], **ref) for row in rows if (ref := row.ref)]
        images = iter(read_images(self._referred[0], pictures, self._referred[1]) if pictures else ())
        for row in rows:
            if row.ref:
                row.image = next(images)
        return rows

    def keys(self, rows: np.ndarray | None = None) -> list[str]:
        """Keys of these rows (of all, in order, without an argument); images are not touched."""
        wanted = np.arange(self.num_rows) if rows is None else rows
        return self._each(wanted, lambda records, _: records.column("key").to_pylist(), ["key"])

    def refs(self, rows: np.ndarray) -> list[dict[str, Any] | None]:
        """Where the images are (file, offset, length) that these rows refer to; the images are not touched."""
        return self._each(rows, lambda records, _: records.column("ref").to_pylist(), ["ref"])

    def _each(
        self, rows: np.ndarray, of: Callable[[pa.RecordBatch, Shard], list[T]], columns: list[str] | None = None
    ) -> list[T]:
        """What `of` makes of the records of these rows, in their order."""
        rows = np.asarray(rows, np.int64)
        out: list[Any] = [None] * len(rows)
        groups = list(self._grouped(rows))

        def fill(number: int, records: pa.RecordBatch) -> bool:
            group = groups[number]
            taken = (records.select(columns) if columns else records).take(pa.array(group.inside))
            values = of(taken, group.shard)
            for index, value in zip(group.indices, values, strict=True):
                out[index] = value
            return not self._chunk or all(value.is_intact for value in values if isinstance(value, Row))

        self._files.each([group.wanted for group in groups], fill)
        return out

    def _grouped(self, rows: np.ndarray) -> Iterator[_Group]:
        """The rows by the record batch they are in, each record batch once."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of a set of {self.num_rows}")
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        within = rows - self._starts[shards]
        for shard in np.unique(shards).tolist():
            indices = np.flatnonzero(shards == shard)
            physical = self._physical(shard, within[indices])
            for batch in np.unique(physical // BATCH_ROWS).tolist():
                here = physical // BATCH_ROWS == batch
                keep = self._chunk_of(shard, int(rows[indices[here]].min())) if self._chunk else (batch, batch)
                entry = self._shards[shard]
                yield _Group(entry, BatchRequest(entry, batch, *keep), indices[here], physical[here] % BATCH_ROWS)

    def _chunk_of(self, shard: int, row: int) -> tuple[int, int]:
        """First and last record batch, in this shard, of the chunk that a row is in."""
        first, rows = int(self._starts[shard]), self._shards[shard].num_live
        start = row // self._chunk * self._chunk - first
        ends = np.array([max(start, 0), min(start + self._chunk, rows) - 1])
        begin, end = (self._physical(shard, ends) // BATCH_ROWS).tolist()
        return begin, end

    def _physical(self, shard: int, live: np.ndarray) -> np.ndarray:
        """Row numbers in the file for row numbers among those that count."""
        entry = self._shards[shard]
        return np.delete(np.arange(entry.num_rows), entry.dropped)[live] if entry.dropped else live


def _to_pylist(records: pa.RecordBatch, shard: Shard) -> list[dict[str, Any]]:
    try:
        return list(records.to_pylist())
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{shard.file}: {error}") from None


def _not_a_set(storage: Storage) -> str:
    if storage.listdir(PARTS):
        return f"{storage.address} is not complete: rerun the same `mmray prepare` command to finish it"
    return f"{storage.address} is not a prepared set (no {MANIFEST}): run `mmray prepare SOURCE {storage.address}`"


# Several prepared sets as one: rows numbered through, set after set; which come when, order.py's Plan says.
class PreparedMixture:
    """Prepared sets with the weight of each: an epoch has round(weight x rows) rows of it.

    A row's key is `SET/KEY`, for two sets may use the same keys for other rows. Cheap to pickle, as its sets are.
    """

    def __init__(self, sets: Sequence[PreparedSet], weights: Sequence[float]) -> None:
        self.sets, self.weights = tuple(sets), tuple(weights)
        self.names = _names([each.storage.address for each in sets])
        self._starts = np.cumsum([0, *(each.num_rows for each in sets)])

    @property
    def parts(self) -> tuple[MixtureComponent, ...]:
        """What the order needs to know of each set."""
        return tuple(
            MixtureComponent(each.num_rows, max(1, round(weight * each.num_rows)))
            for each, weight in zip(self.sets, self.weights, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """Rows of all sets."""
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rows of all sets, and of their weights."""
        parts = [(each.fingerprint, weight) for each, weight in zip(self.sets, self.weights, strict=True)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows of all sets."""
        return frozenset[str]().union(*(each.languages for each in self.sets))

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer of the first set that has one."""
        return next((found for each in self.sets if (found := each.tokenizer_json)), None)

    def read(self, rows: np.ndarray) -> list[Row]:
        """The rows of these numbers, in the order asked for. Raises as PreparedSet.read does."""
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of sets of {self.num_rows}")
        out: list[Row | None] = [None] * len(rows)
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(owner).tolist():
            indices = np.flatnonzero(owner == number)
            for index, row in zip(indices, self.sets[number].read(rows[indices] - self._starts[number]), strict=True):
                out[index] = replace(row, key=f"{self.names[number]}/{row.key}")
        return out  # type: ignore[return-value]  # every row has an owner


def _names(addresses: Sequence[str]) -> list[str]:
    """The last part of each address, with a number where two are the same."""
    bases = [PurePosixPath(address.partition("?")[0]).name for address in addresses]
    return [base if bases.count(base) == 1 else f"{base}-{number}" for number, base in enumerate(bases)]
