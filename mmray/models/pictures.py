"""Pictures that a person hands over, as the pixels that a model was trained on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mmray.data.image import MAX_PIXELS, decode, to_pixels
from mmray.errors import DataError

if TYPE_CHECKING:
    from mmray.config import Inputs

_PNG_MODES = ("1", "L", "LA", "P", "I", "I;16", "I;16B", "RGB", "RGBA")
Picture = Image.Image | bytes | str | Path


def stacked(images: Sequence[Picture], inputs: Inputs, first: int = 0) -> Tensor:
    """Pixels uint8 [N, 3, S, S] of PIL images, encoded bytes, or paths.

    Raises DataError naming the first that cannot be read, by its number, counted from `first`.
    """
    pixels = [_pixels(number, image, inputs) for number, image in enumerate(images, first)]
    return torch.from_numpy(np.stack(pixels))


def _pixels(number: int, image: Picture, inputs: Inputs) -> np.ndarray:
    try:
        return to_pixels(_picture(image), inputs.image_side, inputs.fit, inputs.interpolation)
    except (OSError, ValueError) as error:
        name = f" ({image})" if isinstance(image, str | Path) else ""
        raise DataError(f"image {number}{name}: {error}") from error


def _picture(image: Picture) -> Image.Image:
    """An upright RGB image, as training saw it."""
    if isinstance(image, str | Path):
        return decode(Path(image).read_bytes(), MAX_PIXELS)
    if isinstance(image, bytes):
        return decode(image, MAX_PIXELS)
    upright = ImageOps.exif_transpose(image)
    if upright.mode not in _PNG_MODES:
        upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    if upright.mode == "RGB" and "transparency" not in upright.info:
        return upright
    file = io.BytesIO()
    upright.save(file, "PNG")  # lossless, and then read by the one function that decides about alpha and 16 bits
    return decode(file.getvalue(), MAX_PIXELS)
