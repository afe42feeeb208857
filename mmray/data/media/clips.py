"""Clips: the frames and samples of a row's medium inside the span of a text.

A clip is a pure function of the row, the chosen text and random numbers, which the stream derives
from (seed, pass over the set, key).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import numpy as np

from mmray.data.images.decode import decode
from mmray.data.images.transform import NUM_UNIFORMS, transform
from mmray.data.media.decode import (
    BadMedia,
    read_audio,
    read_frames,
    read_header,
    verify_media,
)

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs
    from mmray.config.model_kinds import ClipInputs
    from mmray.data.store.stored_row import Media, Row

# Random numbers of a clip: for the augmentation of its frames, the start of the window in the span,
# and the times of the frames in the window.
NUM_CLIP_UNIFORMS = NUM_UNIFORMS + 2
MIN_SAMPLES = 1600  # width of `audio` in a batch without audio


class Window(NamedTuple):
    """Part of a recording that a clip shows: `start_s` and `end_s` in seconds, as timestamps of its
    file (the start of most files has 0).
    """

    start_s: float
    end_s: float


def choose_window(span: tuple[float, float], clip_s: float, uniform: float) -> Window:
    """Return the part of a span that a clip shows: the span, or `clip_s` seconds of a longer one.

    Args:
        uniform: Random number in [0, 1): where the clip is in a longer span; 0.5: in its middle.
    """
    start, end = span
    excess = end - start - clip_s
    if excess > 0:
        start += uniform * excess
        end = start + clip_s
    return Window(start, end)


def frame_times(window: Window, frames: int, frame_rate: float, uniform: float) -> list[float]:
    """Return the times of the frames of a clip, ascending and inside its window.

    Args:
        frames: Number of times; with a `frame_rate` the largest number.
        frame_rate: Frames per second; 0: `frames` times at equal distances.
        uniform: Random number in [0, 1): place of each time in its interval; 0.5: the middle.
    """
    length = window.end_s - window.start_s
    if not frame_rate:
        return [window.start_s + (index + uniform) * length / frames for index in range(frames)]
    times = [window.start_s + (index + uniform) / frame_rate for index in range(frames)]
    # A clip that is shorter than one interval has one frame.
    return [time for time in times if time < window.end_s] or [window.start_s + uniform * length]


def full_span(media: Media, with_sound: bool = False) -> tuple[float, float]:
    """Return the start and end of audio, or of the frames of a video, in seconds, as timestamps of
    the file.

    Raises:
        BadMedia: Its header cannot be read, or states no duration and it is damaged.
    """
    info = read_header(media.data, media.kind)
    # A complete check measured the duration; live recordings state none.
    duration = media.duration or info.stream_s or verify_media(media.data, media.kind).stream_s
    start = info.stream_start_s
    end = start + duration
    return (min(start, info.start_s), max(end, info.end_s)) if with_sound else (start, end)


def clip_window(row: Row, clip_s: float, uniform: float) -> Window:
    """Return the part of the audio or video of a row that its clip shows; (0, 0) without any.

    It is the span of the row's only text, if it has one, otherwise the whole file.

    Raises:
        BadMedia: The header of the audio or video cannot be read.
    """
    by_kind = {media.kind: media for media in row.media}
    timed = by_kind.get("video") or by_kind.get("audio")
    if timed is None:
        return Window(0, 0)
    span = row.spans[0] if row.spans else None
    start, end = full_span(timed, with_sound=True) if span is None else span
    return choose_window((start, end), clip_s, uniform)


def read_sound(by_kind: Mapping[str, Media], window: Window, rate: int) -> np.ndarray | None:
    """Return the audio of a clip, otherwise the sound of its video.

    Returns:
        Mono samples int16, less than the window if the sound starts or ends inside it; None if the
        row has no sound there.

    Raises:
        BadMedia: The sound cannot be decoded.
    """
    audio = by_kind.get("audio")
    if audio is None and "video" in by_kind and by_kind["video"].channels != 0:
        audio = by_kind["video"]
    if audio is None:
        return None
    try:
        samples = read_audio(audio.data, *window, rate, only_present=True)
        return samples if len(samples) else None
    except BadMedia as bad:
        # Without a check at prepare it is not known whether a video has sound.
        if bad.reason == "no-audio" and audio.kind == "video":
            return None
        raise


class ClipColumns:
    """Decodes clips of audio and video into the columns of a block.

    A block has `video` uint8 [R, F, 3, S, S], `num_frames` int32 [R], `audio` int16 [R, N] (mono),
    `num_samples` int32 [R] and `has_text` bool [R], False for a row without a text. A row without
    video or audio, or without any in the span of its clip, has the number 0; an image is a video of
    one frame. `video` and `num_frames` are missing if `frames` is 0, `audio` and `num_samples` if
    `audio_rate` is 0. A batch (`clip_batch`) has also `has_video` and `has_audio` bool [B].

    Args:
        inputs: The `model.inputs` section: S is its `image_side`, F its `frames`, and N the samples
            of `clip_s` seconds at `audio_rate` samples per second.
        augment: The `augment` section, which is applied equally to all frames of a clip; None for
            none.
    """

    def __init__(self, inputs: ClipInputs, augment: Augment | None = None) -> None:
        self.inputs = inputs
        self.augment = augment

    def empty(self, num_rows: int) -> dict[str, np.ndarray]:
        """Return the columns of a block of rows without clips."""
        columns = {"has_text": np.zeros(num_rows, bool)}
        side = self.inputs.image_side
        if frames := self.inputs.frames:
            columns["video"] = np.zeros((num_rows, frames, 3, side, side), np.uint8)
            columns["num_frames"] = np.zeros(num_rows, np.int32)
        if self.inputs.audio_rate:
            samples = round(self.inputs.clip_s * self.inputs.audio_rate)
            columns["audio"] = np.zeros((num_rows, samples), np.int16)
            columns["num_samples"] = np.zeros(num_rows, np.int32)
        return columns

    def set_row(
        self,
        columns: dict[str, np.ndarray],
        index: int,
        row: Row,
        uniforms: np.ndarray | None,
    ) -> None:
        """Decode the clip of one row, which shows the span of its text, otherwise the whole file.

        Args:
            columns: The arrays that `empty` returned; entry `index` of each is changed.
            row: The stored row with at most one text.
            uniforms: Random numbers in [0, 1) that determine its augmentation, float64 [51]: the
                first 49 are those for its pixels, the last two place a clip and its frames. None:
                no augmentation, and the middle of a span.

        Raises:
            BadImage: The row has several media of a kind, or one cannot be decoded.
        """
        by_kind: dict[str, Media] = {}
        for media in row.media:
            if media.kind in by_kind:
                raise BadMedia(f"{media.kind}-count", f"the row has several media: {media.kind}")
            by_kind[media.kind] = media
        place, phase = (0.5, 0.5) if uniforms is None else uniforms[NUM_UNIFORMS:].tolist()
        window = clip_window(row, self.inputs.clip_s, place)
        frames = self._frames(by_kind, window, phase, uniforms)
        samples = self._samples(by_kind, window)
        if frames:
            columns["video"][index, : len(frames)] = frames
            columns["num_frames"][index] = len(frames)
        if samples is not None:
            columns["audio"][index, : len(samples)] = samples
            columns["num_samples"][index] = len(samples)
        columns["has_text"][index] = bool(row.texts)

    def _frames(
        self,
        by_kind: dict[str, Media],
        window: Window,
        phase: float,
        uniforms: np.ndarray | None,
    ) -> list[np.ndarray] | None:
        """Return the transformed frames uint8 [3, S, S], those that the video has inside the
        window; an image is a video of one frame.
        """
        inputs = self.inputs
        video = by_kind.get("video")
        image = by_kind.get("image")
        if not inputs.frames or not (video or image):
            return None
        if video is not None:
            times = frame_times(window, inputs.frames, inputs.frame_rate, phase)
            pixels, _ = read_frames(video.data, times, only_shown=True)
        else:
            assert image is not None
            pixels = decode(image.data)[None]
        crop = None if uniforms is None else uniforms[:NUM_UNIFORMS]
        return [transform(frame, inputs, self.augment, crop) for frame in pixels]

    def _samples(self, by_kind: dict[str, Media], window: Window) -> np.ndarray | None:
        """Return the samples of the clip; None without sound, or if the model takes none."""
        rate = self.inputs.audio_rate
        samples = read_sound(by_kind, window, rate) if rate else None
        return None if samples is None else samples[: round(self.inputs.clip_s * rate)]


def has_clips(inputs: Inputs) -> TypeGuard[ClipInputs]:
    """Return whether a section `model.inputs`, or a copy of it, is of a model that takes clips."""
    return bool(vars(inputs).get("clip_s"))


def clip_columns(inputs: Inputs, augment: Augment | None = None) -> ClipColumns | None:
    """Return the columns of clips for the `model.inputs` of a model that takes clips; None for
    others.
    """
    return ClipColumns(inputs, augment) if has_clips(inputs) else None


def clip_batch(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of clips that the model reads, cut to the longest clip, from columns of a
    block; {} without clips.
    """
    if "has_text" not in rows:
        return {}
    batch = {"has_text": rows["has_text"]}
    for name, count, present, least in (
        ("video", "num_frames", "has_video", 1),
        ("audio", "num_samples", "has_audio", MIN_SAMPLES),
    ):
        if name in rows:
            longest = max(least, int(rows[count].max()))
            batch[name] = np.ascontiguousarray(rows[name][:, :longest])
            batch[count] = rows[count].astype(np.int64)
            batch[present] = rows[count] > 0
    return batch
