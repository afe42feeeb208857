"""Which way up a picture is, as its EXIF says. For image.py."""

from __future__ import annotations

from PIL import Image

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


def turn_upright(image: Image.Image) -> Image.Image:
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
