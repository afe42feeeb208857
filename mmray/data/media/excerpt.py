"""Excerpts of audio and video for HTML pages: frames with their times, and sound that browsers
play.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.data.images.transform import thumbnail
from mmray.data.media.clips import clip_window, frame_times, read_sound
from mmray.data.media.decode import read_frames
from mmray.data.media.encode import encode_audio

if TYPE_CHECKING:
    from mmray.data.store.stored_row import Row

NUM_FRAMES = 6
SOUND_RATE = 24_000
SOUND_BITS_PER_S = 64_000


def make_excerpt(row: Row, clip_s: float) -> dict[str, Any]:
    """Return the clip of a row with one of its texts, small enough for a page.

    Args:
        row: A row with audio or video, and at most one text, whose span the clip is.
        clip_s: Longest clip in seconds; of a longer span its middle.

    Returns:
        JSON values: `start_s` and `end_s` of the clip, timestamps of the file in seconds; `frames`,
        a list of {`time_s`, `image`} with the times of the decoded frames and thumbnails as data
        URIs, empty without video; and `sound`, an MP3 as data URI, None without sound.

    Raises:
        BadMedia: The audio or video cannot be decoded.
    """
    by_kind = {media.kind: media for media in row.media}
    window = clip_window(row, clip_s, 0.5)
    frames = []
    if video := by_kind.get("video"):
        times_s = frame_times(window, NUM_FRAMES, 0, 0.5)
        pixels, times = read_frames(video.data, times_s, only_shown=True)
        # A short clip shows a frame at several times.
        _, first = np.unique(times, return_index=True)
        frames = [
            {"time_s": round(float(times[index]), 3), "image": thumbnail(pixels[index])}
            for index in first.tolist()
        ]
    samples = read_sound(by_kind, window, SOUND_RATE)
    sound = None
    if samples is not None and len(samples):
        encoded = encode_audio(samples, SOUND_RATE, "mp3", SOUND_BITS_PER_S)
        sound = "data:audio/mpeg;base64," + base64.b64encode(encoded).decode()
    return {
        "start_s": round(window.start_s, 3),
        "end_s": round(window.end_s, 3),
        "frames": frames,
        "sound": sound,
    }
