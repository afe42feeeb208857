"""Tables of rows and of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from mmray.report.run import (
    format_compact,
    non_retrieval_metrics,
    recall_rows,
)

MIN_WIDTH = 12  # characters of a text column in a narrow terminal
_NUMBER = re.compile(r"-?[\d,.]+(e[-+]?\d+)?%?|[-–]")
COMPACT = "compact"  # style of a column: about three digits


def scores_tables(metrics: Mapping[str, float | None]) -> list[Table]:
    """Return the tables of an evaluation.

    Args:
        metrics: values by name, such as `{"recall_at_1/image_to_text": 0.41, "loss": 1.9}`.

    Returns:
        A table of recall and median rank, if these are among the metrics, and a table of all other
        metrics.
    """
    others = Table(show_edge=False, show_header=False)
    # Aligned with the table of recalls.
    others.add_column(justify="right", min_width=len("image to text"))
    for name, value in non_retrieval_metrics(metrics):
        others.add_row(name, value)
    rows = recall_rows(metrics)
    if not rows:
        return [others]
    columns = {name: (name, ">" if name else "") for name in rows[0]}
    return [rows_table(rows, columns), others]


def text_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of texts; columns of numbers are aligned to the right.

    Args:
        rows: the texts of each line by the title of their column; the first line has all columns.
    """
    columns = {}
    for title in rows[0] if rows else ():
        is_numeric = all(_NUMBER.fullmatch(row.get(title, "-")) for row in rows)
        columns[title] = (title, ">" if is_numeric else "")
    return rows_table(rows, columns)


def rows_table(rows: Sequence[Mapping[str, Any]], columns: dict[str, tuple[str, str]]) -> Table:
    """Return a table with one line for each of `rows`.

    Texts that are too long for the terminal continue on further lines, because names are needed in
    full.

    Args:
        rows: the cells of each line by name of the column. A missing value or None is shown as a
            dash.
        columns: name -> (title, style), in the order of the table. The style is a format of Python
            such as `,.3f`, or `compact` for about three digits. A column with an empty style has
            text, which is aligned to the left.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    cells = [
        [_format_cell(row.get(name), style) for row in rows] for name, (_, style) in columns.items()
    ]
    for (title, style), column in zip(columns.values(), cells, strict=True):
        longest = max(map(len, (title, *column)))
        justify: Literal["left", "right"] = "right" if style else "left"
        table.add_column(
            title,
            justify=justify,
            no_wrap=style not in ("", ">"),  # long titles of texts continue on further lines
            overflow="fold",
            min_width=min(MIN_WIDTH, longest),
        )
    for row_cells in zip(*cells, strict=True):
        table.add_row(*map(Text, row_cells))  # brackets in a text are not markup
    return table


def _format_cell(value: Any, style: str) -> str:
    if value is None:
        return "-"
    return format_compact(value) if style == COMPACT else format(value, style)
