"""Types of the columns of a set: those of the source that `prepare --keep` stores, and scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

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


def separate_columns(types: Mapping[str, str]) -> Columns:
    """Return columns of these types, each in a folder of its name."""
    return {name: {name: kind} for name, kind in types.items()}


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
        return "double" if math.isfinite(float(value)) else "string"
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
    """Return the type that stores values of two types exactly, such as `double` for `int64` and
    `double`; None (all values are missing) if both are None.

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


def column_types(columns: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the type of each column of a set by name, over all folders of column files."""
    return {name: kind for types in columns.values() for name, kind in types.items()}
