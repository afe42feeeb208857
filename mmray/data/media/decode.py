"""Decode audio and video with FFmpeg (PyAV): headers, complete checks, and the parts inside a span.

Times are seconds on the timeline of the file, as players and subtitles count: edit lists are
applied, and a stream may start after zero. MP3 has no timestamps, so its first sample is at zero.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmray.data.images.decode import MAX_PIXELS, BadImage
from mmray.data.media.formats import NAMES, detect_demuxer
from mmray.data.media.orientation import display_matrix, turns_sideways, upright
from mmray.errors import UsageError

if TYPE_CHECKING:
    from av import AudioFrame, AudioResampler, AudioStream, VideoFrame, VideoStream
    from av.container import InputContainer

_EXTRA_HINT = "audio and video need an extra: pip install 'mmray[media]'"
MAX_DURATION_S = 4 * 3600.0
MAX_SAMPLE_RATE = 192_000
MAX_FRAME_RATE = 240.0
MAX_CHANNELS = 8
# Audio before a span that is decoded but not used: decoders are not exact after a seek (Opus: 80
# ms, AAC: two frames of up to 64 ms).
_PREROLL_S = 0.3
# Audio after a span that the filter of the resampler takes, at most 32 samples of the lower rate.
_POSTROLL_S = 0.05
# A header may round its duration, and codecs pad their last frame.
_DURATION_SLACK_S = 0.1
# Players convert files that do not state their color matrix by BT.709 from this size on, smaller
# ones by BT.601, which FFmpeg takes for all.
_HD_SIZE = (1280, 720)
_UNSPECIFIED_MATRIX = 2
_BT709 = 1
_HDR_TRANSFERS = (16, 18)  # PQ and HLG
_PROGRESSIVE = (0, 1)  # field orders: unknown, progressive
# A larger gap between the timestamps of two audio frames is filled with silence.
_MAX_JITTER_S = 0.01
# Their durations are estimated from the size of the file.
WITHOUT_DURATION = ("mp3", "ogg")


class BadMedia(BadImage):
    """Bytes that are not complete audio or video within the limits.

    `reason` is `empty` (no bytes), `format` (not a format that is read), `extra` (the package PyAV
    is missing), `no-audio`, `no-video`, `too-large` (pixels of a frame), `too-long`, `rate`,
    `channels`, `corrupt` or `truncated`; or `audio-count`, `video-count` or `image-count` if a row
    has several media of this kind.
    """


class MediaInfo(NamedTuple):
    """What the header of audio or video states, or what a complete check measured.

    Args:
        start_s: Timestamp of its first sample or frame in seconds, 0 in most files.
        duration_s: Seconds from there to its end; 0 if the header has none.
        rate: Samples or frames per second.
        channels: Channels of the audio; 0 for a video without sound.
        width: Width of frames in pixels, upright after a complete check; 0 for audio.
        height: Height of frames in pixels, upright after a complete check; 0 for audio.
        stream_start_s: Like `start_s`, of a video without its sound.
        stream_s: Like `duration_s`, of a video without its sound.
        notices: What the file has and a clip of it does not, as clauses of `SourceRow.notices`.
    """

    start_s: float
    duration_s: float
    rate: float
    channels: int
    width: int = 0
    height: int = 0
    stream_start_s: float = 0.0
    stream_s: float = 0.0
    notices: Sequence[str] = ()

    @property
    def end_s(self) -> float:
        """Timestamp of the end of the audio or video in seconds: `start_s` + `duration_s`."""
        return self.start_s + self.duration_s


@cache
def _is_available() -> bool:
    return find_spec("av") is not None


def require_decoder(what: str) -> None:
    """Raise UsageError if PyAV is not installed, the package of the extra `media` that decodes
    audio and video.
    """
    if not _is_available():
        raise UsageError(f"{what}: {_EXTRA_HINT}")


def read_header(data: bytes, kind: str, max_pixels: int = MAX_PIXELS) -> MediaInfo:
    """Return what the header of audio or video states. Raises BadMedia."""
    with _open(data, max_pixels) as container:
        return _read_header(container, kind, max_pixels)


def verify_media(data: bytes, kind: str, max_pixels: int = MAX_PIXELS) -> MediaInfo:
    """Decode audio or video completely, with the sound of a video, and measure where it starts and
    ends.

    Raises:
        BadMedia: It is damaged, or exceeds a limit.
    """
    import av

    with _open(data, max_pixels) as container:
        info = _read_header(container, kind, max_pixels)
        streams = [each for each in (_video(container), _audio(container)) if each is not None]
        if kind == "audio":
            streams = streams[-1:]
        for stream in streams:
            stream.codec_context.options = {
                # A damaged frame is an error instead of an invented one.
                "err_detect": "crccheck+bitstream+buffer+explode",
                "max_pixels": str(max_pixels),
            }
        starts = dict.fromkeys((stream.index for stream in streams), math.inf)
        ends = dict.fromkeys(starts, -math.inf)
        is_turned = False
        for packet in container.demux(streams):
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise BadMedia("corrupt", f"a frame at {frame.time or 0:.2f} s is damaged")
                if isinstance(frame, av.VideoFrame):
                    is_turned = turns_sideways(display_matrix(frame))
                    if frame.width * frame.height > max_pixels:
                        size = f"{frame.width} x {frame.height}"
                        raise BadMedia("too-large", f"{size} is over {max_pixels} pixels")
                if frame.time is None:
                    continue
                start = frame.time - _zero(container)
                index = packet.stream.index
                starts[index] = min(starts[index], start)
                ends[index] = max(ends[index], start + _frame_duration(frame, info))
                if ends[index] - min(starts.values()) > MAX_DURATION_S:
                    raise BadMedia("too-long", f"it has over {MAX_DURATION_S:,.0f} s")
        first = min(starts.values())
        if first == math.inf:
            raise BadMedia("truncated", "it has a header, and nothing that can be decoded")
        index = streams[0].index
        if kind == "video" and streams[0].duration is not None and starts[index] < math.inf:
            ends[index] = _video_end(container, streams[0])
        last = max(ends.values())
        _check_duration(container, streams, ends)
        width, height = (info.width, info.height)[:: -1 if is_turned else 1]
        return info._replace(
            width=width,
            height=height,
            start_s=first,
            duration_s=last - first,
            stream_start_s=starts[index] if ends[index] > starts[index] else first,
            stream_s=max(0.0, ends[index] - starts[index]),
        )


def read_frames(
    data: bytes,
    times_s: Sequence[float],
    max_pixels: int = MAX_PIXELS,
    only_shown: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the frames that a video shows at some times.

    A frame is shown from its time until the time of the next one. Times before the first frame give
    the first one, times after the last frame the last one. Without a color matrix in the file it is
    BT.709 from 720p on (1280 pixels wide or 720 high), otherwise BT.601, as in players. HDR is not
    tone-mapped.

    Args:
        data: Encoded video.
        times_s: At least one time, ascending: timestamps of the file in seconds.
        max_pixels: Maximum width x height of a frame; MAX_PIXELS is 25 million.
        only_shown: Leave out times before the first frame (by over 0.1 s) and after the end of the
            last one, even all.

    Returns:
        RGB pixels uint8 [F, H, W, 3], upright, of a frame for each time, which may repeat; and the
        time from which each frame is shown, float64 [F] in seconds.

    Raises:
        BadMedia: It cannot be decoded.
    """
    with _open(data, max_pixels) as container:
        from av.video.reformatter import VideoReformatter

        info = _read_header(container, "video", max_pixels)
        stream = _video(container)
        stream.codec_context.options = {"max_pixels": str(max_pixels)}
        stream.codec_context.thread_count = 1  # a decode process has one CPU
        shown: list[Any] = []
        if times_s[0] > _PREROLL_S:
            container.seek(math.floor(times_s[0] / stream.time_base), stream=stream)
            shown, end_s = _shown_frames(container, stream, times_s, info)
        if not shown or shown[0].time > times_s[0]:
            # The index of a file may be wrong, or miss frames that follow a keyframe in the file
            # and precede it in time.
            container.seek(0)
            shown, end_s = _shown_frames(container, stream, times_s, info)
        if not shown:
            raise BadMedia("truncated", "it has no frame")
        size = (shown[0].height, shown[0].width)
        if only_shown:
            shown = [
                frame
                for frame, time in zip(shown, times_s, strict=True)
                if frame.time - _DURATION_SLACK_S <= time < end_s
            ]
        times = np.array([frame.time for frame in shown])
        pixels = [np.zeros((0, *size, 3), np.uint8)]
        reformatter = VideoReformatter()  # its setup takes longer than a small frame
        for frame in shown:
            if frame.height * frame.width > max_pixels:
                raise BadMedia("too-large", f"{frame.width} x {frame.height} pixels")
            # A stream may change its size, but a clip has one.
            # One thread: starting more takes longer than small frames, and there is one CPU.
            is_hd = frame.width >= _HD_SIZE[0] or frame.height >= _HD_SIZE[1]
            is_untagged = int(frame.colorspace) == _UNSPECIFIED_MATRIX
            rgb = reformatter.reformat(
                frame,
                width=size[1],
                height=size[0],
                format="rgb24",
                src_colorspace=_BT709 if is_hd and is_untagged else None,
                threads=1,
            )
            pixels.append(upright(rgb.to_ndarray(), display_matrix(frame))[None])
        return np.concatenate(pixels[len(shown) > 0 :]), times


def read_audio(
    data: bytes, start_s: float, end_s: float, rate: int, only_present: bool = False
) -> np.ndarray:
    """Decode the audio of a file between two times, as mono samples of a given rate.

    Args:
        data: Encoded audio, or a video with sound.
        start_s: Timestamp of the first sample in seconds; the start of most files has 0.
        end_s: Timestamp after the last sample in seconds.
        rate: Samples per second of the result.
        only_present: Leave out what is before or after the audio of the file (if it is over 0.1 s),
            and all of less than 0.1 s of audio.

    Returns:
        Samples int16 [round((end_s - start_s) * rate)]; zeros where the file has no audio.

    Raises:
        BadMedia: It has no audio, or cannot be decoded.
    """
    with _open(data, MAX_PIXELS) as container:
        _read_header(container, "audio", MAX_PIXELS)
        stream = _audio(container)
        zero = _zero(container)
        samples = np.zeros(max(0, round((end_s - start_s) * rate)), np.int16)
        # A seek in an MP3 is not exact.
        if start_s > _PREROLL_S and container.format.name != "mp3":
            target = start_s - _PREROLL_S
            container.seek(math.floor(target / stream.time_base), stream=stream)
        run = _Run(start_s, samples, rate)
        for frame in container.decode(stream):
            time = None if frame.time is None else frame.time - zero
            if time is not None and time < start_s - 2 * _PREROLL_S:
                continue
            if time is not None and time > end_s + _POSTROLL_S:
                break
            run.add(frame, time)
        run.flush()
        if not only_present:
            return samples
        slack = min(round(_DURATION_SLACK_S * rate), len(samples))
        if run.stop - run.start < slack:
            return samples[:0]
        start = run.start if run.start > slack else 0
        return samples[start : run.stop if run.stop < len(samples) - slack else None]


class _Run:
    """Resamples audio frames without gaps between them, and copies them to their time.

    Attributes:
        start: Index of the first copied sample.
        stop: Index after the last one.
    """

    def __init__(self, start_s: float, samples: np.ndarray, rate: int) -> None:
        self.start = len(samples)
        self.stop = 0
        self._start_s = start_s
        self._samples = samples
        self._rate = rate
        self._resampler: AudioResampler | None = None
        self._index = 0  # index of the next resampled sample
        self._next_s = 0.0

    def add(self, frame: AudioFrame, time: float | None) -> None:
        """Add the next frame, which starts at a time in seconds; None: after the last one."""
        import av

        if time is not None and abs(time - self._next_s) > _MAX_JITTER_S:
            self.flush()
        if self._resampler is None:
            self._resampler = av.AudioResampler("s16", "mono", self._rate)
            self._next_s = self._next_s if time is None else time
            self._index = round((self._next_s - self._start_s) * self._rate)
        self._next_s += frame.samples / frame.sample_rate
        frame.pts = None
        self._copy(self._resampler.resample(frame))

    def flush(self) -> None:
        """Copy the samples that the resampler still has, before a gap or the end."""
        if self._resampler is not None:
            self._copy(self._resampler.resample(None))
            self._resampler = None

    def _copy(self, frames: list[Any]) -> None:
        for resampled in frames:
            samples = np.frombuffer(resampled.planes[0], np.int16, resampled.samples)
            start = max(0, self._index)
            stop = min(self._index + len(samples), len(self._samples))
            if start < stop:
                self._samples[start:stop] = samples[start - self._index : stop - self._index]
                self.start = min(self.start, start)
                self.stop = max(self.stop, stop)
            self._index += len(samples)


@contextmanager
def _open(data: bytes, max_pixels: int) -> Iterator[Any]:
    """Open encoded bytes. Raises BadMedia, also for errors of FFmpeg inside the block.

    Decoders do not allocate frames of more than `max_pixels`.
    """
    if not _is_available():
        raise BadMedia("extra", _EXTRA_HINT)
    import av

    if not data:
        raise BadMedia("empty", "no bytes")
    demuxer = detect_demuxer(data)
    if demuxer is None:
        raise BadMedia("format", f"not {NAMES}: it starts with {data[:12]!r}")
    if demuxer == "wav":
        _check_wav_size(data)
    options = {"max_pixels": str(max_pixels)}
    if demuxer == "wav":
        # FFmpeg would search its first seconds for another format inside it.
        options["max_probe_packets"] = "1"
    file = io.BytesIO(data)
    try:
        with av.open(file, format=demuxer, options=options, metadata_errors="replace") as container:
            yield container
    except BadMedia:
        raise
    # Also if FFmpeg has no memory for a size in a damaged header. Python's own MemoryError is not
    # an error of the file.
    except (av.FFmpegError, ValueError, IndexError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            text = "FFmpeg does not allocate what its header states, such as over 1,000 streams"
        # FFmpeg reports the end of a file inside its header as invalid data or as its end.
        is_end = isinstance(error, EOFError)
        raise BadMedia("truncated" if is_end else "corrupt", text[:300]) from None


def _check_wav_size(data: bytes) -> None:
    """Raise BadMedia for a WAV with fewer samples than its header states: FFmpeg accepts it."""
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        # A program that could not seek back wrote no size.
        if data[at : at + 4] == b"data" and size != 0xFFFFFFFF and size > len(data) - at - 8:
            raise BadMedia("truncated", f"{len(data) - at - 8} of the {size} bytes of its header")
        at += 8 + size + size % 2


def _video(container: InputContainer) -> Any:
    """Return the first video stream that is not a cover image; None if there is none."""
    import av

    cover = av.stream.Disposition.attached_pic
    streams = (each for each in container.streams.video if not each.disposition & cover)
    return next(streams, None)


def _audio(container: InputContainer) -> Any:
    return next(iter(container.streams.audio), None)


def _zero(container: InputContainer) -> float:
    """Return the timestamp of time zero in seconds."""
    if container.format.name != "mp3":
        return 0.0
    stream = _audio(container)
    return float((stream.start_time or 0) * stream.time_base) if stream else 0.0


def _read_header(container: InputContainer, kind: str, max_pixels: int) -> MediaInfo:
    video = _video(container)
    audio = _audio(container)
    stream = video if kind == "video" else audio
    if stream is None:
        others = [name for name, each in (("video", video), ("audio", audio)) if each is not None]
        raise BadMedia(f"no-{kind}", f"it has no {kind} ({(others or ['no stream'])[0]} only)")
    streams = [each for each in ((video, audio) if kind == "video" else (audio,)) if each]
    for each in streams:
        if each.codec_context is None:
            raise BadMedia("format", f"there is no decoder for its {each.type}")
    channels = 0 if audio is None else audio.codec_context.channels
    width = height = 0
    if kind == "video":
        width = video.codec_context.width
        height = video.codec_context.height
        if width * height > max_pixels:
            raise BadMedia("too-large", f"{width} x {height} is over {max_pixels} pixels")
        if not width * height:
            # Also if FFmpeg read a larger size, which it then does not report.
            raise BadMedia("corrupt", f"its frames have no size, or over {max_pixels:,} pixels")
    rate = float((video.average_rate or video.guessed_rate or 0) if kind == "video" else audio.rate)
    limit = MAX_FRAME_RATE if kind == "video" else MAX_SAMPLE_RATE
    # The average rate of a file with one frame is the rate of its clock.
    if kind == "audio" and not 0 < rate <= limit:
        raise BadMedia("rate", f"{rate:,.0f} samples a second; the limit is {limit:,.0f}")
    if kind == "video" and video.frames > 2 and rate > limit:
        raise BadMedia("rate", f"{rate:,.1f} frames a second; the limit is {limit:,.0f}")
    if kind == "audio" and not channels:
        raise BadMedia("corrupt", "its header states no channels")
    if channels > MAX_CHANNELS:
        raise BadMedia("channels", f"{channels} channels; the limit is {MAX_CHANNELS}")
    starts = [float((each.start_time or 0) * each.time_base) for each in streams]
    start = min(starts) - _zero(container)
    duration = max([0.0, *(_header_end(container, each) for each in streams)]) - start
    if duration > MAX_DURATION_S:
        raise BadMedia("too-long", f"{duration:,.1f} s; the limit is {MAX_DURATION_S:,.0f} s")
    return MediaInfo(
        start,
        max(0.0, duration),
        rate,
        channels,
        width,
        height,
        starts[0] - _zero(container),
        max(0.0, _header_end(container, stream) - starts[0] + _zero(container)),
        _notices(container, kind, video),
    )


def _notices(container: InputContainer, kind: str, video: VideoStream | None) -> list[str]:
    """Return what a file has and a clip of it does not."""
    import av

    covers = sum(
        bool(each.disposition & av.stream.Disposition.attached_pic)
        for each in container.streams.video
    )
    checks = {
        "an HDR video (PQ or HLG) is not tone-mapped, so its colors are pale": kind == "video"
        and video is not None
        and video.codec_context.color_trc in _HDR_TRANSFERS,
        "an interlaced video is not deinterlaced": kind == "video"
        and video is not None
        and video.codec_context.field_order not in _PROGRESSIVE,
        "a video whose pixels are not square is not stretched": kind == "video"
        and video is not None
        and (video.sample_aspect_ratio or 1) != 1,
        "the video of a file in the column `audio` is not used": kind == "audio"
        and video is not None,
        "video streams of a file after the first are not used": kind == "video"
        and len(container.streams.video) - covers > 1,
        "audio streams of a file after the first are not used": len(container.streams.audio) > 1,
        "subtitles inside a file are not used": len(container.streams.subtitles) > 0,
    }
    return [text for text, holds in checks.items() if holds]


def _header_end(container: InputContainer, stream: Any) -> float:
    """Return the time at which a stream ends according to the header; 0 if it does not state it."""
    if stream.duration is not None:
        start = stream.start_time or 0
        return float((start + stream.duration) * stream.time_base) - _zero(container)
    # In Matroska it is the end of the last frame.
    return (container.duration or 0) / 1e6


def _video_end(container: Any, stream: Any) -> float:
    """Return the end of the video of an MP4 in seconds, by its last packets.

    It has durations in the order of decoding. With B-frames and a variable rate the last frame has
    that of another one, and the header may end before it.
    """
    container.seek(stream.duration, stream=stream)
    packets = [each for each in container.demux(stream) if each.size and not each.is_discard]
    last = max(packets, key=lambda each: each.pts)
    return float((last.pts + min(last.duration, packets[-1].duration)) * stream.time_base)


def _check_duration(
    container: InputContainer, streams: Sequence[VideoStream | AudioStream], ends: dict[int, float]
) -> None:
    """Raise BadMedia if less was decoded than the header states."""
    if container.format.name in WITHOUT_DURATION:
        return
    expected = [_header_end(container, stream) for stream in streams]
    # Matroska has one duration, of the longest stream.
    measured = [max(ends.values())] if streams[0].duration is None else list(ends.values())
    for end, stated in zip(measured, expected, strict=False):
        if end < stated - max(_DURATION_SLACK_S, 0.02 * stated):
            raise BadMedia(
                "truncated", f"{max(0.0, end):.2f} s of the {stated:.2f} s of its header"
            )


def _frame_duration(frame: AudioFrame | VideoFrame, info: MediaInfo) -> float:
    import av

    if isinstance(frame, av.AudioFrame):
        return float(frame.samples / frame.sample_rate)
    if frame.duration and frame.time_base:
        return float(frame.duration * frame.time_base)
    return 1 / info.rate if info.rate else 0.0


def _shown_frames(
    container: InputContainer, stream: VideoStream, times_s: Sequence[float], info: MediaInfo
) -> tuple[list[Any], float]:
    """Return the last frame at or before each time, decoded from the current position (the first
    frame for times before it), and the end of the last frame if it was reached, otherwise inf.
    """
    shown: list[Any] = []
    before = None
    gap = 0.0
    for frame in container.decode(stream):
        if frame.time is None:
            continue
        # Times and timestamps are rounded differently.
        while len(shown) < len(times_s) and times_s[len(shown)] < frame.time - 1e-6:
            shown.append(before or frame)
        gap = frame.time - before.time if before else 0.0
        before = frame
        if len(shown) == len(times_s):
            return shown, math.inf
    if before is None:
        return shown, math.inf
    shown += [before] * (len(times_s) - len(shown))
    # Some formats do not state how long the last frame is shown.
    return shown, before.time + max(_frame_duration(before, info), gap)
