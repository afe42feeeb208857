"""Pages and frames of images, and what images have and their decoded pixels do not."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFile

from mmray.data.images.decode import (
    MAX_PIXELS,
    BadImage,
    decode_with_pillow,
    errors_as_bad_image,
    gray_bits,
    open_image,
    tag_of,
)
from mmray.data.images.formats import detect_format

_NEW_SUBFILE_TYPE = 254  # tag of a TIFF
_MAX_PAGES = 256
# Values of SourceRow.notices.
_MORE_PAGES = (
    "pages 2 and later of a TIFF are not used (in conversations `--pages images` makes them images)"
)
_MORE_FRAMES = "frames after the first of an animation are not used"
_GUESSED_WHITE = (
    "a gray image has 16 bits a sample and uses fewer, without stating how many: white is the "
    "largest value of 8, 10, 12 or 14 bits"
)
_HDR = "an HDR image (PQ or HLG) is not tone-mapped, so its colors are pale"
# Their transfer functions (16 and 18 of ITU-T H.273), and where they are in an AVIF or HEIF, and in
# a PNG: after these bytes, so many bytes after their start.
_HDR_TRANSFERS = (16, 18)
_TRANSFER_AT = {b"colrnclx": 11, b"\0\0\0\4cICP": 9}
_HEAD_BYTES = 1 << 13  # of a file, which have its color space
_DARK = (
    "an image has 16 bits a sample and uses less than a quarter of their range, so it is dark or "
    "has little contrast"
)
_QUARTER = 1 << 14


def image_notices(data: bytes, max_pixels: int = MAX_PIXELS) -> list[str]:
    """Return what an image has and its decoded pixels do not, as clauses for `SourceRow.notices`.

    Not counted are further images of a JPEG (MPO), which are previews and maps of depth or gain.

    Raises:
        BadImage: As `decode` does.
    """
    if detect_format(data) == "JPEG":
        return []
    hdr = [_HDR] * _is_hdr(data)
    is_png = data.startswith(b"IHDR", 12)
    # Most PNGs are not opened for this: they have 8 bits and no chunk of an animation.
    if is_png and data[24] < 16 and data.find(b"acTL", 0, data.find(b"IDAT")) < 0:
        return hdr
    image = open_image(data, max_pixels)
    more = [_MORE_PAGES if image.format == "TIFF" else _MORE_FRAMES] * _has_pages(image)
    return more + hdr + _sample_notices(open_image(data, max_pixels), data)


def split_pages(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[list[bytes], list[str]]:
    """Return each page of a TIFF of several pages as a PNG with the pixels that `decode` returns of
    it, and the notices of all pages. Gray pages of 16 bits have one white, so that slices of a scan
    stay comparable.

    Returns:
        Two empty lists for a TIFF of one page, and for another format.

    Raises:
        BadImage: A page cannot be decoded, or there are over 256.
    """
    pages: list[bytes] = []
    notices: list[str] = []
    indices: Sequence[int] = ()
    if detect_format(data) == "TIFF":
        indices = _page_indices(open_image(data, max_pixels))
    if len(indices) > _MAX_PAGES:
        raise BadImage("pages", f"{len(indices)} pages; the limit is {_MAX_PAGES}")
    if len(indices) < 2:
        return pages, notices
    largest = 0
    for index in indices:
        page = open_image(data, max_pixels, index)
        if page.mode.startswith("I"):
            with errors_as_bad_image():
                page.load()
            largest = max(largest, int(np.asarray(page).max()))
    for index in indices:
        page = open_image(data, max_pixels, index)
        rgb = decode_with_pillow(page, data, max_pixels, largest=largest)
        red, green, blue = rgb.split()
        file = io.BytesIO()
        (red if red == green == blue else rgb).save(file, "PNG")
        pages.append(file.getvalue())
        notices += _sample_notices(open_image(data, max_pixels, index), data, largest)
    return pages, notices


def _sample_notices(image: ImageFile.ImageFile, data: bytes, largest: int = 0) -> list[str]:
    """Return the notices of an opened image of 16 bits; `largest`: sample of its other pages."""
    raw_mode = str(image.tile[0][3]) if image.tile else ""
    is_gray = image.mode.startswith("I")
    if not is_gray and ";16" not in raw_mode:
        return []
    with errors_as_bad_image():
        image.load()
    pixels = np.asarray(image)
    if not is_gray:  # Pillow's pixels are the high bytes
        high = pixels[..., : 1 if image.mode == "LA" else 3]
        return [_DARK] * bool(int(high.max()) - int(high.min()) < _QUARTER >> 8)
    is_stated, bits = gray_bits(image, data, pixels, largest)
    if bits < 16:
        return [_GUESSED_WHITE] * (not is_stated)
    return [_DARK] * (max(largest, int(pixels.max())) - int(pixels.min()) < _QUARTER)


def _page_indices(image: Image.Image) -> Sequence[int]:
    """Return the indices of the frames of an opened image, of a TIFF of the pages without smaller
    copies and masks of pages. Raises BadImage.
    """
    with errors_as_bad_image():
        frames = range(getattr(image, "n_frames", 1))
        if image.format != "TIFF":
            return frames
        indices = []
        for index in frames:
            image.seek(index)
            # 1: a smaller copy of another page; 4: the mask of one.
            if index == 0 or not tag_of(image, _NEW_SUBFILE_TYPE) & 5:
                indices.append(index)
        image.seek(0)
        return indices


def _has_pages(image: Image.Image) -> bool:
    try:
        return len(_page_indices(image)) > 1
    except BadImage:  # one after the first is damaged
        image.seek(0)
        return True


def _is_hdr(data: bytes) -> bool:
    for start, offset in _TRANSFER_AT.items():
        at = data.find(start, 0, _HEAD_BYTES)
        if at >= 0 and data[at + offset : at + offset + 1] in map(int.to_bytes, _HDR_TRANSFERS):
            return True
    return False
