"""Values of the rows of a set in Arrow files next to the shards: kept columns, scores, embeddings,
token counts, hashes of images.

A file in `columns/FOLDER` has the values of all rows of some shards, also of dropped rows: a record
batch a shard. The metadata of its schema has the keys of the shards and the ranges of their values.
`index.json` repeats them for all files, so a reader opens only the files that it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.store.row_columns import TYPES, Columns
from mmray.errors import DataError
from mmray.storage.paths import (
    AnyPath,
    RemotePath,
    list_names,
    open_input,
    retry_if_remote,
    write_atomic,
)
from mmray.storage.requests import iter_parallel, parallel_map

COLUMNS_DIR = "columns"
_INDEX = "index.json"
_METADATA = b"mmray"
OPEN_FILES = 32  # of a process: mapped, or in memory if the set is on an object store
_MAX_RANGE_TEXT = 64  # characters of a text in a range
# Of a column of a shard the number of missing values, and the lowest and highest other one, if they
# are known.
Range = list[Any]


class _Batch(NamedTuple):
    """The record batch of a shard in a file."""

    file: str
    number: int
    ranges: dict[str, Range]


def write_values(
    folder: AnyPath,
    group: str,
    values: Mapping[str, pa.RecordBatch],
    types: Mapping[str, str | None] | None = None,
) -> str:
    """Write columns of all rows of some shards to a file; return its name.

    Args:
        folder: Folder of the set.
        group: Folder of these columns in `columns/`, such as `kept`.
        values: Columns by key of the shard, with the same schema.
        types: Types in which the columns will be read; their own without.
    """
    ranges = [
        {name: _range(_cast(batch, name, (types or {}).get(name))) for name in batch.schema.names}
        for batch in values.values()
    ]
    metadata = orjson.dumps({"shards": list(values), "ranges": ranges})
    schema = next(iter(values.values())).schema.with_metadata({_METADATA: metadata})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_file(stream, schema) as writer:
        for batch in values.values():
            writer.write_batch(batch)
    data = stream.getvalue().to_pybytes()
    (folder / COLUMNS_DIR / group).mkdir(parents=True, exist_ok=True)
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.arrow"
    write_atomic(folder / COLUMNS_DIR / group / name, data)
    return name


def _range(values: pa.Array) -> Range:
    from pyarrow import compute as pc  # 0.1 s, which processes that write no columns need not spend

    missing = [values.null_count]
    if values.type not in TYPES.values() or values.null_count == len(values):
        return missing
    # NaN is outside every range.
    if pa.types.is_floating(values.type) and not pc.all(pc.is_finite(values)).as_py():
        return missing
    ends = pc.min_max(values).as_py()
    if any(isinstance(end, str) and len(end) > _MAX_RANGE_TEXT for end in ends.values()):
        return missing
    return [*missing, ends["min"], ends["max"]]


def update_index(folder: AnyPath, group: str, keys: Collection[str] | None = None) -> None:
    """Write the index of the files in `columns/GROUP`.

    Args:
        folder: Folder of the set.
        keys: Keys of the shards of the set; files of other shards are deleted. None: none is.
    """
    path = folder / COLUMNS_DIR / group
    index = _read_index(path)
    if keys is not None:
        stale = [file for file, entry in index.items() if not set(keys) & {*entry["shards"]}]
        parallel_map(lambda file: (path / file).unlink(), stale)
        for file in stale:
            del index[file]
    if index:
        write_atomic(path / _INDEX, orjson.dumps(index))


def _read_index(path: AnyPath) -> dict[str, Any]:
    """Return the metadata of each file in a folder of columns, by name of the file."""
    names = list_names(path)
    index: dict[str, Any] = {}
    if _INDEX in names:
        index = orjson.loads((path / _INDEX).read_bytes())
    files = [name for name in names if name.endswith(".arrow")]
    added = [file for file in files if file not in index]
    index.update(zip(added, iter_parallel(partial(_read_metadata, path), added), strict=True))
    return {file: index[file] for file in files}


def _read_metadata(path: AnyPath, file: str) -> Any:
    def read() -> bytes:
        with open_input(path / file, mapped=True) as stream:
            metadata: bytes = pa.ipc.open_file(stream).schema.metadata[_METADATA]
        return metadata

    return orjson.loads(retry_if_remote(path, read))


class RowValues:
    """Reads the columns of the rows of a set.

    Args:
        folder: Folder of the set.
        columns: Type of each column by its name, by folder in `columns/`.
    """

    def __init__(self, folder: AnyPath, columns: Columns) -> None:
        self._folder = folder / COLUMNS_DIR
        self._columns = columns
        self._indices: dict[str, dict[str, _Batch]] = {}

    def _index(self, group: str) -> dict[str, _Batch]:
        if group not in self._indices:
            self._indices[group] = {
                key: _Batch(file, number, ranges)
                for file, entry in _read_index(self._folder / group).items()
                for number, (key, ranges) in enumerate(
                    zip(entry["shards"], entry["ranges"], strict=True)
                )
            }
        return self._indices[group]

    def has(self, key: str) -> bool:
        """Return whether a shard has values of all columns."""
        return all(key in self._index(group) for group in self._columns)

    def num_missing(self, keys: Sequence[str], name: str) -> int:
        """Return the number of rows of some shards that have no value of a column."""
        [group] = self._find(keys, [name])
        return sum(self._index(group)[key].ranges[name][0] for key in keys)

    def ends(self, keys: Sequence[str], name: str) -> tuple[pa.Array, pa.Array]:
        """Return the lowest and the highest value of a column in each of some shards; null in a
        shard with missing values, or if they are not known. Raises DataError.
        """
        [group] = self._find(keys, [name])
        index = self._index(group)
        kind = self._columns[group][name]
        pairs = np.full((2, len(keys)), None)
        for number, key in enumerate(keys):
            missing, *ends = index[key].ranges.get(name, [0])
            # Numbers of a CSV whose column has texts in other shards are no texts there.
            if missing == 0 and ends and isinstance(ends[0], str) == (kind == "string"):
                pairs[:, number] = ends
        lows, highs = (pa.array(each.tolist(), TYPES[kind]) for each in pairs)
        return lows, highs

    def digest(self, names: Sequence[str]) -> str:
        """Return a hash of the content of the files that have some columns."""
        groups = self._find((), names)
        files = [list_names(self._folder / group) for group in groups]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def _find(self, keys: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
        """Return the names by folder. Raises DataError if a shard has no values of them."""
        groups = {
            group: [name for name in names if name in types]
            for group, types in self._columns.items()
            if not types.keys().isdisjoint(names)
        }
        for group, in_group in groups.items():
            if any(key not in self._index(group) for key in keys):
                raise DataError(
                    f"{self._folder / group}: the set has rows without {', '.join(in_group)}: "
                    "rerun the `mmray score` (or `mmray prepare`) command that wrote this column"
                )
        return groups

    def read(self, keys: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, pa.Array]]:
        """Read columns of shards; several files at a time.

        Args:
            keys: Keys of the shards.
            names: Names of columns of the set.

        Yields:
            For each shard a value for each stored row, also for dropped rows, in the type of the
            set; by name in the order of `names`.

        Raises:
            DataError: A shard has no values, because the set grew after they were written.
        """
        groups = self._find(keys, names)

        def files_of(key: str) -> list[str]:
            return [self._index(group)[key].file for group in groups]

        def read_files(keys: list[str]) -> list[dict[str, pa.Array]]:
            parts: list[dict[str, pa.Array]] = [{} for _ in keys]
            for group, in_group in groups.items():
                index = self._index(group)
                reader = pa.ipc.open_file(_read_buffer(self._folder / group / index[keys[0]].file))
                for key, part in zip(keys, parts, strict=True):
                    batch = reader.get_batch(index[key].number)
                    for name in in_group:
                        part[name] = _cast(batch, name, self._columns[group][name])
            return [{name: part[name] for name in names} for part in parts]

        parts = [list(part) for _, part in groupby(keys, files_of)]
        for part in iter_parallel(read_files, parts):
            yield from part


@lru_cache(OPEN_FILES)
def _read_buffer(path: AnyPath) -> pa.Buffer:
    """Return a file of columns, whose name is the hash of its content."""
    if isinstance(path, RemotePath):
        return pa.py_buffer(path.read_bytes())
    with open_input(path, mapped=True) as file:
        return file.read_buffer()


def _cast(batch: pa.RecordBatch, name: str, type_name: str | None) -> pa.Array:
    """Return a column in the type that it has in all shards of the set."""
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, TYPES[str(type_name)])
    if type_name not in TYPES:
        return batch[name]
    return batch[name].cast(TYPES[type_name], safe=False)
