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
    """Computes columns besides pixels and texts for the models that read them: boxes (BoxColumns),
    or clips of audio and video (ClipColumns).

    A model reads boxes if `model.inputs.max_boxes` is above 0, and clips if its `model.inputs` has
    `clip_s`.

    A class implements the three methods. For a block of R rows, a dict of arrays [R, ...] by column
    name, `empty` creates the columns and `set_row` writes one row; `to_batch` converts them to the
    columns that the model reads. `empty` and `to_batch` list the columns.

    Attributes:
        counts: By name of a column with numbers of values the column of these values: {"num_boxes":
            "boxes"}, or {"num_frames": "video", "num_samples": "audio"}.
    """

    counts: ClassVar[dict[str, str]]

    def empty(self, num_rows: int) -> Block:
        """Return the columns of several rows (a block) without boxes, or without clips.

        Args:
            num_rows: Number of rows, R.

        Returns:
            Arrays by column name. For boxes `boxes` float32 [R, M, 4], `box_labels` int64 [R, M]
            and `num_boxes` int32 [R]. For clips `video` uint8 [R, F, 3, S, S], `num_frames` int32
            [R], `audio` int16 [R, N], `num_samples` int32 [R] and `has_text` bool [R]. M, F and N
            are the largest numbers of boxes, frames and samples, S is the side of a frame.
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
            columns: The arrays that `empty` returned, by column name; entry `index` of each is
                changed.
            index: Index of the row in the block, below R.
            row: The stored row, with the bytes of its media; for clips with at most one text, the
                span of which is the clip.
            image_size: (width, height) of its upright image in pixels, before it was transformed;
                not used for clips.
            uniforms: Random numbers in [0, 1) that determine its augmentation, float64 [51]: the
                first 49 are those for its pixels, the last two place a clip and its frames. None:
                no augmentation, and the middle of a span.
        """
        ...

    def to_batch(self, rows: Block) -> Block:
        """Convert the columns of stored rows to those that the model reads.

        Args:
            rows: The columns that `empty` creates, for the B rows of a batch.

        Returns:
            Arrays by name, cut to the longest row. For boxes `boxes` float32 [B, M, 4],
            `box_labels` int64 [B, M] and `box_mask` bool [B, M] (False: padding). For clips `video`
            uint8 [B, F, 3, S, S], `num_frames` int64 [B], `audio` int16 [B, N], `num_samples` int64
            [B], and `has_video`, `has_audio` and `has_text` bool [B].
        """
        ...


COLUMNS: dict[str, Callable[[Inputs, Augment | None], ExtraColumns]] = {
    "max_boxes": BoxColumns,
    "clip_s": ClipColumns,  # type: ignore[dict-item]  # inputs that have the setting
}
"""Kinds of columns by the setting in `model.inputs` that adds them if it is not zero."""


def extra_columns(inputs: Inputs, augment: Augment | None = None) -> list[ExtraColumns]:
    """Return the objects that compute the columns of a model besides pixels and texts.

    Args:
        inputs: The `model.inputs` section. `max_boxes` above zero adds boxes and their labels;
            `clip_s`, which only some models have, adds clips of audio and video.
        augment: The `augment` section, which is applied as to the pixels; None for none.

    Returns:
        A BoxColumns and a ClipColumns, each only if the section asks for it; empty for most models.
    """
    return [
        build(inputs, augment) for setting, build in COLUMNS.items() if getattr(inputs, setting, 0)
    ]
