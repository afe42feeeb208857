"""Prepared sets: validated rows in Arrow IPC shards with random access by row number.

The manifest defines the rows of a set, their order, and the byte offsets of the record batches of
each shard, so an object store needs no request for an index. Shards on a local disk are
memory-mapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mmray.data.images.read import read_images
from mmray.data.rows import ImageRef
from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import (
    CHUNK_RECORDS,
    MANIFEST,
    RECORD_BATCH_ROWS,
    TOKENIZER,
    Manifest,
    read_manifest,
)
from mmray.data.store.row_columns import TYPES, column_types
from mmray.data.store.row_values import RowValues
from mmray.data.store.shard_reader import ReadRequest, ShardReader
from mmray.data.store.shard_table import Shard, ShardTable
from mmray.data.store.stored_row import Row, to_row
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, RemotePath, list_names, to_path
from mmray.storage.ranges import RangeReader

UNKNOWN_CLASS = -2  # label of a row whose class a run does not have


@dataclass(eq=False, repr=False)
class PreparedSet:
    """The rows of a prepared set, or of one split of it, numbered from 0 in source order.

    Cheap to pickle. The manifest is pickled with it, so all processes read the same rows even if
    the set grows. Thread-safe.

    `read(numbers)` returns the rows with these numbers, each a Row: `key`, `media` (encoded bytes),
    `texts` or `messages`, `label` and others.

    Args:
        manifest: Its manifest, from `read_manifest`.
        split: Split whose rows are the set, such as `train`; None: all rows.
        cache: Cache of this node for reads from an object store; None: none.
        shuffle_block: Number of adjacent rows that the cache fetches at once.
        captions: Relative frequency, by column of the source, with which training takes its texts;
            texts of other columns are not used. None: all texts, equally often.
        label_numbers: Label that rows get by their class in the set, UNKNOWN_CLASS without an
            entry; negative ones stay. None: the class.

    Attributes:
        table: The shards of the full set.
        shard_numbers: Indices in it of the shards with rows of this set, int64.
    """

    names: ClassVar[Sequence[str]] = ()  # of the sets of a mixture

    folder: AnyPath
    manifest: Manifest
    split: str | None = None
    cache: ShardCache | None = None
    shuffle_block: int = RECORD_BATCH_ROWS
    captions: Mapping[str, float] | None = None
    label_numbers: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        shards = self.manifest.shards
        self.table = shards if isinstance(shards, ShardTable) else ShardTable.from_shards(shards)
        self.shard_numbers = self.table.of_split(self.split)
        kept = self.table.num_kept[self.shard_numbers]
        self._starts = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
        self._shard_reader = ShardReader(self.folder, self.table, self.cache)
        is_cached = self.cache is not None and isinstance(self.folder, RemotePath)
        self._cached_block_rows = self.shuffle_block if is_cached else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedSet, tuple(vars(self)[each.name] for each in fields(self))

    @classmethod
    def open(cls, path: str, split: str | None = None) -> PreparedSet:
        """Open a prepared set, or a split of it.

        Args:
            path: Folder or URI of the set, such as `s3://bucket/set`.
            split: Split to open, such as `val`; None: all rows. A set without splits is opened
                completely, whatever the split is.

        Returns:
            The set, whose `read(numbers)` returns its rows.

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
        """Return this set with a cache, which is not used if the set is on a local disk."""
        return replace(self, cache=cache, shuffle_block=shuffle_block)

    def with_captions(self, weights: Mapping[str, float]) -> PreparedSet:
        """Return this set, whose rows have the texts of some columns of the source only, maybe
        none, and their frequencies as `text_weights`.
        """
        return replace(self, captions=weights)

    def with_label_numbers(self, numbers: Mapping[int, int]) -> PreparedSet:
        """Return this set with a new label for each class; labels without an entry that are
        not negative become UNKNOWN_CLASS.
        """
        return replace(self, label_numbers=numbers)

    def with_shards(self, shards: ShardTable | tuple[Shard, ...]) -> PreparedSet:
        """Return a set that has the rows of other shards in the same folder."""
        return replace(self, manifest=replace(self.manifest, shards=shards))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards with rows of this set, in order, with their names, sizes and digests."""
        return tuple(self.table[number] for number in self.shard_numbers.tolist())

    @property
    def num_rows(self) -> int:
        """Number of rows of this set, or of the split that was opened."""
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the files (shards) that have these rows."""
        return int(self.table.num_bytes[self.shard_numbers].sum())

    @property
    def max_pixels(self) -> int:
        """Maximum width x height of an image, as the set was prepared; 0: not recorded."""
        return self.manifest.max_pixels

    @property
    def fingerprint(self) -> str:
        """Hex digest of these rows in this order; sets with the same digest have the same rows."""
        return self.table.fingerprint(self.shard_numbers)

    @property
    def rows_by_num_images(self) -> dict[int, int]:
        """Number of rows by their number of images: {1: 980, 2: 20} if 20 rows have two images."""
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
        """Read rows by their numbers, int64 [N], in any order and with duplicates.

        Args:
            whole_blocks: If the set has a cache, fetch the complete blocks of these rows into it.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: A shard, or an image of an index-only set, is damaged.
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
        """Read rows as `read`, without the images of an index-only set; their bytes are then
        empty.
        """
        return self._read_batches(rows)

    @cached_property
    def values(self) -> RowValues:
        """The columns of the rows, also of dropped ones."""
        return RowValues(self.folder, self.manifest.columns)

    @property
    def image_folder(self) -> AnyPath:
        """Folder of the source, which has the images if the set is index-only."""
        return to_path(self.manifest.source["address"])

    @cached_property
    def _image_reader(self) -> RangeReader:
        return RangeReader(self.image_folder)

    def keys(self, rows: np.ndarray | None = None) -> list[str]:
        """Return the keys of rows, of all rows without numbers, without reading their images."""
        return self._read_batches(np.arange(self.num_rows) if rows is None else rows, "key")

    def texts(self, rows: np.ndarray) -> list[list[str]]:
        """Return the captions of rows, without reading images that the set only refers to."""
        return self._read_batches(rows, "texts")

    def stored_labels(self, rows: np.ndarray) -> list[int | None]:
        """Return the labels of rows as they are stored, None for a row without one."""
        return self._read_batches(rows, "label")

    def columns(self, rows: np.ndarray, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the columns of rows: those that `prepare --keep` stored, and scores.

        Args:
            rows: Row numbers int64 [N].
            names: Columns to read; None: all but embeddings.

        Returns:
            For each row, in this order, its values by name, embeddings as an array float16; a
            missing value is None.

        Raises:
            DataError: A shard has no such columns, because the set grew after it was scored.
        """
        if names is None:
            types = column_types(self.manifest.columns)
            names = [name for name, kind in types.items() if kind in TYPES]
        out: list[dict[str, Any]] = [{} for _ in rows]
        if not names:
            return out
        of_rows, numbers = self.positions(np.asarray(rows, np.int64))
        shards = np.unique(of_rows).tolist()
        parts = self.values.read([self.table.key(shard) for shard in shards], names)
        for shard, columns in zip(shards, parts, strict=True):
            for index in np.flatnonzero(of_rows == shard).tolist():
                number = int(numbers[index])
                out[index] = {name: _to_value(columns[name][number]) for name in names}
        return out

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
                file = self.table.file_name(request.shard)
                raise ValueError(f"{file}: {error}") from None
            for index, value in zip(request.indices, values, strict=True):
                out[index] = self._to_row(value, request.shard) if column is None else value[column]

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

    def _to_row(self, values: dict[str, Any], shard: int) -> Row:
        row = to_row(values)
        labels = self.table.labels(shard)
        if row.label is not None and 0 <= row.label < len(labels):
            row.label = int(labels[row.label])
        if self.label_numbers is not None and row.label is not None and row.label >= 0:
            row.label = self.label_numbers.get(row.label, UNKNOWN_CLASS)
        return row if self.captions is None else row.with_captions(self.captions)

    def fetch_blocks(self, rows: np.ndarray) -> None:
        """Fetch the blocks of rows into the cache on the local disk, if the set has one. Raises
        OSError, and ValueError for a shard that is shorter than its table states.
        """
        if self.is_cached:
            self._shard_reader.fetch_blocks(list(self._requests(rows)))

    @property
    def is_cached(self) -> bool:
        """Whether reads go through a cache on the local disk."""
        return self._cached_block_rows > 0

    def _requests(self, rows: np.ndarray) -> Iterator[ReadRequest]:
        """Group rows by their record batch."""
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        indices = self._shard_indices(rows)
        file_rows = self._file_rows(indices, rows)
        batches = file_rows // RECORD_BATCH_ROWS
        is_first = (np.diff(indices, prepend=-1) != 0) | (np.diff(batches, prepend=-1) != 0)
        starts = np.flatnonzero(is_first)
        for start, end in pairwise([*starts.tolist(), len(rows)]):
            shard = int(self.shard_numbers[indices[start]])
            block = None
            if self._cached_block_rows:
                block = self._block_of(int(indices[start]), int(rows[start]))
            rows_in_batch = file_rows[start:end] % RECORD_BATCH_ROWS
            yield ReadRequest(shard, int(batches[start]), block, order[start:end], rows_in_batch)

    def _block_of(self, index: int, row: int) -> tuple[int, int]:
        """Return the first and last record batch of a shard that have rows of the block of `row`.

        `index` is the index of the shard in this set or split.
        """
        start = row // self._cached_block_rows * self._cached_block_rows
        bounds = np.array([start, start + self._cached_block_rows - 1])
        bounds = bounds.clip(self._starts[index], self._starts[index + 1] - 1)
        first, last = self._file_rows(np.array([index, index]), bounds) // RECORD_BATCH_ROWS
        return int(first), int(last)

    def positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each row (index in `table`), and the number of the row in it."""
        indices = self._shard_indices(rows)
        return self.shard_numbers[indices], self._file_rows(indices, rows)

    def _shard_indices(self, rows: np.ndarray) -> np.ndarray:
        """Return the index in `shard_numbers` of the shard of each row. Raises IndexError."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of a set of {self.num_rows}")
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _file_rows(self, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the row numbers in their shards of rows of the set, int64 [N].

        Dropped rows have a number in the shard, but not in the set.
        """
        in_shards = rows - self._starts[indices]
        out = in_shards.copy()
        for index in np.unique(indices).tolist():
            dropped = self.table.dropped(int(self.shard_numbers[index]))
            if len(dropped):
                # Rows of the set before each dropped row of the shard.
                kept_before = dropped - np.arange(len(dropped))
                selected = indices == index
                out[selected] += np.searchsorted(kept_before, in_shards[selected], side="right")
        return out


def _to_value(scalar: pa.Scalar) -> Any:
    """Return a value of a column; of a list of embeddings one array."""
    if not scalar.is_valid or not pa.types.is_nested(scalar.type):
        return scalar.as_py()
    values = scalar.values
    while pa.types.is_nested(values.type):
        values = values.flatten()
    return np.from_dlpack(values)
