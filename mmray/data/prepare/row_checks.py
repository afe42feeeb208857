"""Checks of a row against its media: spans of texts, aspect ratios and boxes."""

from __future__ import annotations

import math

from mmray.data.media.decode import MediaInfo
from mmray.data.rows import BadRow
from mmray.data.store.stored_row import Row

# Ratio of the sides of an image in a conversation; the processors of Qwen-VL refuse a larger one.
MAX_ASPECT_RATIO = 200
# Subtitles may end a moment after their video.
MAX_OVERHANG_S = 0.5
# tolerated fraction outside the image, because annotations may exceed the edge by a pixel
_BOX_SLACK = 0.01


def check_spans(row: Row, name: str, info: MediaInfo) -> None:
    """Check that the spans of a row are in its audio or video, and cut small overhangs and spans
    without an end (infinity).

    Args:
        row: The row, whose `spans`, [start, end] in seconds on the time axis of the file or None
            for each text, are changed in place.
        name: Name of the file, for the error.
        info: The MediaInfo of the file: its audio or video is from `start_s` to `end_s`, in
            seconds.

    Raises:
        BadRow: Nothing of a span is in it, or more than MAX_OVERHANG_S (0.5 s) of it is outside.
    """
    for number, span in enumerate(row.spans or []):
        if span is None:
            continue
        start = max(span[0], info.start_s)
        end = min(span[1], info.end_s)
        overhang = max(start - span[0], span[1] - end if span[1] < math.inf else 0.0)
        if overhang > MAX_OVERHANG_S or start >= end:
            raise BadRow(
                "columns",
                "span",
                f"text {number + 1} is at {span[0]:.2f} to {span[1]:.2f} s, and {name} has "
                f"{info.start_s:.2f} to {info.end_s:.2f} s",
            )
        span[:] = [start, end]


def check_aspect_ratio(name: str, size: tuple[int, int]) -> None:
    """Check that vision-language models accept the shape of an image of a conversation.

    Args:
        size: Its width and height in pixels.

    Raises:
        BadRow: One side is more than MAX_ASPECT_RATIO (200) times the other.
    """
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise BadRow(
            "decode",
            "aspect-ratio",
            f"{name} has {size[0]} x {size[1]} pixels; vision-language models accept a ratio of "
            f"up to {MAX_ASPECT_RATIO}",
        )


def relative_boxes(
    boxes: list[list[float]], stated: tuple[int, int], size: tuple[int, int], orientation: int
) -> list[list[float]]:
    """Convert boxes to (left, top, right, bottom) in fractions of the upright image.

    Args:
        boxes: (x, y, width, height) of each box in pixels.
        stated: Width and height in pixels that the source states for the image of the boxes.
        size: Width and height of the upright image in pixels.
        orientation: EXIF orientation, if the boxes are in the pixels before the rotation, else 1.

    Returns:
        The boxes, each number between 0 and 1.

    Raises:
        BadRow: A box exceeds the image, or the image has another aspect ratio than `stated`.
    """
    if not size[0]:
        raise BadRow(
            "columns", "boxes", "boxes need the image size: prepare with --check full or header"
        )
    width, height = stated
    stored = size if orientation == 1 else size[::-1]
    if abs(width * stored[1] - height * stored[0]) > _BOX_SLACK * stored[0] * height:
        raise BadRow(
            "columns",
            "boxes",
            f"the document states {width} x {height} pixels, and the image has "
            f"{size[0]} x {size[1]}: do its boxes belong to another image?",
        )
    out = [[x / width, y / height, (x + w) / width, (y + h) / height] for x, y, w, h in boxes]
    if any(min(box) < -_BOX_SLACK or max(box) > 1 + _BOX_SLACK for box in out):
        raise BadRow("columns", "boxes", f"a box exceeds the image of {width} x {height} pixels")
    out = [_rotate_box(box, orientation) for box in out]
    return [[min(1.0, max(0.0, number)) for number in box] for box in out]


def _rotate_box(box: list[float], orientation: int) -> list[float]:
    """Return a box of the stored image in the upright one; orientations 5 to 8 swap the axes."""
    left, top, right, bottom = box
    if orientation < 5:
        return box
    # columns of the upright image are rows of the stored one
    columns = (1 - bottom, 1 - top) if orientation in (6, 7) else (top, bottom)
    rows = (1 - right, 1 - left) if orientation in (7, 8) else (left, right)
    return [columns[0], rows[0], columns[1], rows[1]]
