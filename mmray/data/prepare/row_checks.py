"""Checks of a row against its media: spans of texts and aspect ratios."""

from __future__ import annotations

import math

from mmray.data.media.decode import MediaInfo
from mmray.data.rows import BadRow
from mmray.data.store.stored_row import Row

# Ratio of the sides of an image in a conversation; the processors of Qwen-VL refuse a larger one.
MAX_ASPECT_RATIO = 200
# Subtitles may end a moment after their video.
MAX_OVERHANG_S = 0.5


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
