"""Columns of a batch besides pixels and texts, which only models with the setting have.

A kind of columns is a class and an entry in COLUMNS. The stream, evaluation and dry runs handle all
kinds alike, so a model without them has neither the columns nor code for them. Without torch,
because data processes import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mmray.data.images.boxes import BoxColumns

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs
    from mmray.data.store.prepared_set import Row
    from mmray.data.stream.blocks import Block


class ExtraColumns(Protocol):
    """Columns that a model reads in addition to those of every model."""

    def empty(self, num_rows: int) -> Block:
        """Return the columns of a block [num_rows, ...], for rows without values."""
        ...

    def set_row(
        self,
        columns: Block,
        index: int,
        row: Row,
        image_size: tuple[int, int],
        uniforms: np.ndarray | None,
    ) -> None:
        """Write the values of a row.

        Args:
            columns: A block with at least the columns of `empty`.
            index: Index of the row in the block.
            row: The stored row.
            image_size: (width, height) of its image in pixels, before it was transformed.
            uniforms: Random numbers of its augmentation [NUM_UNIFORMS]; None without one.
        """
        ...

    def to_batch(self, rows: Block) -> Block:
        """Return the columns of a batch from those of a block, trimmed to its rows."""
        ...

    def synthetic(self, num_rows: int) -> Block:
        """Return the columns of a block with as many values as a row can have, for dry runs."""
        ...


COLUMNS: dict[str, Callable[[Inputs, Augment | None], ExtraColumns]] = {"max_boxes": BoxColumns}
"""Kinds of columns by the setting in `model.inputs` that asks for them if it is not zero."""


def extra_columns(inputs: Inputs, augment: Augment | None = None) -> list[ExtraColumns]:
    """Return the kinds of columns that a model's inputs ask for.

    Args:
        inputs: The `model.inputs` section.
        augment: The augmentation of the pixels; None for none.
    """
    return [
        build(inputs, augment) for setting, build in COLUMNS.items() if getattr(inputs, setting)
    ]
