"""Resizing of RGB pixels: Pillow's convolution, by SIMD where there is a build of it for this processor.

Pillow's filters with 8 bits between two passes, always the width first: a pixel is within 2 levels of what Pillow makes
in that order, 0.05 on average of pictures and text (a test holds them side by side), at a quarter of the time. The
order shows where bicubic overshoots, as at the edges of text: up to 30 levels, which is how far the other order is off.
Pillow takes the width first too, but from 13 on not of a picture that is tall, and SIMD by itself never does. On
processors without that build Pillow does it.
"""

from __future__ import annotations

import math
import threading
from typing import Literal

import numpy as np
from PIL import Image

try:  # no build for Linux on ARM
    import cykooz_resizer as simd
except ImportError:
    simd = None

Box = tuple[float, float, float, float]  # left, top, right, bottom
_PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_REACH = 2  # pixels to either side that the widest filter, the bicubic one, looks at
_THREAD = threading.local()  # a resizer keeps its working memory, so that two threads must not share one


def resample(
    rgb: np.ndarray, size: tuple[int, int], interpolation: Literal["bilinear", "bicubic"], box: Box
) -> np.ndarray:
    """The part `box` of uint8 [H, W, 3] as uint8 [h, w, 3], `size` being (w, h).

    Each pass is a call of its own, for the order; and because the SIMD build (4.0.1), asked to enlarge a part both ways
    at once, has read beyond its memory and died.
    """
    if simd is None:
        return resample_by_pillow(rgb, size, interpolation, box)
    left, top, right, bottom = box
    # Catmull and Rom's filter is the bicubic one that Pillow has (a = -0.5).
    kind = simd.FilterType.bilinear if interpolation == "bilinear" else simd.FilterType.catmull_rom
    filtered = simd.ResizeAlg.convolution(kind)
    reach = math.ceil(_REACH * max(1, (bottom - top) / size[1]))
    first = max(0, math.floor(top) - reach)
    rows = rgb[first : math.ceil(bottom) + reach]  # all that the second pass looks at
    height, width = rows.shape[:2]
    source, narrow, out = (
        simd.ImageData(width, height, simd.PixelType.U8x3, rows.tobytes()),
        simd.ImageData(size[0], height, simd.PixelType.U8x3),
        simd.ImageData(*size, simd.PixelType.U8x3),
    )
    across = simd.ResizeOptions(resize_alg=filtered, crop_box=simd.CropBox(left, 0, right - left, height))
    down = simd.ResizeOptions(resize_alg=filtered, crop_box=simd.CropBox(0, top - first, size[0], bottom - top))
    _resizer().resize(source, narrow, across)
    _resizer().resize(narrow, out, down)
    return np.frombuffer(out.get_buffer(), np.uint8).reshape(size[1], size[0], 3)


def resample_by_pillow(
    rgb: np.ndarray, size: tuple[int, int], interpolation: Literal["bilinear", "bicubic"], box: Box
) -> np.ndarray:
    """The same by Pillow: the yardstick, and what does it where there is no other."""
    left, top, right, bottom = box
    across = Image.fromarray(rgb).resize((size[0], len(rgb)), _PILLOW[interpolation], box=(left, 0, right, len(rgb)))
    return np.asarray(across.resize(size, _PILLOW[interpolation], box=(0, top, size[0], bottom)))


def _resizer() -> simd.Resizer:
    if not hasattr(_THREAD, "resizer"):
        _THREAD.resizer = simd.Resizer()
    return _THREAD.resizer
