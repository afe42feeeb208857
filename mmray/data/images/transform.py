"""Convert RGB pixels to model input: resize to a square or to patches, and random crop, flip and
color jitter of training images.

Resizing uses SIMD (`cykooz.resizer`) if a build exists for the processor: 0.4 instead of 2.5 ms for
640 x 480 to 224. It is within 2 of 255 levels of Pillow's filters in two passes, width first.
Pillow 13 resizes the height of tall images first, which differs by up to 30 levels at sharp edges.
"""

from __future__ import annotations

import base64
import io
import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
from PIL import Image, ImageEnhance

from mmray.data.images.decode import WHITE
from mmray.data.images.formats import detect_format
from mmray.data.images.patches import patch_grid, takes_patches, to_patches
from mmray.errors import UsageError
from mmray.plugins import load_class

try:  # no build for Linux on ARM
    import cykooz_resizer as simd
except ImportError:
    simd = None

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs
    from mmray.config.model import Fit, Interpolation
    from mmray.config.model_kinds import NaflexInputs

Rect = tuple[float, float, float, float]  # left, top, right, bottom in pixels

_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_FILTER_RADIUS = 2  # radius in pixels of the widest filter, bicubic
_THREAD = threading.local()  # a resizer owns its buffers, so threads must not share one
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_LOSSLESS = ("PNG", "GIF", "BMP", "PPM", "ICO")
CROP_TRIES = 10
CROP_RATIO = (3 / 4, 4 / 3)  # width by height, as in torchvision's RandomResizedCrop
FLIP_INDEX = 4 * CROP_TRIES
CROP_SLICE = slice(0, FLIP_INDEX)
JITTER_SLICE = slice(FLIP_INDEX + 1, FLIP_INDEX + 5)
JITTER_ORDER_SLICE = slice(FLIP_INDEX + 5, FLIP_INDEX + 9)
NUM_UNIFORMS = FLIP_INDEX + 9  # random numbers per row, at the indices above
THUMBNAIL_SIDE = 128  # pixels


def transform(
    rgb: np.ndarray,
    inputs: Inputs,
    augment: Augment | None = None,
    uniforms: np.ndarray | None = None,
) -> np.ndarray:
    """Convert an image to model input: resize it to a square, or to patches within the budget of a
    model that reads them, and augment it if requested.

    A random crop fills the square for any `inputs.fit`; as patches it keeps its aspect ratio.

    Args:
        rgb: Pixels uint8 [H, W, 3].
        inputs: The `model.inputs` section.
        augment: The `augment` section: random crop, flip and color jitter, and then `function`, the
            name of the user's; None for none.
        uniforms: Random numbers in [0, 1) that determine the augmentation, float64; the first
            NUM_UNIFORMS (49) are used. In training they are a pure function of seed, row and epoch.
            None: no augmentation.

    Returns:
        Contiguous RGB pixels uint8 [3, image_side, image_side], not normalized, or those that
        patches.py describes.
    """
    if augment is None or uniforms is None:
        return _as_input(_resize_to_inputs(rgb, inputs), inputs)
    if augment.has_random_crop:
        left, top, right, bottom = random_crop_box(
            (rgb.shape[1], rgb.shape[0]), augment, uniforms[CROP_SLICE]
        )
        rgb = rgb[top:bottom, left:right]
    planes = _resize_to_inputs(rgb, inputs, augment.has_random_crop)
    if uniforms[FLIP_INDEX] < augment.flip:
        planes = planes[:, :, ::-1]
    if any(augment.color_jitter):
        image = Image.fromarray(planes.transpose(1, 2, 0))
        jittered = _jitter(
            image, augment, uniforms[JITTER_SLICE], np.argsort(uniforms[JITTER_ORDER_SLICE])
        )
        planes = np.asarray(jittered).transpose(2, 0, 1)
    if augment.function is not None:
        planes = _apply_function(augment.function, planes, uniforms)
    return _as_input(planes, inputs)


def _resize_to_inputs(
    rgb: np.ndarray, inputs: Inputs | NaflexInputs, is_crop: bool = False
) -> np.ndarray:
    """Return an image, or a crop of one, in the size that the model reads: uint8 [3, H, W]."""
    if not takes_patches(inputs):
        fit: Fit = "squash" if is_crop else inputs.fit
        return resize_to_square(rgb, inputs.image_side, fit, inputs.interpolation)
    height, width = rgb.shape[:2]
    rows, columns = patch_grid(height, width, inputs)
    size = (columns * inputs.patch, rows * inputs.patch)
    return _to_planes(resize(rgb, size, inputs.interpolation, (0, 0, width, height)))


def _as_input(planes: np.ndarray, inputs: Inputs | NaflexInputs) -> np.ndarray:
    return to_patches(planes, inputs) if takes_patches(inputs) else np.ascontiguousarray(planes)


def _apply_function(name: str, planes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return pixels uint8 [3, H, W] as the user's function augments them."""
    # Frames of a clip have equal uniforms, and so equal random numbers.
    generator = np.random.default_rng(uniforms[:4].view(np.uint64))
    image = np.array(planes.transpose(1, 2, 0), order="C")  # a copy, which may be changed
    augmented = load_class(name, "data.augment")(image, generator)
    if not isinstance(augmented, np.ndarray) or augmented.dtype != np.uint8:
        raise UsageError(f"data.augment: `{name}` returned no array of type uint8")
    if augmented.shape != image.shape:
        raise UsageError(
            f"data.augment: `{name}` returned the shape {augmented.shape} for an image of "
            f"{image.shape}"
        )
    return augmented.transpose(2, 0, 1)


def resize_to_square(
    rgb: np.ndarray, side: int, fit: Fit, interpolation: Interpolation
) -> np.ndarray:
    """Resize uint8 [H, W, 3] to contiguous uint8 [3, side, side]; `pad` pads with white."""
    height, width = rgb.shape[:2]
    if fit == "pad":
        left, top, w, h = letterbox_xywh(width, height, side)
        square = np.full((side, side, 3), WHITE, np.uint8)
        square[top : top + h, left : left + w] = resize(
            rgb, (w, h), interpolation, (0, 0, width, height)
        )
    else:
        square = resize(rgb, (side, side), interpolation, crop_box(width, height, fit))
    return _to_planes(square)


def _to_planes(rgb: np.ndarray) -> np.ndarray:
    """Return pixels uint8 [H, W, 3] as contiguous planes [3, H, W]."""
    if rgb.strides[1] != 4:
        return np.ascontiguousarray(rgb.transpose(2, 0, 1))
    # Words of four bytes are shifted and cut by SIMD, single bytes are not.
    height, width = rgb.shape[:2]
    words = np.lib.stride_tricks.as_strided(rgb, (height, width, 4)).view("<u4")[:, :, 0]
    planes = np.empty((3, height, width), np.uint8)
    for channel, plane in enumerate(planes):
        np.copyto(plane, words >> (8 * channel), casting="unsafe")
    return planes


def to_pillow(rgb: np.ndarray) -> Image.Image:
    """Return pixels uint8 [H, W, 3] as an image of mode RGB."""
    pixels = _all_channels(rgb)
    if pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    return Image.frombuffer("RGBX", rgb.shape[1::-1], pixels, "raw", "RGBX", 0, 1).convert("RGB")


def thumbnail(rgb: np.ndarray) -> str:
    """Return a small copy of an image as a data URI of about 3 KB; the longer side has at most
    THUMBNAIL_SIDE (128) pixels.
    """
    small = to_pillow(rgb)
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80, method=2)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def reencode(rgb: np.ndarray, data: bytes, side: int) -> tuple[bytes, tuple[int, int]]:
    """Encode an image with its shorter side reduced to `side` pixels.

    Args:
        rgb: Its pixels uint8 [H, W, 3], which are `decode(data)`.

    Returns:
        A JPEG of quality 90, or a PNG if the source is lossless (PNG, GIF, BMP, PPM, ICO or
        lossless WebP); `data` itself if the image is not larger. And its size (width, height).
    """
    height, width = rgb.shape[:2]
    shorter = min(width, height)
    if shorter <= side:
        return data, (width, height)
    size = (max(1, round(width * side / shorter)), max(1, round(height * side / shorter)))
    small = resize(rgb, size, "bicubic", (0, 0, width, height))
    if detect_format(data) in _LOSSLESS or data[12:16] == b"VP8L":
        out = io.BytesIO()
        to_pillow(small).save(out, "PNG")
        return out.getvalue(), size
    pixels = _all_channels(small)
    colors = "RGBX" if pixels.shape[2] == 4 else "RGB"
    return simplejpeg.encode_jpeg(pixels, 90, colors, "420"), size


def _all_channels(rgb: np.ndarray) -> np.ndarray:
    """Return pixels uint8 [H, W, 3] as a contiguous array, with the fourth channel that `decode`
    and `resize` leave out: to copy three of four takes as long as to decode a JPEG.
    """
    if rgb.strides[1] == 4:
        rgb = np.lib.stride_tricks.as_strided(rgb, (*rgb.shape[:2], 4))
    return np.ascontiguousarray(rgb)


def resize(
    rgb: np.ndarray, size: tuple[int, int], interpolation: Interpolation, box: Rect
) -> np.ndarray:
    """Resize a part of an image, in one pass per direction.

    Args:
        rgb: Pixels uint8 [H, W, 3].
        size: (width, height) of the result in pixels.
        interpolation: `bilinear` or `bicubic`.
        box: Part of the image (left, top, right, bottom) in pixels, which may be fractional.

    Returns:
        Pixels uint8 [height, width, 3].
    """
    if simd is None:
        return resize_with_pillow(rgb, size, interpolation, box)
    left, top, right, bottom = box
    radius = math.ceil(_FILTER_RADIUS * max(1, (bottom - top) / size[1]))
    first = max(0, math.floor(top) - radius)
    rows = rgb[first : math.ceil(bottom) + radius]  # all rows that the second pass reads
    height, width = rows.shape[:2]
    kind = simd.PixelType.U8x3
    channels = 3
    if rows.strides[1] == 4:
        # The first three channels of four, as `decode` returns them: the width takes two thirds of
        # the time.
        rows = _all_channels(rows)
        kind = simd.PixelType.U8x4
        channels = 4
    source = simd.ImageData(width, height, kind, rows.tobytes())
    if not hasattr(_THREAD, "resizer"):
        _THREAD.resizer = simd.Resizer()
        _THREAD.scratch = lru_cache(8)(simd.ImageData)  # memory by size
    narrow = _THREAD.scratch(size[0], height, kind)
    out = _THREAD.scratch(size[0], size[1], kind)
    if out is narrow:
        out = simd.ImageData(size[0], size[1], kind)
    # In two steps, because the SIMD build (4.0.1) has crashed when it enlarges a part in both
    # directions at once.
    horizontal = _resize_options(interpolation, (left, 0, right - left, height))
    _THREAD.resizer.resize(source, narrow, horizontal)
    vertical = _resize_options(interpolation, (0, top - first, size[0], bottom - top))
    _THREAD.resizer.resize(narrow, out, vertical)
    return np.frombuffer(out.get_buffer(), np.uint8).reshape(size[1], size[0], channels)[:, :, :3]


@lru_cache(256)
def _resize_options(interpolation: Interpolation, crop: Rect) -> Any:
    """Return the options of a SIMD resize of a part (left, top, width, height) of an image."""
    # The Catmull-Rom filter is Pillow's bicubic (a = -0.5).
    kind = simd.FilterType.bilinear if interpolation == "bilinear" else simd.FilterType.catmull_rom
    return simd.ResizeOptions(
        resize_alg=simd.ResizeAlg.convolution(kind), use_alpha=False, crop_box=simd.CropBox(*crop)
    )


def resize_with_pillow(
    rgb: np.ndarray, size: tuple[int, int], interpolation: Interpolation, box: Rect
) -> np.ndarray:
    """Resize a part of an image with Pillow: the fallback of `resize` without SIMD, and the
    reference of its tests.
    """
    left, top, right, bottom = box
    kind = _PILLOW_FILTERS[interpolation]
    narrow = to_pillow(rgb).resize((size[0], len(rgb)), kind, box=(left, 0, right, len(rgb)))
    return np.asarray(narrow.resize(size, kind, box=(0, top, size[0], bottom)))


def letterbox_xywh(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of a full image on a padded square in pixels, centered with
    its aspect ratio kept.
    """
    scale = side / max(width, height)
    w = max(1, round(width * scale))
    h = max(1, round(height * scale))
    return (side - w) // 2, (side - h) // 2, w, h


def crop_box(width: int, height: int, fit: str) -> Rect:
    """Return the part of an image that fills the square: all of it to `squash`, otherwise the
    central square.
    """
    if fit == "squash":
        return (0, 0, width, height)
    short = min(width, height)
    left = (width - short) / 2
    top = (height - short) / 2
    return (left, top, left + short, top + short)


def random_crop_box(
    size: tuple[int, int], augment: Augment, uniforms: np.ndarray
) -> tuple[int, int, int, int]:
    """Return a random part of an image, as torchvision's RandomResizedCrop does.

    Args:
        size: (width, height) of the image in pixels.
        uniforms: Random numbers in [0, 1), float64 [40], four for each of CROP_TRIES (10) tries:
            area, aspect ratio, left and top. The first part that fits into the image is taken,
            otherwise a central one.
    """
    width, height = size
    low, high = augment.crop_scale
    log_min, log_max = np.log(CROP_RATIO)
    for scale, ratio, u_left, u_top in uniforms.reshape(CROP_TRIES, 4):
        area = width * height * (low + (high - low) * scale)
        aspect = np.exp(log_min + (log_max - log_min) * ratio)
        w = round(float(np.sqrt(area * aspect)))
        h = round(float(np.sqrt(area / aspect)))
        if 1 <= w <= width and 1 <= h <= height:
            left = int((width - w + 1) * u_left)
            top = int((height - h + 1) * u_top)
            return (left, top, left + w, top + h)
    w = max(1, min(width, round(height * CROP_RATIO[1])))
    h = max(1, min(height, round(width / CROP_RATIO[0])))
    left = (width - w) // 2
    top = (height - h) // 2
    return (left, top, left + w, top + h)


def _jitter(
    square: Image.Image, augment: Augment, factors: np.ndarray, order: np.ndarray
) -> Image.Image:
    """Apply brightness, contrast, saturation and hue (0 to 3) in `order`; factors are in [0, 1)."""
    for index in order:
        change = augment.color_jitter[index] * (2 * factors[index] - 1)
        if change and index < len(_ENHANCERS):
            square = _ENHANCERS[index](square).enhance(1 + change)
        elif change:  # a share of the color circle, which Pillow's HSV divides into 255 steps
            hue, saturation, value = square.convert("HSV").split()
            shifted = Image.fromarray(
                (np.asarray(hue).astype(np.int16) + round(change * 255)).astype(np.uint8)
            )
            square = Image.merge("HSV", (shifted, saturation, value)).convert("RGB")
    return square
