"""Synthesised audio and video: frames show their time as bits, and a tone's pitch is its time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

SIZE = 64
NUM_BITS = 16  # of the clock in a frame: 4 x 4 squares
SWEEP = (200.0, 200.0)  # Hz at time 0, and Hz a second
AUDIO_CODECS = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "mp3": "libmp3lame",
    "ogg": "libopus",
    "m4a": "aac",
}
MUXERS = {"m4a": "mp4", "mkv": "matroska"}


def draw_clock(milliseconds: int, size: int = SIZE) -> np.ndarray:
    """Return a gray frame uint8 [size, size, 3] whose 4 x 4 squares are the bits of a number."""
    bits = [(milliseconds >> bit) & 1 for bit in range(NUM_BITS)]
    squares = np.array(bits, np.uint8).reshape(4, 4) * 255
    gray = np.kron(squares, np.ones((size // 4, size // 4), np.uint8))
    return np.repeat(gray[:, :, None], 3, axis=2)


def read_clock(frame: np.ndarray) -> int:
    """Return the number of a frame uint8 [H, W, 3] of `draw_clock`."""
    height, width = frame.shape[:2]
    rows = (np.arange(4) * 2 + 1) * height // 8
    columns = (np.arange(4) * 2 + 1) * width // 8
    bits = frame[rows][:, columns].mean(axis=2).flatten() > 127
    return int(sum(1 << bit for bit, is_set in enumerate(bits) if is_set))


def sweep(duration: float, rate: int, start: float = 0.0) -> np.ndarray:
    """Return a sine float64 [N] whose frequency rises linearly with time: 200 + 200 t Hz."""
    times = start + np.arange(round(duration * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * (SWEEP[0] * times + SWEEP[1] * times**2 / 2))


def time_of_sweep(samples: np.ndarray, rate: int) -> float:
    """Return the time in seconds of the middle of a short piece of the sweep, by its pitch."""
    signal = samples.astype(np.float64) * np.hanning(len(samples))
    spectrum = np.abs(np.fft.rfft(signal, 16 * len(samples)))
    frequency = spectrum.argmax() * rate / (16 * len(samples))
    return float((frequency - SWEEP[0]) / SWEEP[1])


def encode_audio(suffix: str, duration: float = 3.0, rate: int = 24000, channels: int = 1) -> bytes:
    """Return the sweep as a file with this suffix."""
    file = io.BytesIO()
    with av.open(file, "w", format=MUXERS.get(suffix, suffix)) as container:
        _add_audio(container, AUDIO_CODECS[suffix], duration, rate, channels)
    return file.getvalue()


def _add_audio(
    container: av.container.OutputContainer,
    codec: str,
    duration: float,
    rate: int,
    channels: int = 1,
    start: float = 0.0,
) -> None:
    layout = {1: "mono", 2: "stereo"}[channels]
    stream = container.add_stream(codec, rate=rate, layout=layout)
    container.mux(list(_encode_audio(stream, duration, rate, layout, start)))


def _encode_audio(stream, duration, rate, layout, start=0.0):
    samples = (sweep(duration, rate, start) * 32767).astype(np.int16)
    channels = {"mono": 1, "stereo": 2}[layout]
    resampler = av.AudioResampler(stream.format, layout, rate, stream.frame_size or 1024)
    frame = av.AudioFrame.from_ndarray(
        np.repeat(samples, channels)[None], format="s16", layout=layout
    )
    frame.sample_rate = rate
    frame.pts = round(start * rate)
    frame.time_base = Fraction(1, rate)
    for resampled in (*resampler.resample(frame), *resampler.resample(None)):
        yield from stream.encode(resampled)
    yield from stream.encode(None)


def encode_video(
    suffix: str = "mp4",
    times_ms: Sequence[int] = tuple(range(0, 3000, 40)),
    codec: str | None = None,
    audio: str | None = None,
    gop: int = 25,
    b_frames: int = 0,
    size: int = SIZE,
    audio_s: float | None = None,
    options: dict[str, str] | None = None,
    muxer_options: dict[str, str] | None = None,
) -> bytes:
    """Return a video whose frame at each time shows this time in milliseconds as a clock.

    Args:
        suffix: Suffix of the file, such as `mp4`.
        times_ms: Presentation time of each frame.
        codec: Video codec; None: H.264, and VP9 for `webm`.
        audio: Codec of a sweep with the length of the video; None: no audio.
        gop: Frames from a keyframe to the next.
        b_frames: Consecutive B-frames of H.264.
        size: Side of the frames in pixels.
        audio_s: Seconds of the sweep; None: up to the end of the last frame.
        options: Further options of the codec.
        muxer_options: Options of the container.
    """
    codec = codec or ("libvpx-vp9" if suffix == "webm" else "libx264")
    file = io.BytesIO()
    time_base = Fraction(1, 1000)
    with av.open(
        file, "w", format=MUXERS.get(suffix, suffix), options=muxer_options or {}
    ) as container:
        video = container.add_stream(codec, rate=25)
        video.width = video.height = size
        video.pix_fmt = "yuv420p"
        video.codec_context.time_base = time_base
        video.codec_context.gop_size = gop
        if codec == "libx264":
            video.codec_context.max_b_frames = b_frames
            video.options = {"preset": "ultrafast", "bf": str(b_frames), "crf": "18"}
        elif codec == "libvpx-vp9":
            video.options = {"deadline": "realtime", "cpu-used": "8", "crf": "20"}
        if options:
            video.options = video.options | options
        packets = []
        if audio is not None:
            rate = 48000 if audio == "libopus" else 24000
            sound = container.add_stream(audio, rate=rate, layout="mono")
            seconds = audio_s if audio_s is not None else times_ms[-1] / 1000 + 0.04
        for time in times_ms:
            frame = av.VideoFrame.from_ndarray(draw_clock(max(time, 0), size), format="rgb24")
            frame.pts = time
            frame.time_base = time_base
            packets += video.encode(frame)
        packets += video.encode(None)
        if audio is not None:
            packets += _encode_audio(sound, seconds, rate, "mono")
        packets.sort(key=lambda packet: float(packet.dts * packet.time_base))
        for packet in packets:
            container.mux(packet)
    return file.getvalue()
