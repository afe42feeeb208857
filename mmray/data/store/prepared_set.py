"""Prepared sets: validated rows in Arrow IPC shards with random access by row number; and mixtures
of several sets.

The manifest defines the rows of a set, their order, and the byte offsets of the record batches of
each shard, so an object store needs no request for an index. Shards on a local disk are
memory-mapped.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmray.data.images.decode import BadImage
from mmray.data.images.read import read_images
from mmray.data.messages import Message
from mmray.data.rows import ImageRef
from mmray.data.store import older_versions
from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import (
    CHUNK_RECORDS,
    MANIFEST,
    RECORD_BATCH_ROWS,
    SCHEMA_VERSION,
    TOKENIZER,
    Manifest,
    read_manifest,
)
from mmray.data.store.shard_table import Shard, ShardTable
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, RemotePath, list_names, open_input, to_path
from mmray.storage.ranges import RangeReader, coalesce_ranges
from mmray.storage.requests import parallel_map

MAX_OPEN = 256  # memory-mapped shards; each uses a file descriptor
MAGIC_BYTES = 8  # padded magic at the start of an Arrow IPC file
# errors of a row; any other error is a storage failure
ROW_ERRORS = (FileNotFoundError, ValueError)
_REF = pa.struct([("file", pa.string()), ("offset", pa.int64()), ("length", pa.int64())])
_MEDIA = pa.struct(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        ("ref", _REF),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        ("duration", pa.float64()),
        ("rate", pa.float64()),
        ("channels", pa.int32()),
    ]
)
_PART = pa.struct([pa.field("type", pa.string(), nullable=False), ("text", pa.string())])
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(_PART))])
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        ("label", pa.int64()),
        ("split", pa.string()),
        ("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        ("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        ("box_labels", pa.list_(pa.int64())),
        pa.field("media", pa.list_(_MEDIA), nullable=False),
        ("messages", pa.list_(_MESSAGE)),
        ("spans", pa.list_(pa.list_(pa.float64(), 2))),
    ]
)
_SCHEMAS = {SCHEMA_VERSION: SCHEMA, **older_versions.schemas(SCHEMA)}


@dataclass
class Media:
    """An image, audio or video of a row.

    Args:
        kind: `image`, `audio` or `video`.
        data: The encoded bytes. In an index-only set, which refers to the images in its source,
            they are empty until the image is read.
        ref: Index-only set: file, offset and length in the folder of the source.
        sha256: Digest of the bytes; empty if an index-only set was prepared without a check.
        width: Upright size in pixels, 0 if the set was prepared without a check.
        height: As `width`.
        duration: Seconds, of audio and video; None if the set was prepared without a check.
        rate: Samples or frames per second, of audio and video.
        channels: Channels of the sound, of audio and video; 0 for a silent video.
    """

    kind: str
    data: bytes
    ref: dict[str, Any] | None = None
    sha256: str = ""
    width: int = 0
    height: int = 0
    duration: float | None = None
    rate: float | None = None
    channels: int | None = None

    @cached_property
    def checksum_ok(self) -> bool:
        """Whether the bytes have the digest of the image that `prepare` validated.

        A damaged JPEG often decodes, so decoding alone does not show it. True if `prepare` did not
        validate the image. It is computed once, because the cache of a node and the reader of a row
        both read it.
        """
        is_unvalidated = not self.sha256 and self.ref is not None
        return is_unvalidated or self.sha256 == hashlib.sha256(self.data).hexdigest()


@dataclass
class Row:
    """A stored sample: its media, captions or messages, and its location in the source
    (`file:line`).

    Attributes:
        key: Name of the row, unique in the set.
        media: Its images, audio and video.
        texts: Its captions; empty if it has `messages`.
        label: Number of its class; None: none.
        split: Split of the row; None: none.
        language: Language of its captions, such as `de`; None: unknown.
        source: Location in the source, `file:line`.
        boxes: (left, top, right, bottom) of each box in fractions of the image; None: none.
        box_labels: Class number of each box; None: none.
        messages: A conversation; each content part of type `image` takes the next of `media`. None:
            none.
        spans: (start, end) of each text in seconds, None for the whole audio or video; None: no
            text has a span.
    """

    key: str
    media: list[Media]
    texts: list[str]
    label: int | None = None
    split: str | None = None
    language: str | None = None
    source: str = ""
    boxes: list[list[float]] | None = None
    box_labels: list[int] | None = None
    messages: list[Message] | None = None
    spans: list[list[float] | None] | None = None

    @property
    def checksum_ok(self) -> bool:
        """Whether the bytes of all images of this row have the digests of those that `prepare`
        validated.
        """
        return all(media.checksum_ok for media in self.media)

    def with_text(self, number: int) -> Row:
        """Return this row with one of its texts and the span of it; without texts the row itself.

        Args:
            number: Index of the text.
        """
        if not self.texts:
            return self
        spans = None if self.spans is None else [self.spans[number]]
        return replace(self, texts=[self.texts[number]], spans=spans)

    @property
    def image(self) -> bytes:
        """Encoded bytes of the only image, for models that take one image per row.

        Raises:
            BadImage: The row has no image, several, or audio or video.
        """
        others = [media.kind for media in self.media if media.kind in ("audio", "video")]
        if len(self.media) != 1 or others:
            has = " and ".join([f"{len(self.media) - len(others)} images", *others])
            raise BadImage("image-count", f"the row has {has}, not one")
        return self.media[0].data


def _to_row(values: dict[str, Any]) -> Row:
    """Return the row of stored values."""
    if "image" in values:
        values = older_versions.upgrade_3(values)
    return Row(**values | {"media": [Media(**media) for media in values["media"]]})


def hash_key(key: str) -> int:
    """Return the hash of a row key, which is the column `key` of a training batch.

    Args:
        key: Key of the row in its set, such as `shapes-00012`.

    Returns:
        A signed 64-bit integer, the same in every process.
    """
    return int.from_bytes(
        hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True
    )


class ReadRequest(NamedTuple):
    """Rows of one record batch (8 adjacent rows) of a shard that are to be read.

    Attributes:
        shard: Number of the shard in the table of shards.
        batch: Number of the record batch in the shard.
        block: First and last record batch of the block (range of adjacent rows) that a cache
            fetches as one; None without a cache.
        indices: int64 [N], the places of the rows in the result.
        rows_in_batch: int64 [N], the numbers of the rows in the record batch.
    """

    shard: int
    batch: int
    block: tuple[int, int] | None
    indices: np.ndarray
    rows_in_batch: np.ndarray


class Fetch(NamedTuple):
    """A range of bytes of a shard that is read in one request.

    Attributes:
        start: First byte.
        stop: The byte after the last.
        requests: The record batches in the range, with the rows that are wanted.
        is_block: Whether the range is a block (range of adjacent rows) that becomes an entry of the
            cache.
    """

    start: int
    stop: int
    requests: list[ReadRequest]
    is_block: bool


Consumer = Callable[[ReadRequest, pa.RecordBatch], None]


class ShardReader:
    """Reads record batches of the shards in a folder; safe for threads, cheap to pickle.

    On an object store, nearby batches share a request. With a cache, a block (a larger range of
    adjacent rows) is fetched completely once, and kept on the local disk.

    Args:
        folder: Folder of the prepared set.
        table: Its shards, with the byte offsets of their record batches.
        cache: Cache of this node for blocks from an object store; None: none.
        schema: Schema of the shards.
    """

    def __init__(
        self,
        folder: AnyPath,
        table: ShardTable,
        cache: ShardCache | None = None,
        schema: pa.Schema = SCHEMA,
    ) -> None:
        self._folder = folder
        self._table = table
        self._cache = cache
        self._schema = schema
        self._ranges = RangeReader(folder)
        self._lock = threading.Lock()
        self._open_mapped = lru_cache(MAX_OPEN)(partial(_open_mapped, folder, schema))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self._folder, self._table, self._cache, self._schema)

    def for_each_record_batch(
        self,
        requests: Sequence[ReadRequest],
        consume: Consumer,
        whole_blocks: bool = True,
        refresh: bool = False,
    ) -> None:
        """Read record batches and call a function with each.

        Args:
            requests: Record batches to read, in any order, with the rows that are wanted of each.
            consume: Called with a request and its pyarrow.RecordBatch. On an object store several
                threads call it.
            whole_blocks: If the block (range of adjacent rows) of a record batch is not in the
                cache, fetch all of it into the cache; False: read only the record batches of
                `requests`.
            refresh: Fetch blocks again and replace their entries in the cache.

        Raises:
            OSError: A file cannot be read.
            ValueError: A shard is damaged; the message has its name.
        """
        if not isinstance(self._folder, RemotePath):
            for request in requests:
                file = self._table.file_name(request.shard)
                consume(request, self._read_mapped(file, request.batch))
            return
        fetches = list(self._plan(requests, whole_blocks))
        # so that actors that start a window together fetch different blocks of it
        if self._cache is not None:
            random.shuffle(fetches)
        parallel_map(lambda fetch: self._read_fetched(fetch, consume, refresh), fetches)

    def fetch_blocks(self, requests: Sequence[ReadRequest]) -> None:
        """Fetch blocks (ranges of adjacent rows) from the store into the cache on the local disk,
        one after the other; those that are in the cache are not fetched again.

        Args:
            requests: Rows of record batches (8 adjacent rows each). The `block` of each request,
                which contains its record batch, is fetched completely, once if requests share it.

        Raises:
            OSError: A file cannot be read.
            ValueError: A shard is shorter than its table states.
        """
        fetches = list(self._plan(requests, whole_blocks=True))
        random.shuffle(fetches)
        for fetch in fetches:
            self._fetch(fetch)

    def _plan(self, requests: Sequence[ReadRequest], whole_blocks: bool) -> Iterator[Fetch]:
        """Yield fetches of one shard each."""
        groups: dict[tuple[Any, ...], list[ReadRequest]] = {}
        for request in requests:
            groups.setdefault((request.shard, request.block), []).append(request)
        for (shard, block), group in groups.items():
            offsets = self._table.offsets(shard)
            if block is not None:
                start = int(offsets[block[0]])
                stop = int(offsets[block[1] + 1])
                fetch = Fetch(start, stop, group, is_block=True)
                if whole_blocks or self._find(fetch) is not None:
                    yield fetch
                    continue
            for start, stop, indices in coalesce_ranges(
                [(int(offsets[each.batch]), int(offsets[each.batch + 1])) for each in group]
            ):
                yield Fetch(start, stop, [group[index] for index in indices], is_block=False)

    def _find(self, fetch: Fetch) -> pa.Buffer | None:
        """Return a block if it is in the cache."""
        assert self._cache is not None, "only a set with a cache has blocks"
        return self._cache.find(self._entry_name(fetch), fetch.stop - fetch.start)

    def _entry_name(self, fetch: Fetch) -> str:
        shard = fetch.requests[0].shard
        path = self._folder / self._table.file_name(shard)
        size = self._table.num_bytes[shard]
        key = f"{path} {self._table.sha256(shard)} {size} {fetch.start} {fetch.stop}"
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    def _fetch(self, fetch: Fetch, refresh: bool = False) -> pa.Buffer:
        """Return the bytes of a fetch, of a block from the cache."""
        file = self._table.file_name(fetch.requests[0].shard)
        read = partial(self._ranges.read, file, fetch.start, fetch.stop)
        if not fetch.is_block or self._cache is None:
            return pa.py_buffer(read())
        return self._cache.get(self._entry_name(fetch), fetch.stop - fetch.start, read, refresh)

    def _read_fetched(self, fetch: Fetch, consume: Consumer, refresh: bool) -> None:
        data = self._fetch(fetch, refresh)
        shard = fetch.requests[0].shard
        offsets = self._table.offsets(shard) - fetch.start
        for request in fetch.requests:
            message = data[int(offsets[request.batch]) : int(offsets[request.batch + 1])]
            with self._name_damaged_shard(self._table.file_name(shard), request.batch):
                record_batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
                record_batch.validate(full=True)  # damaged offsets would crash the process later
            consume(request, record_batch)

    def _read_mapped(self, file: str, batch: int) -> pa.RecordBatch:
        """Return a record batch of a local shard, without a copy."""
        with self._name_damaged_shard(file, batch):
            with self._lock:
                record_batch = self._open_mapped(file).get_batch(batch)
            record_batch.validate(full=True)
            return record_batch

    @contextmanager
    def _name_damaged_shard(self, file: str, batch: int) -> Iterator[None]:
        """Convert Arrow's errors for damaged bytes to a ValueError with the file name."""
        try:
            yield
        except (OSError, EOFError, pa.ArrowException) as error:
            # Arrow's own OSError for a short file has no errno
            if isinstance(error, OSError) and error.errno:
                raise
            raise ValueError(f"{self._folder / file}, record batch {batch}: {error}") from None


def _open_mapped(folder: AnyPath, schema: pa.Schema, file: str) -> pa.RecordBatchFileReader:
    reader = pa.ipc.open_file(open_input(folder / file, mapped=True))
    if not reader.schema.equals(schema):
        raise pa.ArrowInvalid("it has not the schema of a shard")
    return reader


class PreparedSet:
    """The rows of a prepared set, or of one split of it, numbered from 0 in source order.

    Cheap to pickle. The manifest is pickled with it, so all processes read the same rows even if
    the set grows. Thread-safe.

    Args:
        folder: Folder of the set.
        manifest: Its manifest, from `read_manifest`.
        split: Split whose rows are the set, such as `train`; None: all rows.
        cache: Cache of this node for reads from an object store; None: none.
        shuffle_block: Number of adjacent rows that the cache fetches at once.
    """

    def __init__(
        self,
        folder: AnyPath,
        manifest: Manifest,
        split: str | None = None,
        cache: ShardCache | None = None,
        shuffle_block: int = RECORD_BATCH_ROWS,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.split = split
        shards = manifest.shards
        self._table = shards if isinstance(shards, ShardTable) else ShardTable.from_shards(shards)
        self._numbers = self._table.of_split(split)
        kept = self._table.num_kept[self._numbers]
        self._starts = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
        schema = _SCHEMAS[manifest.schema_version]
        self._shard_reader = ShardReader(folder, self._table, cache, schema)
        is_cached = cache is not None and isinstance(folder, RemotePath)
        self._cached_block_rows = shuffle_block if is_cached else 0
        self._arguments = (folder, manifest, split, cache, shuffle_block)

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedSet, self._arguments

    @classmethod
    def open(cls, path: str, split: str | None = None) -> PreparedSet:
        """Open a prepared set, or a split of it.

        Args:
            path: Folder or URI of the set, such as `s3://bucket/set`.
            split: Split to open, such as `val`; None: all rows. A set without splits is opened
                completely, whatever the split is.

        Raises:
            DataError: The folder is not a complete prepared set, or has no such split.
            UsageError: The address of the set, or that of its source, is invalid.
        """
        folder = to_path(path)
        manifest = read_manifest(folder)
        if manifest is None:
            if list_names(folder / CHUNK_RECORDS):
                raise DataError(
                    f"{path} is not complete: rerun the same `mmray prepare` command to finish it"
                )
            raise DataError(
                f"{path} is not a prepared set (no {MANIFEST}): run `mmray prepare SOURCE {path}`"
            )
        if "address" in manifest.source:
            to_path(str(manifest.source["address"]))  # raises UsageError for an invalid one
        split = split if manifest.splits else None
        if split and split not in manifest.splits:
            known = ", ".join(f"{name} ({rows:,} rows)" for name, rows in manifest.splits.items())
            raise DataError(f"{path} has no split `{split}`; it has {known}")
        return cls(folder, manifest, split)

    def with_cache(self, cache: ShardCache, shuffle_block: int) -> PreparedSet:
        """Return this set with a cache on the local disk for reads from an object store.

        Args:
            cache: The cache; not used if the set is on a local disk.
            shuffle_block: Number of adjacent rows that are fetched at once.
        """
        return PreparedSet(self.folder, self.manifest, self.split, cache, shuffle_block)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards (files) with rows of this set, in order, with their names, sizes and
        digests.
        """
        return tuple(self._table[number] for number in self._numbers.tolist())

    @property
    def num_rows(self) -> int:
        """Number of rows of this set, or of the split that was opened."""
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the files (shards) that have these rows."""
        return int(self._table.num_bytes[self._numbers].sum())

    @property
    def max_pixels(self) -> int:
        """Maximum width x height of an image, as the set was prepared; 0: not recorded."""
        return self.manifest.max_pixels

    @property
    def fingerprint(self) -> str:
        """Hex digest of these rows in this order; sets with the same digest have the same rows."""
        return self._table.fingerprint(self._numbers)

    @property
    def rows_by_num_images(self) -> dict[int, int]:
        """Number of rows by their number of images: {1: 980, 2: 20} if 20 rows have two images."""
        if self.manifest.schema_version == 3:
            return {1: self.num_rows}
        counts = self._of_split(self.manifest.num_images)
        return {int(number): rows for number, rows in counts.items()}

    @property
    def rows_by_media_kinds(self) -> dict[str, int]:
        """Number of rows with audio or video by the kinds of their media: {"audio video": 20}."""
        return self._of_split(self.manifest.media_kinds)

    def _of_split(self, by_split: dict[str, dict[str, int]]) -> dict[str, int]:
        """Return the counts of this split; without one, of all splits together."""
        counts: Counter[str] = Counter()
        for split, values in by_split.items():
            if self.split in (None, split):
                counts.update(values)
        return dict(counts)

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows of the full set, also outside this split, such as `de`."""
        return frozenset(self.manifest.languages)

    @property
    def tokenizer_json(self) -> str | None:
        """Content of the tokenizer.json that was trained on this set's captions; None if there is
        none.
        """
        return (
            (self.folder / TOKENIZER).read_text(encoding="utf-8")
            if self.manifest.tokenizer
            else None
        )

    def read(self, rows: np.ndarray, whole_blocks: bool = True) -> list[Row]:
        """Read rows by their numbers.

        Args:
            rows: Row numbers int64 [N], in any order; duplicates are allowed.
            whole_blocks: If the set has a cache, fetch the complete blocks of these rows into it:
                groups of `shuffle_block` adjacent rows. False: read only rows that are not in it
                from the store.

        Returns:
            The N rows in the order of `rows`, with the bytes of their images; those of an
            index-only set are read from its source.

        Raises:
            IndexError: A number is outside the set.
            OSError: A file is missing or cannot be read.
            ValueError: A shard is damaged; the message has its name. BadRow, a ValueError, for an
                image of an index-only set that cannot be read.
        """
        out: list[Row] = self._read_batches(rows, whole_blocks=whole_blocks)
        with_refs = [(media, media.ref) for row in out for media in row.media if media.ref]
        if with_refs:
            image_refs = [ImageRef(ref["file"], **ref) for _, ref in with_refs]
            images = read_images(self.image_folder, image_refs, self._image_reader)
            for (media, _), image in zip(with_refs, images, strict=True):
                media.data = image
        return out

    def read_without_references(self, rows: np.ndarray) -> list[Row]:
        """Read rows by their numbers, without reading images that the set only refers to.

        The images of an index-only set are in its source; their bytes are then empty.

        Args:
            rows: Row numbers int64 [N], in any order.

        Returns:
            The N rows in this order.

        Raises:
            IndexError: A number is outside the set.
            OSError: A shard cannot be read.
            ValueError: A shard is damaged; the message has its name.
        """
        return self._read_batches(rows)

    @property
    def image_folder(self) -> AnyPath:
        """Folder of the source, which has the images if the set is index-only (refers to its
        images).
        """
        return to_path(self.manifest.source["address"])

    @cached_property
    def _image_reader(self) -> RangeReader:
        return RangeReader(self.image_folder)

    def keys(self, rows: np.ndarray | None = None) -> list[str]:
        """Return the keys (names that are unique in the set) of rows, without reading their images.

        Args:
            rows: Row numbers int64 [N]; None: all rows.

        Returns:
            The N keys in this order, such as `shapes-00012`.
        """
        return self._read_batches(np.arange(self.num_rows) if rows is None else rows, "key")

    def texts(self, rows: np.ndarray) -> list[list[str]]:
        """Return the captions of rows, without reading images that the set only refers to.

        Args:
            rows: Row numbers int64 [N].

        Returns:
            A list of captions for each row, in this order.
        """
        return self._read_batches(rows, "texts")

    def _read_batches(
        self, rows: np.ndarray, column: str | None = None, whole_blocks: bool = True
    ) -> list[Any]:
        """Return these rows, or one column of them, in their order."""
        rows = np.asarray(rows, np.int64)
        out: list[Any] = [None] * len(rows)

        def fill(request: ReadRequest, record_batch: pa.RecordBatch) -> None:
            columns = record_batch if column is None else record_batch.select([column])
            try:
                # `take` would allocate and copy the rows first, which takes four times as long.
                in_batch = request.rows_in_batch.tolist()
                values = [columns.slice(number, 1).to_pylist()[0] for number in in_batch]
            except (UnicodeDecodeError, pa.ArrowException) as error:
                file = self._table.file_name(request.shard)
                raise ValueError(f"{file}: {error}") from None
            for index, value in zip(request.indices, values, strict=True):
                out[index] = _to_row(value) if column is None else value[column]

        requests = list(self._requests(rows))
        try:
            self._shard_reader.for_each_record_batch(requests, fill, whole_blocks)
            is_intact = (
                not self._cached_block_rows
                or column is not None
                or all(row.checksum_ok for row in out)
            )
        except ValueError:
            if not self._cached_block_rows:
                raise
            is_intact = False
        # damaged in the cache or in the store; the caller gets the bytes of the store
        if not is_intact:
            self._shard_reader.for_each_record_batch(requests, fill, refresh=True)
        return out

    def fetch_blocks(self, rows: np.ndarray) -> None:
        """Fetch the blocks (ranges of `shuffle_block` adjacent rows) of rows into the cache on the
        local disk.

        Without effect if the set has no cache.

        Args:
            rows: Row numbers int64 [N], whose blocks are fetched.

        Raises:
            OSError: A file cannot be read.
            ValueError: A shard is shorter than its table states.
        """
        if self.is_cached:
            self._shard_reader.fetch_blocks(list(self._requests(rows)))

    @property
    def is_cached(self) -> bool:
        """Whether reads go through a cache on the local disk."""
        return self._cached_block_rows > 0

    def _requests(self, rows: np.ndarray) -> Iterator[ReadRequest]:
        """Group rows by their record batch."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of a set of {self.num_rows}")
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        places = np.searchsorted(self._starts, rows, side="right") - 1
        file_rows = self._file_rows(places, rows)
        batches = file_rows // RECORD_BATCH_ROWS
        is_first = (np.diff(places, prepend=-1) != 0) | (np.diff(batches, prepend=-1) != 0)
        starts = np.flatnonzero(is_first)
        for start, end in pairwise([*starts.tolist(), len(rows)]):
            shard = int(self._numbers[places[start]])
            block = None
            if self._cached_block_rows:
                block = self._block_of(int(places[start]), int(rows[start]))
            rows_in_batch = file_rows[start:end] % RECORD_BATCH_ROWS
            yield ReadRequest(shard, int(batches[start]), block, order[start:end], rows_in_batch)

    def _block_of(self, place: int, row: int) -> tuple[int, int]:
        """Return the first and last record batch of a shard that have rows of the block of `row`.

        `place` is the index of the shard in this set or split.
        """
        start = row // self._cached_block_rows * self._cached_block_rows
        bounds = np.array([start, start + self._cached_block_rows - 1])
        bounds = bounds.clip(self._starts[place], self._starts[place + 1] - 1)
        first, last = self._file_rows(np.array([place, place]), bounds) // RECORD_BATCH_ROWS
        return int(first), int(last)

    def _file_rows(self, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the row numbers in their shards of rows of the set, int64 [N].

        Dropped rows have a number in the shard, but not in the set.
        """
        in_shards = rows - self._starts[places]
        out = in_shards.copy()
        for place in np.unique(places).tolist():
            dropped = self._table.dropped(int(self._numbers[place]))
            if len(dropped):
                # Rows of the set before each dropped row of the shard.
                kept_before = dropped - np.arange(len(dropped))
                selected = places == place
                out[selected] += np.searchsorted(kept_before, in_shards[selected], side="right")
        return out


class MixtureComponent(NamedTuple):
    """One set of a mixture.

    Attributes:
        num_rows: Number of rows of the set.
        per_epoch: How many of the rows of an epoch are from this set.
    """

    num_rows: int
    per_epoch: int


class PreparedMixture:
    """Several prepared sets with weights as one set.

    Rows are numbered set by set. Keys are `SET/KEY`, because two sets may use the same keys. Cheap
    to pickle.

    Args:
        sets: The sets, in the order of their row numbers.
        weights: For each set, how often an epoch takes each of its rows on average, or its share.
        are_shares: Whether the weights are the proportions of the sets in an epoch.
    """

    def __init__(
        self, sets: Sequence[PreparedSet], weights: Sequence[float], are_shares: bool = False
    ) -> None:
        self.sets = tuple(sets)
        self.weights = tuple(weights)
        self.are_shares = are_shares
        names = [each.folder.name for each in sets]
        self.names = [
            name if names.count(name) == 1 else f"{name}-{number}"
            for number, name in enumerate(names)
        ]
        self._starts = np.cumsum([0, *(each.num_rows for each in sets)])

    @property
    def components(self) -> tuple[MixtureComponent, ...]:
        """The size of each set and its share of an epoch, in the order of `sets`.

        `num_rows` is the number of rows of a set. `per_epoch` is round(weight x num_rows), at least
        1: with weight 2 an epoch takes each row of the set twice. With weight 0.5 it takes half of
        the rows, and the next epoch the other half. With shares an epoch has as many positions as
        all sets have rows, and `per_epoch` is the share of a set in them, at least 1.
        """
        sizes = [each.num_rows for each in self.sets]
        counts = [weight * size for weight, size in zip(self.weights, sizes, strict=True)]
        if self.are_shares:
            counts = [weight * self.num_rows / sum(self.weights) for weight in self.weights]
        return tuple(
            MixtureComponent(size, max(1, round(count)))
            for size, count in zip(sizes, counts, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of all sets, each counted once, whatever the weights are."""
        return int(self._starts[-1])

    @property
    def max_pixels(self) -> int:
        """Largest `max_pixels` of the sets: maximum width x height of an image."""
        return max(each.max_pixels for each in self.sets)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rows and weights of all sets; mixtures with the same digest are the
        same.
        """
        components = [
            (each.fingerprint, weight) for each, weight in zip(self.sets, self.weights, strict=True)
        ]
        kind = " shares" if self.are_shares else ""
        return hashlib.sha256(f"{components!r}{kind}".encode()).hexdigest()

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows of all sets."""
        return frozenset[str]().union(*(each.languages for each in self.sets))

    @property
    def tokenizer_json(self) -> str | None:
        """Content of the tokenizer.json of the first set that has one; None if none has."""
        return next((text for each in self.sets if (text := each.tokenizer_json)), None)

    def read(self, rows: np.ndarray, whole_blocks: bool = True) -> list[Row]:
        """Read rows by their numbers: first those of the first set, then those of the next one.

        Args:
            rows: Row numbers int64 [N], in any order; duplicates are allowed.
            whole_blocks: If a set has a cache, fetch the complete blocks of these rows into it:
                groups of adjacent rows. False: read only rows that are not in it from the store.

        Returns:
            The N rows in the order of `rows`, with the bytes of their images and keys `SET/KEY`.

        Raises:
            IndexError: A number is outside the sets.
            OSError: A file is missing or cannot be read.
            ValueError: A shard is damaged; or (BadRow) an image cannot be read that a set only
                refers to.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of sets of {self.num_rows}")
        out: list[Row | None] = [None] * len(rows)
        for number, indices, in_set in self._by_set(rows):
            for index, row in zip(
                indices, self.sets[number].read(in_set, whole_blocks), strict=True
            ):
                out[index] = replace(row, key=f"{self.names[number]}/{row.key}")
        return out  # type: ignore[return-value]  # every row belongs to a set

    def fetch_blocks(self, rows: np.ndarray) -> None:
        """Fetch the blocks (ranges of adjacent rows) of rows into the caches of the sets that have
        one.

        Args:
            rows: Row numbers int64 [N]: first those of the first set, then those of the next one.

        Raises:
            OSError: A file cannot be read.
            ValueError: A shard is shorter than its table states.
        """
        for number, _, in_set in self._by_set(rows):
            self.sets[number].fetch_blocks(in_set)

    @property
    def is_cached(self) -> bool:
        """Whether reads of at least one set go through a cache on the local disk."""
        return any(each.is_cached for each in self.sets)

    def _by_set(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the number of each set with rows, their indices in `rows`, and their numbers in the
        set.
        """
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(owner).tolist():
            indices = np.flatnonzero(owner == number)
            yield number, indices, rows[indices] - self._starts[number]


def read_each(
    prepared: PreparedSet | PreparedMixture,
    rows: np.ndarray,
    errors: tuple[type[Exception], ...] = ROW_ERRORS,
    whole_blocks: bool = True,
) -> list[Row | Exception]:
    """Read rows by their numbers; a row that cannot be read becomes an error in its place.

    Args:
        prepared: A set or a mixture.
        rows: Row numbers int64 [N].
        errors: Types of errors that belong to a row and are returned; others are raised.
        whole_blocks: If a set has a cache, fetch the complete blocks of these rows into it: groups
            of adjacent rows. False: read only rows that are not in it from the store.

    Returns:
        The row or its error for each of the N numbers, in this order.
    """
    try:
        return list(prepared.read(rows, whole_blocks))
    except errors as error:
        if len(rows) <= 1:
            return [error] * len(rows)
        middle = len(rows) // 2
        halves = (rows[:middle], rows[middle:])
        first, second = (read_each(prepared, half, errors, whole_blocks) for half in halves)
        return first + second
