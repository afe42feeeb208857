"""The shards of a prepared set as columns of an Arrow file, which the processes of a node share.

A set of 100 million rows has 100 MB of byte offsets. They are memory-mapped, so a node has them in
memory once, and a process reads those of a shard without parsing others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from mmray.data.rows import is_safe_path
from mmray.data.store.cache import node_cache
from mmray.errors import DataError, UsageError
from mmray.storage.paths import AnyPath, open_input, write_atomic

_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        ("split", pa.string()),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("dropped", pa.list_(pa.uint8()), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("labels", pa.list_(pa.int64()), nullable=False),
    ]
)


@dataclass(frozen=True)
class Shard:
    """A file of a prepared set, with rows of one split.

    Attributes:
        file: Path of the file, relative to the folder of the set.
        split: Split of its rows; None: none.
        num_rows: Number of rows in the file.
        num_bytes: Size of the file.
        sha256: Hex digest of the rows, in order.
        dropped: A bit for each row of the file, which is set if the row is not part of the set (a
            duplicate or contaminated); empty if no row is dropped. See `pack_rows`.
        offsets: Byte offset of each Arrow record batch and of the end of the last one.
        labels: Class in the set of each label of the file, because classes are numbered by their
            names in the whole set; empty: they are the same.
    """

    file: str
    split: str | None
    num_rows: int
    num_bytes: int
    sha256: str
    dropped: bytes = b""
    offsets: Sequence[int] | np.ndarray = field(default=(), compare=False)
    labels: tuple[int, ...] = ()

    @property
    def num_kept(self) -> int:
        """Number of rows of the file that are part of the set: all but the dropped ones."""
        return self.num_rows - int.from_bytes(self.dropped).bit_count()

    @property
    def kept(self) -> np.ndarray:
        """Sorted numbers of these rows in the file, int64."""
        return np.flatnonzero(~_unpack_rows(self.dropped, self.num_rows))

    @property
    def key(self) -> str:
        """What identifies its stored rows, also among the shards of other sets."""
        return _shard_key(self.file, self.sha256)


def pack_rows(rows: Sequence[int] | np.ndarray, num_rows: int) -> bytes:
    """Return `Shard.dropped` of a shard with some rows; IndexError if it does not have them."""
    is_dropped = np.zeros(num_rows, bool)
    is_dropped[np.asarray(rows, np.int64)] = True
    return pack_mask(is_dropped)


def pack_mask(is_dropped: np.ndarray) -> bytes:
    """Return `Shard.dropped` of a shard with a bool for each row."""
    return np.packbits(is_dropped).tobytes() if is_dropped.any() else b""


def _unpack_rows(bits: bytes, num_rows: int) -> np.ndarray:
    # `unpackbits` returns random bits for none.
    data = np.frombuffer(bits or bytes(num_rows), np.uint8)
    return np.unpackbits(data, count=num_rows).astype(bool)


def _shard_key(file: str, sha256: str) -> str:
    return f"{PurePosixPath(file).stem}-{sha256[:16]}"


@dataclass(frozen=True)
class MappedFile:
    """Location of a file that the processes of a node map, so that its content is in memory once.

    It is pickled in place of the content.

    Args:
        name: File name in the folder.
        sha256: Hex digest of the content.
    """

    folder: AnyPath
    name: str
    sha256: str
    num_bytes: int

    @classmethod
    def write(cls, folder: AnyPath, name: str, data: Any) -> MappedFile:
        """Write a file whose name, such as `shards-{}.arrow`, has the digest of its content."""
        sha256 = hashlib.sha256(data).hexdigest()
        file = cls(folder, name.format(sha256[:16]), sha256, memoryview(data).nbytes)
        write_atomic(folder / file.name, data)
        return file

    def map(self) -> pa.Buffer:
        """Return the content: of a file on a local disk mapped in its folder, of another one in the
        cache folder of this node.

        Raises:
            DataError: The content has another digest, because the file was changed. A file in a
                local folder is mapped without this check.
        """
        if isinstance(self.folder, Path):
            with open_input(self.folder / self.name, mapped=True) as file:
                return file.read_buffer()
        try:
            return node_cache().get(self.sha256[:32], self.num_bytes, self._fetch)
        except UsageError:  # no temporary folder, so each process has its own copy
            return pa.py_buffer(self._fetch())

    def _fetch(self) -> bytes:
        data = (self.folder / self.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(
                f"{self.folder} was changed, or is damaged: {self.name} differs from the file that "
                "the command read. Rerun the command"
            )
        return data


@dataclass(frozen=True)
class MappedArray:
    """Values of a type in a file, indexed by an array of their numbers; cheap to pickle."""

    file: MappedFile
    dtype: str = "uint32"

    @cached_property
    def _values(self) -> np.ndarray:
        return np.frombuffer(self.file.map(), self.dtype)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return self._values[numbers]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedArray, (self.file, self.dtype)


class ShardTable:
    """The shards of a set in source order; cheap to pickle if the table has a file.

    Iterating yields a Shard for each, with `file`, `split`, `num_rows`, `num_bytes`, `sha256` and
    `dropped`.

    Args:
        data: An Arrow IPC file with one record batch, a row per shard, with the columns `file`,
            `split`, `num_rows`, `num_bytes`, `sha256`, `dropped`, `offsets` and `labels`, which
            earlier versions lack.
        file: Where the data is from, to read it again after unpickling; None: it is pickled.
    """

    def __init__(self, data: pa.Buffer, file: MappedFile | None = None) -> None:
        reader = pa.ipc.open_file(data)
        columns: pa.RecordBatch = reader.get_batch(0)
        if "labels" not in reader.schema.names:
            columns = columns.append_column(
                _SCHEMA.field("labels"), _list_array([[]] * len(columns))
            )
        index = columns.schema.get_field_index("dropped")
        if columns["dropped"].type.value_type == pa.int64():
            packed = map(pack_rows, _List(columns["dropped"]), columns["num_rows"].to_pylist())
            columns = columns.set_column(index, _SCHEMA.field("dropped"), _bits_array([*packed]))
        if not columns.schema.equals(_SCHEMA):
            raise ValueError("the table of shards has other columns")
        self.data = data
        self.file = file
        self._columns = columns
        self.num_rows = np.from_dlpack(self._columns["num_rows"])
        self.num_bytes = np.from_dlpack(self._columns["num_bytes"])
        self._dropped = _List(self._columns["dropped"])
        self._offsets = _List(self._columns["offsets"])
        self._labels = _List(self._columns["labels"])

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is not None:
            return ShardTable.open, (self.file,)
        return ShardTable, (self.data,)

    @classmethod
    def open(cls, file: MappedFile) -> ShardTable:
        """Open the table in a file. Raises DataError."""
        return cls(file.map(), file)

    @classmethod
    def from_shards(cls, shards: Iterable[Shard]) -> ShardTable:
        """Create the table of some shards, in memory and without a file of its own.

        Args:
            shards: The shards in source order, with file name, split, numbers of rows and bytes,
                digest, dropped rows and byte offsets.
        """
        rows = list(shards)
        names = [field.name for field in _SCHEMA if not pa.types.is_list(field.type)]
        columns = [
            pa.array([vars(shard)[name] for shard in rows], _SCHEMA.field(name).type)
            for name in names
        ]
        columns.append(_bits_array([shard.dropped for shard in rows]))
        columns.append(_list_array([shard.offsets for shard in rows]))
        columns.append(_list_array([shard.labels for shard in rows]))
        return cls(_write_table(columns))

    def write(self, folder: AnyPath) -> MappedFile:
        """Write the table to a file of a folder that all nodes can read."""
        return MappedFile.write(folder, "shards-{}.arrow", self.data)

    def with_dropped(self, dropped: Mapping[int, bytes]) -> ShardTable:
        """Return a copy of the table, without a file, in which some shards have other dropped rows.

        Args:
            dropped: `Shard.dropped` by index of the shard.
        """
        lists = [dropped.get(number, bits.tobytes()) for number, bits in enumerate(self._dropped)]
        index = _SCHEMA.get_field_index("dropped")
        columns = [*self._columns.columns]
        columns[index] = _bits_array(lists)
        return ShardTable(_write_table(columns))

    def validate(self) -> None:
        """Raise ValueError for values that a set must not have, because it may be damaged or
        untrusted.

        File names must be inside the folder of the set, and the rows that are marked as dropped
        must exist.
        """
        self._columns.validate(full=True)
        for name in self._columns["file"].to_pylist():
            if not is_safe_path(name):
                raise ValueError(f"the shard {name!r} is outside the folder of the set")
        for number, bits in enumerate(self._dropped):
            rows = int(self.num_rows[number])
            if len(bits) not in (0, -(-rows // 8)) or np.unpackbits(bits)[rows:].any():
                name = self.file_name(number)
                raise ValueError(f"the shard {name!r} drops rows that it does not have")

    def __len__(self) -> int:
        return int(self._columns.num_rows)

    def __iter__(self) -> Iterator[Shard]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Shard:
        return Shard(
            self.file_name(number),
            self._columns["split"][number].as_py(),
            int(self.num_rows[number]),
            int(self.num_bytes[number]),
            self.sha256(number),
            self._dropped[number].tobytes(),
            self.offsets(number),
            tuple(self.labels(number).tolist()),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and self.data.equals(other.data)

    @cached_property
    def num_kept(self) -> np.ndarray:
        """Number of rows of each shard that are part of the set (not dropped), int64 [shards]."""
        dropped = [int.from_bytes(bits).bit_count() for bits in self._dropped]
        return self.num_rows - np.array(dropped, np.int64)

    def of_split(self, split: str | None) -> np.ndarray:
        """Return the sorted indices of the shards of a split, int64; of all shards for None."""
        if split is None:
            return np.arange(len(self))
        return np.flatnonzero([each == split for each in self._columns["split"].to_pylist()])

    def file_name(self, number: int) -> str:
        """Return the path of a shard in the set, such as `shards/00000-train-1f2e3d4c.arrow`."""
        return str(self._columns["file"][number].as_py())

    def key(self, number: int) -> str:
        """Return `Shard.key` of a shard."""
        return _shard_key(self.file_name(number), self.sha256(number))

    def sha256(self, number: int) -> str:
        """Return the hex digest of the rows of a shard, in order."""
        return str(self._columns["sha256"][number].as_py())

    def dropped(self, number: int) -> np.ndarray:
        """Return the sorted numbers of the rows of a shard that are not part of the set, int64."""
        bits = self._dropped[number].tobytes()
        return np.flatnonzero(_unpack_rows(bits, int(self.num_rows[number])))

    def offsets(self, number: int) -> np.ndarray:
        """Return the byte offsets of the record batches of a shard, int64 [batches + 1]."""
        return self._offsets[number]

    def labels(self, number: int) -> np.ndarray:
        """Return `Shard.labels` of a shard, int64."""
        return self._labels[number]

    def fingerprint(self, numbers: np.ndarray) -> str:
        """Return a hex digest of the rows of some shards, in order.

        Args:
            numbers: Indices of the shards in this table, int64 [N].
        """
        digest = hashlib.sha256()
        splits = self._columns["split"].to_pylist()
        for number in numbers.tolist():
            dropped = tuple(self.dropped(number).tolist())
            labels = self.labels(number).tolist() or ""
            digest.update(f"{self.sha256(number)} {splits[number]} {dropped}{labels}\n".encode())
        return digest.hexdigest()


def _write_table(columns: Sequence[pa.Array]) -> pa.Buffer:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_file(stream, _SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
    return stream.getvalue()


class _List:
    """A column of lists of integers, as numpy arrays that share its memory."""

    def __init__(self, column: pa.ListArray) -> None:
        # `to_numpy` imports pandas (0.3 s).
        self._ends = np.from_dlpack(column.offsets)
        self._values = np.from_dlpack(column.values)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self._ends) - 1))

    def __getitem__(self, number: int) -> np.ndarray:
        return self._values[self._ends[number] : self._ends[number + 1]]


def _bits_array(lists: Sequence[bytes]) -> pa.ListArray:
    ends = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), np.frombuffer(b"".join(lists), np.uint8))


def _list_array(lists: Sequence[Sequence[int] | np.ndarray]) -> pa.ListArray:
    ends = np.cumsum([0, *(len(each) for each in lists)]).astype(np.int32)
    values = np.concatenate([np.asarray(each, np.int64) for each in ([], *lists)])
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
