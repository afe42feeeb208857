"""Rows of a prepared set that an expression over its columns selects (`data.where`).

The expression has the syntax of Python and is evaluated by pyarrow. The rows that it does not
select count as dropped rows of their shards, like duplicates, so everything that reads a set reads
a selection alike. DuckDB would need the same walk over the syntax, because `0.1 < x < 0.5`, `x is
None` and `license == "by"` are errors there, and it selects NaN with `x > 0.3`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import TYPES, column_types
from mmray.data.store.shard_table import MappedFile, ShardTable, pack_mask
from mmray.errors import UsageError, suggest
from mmray.storage.paths import AnyPath, write_atomic

SELECTIONS_DIR = ".selections"
_HINT = "write for example `similarity > 0.3 and width >= 200`"
_KEEP = "`mmray prepare --keep NAME,NAME` stores columns of a source"
_SYNTAX = "comparisons, and, or, not, in [...], is None, and + - * / of numbers"
_ORDERS = {
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_COMPARISONS = _ORDERS | {ast.Eq: pc.equal, ast.NotEq: pc.not_equal}
_ARITHMETIC = {  # of integers exactly; one of more than 64 bits is an error
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: pc.divide,
}
_TYPE_NAMES = {"string": "a text", "bool": "true or false"}
_OPERATORS = (ast.expr_context, ast.boolop, ast.cmpop, ast.Not, ast.USub)
_OPERANDS = (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Name, ast.List, ast.Tuple)
Values = Any  # pa.Array or pa.Scalar
Columns = Mapping[str, pa.Array]


class RowFilter:
    """A condition on the columns of rows, in the syntax of Python.

    It has names of columns, numbers, texts, True and False, the comparisons < <= > >= == !=,
    `in [...]`, `is None`, and, or, not, + - * / and parentheses. A comparison with a missing value
    selects no row, also below `not`, as in SQL.

    `selected(columns)` takes pyarrow arrays by column name, and returns the sorted numbers of the
    rows that it selects, int64.

    Args:
        text: Such as `similarity > 0.3 and (width * height >= 40000 or license in ["cc0", "by"])`.

    Attributes:
        columns: Names of the columns in it, sorted.

    Raises:
        ValueError: The text is no such condition; the message has the part.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._root = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = ""
            if isinstance(error, SyntaxError) and error.offset:
                where = f", at `{text.strip()[error.offset - 1 :][:40] or 'the end'}`"
            raise ValueError(f"`{text}` is no condition{where}; {_HINT}") from None
        names = {node.id for node in ast.walk(self._root) if isinstance(node, ast.Name)}
        self.columns = sorted(names)
        # Every name could be a number, so this finds what is wrong whatever the columns are.
        self._check_nodes()
        if not names:
            raise ValueError(f"`{text}` names no column; {_HINT}")

    def check(self, types: Mapping[str, str | None]) -> None:
        """Check the condition against the columns of a set.

        Args:
            types: Type of each column by name: `bool`, `int64`, `double` or `string`; columns of
                other types, such as embeddings, cannot be compared. None: not known yet, so that
                only the name is checked.

        Raises:
            ValueError: A column does not exist, or is compared with a value of another type.
        """
        comparable = {name: kind for name, kind in types.items() if kind in (None, *TYPES)}
        for node in ast.walk(self._root):
            if isinstance(node, ast.Name) and node.id not in comparable:
                hint = suggest(node.id, sorted(comparable)) if comparable else "it has no columns"
                if node.id in types:
                    hint = f"it has {types[node.id]} values, which have no order"
                raise self._error(node, f"no column `{node.id}` to compare; {hint}")
        compared_types = {name: comparable[name] for name in self.columns}
        if None not in compared_types.values():
            self.selected(
                {name: pa.nulls(0, TYPES[str(kind)]) for name, kind in compared_types.items()}
            )

    def selected(self, columns: Columns) -> np.ndarray:
        """Return the numbers of the rows that the condition selects, sorted, int64.

        Raises:
            ValueError: A value has a type that the condition cannot compare.
        """
        try:
            # Arrow refuses a result that is no boolean.
            result = pc.or_kleene(self._evaluate(self._root, columns), pa.scalar(False))
        except (pa.ArrowException, OverflowError) as error:
            types = ", ".join(f"`{name}` is {columns[name].type}" for name in self.columns)
            raise ValueError(f"`{self.text}`: {error} ({types}); {_HINT}") from None
        return pc.indices_nonzero(result).to_numpy().astype(np.int64)

    def selected_shards(self, lows: Columns, highs: Columns) -> list[bool | None]:
        """Return whether all rows (True) or none (False) of each shard are selected; None if that
        is known only from its rows.

        Parts that `and` joins decide if they compare one column by <, <=, > or >= with a value.

        Args:
            lows: Lowest value of each column in each shard; null if not known, or if values of the
                shard are missing.
            highs: Highest values alike.
        """
        root = self._root
        is_and = isinstance(root, ast.BoolOp) and isinstance(root.op, ast.And)
        parts = root.values if isinstance(root, ast.BoolOp) and is_and else [root]
        decided = []
        for part in parts:
            of_shards = pa.nulls(len(lows[self.columns[0]]), pa.bool_())
            if _is_monotone(part):
                first, last = (self._evaluate(part, each) for each in (lows, highs))
                of_shards = pc.if_else(pc.equal(first, last), first, of_shards)
            decided.append(of_shards)
        result: list[bool | None] = reduce(pc.and_kleene, decided).to_pylist()
        return result

    def _error(self, node: ast.AST, message: str) -> ValueError:
        part = ast.get_source_segment(self.text.strip(), node)
        where = "" if part in (None, self.text.strip()) else f", at `{part}`"
        return ValueError(f"`{self.text}`{where}: {message}")

    def _check_nodes(self) -> None:
        """Raise ValueError for a part that no condition may have, such as a call."""
        for node in ast.walk(self._root):
            is_literal = isinstance(node, ast.Constant) and not isinstance(node.value, bytes)
            if not (is_literal or isinstance(node, _OPERATORS + _OPERANDS + tuple(_ARITHMETIC))):
                raise self._error(
                    node if isinstance(node, ast.expr) else self._root,
                    f"{type(node).__name__} is not supported; a condition has {_SYNTAX}",
                )

    def _evaluate(self, node: ast.AST, columns: Columns) -> Values:
        evaluate = partial(self._evaluate, columns=columns)
        if isinstance(node, ast.Name):
            return columns[node.id]
        if isinstance(node, ast.Constant) and node.value is not None:
            return pa.scalar(node.value)
        if isinstance(node, ast.UnaryOp):
            compute = pc.invert if isinstance(node.op, ast.Not) else pc.negate
            return compute(evaluate(node.operand))
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, map(evaluate, node.values))
        if isinstance(node, ast.BinOp):
            operands = [evaluate(node.left), evaluate(node.right)]
            if isinstance(node.op, ast.Div) or operands[0].type != operands[1].type:
                operands = [*map(_as_float, operands)]
            if isinstance(node.op, ast.Div):
                is_zero = pc.equal(operands[1], 0)
                operands[1] = pc.if_else(is_zero, pa.scalar(None, operands[1].type), operands[1])
            return _ARITHMETIC[type(node.op)](*operands)
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            pairs = zip(operands, node.ops, operands[1:], strict=False)
            return reduce(pc.and_kleene, [self._compare(*pair, columns) for pair in pairs])
        hint = "compare with `is None`" if isinstance(node, ast.Constant) else f"use {_SYNTAX}"
        raise self._error(node, f"not a value; {hint}")

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr, columns: Columns) -> Values:
        """Return the result of one comparison."""
        value = self._evaluate(left, columns)
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not isinstance(right, ast.Constant) or right.value is not None:
                raise self._error(right, "`is` compares with None; use == for a value")
            return pc.is_null(value) if isinstance(op, ast.Is) else pc.is_valid(value)
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple)) or not right.elts:
                raise self._error(right, "`in` needs a list of values, such as [1, 2]")
            equal = [self._compare(left, ast.Eq(), each, columns) for each in right.elts]
            is_in_list = reduce(pc.or_kleene, equal)
            return is_in_list if isinstance(op, ast.In) else pc.invert(is_in_list)
        other = self._evaluate(right, columns)
        if value.type != other.type:
            value = _as_float(value)
            other = _as_float(other)
        try:
            return _COMPARISONS[type(op)](value, other)
        except pa.ArrowNotImplementedError:
            kinds = [_TYPE_NAMES.get(str(each.type), "a number") for each in (other, value)]
            message = f"is {kinds[0]}, and is compared with {kinds[1]}; {_HINT}"
            raise self._error(right, message) from None


def _is_monotone(part: ast.expr) -> bool:
    """Return whether a condition compares one column by order with values."""
    if not isinstance(part, ast.Compare) or len(part.ops) > 1 or type(part.ops[0]) not in _ORDERS:
        return False
    names = [each for each in ast.walk(part) if isinstance(each, ast.Name)]
    return len(names) == 1 and names[0] in (part.left, *part.comparators)


def _as_float(value: Values) -> Values:
    """Return integers as float64, also large ones, which Arrow refuses; other values unchanged."""
    return value.cast(pa.float64(), safe=False) if pa.types.is_integer(value.type) else value


def check_where(
    where: str, types: Mapping[str, str | None] | None, location: str, setting: str
) -> RowFilter:
    """Return the filter of an expression after checking it against the columns of a set.

    Args:
        types: Type of each column, None for one that is not known yet. None: check the syntax.

    Raises:
        UsageError: It is invalid, or the set lacks a column; the message has the part.
    """
    try:
        row_filter = RowFilter(where)
        if types is not None:
            row_filter.check(types)
    except ValueError as error:
        hint = f"; {_KEEP}" if types == {} else ""
        raise UsageError(f"{setting}: {error} ({location}{hint})") from None
    return row_filter


def drop_rows(
    prepared: PreparedSet,
    where: str,
    setting: str,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> PreparedSet:
    """Return a set without the rows that a condition does not select; no file is written.

    Args:
        where: The condition on its columns, such as `similarity > 0.3` (see RowFilter).
        setting: Setting that has the condition, for messages.
        on_rows: Called with (done, total): numbers of rows checked so far and of all rows.

    Raises:
        UsageError: The condition is invalid, or no row is selected.
        DataError: A shard lacks a column, because the set grew after it was scored.
    """
    manifest = prepared.manifest
    types = column_types(manifest.columns)
    row_filter = check_where(where, types, str(prepared.folder), setting)
    table = prepared.table
    numbers = prepared.shard_numbers.tolist()
    keys = [table.key(number) for number in numbers]
    ends = {name: prepared.values.ends(keys, name) for name in row_filter.columns}
    lows, highs = ({name: each[end] for name, each in ends.items()} for end in (0, 1))
    are_selected = row_filter.selected_shards(lows, highs)
    undecided = [key for key, selected in zip(keys, are_selected, strict=True) if selected is None]
    parts = prepared.values.read(undecided, row_filter.columns)
    dropped = {}
    done = 0
    on_rows(done, prepared.num_rows)
    for number, is_selected in zip(numbers, are_selected, strict=True):
        is_dropped = np.full(int(table.num_rows[number]), not is_selected)
        try:
            if is_selected is None:
                is_dropped[row_filter.selected(next(parts))] = False
        except ValueError as error:  # an overflow depends on the values
            raise UsageError(f"{setting}: {error} ({prepared.folder})") from None
        is_dropped[table.dropped(number)] = True
        dropped[number] = pack_mask(is_dropped)
        done += int(table.num_kept[number])
        on_rows(done, prepared.num_rows)
    selected = prepared.with_shards(table.with_dropped(dropped))
    if not selected.num_rows:
        raise UsageError(
            f"{setting}: `{where}` selects none of the {prepared.num_rows:,} rows of "
            f"{prepared.folder}"
        )
    return selected


def select_rows(
    prepared: PreparedSet,
    where: str,
    folder: AnyPath,
    setting: str = "data.where",
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> PreparedSet:
    """Return the rows of a set for which a condition holds, in their order and numbered from 0.

    The result refers to the shards of the set; only its list of dropped rows is another one. The
    list is stored in `folder`, and read if the set and its columns are the same. If all rows are
    selected, it is the set itself.

    Args:
        where: The condition on its columns, such as `similarity > 0.3` (see RowFilter).
        on_rows: Called with (done, total): numbers of rows checked so far and of all rows.

    Raises:
        UsageError: The condition is invalid, no row is selected, or `folder` is not writable.
        DataError: A shard lacks a column, because the set grew after it was scored.
    """
    columns = column_types(prepared.manifest.columns)
    row_filter = check_where(where, columns, str(prepared.folder), setting)
    values = prepared.values.digest(row_filter.columns)
    identity = repr((hashlib.sha256(prepared.table.data).digest(), prepared.split, where, values))
    selections = folder / SELECTIONS_DIR
    entry = selections / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if not entry.exists():
        table = drop_rows(prepared, where, setting, on_rows).table
        try:
            selections.mkdir(parents=True, exist_ok=True)
            file = table.write(selections)
            write_atomic(entry, orjson.dumps([file.name, file.sha256, file.num_bytes]))
        except OSError as error:
            raise UsageError(
                f"cannot write the list of selected rows to {selections}: {error}. Choose another "
                "--run.storage"
            ) from error
    file = MappedFile(selections, *orjson.loads(entry.read_bytes()))
    selected = prepared.with_shards(ShardTable.open(file))
    return prepared if selected.num_rows == prepared.num_rows else selected
