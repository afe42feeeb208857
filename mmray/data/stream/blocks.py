"""Blocks of rows, and how they are joined. Without torch, because data processes import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Block = dict[str, np.ndarray]
NO_LABEL = -1  # label of a row without one
# Columns of the embeddings of a teacher (objective distillation).
TEACHER_COLUMNS = ("teacher_image", "teacher_text")


def join_blocks(parts: Sequence[Block], pixels: np.ndarray | None = None) -> Block:
    """Concatenate the rows of blocks with equal columns; arrays [R, T] are padded with zeros.

    Args:
        pixels: Memory for the column `image` of the result; None: new memory.
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
    """Append zeros to the second dimension of an array [R, T], if it is shorter than `width`."""
    if rows.shape[1] >= width:
        return rows
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
