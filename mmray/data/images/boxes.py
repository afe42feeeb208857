"""Transform boxes as transform.py transforms the pixels, then pad them to a fixed number.

A box is (left, top, right, bottom) in fractions: of the upright image in a prepared set, of the
square in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmray.data.images.transform import (
    CROP_SLICE,
    FLIP_INDEX,
    Rect,
    crop_box,
    letterbox_xywh,
    random_crop_box,
)

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs

# A box is dropped if less than this fraction of its area is inside the square.
MIN_VISIBLE_FRACTION = 0.1
NO_LABEL = -1  # label of a row or a box without one


def empty_box_columns(num_rows: int, max_boxes: int) -> dict[str, np.ndarray]:
    """Return columns boxes, box_labels, num_boxes of a block without a box; no columns if
    `max_boxes` is 0.
    """
    if not max_boxes:
        return {}
    return {
        "boxes": np.zeros((num_rows, max_boxes, 4), np.float32),
        "box_labels": np.full((num_rows, max_boxes), NO_LABEL, np.int64),
        "num_boxes": np.zeros(num_rows, np.int32),
    }


def transform_boxes(
    boxes: list[list[float]] | None,
    labels: list[int] | None,
    size: tuple[int, int],
    inputs: Inputs,
    augment: Augment | None = None,
    uniforms: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the box columns of one row: its largest visible boxes on the model's square.

    Args:
        boxes: (left, top, right, bottom) in fractions of the image; None without boxes.
        labels: Label of each box, if the row has them.
        size: (width, height) of the image in pixels.
        inputs: The `model.inputs` section; `max_boxes` limits the number of boxes.
        augment: The augmentation of the pixels; None for none.
        uniforms: Its random numbers [NUM_UNIFORMS].

    Returns:
        boxes float32 [max_boxes, 4], box_labels int64 [max_boxes], num_boxes int32; empty if
        `max_boxes` is 0.
    """
    columns = {name: column[0] for name, column in empty_box_columns(1, inputs.max_boxes).items()}
    if not columns or not boxes:
        return columns
    moved, visible = clip_boxes(
        to_model_coords(np.array(boxes, np.float64), size, inputs, augment, uniforms)
    )
    keep = np.flatnonzero(visible)
    keep = np.sort(keep[np.argsort(-_area(moved[keep]), kind="stable")[: inputs.max_boxes]])
    columns["boxes"][: len(keep)] = moved[keep]
    if labels:
        columns["box_labels"][: len(keep)] = np.array(labels)[keep]
    return columns | {"num_boxes": np.int32(len(keep))}


def to_model_coords(
    boxes: np.ndarray,
    size: tuple[int, int],
    inputs: Inputs,
    augment: Augment | None,
    uniforms: np.ndarray | None,
) -> np.ndarray:
    """Map boxes [N, 4] from fractions of an image to fractions of the model's square, without
    clipping.

    The arguments are the same as of `transform_boxes`.
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
    """Return boxes [N, 4] clipped to the square, and bool [N]: whether enough of each is
    visible.
    """
    clipped = boxes.clip(0, 1)
    visible = _area(clipped)
    return clipped, (visible > 0) & (visible >= MIN_VISIBLE_FRACTION * _area(boxes))


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
