"""Columns that `prepare --keep` and `--compute` store next to the shards, with one type each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa

from mmray.builtin import is_column_name
from mmray.data.rows import BadRow, is_missing, to_utf8
from mmray.data.source_row import SourceRow
from mmray.data.store.row_columns import (
    KEPT,
    LARGE,
    TYPES,
    common_type,
    value_type,
)
from mmray.data.store.row_values import write_values
from mmray.data.store.shard_table import Shard
from mmray.errors import DataError, first_line
from mmray.storage.paths import AnyPath

_ADVICE = "Name other columns with --keep NAME,NAME, or change the source or --compute"
Compute = Callable[[SourceRow], Mapping[str, Any]]  # a function that `prepare.compute` names


def compute_columns(compute: Compute, row: SourceRow) -> dict[str, Any]:
    """Return the kept columns of a row, and the values that a function of the user returns for it.

    Args:
        row: A row with its media, as `RowBuilder.build` completes it.

    Raises:
        BadRow: Stage `compute`: the function raised an exception, or returned the name of a kept
            column. One that the function raises itself keeps its stage and reason.
    """
    try:
        computed = compute(row)
        values = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in computed.items()
        }
    except BadRow:
        raise
    except Exception as error:
        detail = f"prepare.compute: {type(error).__name__}: {first_line(error)}"
        raise BadRow("compute", type(error).__name__, detail) from error
    if repeated := values.keys() & row.columns.keys():
        detail = f"prepare.compute returned {', '.join(repeated)}, which the source has: rename it"
        raise BadRow("compute", "repeated-column", detail)
    return row.columns | values


class KeptColumns:
    """Collects the columns that `prepare.keep` stores, for the rows of one chunk.

    `append(split, values, location)` adds the values of each row in the order in which the rows are
    stored, and `write(folder, shards)` writes all at the end.

    Args:
        has_types: Whether the values of the source have types. False, as for a CSV: all are texts,
            which are stored as texts, and `types` are those that they can be read as.

    Attributes:
        types: Type of each column by its name, from `value_type`; None: all values are missing.
    """

    def __init__(self, has_types: bool) -> None:
        self.types: dict[str, str | None] = {}
        self._has_types = has_types
        self._rows: dict[str | None, list[dict[str, Any]]] = {}  # rows by split

    def append(self, split: str | None, values: Mapping[str, Any], location: str) -> None:
        """Add the columns of the next row of a split.

        Args:
            split: Split of the row; None: none.
            values: Value of each column by its name, such as {"width": 640}; None and NaN are
                missing values.
            location: Location of the row, for messages.

        Raises:
            DataError: A value is no boolean, number or text, or has another type than in the rows
                before.
        """
        row = {}
        for name, value in values.items():
            if not is_column_name(name):
                raise DataError(
                    f"{location}: the column `{name}` cannot have a name in data.where, "
                    f"which has letters, digits and _. {_ADVICE}"
                )
            missing = is_missing(value)
            try:
                kind = None if missing else value_type(value, not self._has_types)
                self.types[name] = common_type(self.types.get(name), kind, not self._has_types)
            except ValueError as error:
                raise DataError(
                    f"{location}: columns are booleans, numbers and texts, and the column `{name}` "
                    f"has {error}. {_ADVICE}"
                ) from None
            if isinstance(value, str):
                value = to_utf8(value)
            row[name] = None if missing else value
        self._rows.setdefault(split, []).append(row)

    def write(self, folder: AnyPath, shards: Iterable[Shard]) -> str:
        """Write the columns to a file in `columns/kept` of the set, and return its name.

        Args:
            shards: The shards with the rows, one for each split.
        """
        values = {}
        for shard in shards:
            rows = self._rows[shard.split]
            columns = {name: self._array(name, rows) for name in self.types}
            # A batch without columns has no rows.
            columns = columns or {"": pa.nulls(len(rows))}
            values[shard.key] = pa.RecordBatch.from_pydict(columns)
        types = {name: "int64" if kind == LARGE else kind for name, kind in self.types.items()}
        return write_values(folder, KEPT, values, types)

    def _array(self, name: str, rows: list[dict[str, Any]]) -> pa.Array:
        values = [row.get(name) for row in rows]
        kind = self.types[name]
        if kind is None:
            return pa.nulls(len(values))
        if not self._has_types:  # a later chunk may have texts that are no numbers
            texts = [None if value is None else str(value) for value in values]
            return pa.array(texts, pa.string())
        if kind == "double":
            values = [None if value is None else float(value) for value in values]
        return pa.array(values, TYPES["int64" if kind == LARGE else kind])


def merge_types(types: Mapping[str, set[str | None]], has_types: bool) -> dict[str, dict[str, str]]:
    """Return the type of each column that `prepare.keep` stores, for the manifest of the set.

    Args:
        types: By name of a column, the types of its values in the parts of the source.
        has_types: Whether the values of the source have types, or are the texts of a CSV.

    Raises:
        DataError: A column has values of different types.
    """
    join = partial(common_type, are_fields=not has_types)
    merged = {}
    for name, kinds in types.items():
        try:
            kind = reduce(join, kinds, None)
        except ValueError as error:
            raise DataError(f"the column `{name}` has {error} values. {_ADVICE}") from None
        merged[name] = "int64" if kind == LARGE else kind or "string"
    return {KEPT: merged} if merged else {}
