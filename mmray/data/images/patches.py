"""Images in their own aspect ratio, as patches within a budget (NaFlex of SigLIP 2, Tschannen et
al. 2025, arXiv:2502.14786).

An image is one array, uint8 [1 + N, 3 P P], for a budget of N patches, P pixels wide. The first two
bytes are the numbers of rows and columns of patches. From entry 1 on the patches follow row by row,
each with its pixels row by row and the three channels of a pixel adjacent; the rest is padding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from mmray.config.model import Inputs
    from mmray.config.model_kinds import NaflexInputs

MAX_SIDE = 255  # patches, because a byte stores their number
# Bounds and precision of the search for the scale, those of transformers' Siglip2ImageProcessor.
_PRECISION = 1e-5
_SCALES = (_PRECISION / 10, 100.0)


def takes_patches(inputs: Inputs | NaflexInputs) -> TypeIs[NaflexInputs]:
    """Return whether a `model.inputs` section is of a model that reads patches within a budget."""
    return hasattr(inputs, "max_patches")


def pixel_shape(inputs: Inputs | NaflexInputs) -> tuple[int, ...]:
    """Return the shape of the pixels of an image: (3, S, S), or (1 + N, 3 P P) as patches."""
    if takes_patches(inputs):
        return (1 + inputs.max_patches, 3 * inputs.patch**2)
    return (3, inputs.image_side, inputs.image_side)


def patch_grid(height: int, width: int, inputs: NaflexInputs) -> tuple[int, int]:
    """Return the numbers of rows and columns of patches of an image of a size in pixels.

    They are those of transformers' Siglip2ImageProcessor, but at most 255: the image is scaled to
    as many patches as the budget allows, and each side is rounded up to whole patches.
    """

    def scaled(scale: float) -> tuple[int, int]:
        rows, columns = (math.ceil(side * scale / inputs.patch) for side in (height, width))
        return min(rows, MAX_SIDE), min(columns, MAX_SIDE)

    low, high = _SCALES
    while high - low >= _PRECISION:
        scale = (low + high) / 2
        if math.prod(scaled(scale)) <= inputs.max_patches:
            low = scale
        else:
            high = scale
    return scaled(low)


def to_patches(planes: np.ndarray, inputs: NaflexInputs) -> np.ndarray:
    """Return an image of whole patches, uint8 [3, H, W], as the array described above."""
    side = inputs.patch
    rows, columns = (size // side for size in planes.shape[1:])
    image = np.zeros(pixel_shape(inputs), np.uint8)
    image[0, :2] = rows, columns
    patches = planes.reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
    image[1 : 1 + rows * columns] = patches.reshape(rows * columns, -1)
    return image
