"""Join blocks of rows. Without torch, because data processes import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Block = dict[str, np.ndarray]


def join_blocks(parts: Sequence[Block], pixels: np.ndarray | None = None) -> Block:
    """Return the rows of all parts in one block.

    Args:
        parts: Blocks with the same columns. Columns of tokens are padded to the same width.
        pixels: Memory for the column `image`; None: new memory.
    """
    if len(parts) == 1:
        return parts[0]
    return {
        name: _concatenate([part[name] for part in parts], pixels if name == "image" else None)
        for name in parts[0]
    }


def _concatenate(columns: list[np.ndarray], out: np.ndarray | None) -> np.ndarray:
    if columns[0].ndim == 2:  # tokens: zero-padded to the same width
        longest = max(column.shape[1] for column in columns)
        columns = [pad_columns(column, longest) for column in columns]
    return np.concatenate(columns, out=out)


def pad_columns(rows: np.ndarray, width: int) -> np.ndarray:
    """[R, T] -> [R, width] by appending zeros, if it is narrower."""
    if rows.shape[1] >= width:
        return rows
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
