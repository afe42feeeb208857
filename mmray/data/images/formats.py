"""Formats of images that are read, by the first bytes of a file, and their file names."""

from __future__ import annotations

import re
from typing import NamedTuple


class ImageFormat(NamedTuple):
    """First bytes of an image format, and the suffixes of its files.

    Attributes:
        pattern: Compiled pattern that matches the first bytes.
        suffixes: Suffixes in lower case with the dot, such as `.jpg`.
    """

    pattern: re.Pattern[bytes]
    suffixes: tuple[str, ...]


def _format(pattern: bytes, *suffixes: str) -> ImageFormat:
    return ImageFormat(re.compile(pattern, re.S), suffixes)


# By the name of the decoder in Pillow, in the order in which they are tried. An extra is needed for
# HEIF; the JPEG decoder also reads MPO.
IMAGE_FORMATS = {
    "JPEG": _format(rb"\xff\xd8\xff", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": _format(rb"\x89PNG\r\n\x1a\n", ".png"),
    "WEBP": _format(rb"RIFF.{4}WEBP", ".webp"),
    "GIF": _format(rb"GIF8[79]a", ".gif"),
    "AVIF": _format(rb".{4}ftyp(avi[fs]|(mif1|miaf).{0,64}?avi[fs])", ".avif"),
    "HEIF": _format(rb".{4}ftyp(he[ivm][cxsmf]|mif1|msf1)", ".heic", ".heif", ".hif"),
    "TIFF": _format(rb"II[*+]\x00|MM\x00[*+]", ".tif", ".tiff"),
    "JPEG2000": _format(
        rb"\x00\x00\x00\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", ".jp2", ".j2k", ".jpx", ".jpf", ".j2c"
    ),
    "ICO": _format(rb"\x00\x00\x01\x00[^\x00]", ".ico"),
    "PPM": _format(rb"P[1-6][\s#]", ".ppm", ".pgm", ".pbm", ".pnm"),
    "BMP": _format(rb"BM.{8}.{4}", ".bmp", ".dib"),
}
IMAGE_SUFFIXES = tuple(suffix for each in IMAGE_FORMATS.values() for suffix in each.suffixes)
# Images that are not read. In a folder of images they are bad rows, not ignored files.
UNREAD_SUFFIXES = (
    *(".svg", ".svgz", ".eps", ".psd", ".xcf", ".ai", ".jxl", ".jxr", ".wdp", ".tga", ".dds"),
    *(".exr", ".hdr", ".pcx", ".xbm", ".xpm", ".cur", ".fits", ".dcm", ".nii"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".raw"),
)
NAMES = "JPEG, PNG, WebP, GIF, AVIF, HEIF, TIFF, JPEG 2000, ICO, PPM or BMP"
_HEAD_BYTES = 128


def detect_format(data: bytes) -> str | None:
    """Return the name of Pillow's decoder for an encoded image by its first 128 bytes; None if it
    is not a format that is read.
    """
    head = data[:_HEAD_BYTES]
    return next((name for name, each in IMAGE_FORMATS.items() if each.pattern.match(head)), None)
