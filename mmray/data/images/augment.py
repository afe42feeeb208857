"""Varying a training image: random resized crop, flip, colour jitter, each from (seed, epoch, key) alone.

The sample's journey: between decoding and the model's square, inside the data worker. Nothing is drawn from a
generator with a state, so a resumed or resized run varies each image as an undisturbed one would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance

from mmray.data.images.decode import channels_first, read_pixels, read_rgb, resized
from mmray.data.stream.order import hash_uniform

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs

PixelBox = tuple[int, int, int, int]  # left, top, right, bottom
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
CROP_TRIES = 10
CROP_RATIO = (3 / 4, 4 / 3)  # width by height, as in torchvision's RandomResizedCrop
CROP, FLIP, JITTER, ORDER = slice(0, 4 * CROP_TRIES), 40, slice(41, 45), slice(45, 49)
NUM_RANDOM = 49  # of a row, at the places above


def random_numbers(seed: int, epoch: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) float64 [R, DRAWS] for rows of int64 `epoch` and `key` [R]."""
    return hash_uniform(seed, epoch, key, NUM_RANDOM)


def load_and_transform(
    data: bytes, max_pixels: int, inputs: Inputs, augment: Augment | None = None, drawn: np.ndarray | None = None
) -> np.ndarray:
    """What a model sees of an encoded image, varied where `drawn` float64 [DRAWS] says how: uint8 [3, side, side].

    Raises BadImage.
    """
    if augment is None or drawn is None:
        return read_pixels(data, inputs.image_side, inputs.fit, inputs.interpolation, max_pixels)
    return augment_image(read_rgb(data, max_pixels), inputs, augment, drawn)


def augment_image(image: Image.Image | np.ndarray, inputs: Inputs, augment: Augment, drawn: np.ndarray) -> np.ndarray:
    """A varied square of an upright RGB image or uint8 [H, W, 3]: uint8 [3, side, side]; `drawn` float64 [DRAWS].

    A random crop fills the square, whatever `inputs.fit` says. Jitter works on the small square: the factors are of
    its pixels, and the cost does not grow with the source.
    """
    rgb, fit = np.asarray(image), inputs.fit
    if augment.crops:
        left, top, right, bottom = random_crop_box((rgb.shape[1], rgb.shape[0]), augment, drawn[CROP])
        rgb, fit = rgb[top:bottom, left:right], "squash"
    square = resized(rgb, inputs.image_side, fit, inputs.interpolation)
    if drawn[FLIP] < augment.flip:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return channels_first(_jitter(square, augment, drawn[JITTER], np.argsort(drawn[ORDER])))


def random_crop_box(size: tuple[int, int], augment: Augment, drawn: np.ndarray) -> PixelBox:
    """Part of an image of (width, height) `size`, of a drawn area, aspect ratio and place (Szegedy et al. 2015).

    In whole pixels, ten tries, then the largest central part whose ratio is allowed, as torchvision's
    RandomResizedCrop has it.
    """
    width, height = size
    (low, high), (narrow, wide) = augment.crop_scale, np.log(CROP_RATIO)
    for scale, ratio, across, down in drawn.reshape(CROP_TRIES, 4):
        area = width * height * (low + (high - low) * scale)
        aspect = np.exp(narrow + (wide - narrow) * ratio)
        w, h = round(float(np.sqrt(area * aspect))), round(float(np.sqrt(area / aspect)))
        if 1 <= w <= width and 1 <= h <= height:
            left, top = int((width - w + 1) * across), int((height - h + 1) * down)
            return (left, top, left + w, top + h)
    w = max(1, min(width, round(height * CROP_RATIO[1])))
    h = max(1, min(height, round(width / CROP_RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h)


def _jitter(square: Image.Image, augment: Augment, factors: np.ndarray, turns: np.ndarray) -> Image.Image:
    """Brightness, contrast, saturation and hue (0 to 3), in the order of `turns`; factors in [0, 1)."""
    widths = augment.color_jitter
    for index in turns:
        change = widths[index] * (2 * factors[index] - 1)
        if change == 0:
            continue
        if index == len(_ENHANCERS):
            square = _adjust_hue(square, change)
        else:
            square = _ENHANCERS[index](square).enhance(1 + change)
    return square


def _adjust_hue(square: Image.Image, change: float) -> Image.Image:
    """Hue moved by `change` of the circle, 8 bits to the circle as Pillow's HSV has it."""
    hue, saturation, value = square.convert("HSV").split()
    turned = Image.fromarray((np.asarray(hue).astype(np.int16) + round(change * 255)).astype(np.uint8))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
