"""From the colours of a file to RGB: transparency laid on white, 16-bit samples scaled. For image.py."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFile

WHITE = (255, 255, 255)
# PNG raw mode -> factor from the transparent grey value of the file to the value Pillow's pixels have.
_GREY_SCALE = {"1": 255, "L;2": 85, "L;4": 17}


def correct_png_transparency(image: ImageFile.ImageFile) -> None:
    """Bring the transparent colour of a PNG into the range of the decoded pixels.

    The file states it at its own depth; Pillow compares it, unscaled, with 8-bit pixels (and of 16 bits the low byte).
    """
    transparent = image.info.get("transparency")
    if transparent is None or not image.tile:
        return
    raw_mode = image.tile[0][3]
    if raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in transparent)
    elif raw_mode in _GREY_SCALE:
        image.info["transparency"] = transparent * _GREY_SCALE[raw_mode]


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, whatever Pillow decoded it to."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        return _wide_grey_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, WHITE)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _wide_grey_to_rgb(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits (Pillow's own conversion clips it to white), its transparent value laid on white."""
    wide = np.asarray(image).astype(np.uint32)
    grey = ((wide * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[wide == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
