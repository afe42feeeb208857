"""Boxes of an image carried along with its pixels: through the square's crop, padding and flip, into a fixed number.

A box is (left, top, right, bottom) in fractions: of the upright image in a prepared set, of the model's square in a
batch. image.py and augment.py move the pixels; the same numbers move the boxes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmray.data.images.augment import CROP, FLIP, random_crop_box
from mmray.data.images.decode import Box, crop_rect, letterbox_rect

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs

MIN_VISIBLE_FRACTION = 0.1  # of a box's area; of one that is cut off further, the picture shows too little
UNLABELED = -1


def empty_box_columns(num_rows: int, most: int) -> dict[str, np.ndarray]:
    """The columns of a block without a box: boxes, box_labels, num_boxes; none at all where `most` is 0."""
    if not most:
        return {}
    return {
        "boxes": np.zeros((num_rows, most, 4), np.float32),
        "box_labels": np.full((num_rows, most), UNLABELED, np.int64),
        "num_boxes": np.zeros(num_rows, np.int32),
    }


def to_model_coords(
    boxes: np.ndarray, size: tuple[int, int], inputs: Inputs, augment: Augment | None, drawn: np.ndarray | None
) -> np.ndarray:
    """Boxes [N, 4] of an image of (width, height) `size` as fractions of the square that the model sees; they may
    reach over its edges. `augment` and `drawn` as `vary` takes them; none: the square is not varied."""
    width, height = size
    if augment is not None and augment.crops and drawn is not None:
        out = _relative_to(boxes, size, random_crop_box(size, augment, drawn[CROP]))
    elif inputs.fit == "pad":
        left, top, w, h = letterbox_rect(width, height, inputs.image_side)
        out = (boxes * [w, h, w, h] + [left, top, left, top]) / inputs.image_side
    else:
        out = _relative_to(boxes, size, crop_rect(width, height, inputs.fit))
    if augment is not None and drawn is not None and drawn[FLIP] < augment.flip:
        out = np.stack([1 - out[:, 2], out[:, 1], 1 - out[:, 0], out[:, 3]], axis=1)
    return out


def _relative_to(boxes: np.ndarray, size: tuple[int, int], part: Box) -> np.ndarray:
    """Fractions of an image of `size` as fractions of the `part` (left, top, right, bottom in pixels) of it."""
    left, top, right, bottom = part
    return (boxes * [*size, *size] - [left, top, left, top]) / [right - left, bottom - top, right - left, bottom - top]


def clip_boxes(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(boxes [N, 4] cut to the square, which of them still show enough, bool [N])."""
    cut = boxes.clip(0, 1)
    whole, left = _area(boxes), _area(cut)
    return cut, (left > 0) & (left >= MIN_VISIBLE_FRACTION * whole)


def pad_boxes(boxes: np.ndarray, labels: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(float32 [most, 4], int64 [most] with UNLABELLED behind, how many are real); of too many the largest stay."""
    keep = np.sort(np.argsort(-_area(boxes), kind="stable")[:most])
    out, out_labels = np.zeros((most, 4), np.float32), np.full(most, UNLABELED, np.int64)
    out[: len(keep)], out_labels[: len(keep)] = boxes[keep], labels[keep]
    return out, out_labels, len(keep)


def transform_boxes(
    boxes: list[list[float]],
    labels: list[int],
    size: tuple[int, int],
    inputs: Inputs,
    augment: Augment | None = None,
    drawn: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """What `padded` gives of a row's boxes, on the square, those that show enough, up to `inputs.max_boxes`."""
    moved, shows = clip_boxes(to_model_coords(np.array(boxes, np.float64).reshape(-1, 4), size, inputs, augment, drawn))
    named = np.array(labels or [UNLABELED] * len(moved), np.int64)
    return pad_boxes(moved[shows], named[shows], inputs.max_boxes)


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
