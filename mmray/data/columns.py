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
    or clips of audio and video (ClipColumns), whose docstrings list the columns.

    Attributes:
        counts: By name of a column with numbers of values the column of these values: {"num_boxes":
            "boxes"}, or {"num_frames": "video", "num_samples": "audio"}.
    """

    counts: ClassVar[dict[str, str]]

    def empty(self, num_rows: int) -> Block:
        """Return the columns of a block of rows without boxes, or without clips."""
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
            columns: The arrays that `empty` returned; entry `index` of each is changed.
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
        """Convert the columns of `empty` for the B rows of a batch to those that the model reads,
        cut to the longest row.
        """
        ...


COLUMNS: dict[str, Callable[[Inputs, Augment | None], ExtraColumns]] = {
    "max_boxes": BoxColumns,
    "clip_s": ClipColumns,  # type: ignore[dict-item]  # inputs that have the setting
}
"""Kinds of columns by the setting in `model.inputs` that adds them if it is not zero."""


def extra_columns(inputs: Inputs, augment: Augment | None = None) -> list[ExtraColumns]:
    """Return the objects that compute the columns of a model besides pixels and texts; none for
    most models.
    """
    return [
        build(inputs, augment) for setting, build in COLUMNS.items() if getattr(inputs, setting, 0)
    ]
