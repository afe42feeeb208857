"""Encoded bytes to checked RGB pixels: the first thing that happens to an image, at prepare time and again in training.

Pillow decodes (other decoders die of damaged files instead of raising), and libjpeg-turbo itself what is a plain JPEG
without any fault. `decode` answers with an upright RGB image or raises BadImage, whatever the bytes are; `to_pixels`
makes the square a model sees, `read_pixels` both at once; `checked_size` only finds out whether `decode` would answer;
`shrink` makes the smaller copy that a prepared set may keep.
Nothing here guesses: half a picture is an error, never a picture that is half grey.
"""

from __future__ import annotations

import io
import math
import threading
import warnings
import zlib
from typing import Literal

import numpy as np
import simplejpeg
from PIL import Image, ImageFile

# Which way up a picture is, as its EXIF says. For image.py.
ORIENTATION = 0x0112  # tag of EXIF
# Its value -> the move that brings the picture upright; 1 is upright.
_MOVES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = (5, 6, 7, 8)  # width and height change places


def exif_transpose(image: Image.Image) -> Image.Image:
    """The picture upright; itself where it is."""
    move = _MOVES.get(_orientation(image))
    return image if move is None else image.transpose(move)


def is_upright(image: Image.Image) -> bool:
    """Whether nothing in the file, EXIF or XMP, asks for a move."""
    return _orientation(image) not in _MOVES


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) that the picture has when it is upright."""
    return (image.height, image.width) if _orientation(image) in _LYING else image.size


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - damaged EXIF (any parser error) does not make the pixels bad: as if it said nothing
        return 1


# From the colours of a file to RGB: transparency laid on white, 16-bit samples scaled. For image.py.
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


# Resizing of RGB pixels: Pillow's convolution, by SIMD where there is a build of it for this processor.
#
# Pillow's filters with 8 bits between two passes, always the width first: a pixel is within 2 levels of what Pillow
# makes
# in that order, 0.05 on average of pictures and text (a test holds them side by side), at a quarter of the time. The
# order shows where bicubic overshoots, as at the edges of text: up to 30 levels, which is how far the other order is
# off.
# Pillow takes the width first too, but from 13 on not of a picture that is tall, and SIMD by itself never does. On
# processors without that build Pillow does it.
try:  # no build for Linux on ARM
    import cykooz_resizer as simd
except ImportError:
    simd = None

Box = tuple[float, float, float, float]  # left, top, right, bottom
_PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_REACH = 2  # pixels to either side that the widest filter, the bicubic one, looks at
_THREAD = threading.local()  # a resizer keeps its working memory, so that two threads must not share one


def resize(
    rgb: np.ndarray, size: tuple[int, int], interpolation: Literal["bilinear", "bicubic"], box: Box
) -> np.ndarray:
    """The part `box` of uint8 [H, W, 3] as uint8 [h, w, 3], `size` being (w, h).

    Each pass is a call of its own, for the order; and because the SIMD build (4.0.1), asked to enlarge a part both ways
    at once, has read beyond its memory and died.
    """
    if simd is None:
        return resize_with_pillow(rgb, size, interpolation, box)
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


def resize_with_pillow(
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


# Another library in the process may have switched this on; half a JPEG would then become mostly grey pixels.
ImageFile.LOAD_TRUNCATED_IMAGES = False
# What Pillow warns of is a file's: damaged EXIF, which costs no picture, or a size that `max_pixels` decides upon. Each
# text has the file's own numbers in it, so that Python would show, and remember, one for every such file.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_PIXELS = 25_000_000


class BadImage(ValueError):
    """Bytes that are not a whole, readable, reasonably sized picture; `reason` is a short word, `detail` a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def check_header(data: bytes, max_pixels: int = MAX_PIXELS) -> str:
    """Format by content (JPEG, MPO, PNG, WEBP or GIF), from the header alone.

    Raises BadImage with reason `empty`, `format`, `corrupt` or `too-large`.
    """
    return str(_open(data, max_pixels).format)


def header_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of the upright picture, as the header says. Raises BadImage as `check_header` does."""
    image = _open(data, max_pixels)
    return upright_size(image)


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture as an upright RGB image.

    EXIF orientation is applied, transparency is laid on white, 16-bit samples are scaled (not clipped), and of an
    animation the first frame is taken. Colour profiles are ignored. Raises BadImage, and MemoryError where this process
    has no room for it, only.
    """
    return _decode(_open(data, max_pixels), data, max_pixels)


def _decode(image: ImageFile.ImageFile, data: bytes, max_pixels: int) -> Image.Image:
    if image.format == "PNG":
        _check_png_chunks(data)
        correct_png_transparency(image)
    try:
        image.load()
        upright = exif_transpose(image)
        rgb = to_rgb(upright)
    except MemoryError:
        raise  # no fault of the image: its row must not be set aside for it
    except Exception as error:  # noqa: BLE001 - fed damaged bytes, a decoder raises what it likes (a dozen kinds seen)
        text = f"{type(error).__name__}: {error}"
        raise BadImage("truncated" if "truncated" in text else "corrupt", text[:300]) from None
    if rgb.width * rgb.height > max_pixels:  # a GIF frame may be larger than its header says
        raise BadImage("too-large", f"{rgb.width} x {rgb.height} is over {max_pixels} pixels")
    return rgb


def verify_image(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of what `decode(data)` gives, at half its price. Raises BadImage as `decode` does.

    All bits of a JPEG are read, which is where its faults are found, and one pixel in 64 is made of them.
    """
    image = _open(data, max_pixels)
    if _decode_jpeg_fast(image, data, sketch=True) is not None:
        return image.size
    return _decode(image, data, max_pixels).size


def read_rgb(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """What `decode(data)` gives, to the bit: uint8 [H, W, 3]. Raises BadImage only.

    The usual file, a whole JPEG that lies upright, goes to libjpeg-turbo without the detour over a Pillow image; any
    other, and any that it finds fault with, takes the way of `decode`.
    """
    image = _open(data, max_pixels)
    rgb = _decode_jpeg_fast(image, data)
    return np.asarray(_decode(image, data, max_pixels)) if rgb is None else rgb


def read_pixels(
    data: bytes,
    side: int,
    fit: Literal["squash", "crop", "pad"],
    interpolation: Literal["bilinear", "bicubic"],
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """What `to_pixels(decode(data))` gives, to the bit: uint8 [3, side, side]. Raises BadImage only."""
    return _channels_first(_square(read_rgb(data, max_pixels), side, fit, interpolation))


def _decode_jpeg_fast(image: ImageFile.ImageFile, data: bytes, sketch: bool = False) -> np.ndarray | None:
    """RGB [H, W, 3] of a JPEG in colour that lies upright and has no fault; else None.

    As a `sketch`, grey and an eighth of its size.
    """
    if image.format != "JPEG" or image.mode != "RGB" or not is_upright(image):
        return None
    try:
        if simplejpeg.decode_jpeg_header(data)[1::-1] != image.size:  # nothing larger than was checked is allocated
            return None
        colours, least = ("GRAY", 1) if sketch else ("RGB", 0)  # `least` of 0: whole
        pixels: np.ndarray = simplejpeg.decode_jpeg(  # strict: a warning is a fault
            data, colours, min_height=least, min_width=least, strict=True
        )
    except ValueError:
        return None
    return pixels


def to_pixels(
    image: Image.Image | np.ndarray,
    side: int,
    fit: Literal["squash", "crop", "pad"],
    interpolation: Literal["bilinear", "bicubic"],
) -> np.ndarray:
    """The square that `resized` makes: uint8 [3, side, side], contiguous."""
    return _channels_first(_square(np.asarray(image), side, fit, interpolation))


def channels_first(square: Image.Image) -> np.ndarray:
    """uint8 [3, H, W], contiguous."""
    return _channels_first(np.asarray(square))


def _channels_first(rgb: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rgb.transpose(2, 0, 1))


def resized(
    image: Image.Image | np.ndarray,
    side: int,
    fit: Literal["squash", "crop", "pad"],
    interpolation: Literal["bilinear", "bicubic"],
) -> Image.Image:
    """A square of `side` pixels, of an RGB image or uint8 [H, W, 3].

    `squash` ignores the aspect ratio, `crop` takes the central square, `pad` keeps everything on white.
    Crop and resize are one call: a third faster than one after the other, and no row of pixels is rounded away.
    """
    return Image.fromarray(_square(np.asarray(image), side, fit, interpolation))


def _square(
    rgb: np.ndarray,
    side: int,
    fit: Literal["squash", "crop", "pad"],
    interpolation: Literal["bilinear", "bicubic"],
) -> np.ndarray:
    """uint8 [H, W, 3] to uint8 [side, side, 3], as `resized` says."""
    height, width = rgb.shape[:2]
    if fit != "pad":
        return resize(rgb, (side, side), interpolation, crop_rect(width, height, fit))
    left, top, w, h = letterbox_rect(width, height, side)
    square = np.full((side, side, 3), WHITE, np.uint8)
    square[top : top + h, left : left + w] = resize(rgb, (w, h), interpolation, (0, 0, width, height))
    return square


def reencode(rgb: np.ndarray, data: bytes, side: int) -> bytes:
    """Encoded bytes whose shorter side is `side`; the same bytes where the picture is no larger than that.

    `rgb` is what `read_rgb(data)` gave. JPEG of quality 90; PNG where the source is PNG, GIF or lossless WebP.
    """
    height, width = rgb.shape[:2]
    shorter = min(width, height)
    if shorter <= side:
        return data
    size = (max(1, round(width * side / shorter)), max(1, round(height * side / shorter)))
    small = Image.fromarray(resize(rgb, size, "bicubic", (0, 0, width, height)))
    out = io.BytesIO()
    if _is_lossless(data):
        small.save(out, "PNG")
    else:
        small.save(out, "JPEG", quality=90)
    return out.getvalue()


def letterbox_rect(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) of an image on a square of `side` pixels that shows all of it."""
    scale = side / max(width, height)
    w, h = max(1, round(width * scale)), max(1, round(height * scale))
    return (side - w) // 2, (side - h) // 2, w, h


def crop_rect(width: int, height: int, fit: str) -> Box:
    """The part of the source that fills the square."""
    if fit == "squash":
        return (0, 0, width, height)
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    return (left, top, left + short, top + short)


def _detect_format(data: bytes) -> str | None:
    """Name of the decoder for these bytes, by their first ones (Pillow finds MPO inside its JPEG decoder)."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "GIF" if data[:6] in (b"GIF87a", b"GIF89a") else None


def _is_lossless(data: bytes) -> bool:
    return _detect_format(data) in ("PNG", "GIF") or data[12:16] == b"VP8L"


def _open(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """The image with its header read and nothing decoded yet. Raises BadImage."""
    if not data:
        raise BadImage("empty", "no bytes")
    decoder = _detect_format(data)
    if decoder is None:
        raise BadImage("format", f"neither JPEG, PNG, WebP, GIF nor MPO: it begins with {data[:12]!r}")
    try:
        image = Image.open(io.BytesIO(data), formats=(decoder,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage("too-large", str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as in decode: a damaged header raises many kinds
        if decoder == "PNG":
            _check_png_chunks(data)  # says which chunk is damaged, where that is the cause
        if decoder == "WEBP" and 8 + int.from_bytes(data[4:8], "little") > len(data):
            raise BadImage("truncated", f"the WebP says it is longer than its {len(data)} bytes") from None
        known = not isinstance(error, Image.UnidentifiedImageError)  # its text is a memory address
        raise BadImage("corrupt", f"the {decoder} header cannot be read" + (f": {error}" if known else "")) from None
    if image.width * image.height > max_pixels:
        raise BadImage("too-large", f"{image.width} x {image.height} is over {max_pixels} pixels")
    return image


def _check_png_chunks(data: bytes) -> None:
    """Check the chunks that make the picture, up to the end mark: Pillow passes over the checksums of the pixels."""
    start = 8
    while start + 12 <= len(data):
        length = int.from_bytes(data[start : start + 4], "big")
        kind, end = data[start + 4 : start + 8], start + 8 + length
        if end + 4 > len(data):
            break
        critical = kind[0] & 0x20 == 0  # PNG specification, 5.4: upper case means the picture needs it
        if critical and zlib.crc32(data[start + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BadImage("checksum", f"PNG chunk {kind!r} at byte {start} does not match its checksum")
        if kind == b"IEND":
            return
        start = end + 4
    raise BadImage("truncated", f"the PNG ends at byte {len(data)} without its end mark")
