"""Transform boxes as transform.py transforms the pixels, then pad them to a fixed number.

A box is (left, top, right, bottom) in fractions: of the upright image in a prepared set, of the
square in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mmray.data.images.transform import (
    CROP_SLICE,
    FLIP_INDEX,
    Rect,
    crop_box,
    letterbox_xywh,
    random_crop_box,
)
from mmray.data.stream.blocks import NO_LABEL

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs
    from mmray.data.store.stored_row import Row

# A box is dropped if less than this fraction of its area is inside the square.
MIN_VISIBLE_FRACTION = 0.1


class BoxColumns:
    """Boxes of a row's image on the model's square, padded to `max_boxes` (M) in a block, and to
    the largest number of a row (N) in a batch.

    A block has boxes float32 [R, M, 4] (left, top, right, bottom) in fractions of the square,
    box_labels int64 [R, M] (-1: no label) and num_boxes int32 [R]. A batch has boxes [B, N, 4],
    box_labels [B, N] and box_mask bool [B, N] (False for padding).

    Args:
        inputs: The `model.inputs` section.
        augment: The `augment` section, which is applied as to the pixels; None for none.
    """

    counts: ClassVar = {"num_boxes": "boxes"}

    def __init__(self, inputs: Inputs, augment: Augment | None = None) -> None:
        self.inputs = inputs
        self.augment = augment

    def empty(self, num_rows: int) -> dict[str, np.ndarray]:
        most = self.inputs.max_boxes
        return {
            "boxes": np.zeros((num_rows, most, 4), np.float32),
            "box_labels": np.full((num_rows, most), NO_LABEL, np.int64),
            "num_boxes": np.zeros(num_rows, np.int32),
        }

    def set_row(
        self,
        columns: dict[str, np.ndarray],
        index: int,
        row: Row,
        image_size: tuple[int, int],
        uniforms: np.ndarray | None,
    ) -> None:
        """Write the boxes of one row.

        They are transformed as the pixels are, and clipped to the square. A box is dropped if less
        than 10% of its area is inside. If more than `max_boxes` are left, the largest are kept, in
        the order of the row.
        """
        if not row.boxes:
            return
        boxes = np.array(row.boxes, np.float64)
        on_square = to_model_coords(boxes, image_size, self.inputs, self.augment, uniforms)
        clipped, is_visible = clip_boxes(on_square)
        visible = np.flatnonzero(is_visible)
        largest_first = np.argsort(-_area(clipped[visible]), kind="stable")
        keep = np.sort(visible[largest_first[: self.inputs.max_boxes]])
        columns["boxes"][index, : len(keep)] = clipped[keep]
        if row.box_labels:
            columns["box_labels"][index, : len(keep)] = np.array(row.box_labels)[keep]
        columns["num_boxes"][index] = len(keep)

    def to_batch(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        num_boxes = rows["num_boxes"]
        most = int(num_boxes.max())
        return {
            "boxes": rows["boxes"][:, :most],
            "box_labels": rows["box_labels"][:, :most],
            "box_mask": np.arange(most) < num_boxes[:, None],
        }


def to_model_coords(
    boxes: np.ndarray,
    size: tuple[int, int],
    inputs: Inputs,
    augment: Augment | None,
    uniforms: np.ndarray | None,
) -> np.ndarray:
    """Map boxes from fractions of an image to fractions of the model's square, without clipping.

    Args:
        boxes: (left, top, right, bottom), float64 [N, 4].
        size: (width, height) of the image in pixels.

    Returns:
        Boxes float64 [N, 4]. Parts outside the square are below 0 or above 1.
    """
    width, height = size
    if augment is not None and augment.has_random_crop and uniforms is not None:
        crop: Rect = random_crop_box(size, augment, uniforms[CROP_SLICE])
    elif inputs.fit == "pad":  # the square is larger than the image
        x, y, w, h = letterbox_xywh(width, height, inputs.image_side)
        scale_x = width / w
        scale_y = height / h
        crop = (
            -x * scale_x,
            -y * scale_y,
            (inputs.image_side - x) * scale_x,
            (inputs.image_side - y) * scale_y,
        )
    else:
        crop = crop_box(width, height, inputs.fit)
    left, top, right, bottom = crop  # in pixels of the image
    origin = [left, top, left, top]
    extent = [right - left, bottom - top, right - left, bottom - top]
    out = (boxes * [width, height, width, height] - origin) / extent
    if augment is not None and uniforms is not None and uniforms[FLIP_INDEX] < augment.flip:
        out = np.stack([1 - out[:, 2], out[:, 1], 1 - out[:, 0], out[:, 3]], axis=1)
    return out


def clip_boxes(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clip boxes float64 [N, 4] to the model's square, and return also whether at least
    MIN_VISIBLE_FRACTION of the area of each is inside, bool [N].
    """
    clipped = boxes.clip(0, 1)
    visible = _area(clipped)
    return clipped, (visible > 0) & (visible >= MIN_VISIBLE_FRACTION * _area(boxes))


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
