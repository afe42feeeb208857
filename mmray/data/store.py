"""The prepared set: checked rows at rest in Arrow IPC shards, read back one by one in any order.

A shard holds rows of one split in record batches of 8: small enough that a single random row costs one small read,
large enough that the file's index stays short (36,000 rows/s of 66 KB from a mapped file). A set is a folder with
shards and a manifest; which rows there are, and in which order, the manifest alone says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.files import read_picture
from mmray.data.formats.rows import Picture
from mmray.data.manifest import MANIFEST, PARTS, TOKENIZER, Manifest, Shard, fingerprint, read_manifest
from mmray.data.open_shards import OpenShards
from mmray.data.place import Place
from mmray.errors import DataError

BATCH_ROWS = 8
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.binary()), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        ("label", pa.int64()),
        ("split", pa.string()),
        ("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        ("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        ("box_labels", pa.list_(pa.int64())),
        ("refs", pa.list_(pa.struct([("file", pa.string()), ("offset", pa.int64()), ("length", pa.int64())]))),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)


@dataclass
class Row:
    """One sample at rest: encoded images, captions, and where it came from (`file:line`)."""

    key: str
    images: list[bytes]
    texts: list[str]
    label: int | None = None
    split: str | None = None
    language: str | None = None
    source: str = ""
    sha256: str = ""  # of the images as they are kept
    boxes: list[list[float]] | None = None  # of the first image: left, top, right, bottom in fractions of its sides
    box_labels: list[int] | None = None
    refs: list[dict[str, Any]] | None = None  # of a set by reference: file, offset, length in the source's folder
    messages: list[dict[str, str]] | None = None  # a conversation about the image: role and content of each turn

    @property
    def is_intact(self) -> bool:
        """Whether the images are, byte for byte, those that were checked (a damaged JPEG often decodes).

        A reference that was not checked has no checksum, and is taken as it is.
        """
        return (not self.sha256 and self.refs is not None) or self.sha256 == images_sha256(self.images)


def images_sha256(images: list[bytes]) -> str:
    """Hex digest of a row's images; for a single one the same as that of its file."""
    if len(images) == 1:
        return hashlib.sha256(images[0]).hexdigest()
    return hashlib.sha256(b"".join(hashlib.sha256(image).digest() for image in images)).hexdigest()


def key_id(key: str) -> int:
    """A row's key as a signed 64-bit number, the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


class ShardWriter:
    """A shard being written, row by row; its file is there once the `with` block has ended well, and not otherwise."""

    def __init__(self, place: Place, name: str, split: str | None = None) -> None:
        self._place, self._name, self._split = place, name, split
        self._digest, self.num_rows = hashlib.sha256(), 0
        self._batch: list[Row] = []

    def __enter__(self) -> ShardWriter:
        with ExitStack() as files:
            stream = files.enter_context(self._place.writing(self._name))
            self._writer = files.enter_context(pa.ipc.new_file(stream, SCHEMA))
            self._files = files.pop_all()
        return self

    def append(self, row: Row) -> None:
        """Add a row; memory holds at most one record batch."""
        self._batch.append(row)
        self.num_rows += 1
        self._digest.update(
            orjson.dumps(
                [
                    row.key,
                    row.texts,
                    row.label,
                    row.split,
                    row.language,
                    row.sha256,
                    row.boxes,
                    row.box_labels,
                    row.refs,
                    *([row.messages] if row.messages else []),
                ]
            )
        )
        if len(self._batch) == BATCH_ROWS:
            self._flush()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._batch:
            self._flush()
        self._files.__exit__(*error)

    def entry(self) -> Shard:
        """The finished file's line in the manifest."""
        size = self._place.size(self._name) or 0
        return Shard(self._name, self._split, self.num_rows, size, self._digest.hexdigest())

    def _flush(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist([vars(row) for row in self._batch], schema=SCHEMA))
        self._batch.clear()


def write_shard(rows: Iterable[Row], place: Place, name: str, split: str | None = None) -> Shard:
    """Write rows as the file `name` in `place` and return its manifest entry."""
    with ShardWriter(place, name, split) as shard:
        for row in rows:
            shard.append(row)
    return shard.entry()


class PreparedSet:
    """The rows of a prepared set, or of one split of it, numbered from 0 in source order.

    Cheap to pickle: another process gets the manifest as it was read here (so both see the same rows even where the set
    has grown since) and opens shards as it needs them. Threads may share one.
    """

    def __init__(self, place: Place, manifest: Manifest, split: str | None = None) -> None:
        self.place, self.manifest, self.split = place, manifest, split
        self._shards = [shard for shard in manifest.shards if split is None or shard.split == split]
        self._starts = np.concatenate([[0], np.cumsum([shard.num_live for shard in self._shards])]).astype(np.int64)
        self._files = OpenShards(place, SCHEMA)

    @classmethod
    def open(cls, path: str, split: str | None = None) -> PreparedSet:
        """The whole set, or one split; a set without splits answers any split with all of its rows.

        `path` is a folder or a URI. Raises DataError where there is no finished set or no such split.
        """
        place = Place(str(path))
        manifest = read_manifest(place)
        if manifest is None:
            raise DataError(_not_a_set(place))
        if split is None or not manifest.splits:
            return cls(place, manifest)
        if split not in manifest.splits:
            known = ", ".join(f"{name} ({rows:,} rows)" for name, rows in manifest.splits.items())
            raise DataError(f"{path} has no split `{split}`; it has {known}")
        return cls(place, manifest, split)

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
    def tokenizer_json(self) -> str | None:
        """The tokenizer trained on this set's captions, where one was."""
        return self.place.read(TOKENIZER).decode() if self.manifest.tokenizer else None

    def read(self, rows: np.ndarray) -> list[Row]:
        """The rows of these numbers (int64 [N], any order, repeats allowed), in the order asked for.

        Raises IndexError for a number outside the set, OSError or ValueError (naming the shard) where a file is gone or
        damaged.
        """
        out: list[Row | None] = [None] * len(rows)
        for shard, batch, places, inside in self._grouped(np.asarray(rows, np.int64)):
            records = self._files.batch(self._shards[shard].file, batch).take(pa.array(inside))
            for place, record in zip(places, _to_pylist(records, self._shards[shard]), strict=True):
                out[place] = self._with_images(Row(**record))
        return out  # type: ignore[return-value]  # every place belongs to one group

    def _with_images(self, row: Row) -> Row:
        """The row with the images that it only refers to. Raises OSError or ValueError."""
        if row.refs:
            source = Place(self.manifest.source["address"])
            row.images = [read_picture(source, Picture(ref["file"], **ref)) for ref in row.refs]
        return row

    def keys(self, rows: np.ndarray | None = None) -> list[str]:
        """Keys of these rows (of all, in order, without an argument); images are not touched."""
        wanted = np.arange(self.num_rows) if rows is None else np.asarray(rows, np.int64)
        out = [""] * len(wanted)
        for shard, batch, places, inside in self._grouped(wanted):
            keys = self._files.batch(self._shards[shard].file, batch).column("key").take(pa.array(inside)).to_pylist()
            for place, key in zip(places, keys, strict=True):
                out[place] = key
        return out

    def _grouped(self, rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(shard, record batch, places in the answer, rows in the batch), each record batch once."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of a set of {self.num_rows}")
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        within = rows - self._starts[shards]
        for shard in np.unique(shards):
            places = np.flatnonzero(shards == shard)
            physical = self._physical(int(shard), within[places])
            for batch in np.unique(physical // BATCH_ROWS):
                here = physical // BATCH_ROWS == batch
                yield int(shard), int(batch), places[here], physical[here] % BATCH_ROWS

    def _physical(self, shard: int, live: np.ndarray) -> np.ndarray:
        """Row numbers in the file for row numbers among those that count."""
        entry = self._shards[shard]
        return np.delete(np.arange(entry.num_rows), entry.dropped)[live] if entry.dropped else live


def _to_pylist(records: pa.RecordBatch, shard: Shard) -> list[dict[str, Any]]:
    try:
        return list(records.to_pylist())
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{shard.file}: {error}") from None


def _not_a_set(place: Place) -> str:
    if place.names(PARTS):
        return f"{place.address} was not prepared to its end: run the same `mmray prepare` again, it goes on there"
    return f"{place.address} is not a prepared set (it has no {MANIFEST}): run `mmray prepare SOURCE {place.address}`"
