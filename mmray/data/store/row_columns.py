"""Columns of rows in files next to the shards: columns of the source that `prepare --keep` stores,
and scores.

A file has a value for each row of its shard, also for dropped rows. It has no images, so a
selection of rows by their columns reads little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from mmray.errors import DataError
from mmray.storage.paths import AnyPath, open_input, open_output

COLUMNS_DIR = "columns"
KEPT = "kept"  # folder of the columns of the source
TYPES = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
}
_NAMES = {bool: "bool", int: "int64", float: "double", str: "string"}
# Type of a column with integers above 2^53 until all types are merged; a double would round them.
LARGE = "large int64"
_MAX_EXACT = 2**53
# Numbers in the fields of a CSV; with leading zeros they are codes, which stay texts.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?")

Columns = dict[str, dict[str, str]]  # type of each column by its name, by folder


def column_file(folder: str, shard_file: str) -> str:
    """Return the path of the Arrow file with columns of the rows of a shard, relative to the folder
    of the set: `columns/FOLDER/NAME.arrow`.
    """
    return f"{COLUMNS_DIR}/{folder}/{PurePosixPath(shard_file).stem}.arrow"


def caption_flag(name: str) -> str:
    """Return the name of the kept column that is true for rows with captions of a text column."""
    return "has_caption_" + re.sub(r"\W", "_", name)


def value_type(value: Any, is_field: bool = False) -> str:
    """Return the type in which a value of the source is stored: `bool`, `int64` (LARGE if over
    2^53), `double` or `string`.

    Args:
        value: The value, not None: a bool, int, float or str of Python or numpy.
        is_field: Whether it is a field of a CSV, a text that may be a number or a boolean.

    Raises:
        ValueError: It is no boolean, number or text, or an integer of more than 64 bits; the
            message names its type.
    """
    name = _NAMES.get(type(value))
    if name is None:
        raise ValueError(f"a value of type {type(value).__name__}")
    if name == "int64":
        return _integer_type(value)
    if not is_field or name != "string":
        return name
    if is_integer(value):
        try:
            return _integer_type(int(value))
        except ValueError:  # also one with more digits than Python converts
            return "string"
    if _FLOAT.fullmatch(value) and any(map(str.isdigit, value)):
        return "double"
    return "bool" if value.lower() in ("true", "false") else "string"


def is_integer(text: str) -> bool:
    """Return whether a text is an integer in plain notation: `0` and `-12`, but not `00` or `1.0`,
    which may be codes.
    """
    return _INTEGER.fullmatch(text) is not None


def _integer_type(value: int) -> str:
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"the integer {value}, of more than 64 bits: write it as a text")
    return "int64" if abs(value) <= _MAX_EXACT else LARGE


def common_type(first: str | None, second: str | None, are_fields: bool = False) -> str | None:
    """Return the type of a column with values of two types.

    Args:
        first: What `value_type` returns; None: all values are missing.

    Returns:
        The type that stores both exactly, such as `double` for `int64` and `double`; None if both
        are None.

    Raises:
        ValueError: No type can store the values of both.
    """
    types = {first, second} - {None}
    if len(types) < 2:
        return next(iter(types), None)
    if types == {"int64", LARGE}:
        return LARGE
    if types == {"int64", "double"}:
        return "double"
    if are_fields:
        return "string"
    raise ValueError(" and ".join(sorted(map(str, types))))


def write_columns(folder: AnyPath, name: str, shard_file: str, columns: pa.RecordBatch) -> None:
    """Write columns of all rows of a shard; the file appears when it is complete.

    Args:
        name: Name of the folder of these columns, such as `kept`.
        shard_file: Path of the shard, relative to the folder of the set.
    """
    (folder / COLUMNS_DIR / name).mkdir(parents=True, exist_ok=True)
    with (
        open_output(folder / column_file(name, shard_file)) as stream,
        pa.ipc.new_file(stream, columns.schema) as writer,
    ):
        writer.write_batch(columns)


def read_columns(
    folder: AnyPath, columns: Columns, shard_file: str, names: Sequence[str]
) -> dict[str, pa.Array]:
    """Read columns of all rows of a shard.

    Args:
        columns: `columns` of its manifest, types by name by folder: `{"kept": {"width": "int64"}}`.
        shard_file: Path of the shard, relative to the folder of the set.
        names: Names of columns of the set.

    Returns:
        A value for each row of the shard file, also for dropped rows, in the type of the set; by
        name in the order of `names`.

    Raises:
        DataError: The shard has no such file, because the set grew after it was scored.
    """
    arrays: dict[str, pa.Array] = {}
    for group, types in columns.items():
        in_group = [name for name in names if name in types]
        if not in_group:
            continue
        path = folder / column_file(group, shard_file)
        try:
            with open_input(path, mapped=True) as stream:
                batch = pa.ipc.open_file(stream).get_batch(0)
        except FileNotFoundError:
            raise DataError(
                f"{path} does not exist: the set has rows without {', '.join(in_group)}. Rerun the "
                "`mmray score` (or `mmray prepare`) command that wrote this column"
            ) from None
        for name in in_group:
            arrays[name] = _cast(batch, name, types[name])
    return {name: arrays[name] for name in names}


def _cast(batch: pa.RecordBatch, name: str, type_name: str) -> pa.Array:
    """Return a column in the type that it has in all shards of the set."""
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, TYPES[type_name])
    return batch[name].cast(TYPES[type_name], safe=False) if type_name in TYPES else batch[name]


def column_types(columns: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the type of each column of a set by name, over all folders of column files.

    Args:
        columns: Types by name, by folder in `columns/` of the set, as in its manifest:
            `{"kept": {"width": "int64"}, "clip": {"clip": "double"}}`.
    """
    return {name: kind for types in columns.values() for name, kind in types.items()}
