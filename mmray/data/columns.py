"""Columns of a batch besides pixels and texts, which only models with the setting have.

A kind of columns is a class and an entry in COLUMNS. The stream, evaluation and dry runs handle all
kinds alike, so a model without them has neither the columns nor code for them. Without torch,
because data processes import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from mmray.data.images.boxes import BoxColumns
from mmray.data.media.clips import ClipColumns

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs
    from mmray.data.store.stored_row import Row
    from mmray.data.stream.blocks import Block


class ExtraColumns(Protocol):
    """Computes columns besides pixels and texts, such as boxes, for the models that read them.

    A model reads them if a setting in its `model.inputs` is not zero, such as `max_boxes`.

    A class implements the three methods. For a block of R rows, a dict of arrays [R, ...] by column
    name, `empty` creates the columns and `set_row` writes one row; `to_batch` converts them to the
    columns that the model reads.

    Attributes:
        counts: Names of the columns with a number of values, such as `num_boxes`, to the columns
            that have these values, such as `boxes` [R, M, 4].
    """

    counts: ClassVar[dict[str, str]]

    def empty(self, num_rows: int) -> Block:
        """Return the columns of several rows (a block) that have no values, such as rows without
        boxes.

        Args:
            num_rows: Number of rows, R.

        Returns:
            Arrays [R, ...] by column name, such as `boxes` float32 [R, M, 4], `box_labels` int64
            [R, M] and `num_boxes` int32 [R].
        """
        ...

    def set_row(
        self,
        columns: Block,
        index: int,
        row: Row,
        image_size: tuple[int, int],
        uniforms: np.ndarray | None,
    ) -> None:
        """Write the values of one row into a block.

        Args:
            columns: Arrays [R, ...] by column name, such as `boxes`, `box_labels` and `num_boxes`;
                changed in place at `index`.
            index: Index of the row in the block, below R.
            row: The stored row: its key, images, texts and boxes.
            image_size: (width, height) of its upright image in pixels, before it was transformed.
            uniforms: Random numbers of its augmentation, float64 [NUM_UNIFORMS (49)] in [0, 1), the
                same as for its pixels; None: no augmentation.
        """
        ...

    def to_batch(self, rows: Block) -> Block:
        """Convert the columns of stored rows to those that the model reads.

        Args:
            rows: Arrays [B, ...] by column name for the rows of a batch, such as `boxes`,
                `box_labels` and `num_boxes`.

        Returns:
            Arrays [B, ...] by name, such as `boxes`, `box_labels` and `box_mask`, without padding
            that no row of the batch needs.
        """
        ...


COLUMNS: dict[str, Callable[[Inputs, Augment | None], ExtraColumns]] = {
    "max_boxes": BoxColumns,
    "clip_s": ClipColumns,  # type: ignore[dict-item]  # inputs that have the setting
}
"""Kinds of columns by the setting in `model.inputs` that adds them if it is not zero."""


def extra_columns(inputs: Inputs, augment: Augment | None = None) -> list[ExtraColumns]:
    """Return the objects that compute the columns of a model besides pixels and texts, such as
    boxes.

    Args:
        inputs: The `model.inputs` section. `max_boxes` above zero adds the columns of boxes and
            their labels.
        augment: The `augment` section, which is applied as to the pixels; None for none.

    Returns:
        One object for each kind of column, such as a BoxColumns, with the methods of ExtraColumns;
        empty for most models.
    """
    return [
        build(inputs, augment) for setting, build in COLUMNS.items() if getattr(inputs, setting, 0)
    ]
