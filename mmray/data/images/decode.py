"""Strict decoding of encoded bytes to RGB pixels: a damaged or truncated image is an error.

Pillow decodes, because other decoders crash on damaged files. An intact color JPEG is decoded by
libjpeg-turbo directly: identical pixels in 0.8 instead of 1.4 ms for 640 x 480.
"""

from __future__ import annotations

import ctypes
import io
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL
import simplejpeg
from PIL import Image, ImageFile, PngImagePlugin

from mmray.data.images.formats import NAMES, detect_format

# Another library in the process may have set this. A truncated JPEG would then decode to mostly
# gray pixels.
ImageFile.LOAD_TRUNCATED_IMAGES = False
# Bytes of one text or color profile of a PNG, and of all texts. Pillow's limits (1 and 64 MiB)
# refuse images of common editors.
PngImagePlugin.MAX_TEXT_CHUNK = 64 << 20
PngImagePlugin.MAX_TEXT_MEMORY = 256 << 20
# Pillow warns of damaged EXIF, which does not affect the pixels, and of sizes, which `max_pixels`
# limits. Each message contains numbers from the file, so Python would print and remember one
# warning per file.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_PIXELS = 25_000_000
_LARGEST_KEPT = 31 << 20  # bytes of an array; glibc's limit is 32 MiB
WHITE = (255, 255, 255)
_EXIF_ORIENTATION = 0x0112
# EXIF orientation -> transposition to upright. ImageOps.exif_transpose is not used: it raises for
# damaged EXIF, and rewrites the EXIF block after the rotation.
_TRANSPOSITIONS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
_TRANSPOSE = {
    orientation: Image.Transpose[name] for orientation, name in enumerate(_TRANSPOSITIONS, 2)
}
_JPEG_START = b"\xff\xd8\xff"
_JPEG_COLORS = ("YCbCr", "RGB")
# The first byte of a segment, and kinds of segments: APP1 has EXIF and XMP, APP2 further images.
_MARKER = 0xFF
_START_OF_SCAN = 0xDA
_APP1 = 0xE1
_APP2 = 0xE2
# PNG raw mode -> factor from the transparent gray value in the file to the value in Pillow's
# pixels.
_GRAY_SCALE = {"1": 255, "L;2": 85, "L;4": 17}
# Numbers of bits that gray samples of 16 bits are taken to have if the file does not state it: the
# first that is enough for the largest sample.
_GRAY_BITS = (8, 10, 12, 14, 16)
# Tags of a TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_MAX_SAMPLE_VALUES = (341, 281)  # SMaxSampleValue and MaxSampleValue
# Modes of 8 bits, whose conversion to RGB raises no error.
_CONVERTIBLE = ("RGB", "RGBA", "L", "LA", "CMYK")


class BadImage(ValueError):
    """Bytes that are not a complete image of acceptable size.

    Args:
        reason: `empty` (no bytes), `format` (not a format that is read), `too-large`, `truncated`,
            `corrupt`, `checksum` (of a PNG, or of the set) or `image-count` (not one image in a
            row), `pages` (too many, of a TIFF); `decoder-crash` or `memory` if a child process that
            decoded it died or had no memory. Audio and video have those of BadMedia too.
        detail: A sentence for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@cache
def keep_image_memory() -> None:
    """Make malloc keep the memory of freed images for the next ones.

    glibc returns freed arrays of more than 128 KiB to the system, until the process has freed a
    larger one (`mallopt(3)`, M_MMAP_THRESHOLD). Decoding would cost a page fault every 4 KiB: a
    prepared image 1.4 instead of 1.0 ms.
    """
    np.empty(_LARGEST_KEPT, np.uint8)


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode an image to upright RGB pixels.

    EXIF orientation is applied, transparency is composited on white, and 16-bit samples are scaled
    to 8 bits; white of gray ones is what the file states, otherwise the largest value of the first
    of 8, 10, 12, 14 and 16 bits that all its samples fit. Color profiles are ignored. Only the
    first page or frame is decoded.

    Args:
        max_pixels: Maximum width x height.

    Returns:
        Pixels uint8 [H, W, 3]: the array itself, or the first three channels of an array [H, W, 4],
        which `resize` reads faster.

    Raises:
        BadImage: With reason `empty`, `format`, `too-large`, `truncated`, `corrupt` or `checksum`.
        MemoryError: Only if this process is out of memory.
    """
    rgb = None
    if data.startswith(_JPEG_START) and not _has_orientation_or_frames(data):
        rgb = _decode_jpeg(data, max_pixels=max_pixels)
    if rgb is None:
        image = open_image(data, max_pixels)
        rgb = _decode_jpeg_fast(image, data)
        if rgb is None:
            rgb = np.asarray(decode_with_pillow(image, data, max_pixels))
    return rgb


def verify_image(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Check that an image decodes completely, and return the (width, height) of the upright image.

    Raises the same errors as `decode`, but computes only one pixel in 64 of most JPEGs.
    """
    image = open_image(data, max_pixels)
    if _decode_jpeg_fast(image, data, eighth=True) is not None:
        return image.size
    return decode_with_pillow(image, data, max_pixels, to_rgb=False).size


def header_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return the (width, height) of the upright image by its header. Raises BadImage."""
    image = open_image(data, max_pixels)
    # Pillow has already applied the orientation to the size of a TIFF.
    is_turned = _orientation(image) >= 5 and image.format != "TIFF"
    return (image.height, image.width) if is_turned else image.size


@contextmanager
def errors_as_bad_image() -> Iterator[None]:
    """Context manager that converts the errors of decoders to BadImage."""
    try:
        yield
    except (MemoryError, BadImage):
        raise  # the first is not an error of the image, so its row must not be quarantined
    except Exception as error:  # noqa: BLE001 - decoders raise a dozen types for damaged bytes
        text = f"{type(error).__name__}: {error}"
        raise BadImage("truncated" if "truncated" in text else "corrupt", text[:300]) from None


def open_image(data: bytes, max_pixels: int, page: int = 0) -> ImageFile.ImageFile:
    """Open an image and read its header only. Raises BadImage."""
    if not data:
        raise BadImage("empty", "no bytes")
    decoder = detect_format(data)
    if decoder is None:
        raise BadImage("format", f"not {NAMES}: it starts with {data[:12]!r}")
    if decoder == "HEIF" and not _register_heif():
        raise BadImage("format", "HEIF (HEIC) needs an extra: pip install 'mmray[heif]'")
    if decoder == "TIFF":
        _silence_libtiff()
    try:
        image = Image.open(io.BytesIO(data), formats=(decoder,))
        if page:
            image.seek(page)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage("too-large", f"over {max_pixels} pixels") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged headers raise many types
        if decoder == "PNG":
            _check_png_chunks(data)  # reports the damaged chunk, if there is one
        if decoder == "WEBP" and 8 + int.from_bytes(data[4:8], "little") > len(data):
            raise BadImage(
                "truncated", f"the WebP header announces more than its {len(data)} bytes"
            ) from None
        # its text is a repr
        detail = "" if isinstance(error, Image.UnidentifiedImageError) else f": {error}"
        raise BadImage("corrupt", f"the {decoder} header cannot be read{detail}") from None
    if image.width * image.height > max_pixels:
        raise BadImage("too-large", f"{image.width} x {image.height} is over {max_pixels} pixels")
    return image


@cache
def _register_heif() -> bool:
    """Add the HEIF decoder to Pillow; return False if its package is not installed."""
    if find_spec("pillow_heif") is None:
        return False
    import pillow_heif

    pillow_heif.register_heif_opener(thumbnails=False)
    return True


@cache
def _silence_libtiff() -> None:
    """Keep the library that Pillow's wheels bundle from writing damages of TIFFs to stderr, where
    they name no row; Pillow raises an error for them.
    """
    for library in Path(PIL.__file__).parent.parent.glob("pillow.libs/libtiff-*"):
        handlers = ctypes.CDLL(f"{library}")
        handlers.TIFFSetErrorHandler(None)
        handlers.TIFFSetWarningHandler(None)


def decode_with_pillow(
    image: ImageFile.ImageFile,
    data: bytes,
    max_pixels: int,
    to_rgb: bool = True,
    largest: int = 0,
) -> Image.Image:
    """Return the upright image, in RGB unless only its size is needed; `largest`: gray sample of
    its other pages. Raises BadImage.
    """
    if image.mode == "F":
        raise BadImage("format", "its samples are floats of unknown range: convert it to 8 bits")
    if image.format == "PNG":
        _check_png_chunks(data)
        transparent = image.info.get("transparency")
        raw_mode = image.tile[0][3] if image.tile else ""
        # It has the bit depth of the file; Pillow compares 8-bit pixels with it unscaled (of 16
        # bits the low byte).
        if transparent is not None and raw_mode == "RGB;16B":
            image.info["transparency"] = tuple(value >> 8 for value in transparent)
        elif transparent is not None and raw_mode in _GRAY_SCALE:
            image.info["transparency"] = transparent * _GRAY_SCALE[raw_mode]
    with errors_as_bad_image():
        image.load()
        move = _TRANSPOSE.get(_orientation(image))
        gray = _gray_to_8_bits(image, data, largest)
        upright = gray if move is None else gray.transpose(move)
        is_checked = not to_rgb and upright.mode in _CONVERTIBLE
        rgb = upright if is_checked else _to_rgb(upright)
    # A frame of a GIF and a PNG in an icon may be larger than in the header.
    if rgb.width * rgb.height > max_pixels:
        raise BadImage("too-large", f"{rgb.width} x {rgb.height} is over {max_pixels} pixels")
    return rgb


def _decode_jpeg_fast(
    image: ImageFile.ImageFile, data: bytes, eighth: bool = False
) -> np.ndarray | None:
    """Return RGB [H, W, 3] of an upright, undamaged color JPEG, else None;

    `eighth`: gray at 1/8 size.
    """
    if image.format != "JPEG" or image.mode != "RGB" or _orientation(image) in _TRANSPOSE:
        return None
    return _decode_jpeg(data, image.width * image.height, eighth)


def _decode_jpeg(data: bytes, max_pixels: int, eighth: bool = False) -> np.ndarray | None:
    """Return RGB [H, W, 3] of an undamaged color JPEG of at most `max_pixels`, else None."""
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        # Do not allocate more than was checked.
        if colors not in _JPEG_COLORS or height * width > max_pixels:
            return None
        # strict: warnings are errors
        if eighth:
            return simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, strict=True)
        return simplejpeg.decode_jpeg(data, "RGBX", strict=True)[:, :, :3]
    except ValueError:
        return None


def _has_orientation_or_frames(data: bytes) -> bool:
    """Return whether a JPEG may have an orientation or several images, or has an unusual header."""
    start = len(_JPEG_START) - 1
    while start + 4 <= len(data) and data[start] == _MARKER:
        kind = data[start + 1]
        if kind == _START_OF_SCAN:
            return False
        if kind == _APP1 or (kind == _APP2 and data[start + 4 : start + 8] == b"MPF\0"):
            return True
        start += 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    return True


def _orientation(image: Image.Image) -> int:
    try:
        # PngImageFile.getexif would decode all pixels to find metadata after them. Such metadata,
        # which is rare, counts in `decode`, because the image is loaded, but not in `header_size`.
        return int(Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - damaged EXIF raises many types; the pixels are intact
        return 1


def _gray_to_8_bits(image: Image.Image, data: bytes, largest: int = 0) -> Image.Image:
    """Return a loaded image, with 8 bits instead of 16 or 32 if it is gray: Pillow's own conversion
    clips these to white. Transparent samples become white. `largest`: sample of its other pages.
    """
    if not image.mode.startswith("I"):
        return image
    wide = np.asarray(image).astype(np.int64)
    _, bits = gray_bits(image, data, wide, largest)
    white = 2**bits - 1
    # White is zero: Pillow inverts samples of 8 bits only.
    if image.format == "TIFF" and tag_of(image, _PHOTOMETRIC) == 0:
        wide = white - wide
    gray = ((wide * 255 + white // 2) // white).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[wide == transparent] = 255
    return Image.fromarray(gray)


def gray_bits(image: Image.Image, data: bytes, wide: np.ndarray, largest: int) -> tuple[bool, int]:
    """Return whether a gray image of 16 or 32 bits states how many bits its samples use, and their
    number, so that white is 2**bits - 1.

    A statement that the largest sample contradicts is ignored. Raises BadImage.

    Args:
        image: The loaded image.
        data: Its encoded bytes.
        largest: Largest sample of other pages.
    """
    if wide.min() < 0 or wide.max() > 65535:
        detail = f"its gray samples are {wide.min():,} to {wide.max():,}: convert it to 8 bits"
        raise BadImage("format", f"{detail} (readable are samples of 0 to 65,535)")
    largest = max(largest, int(wide.max()))
    stated = 16 if image.format in ("PPM", "JPEG2000") else 0  # Pillow has scaled them
    if image.format == "TIFF":
        largest_values = [value for tag in _MAX_SAMPLE_VALUES if (value := tag_of(image, tag))]
        stated = int(largest_values[0]).bit_length() if largest_values else 0
        if tag_of(image, _BITS_PER_SAMPLE) < 16:
            stated = tag_of(image, _BITS_PER_SAMPLE)
    elif image.format == "PNG":
        at = data.find(b"\0\0\0\1sBIT", 0, data.find(b"IDAT"))
        stated = data[at + 8] if at > 0 else 0
        # The specification scales samples to 16 bits whatever this chunk states; many do not.
        if stated and largest >= 1 << stated:
            stated = 16
    if 0 < stated <= 16 and largest < 1 << stated:
        return True, stated
    return False, next((bits for bits in _GRAY_BITS if largest < 1 << bits), 16)


def tag_of(image: Image.Image, tag: int) -> int:
    """Return the (first) number of a tag of a TIFF, 0 if it has none."""
    value = image.tag_v2.get(tag, 0)  # type: ignore[attr-defined]
    return int(value[0] if isinstance(value, tuple) else value)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, WHITE)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _check_png_chunks(data: bytes) -> None:
    """Verify the checksums of critical chunks up to IEND, because Pillow does not.

    Raises BadImage.
    """
    start = 8
    while start + 12 <= len(data):
        length = int.from_bytes(data[start : start + 4], "big")
        kind = data[start + 4 : start + 8]
        end = start + 8 + length
        if end + 4 > len(data):
            break
        is_critical = kind[0] & 0x20 == 0  # PNG specification, 5.4: an upper-case first letter
        if is_critical and zlib.crc32(data[start + 4 : end]) != int.from_bytes(
            data[end : end + 4], "big"
        ):
            raise BadImage(
                "checksum", f"PNG chunk {kind!r} at byte {start} does not match its checksum"
            )
        if kind == b"IEND":
            return
        start = end + 4
    raise BadImage("truncated", f"the PNG ends at byte {len(data)} without its end mark")
