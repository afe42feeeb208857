"""Encode mono audio: FLAC in prepared sets, MP3 in HTML pages."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.data.media.decode import read_audio

if TYPE_CHECKING:
    from av import AudioStream
    from av.container import OutputContainer

_PART_SAMPLES = 1 << 20


def encode_audio(
    samples: np.ndarray, rate: int, codec: str, bits_per_s: int | None = None
) -> bytes:
    """Encode mono audio int16 [N] as `flac` or `mp3`; bits_per_s is for MP3."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=codec) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        if bits_per_s is not None:
            stream.bit_rate = bits_per_s
        write_samples(container, stream, samples, rate)
    return file.getvalue()


def write_samples(
    container: OutputContainer, stream: AudioStream, samples: np.ndarray, rate: int
) -> None:
    """Encode samples int16 [N] as an `av.AudioStream` of mono audio, and write them to its open
    file.
    """
    import av

    # In parts, because the encoder copies what it gets.
    for start in range(0, len(samples), _PART_SAMPLES):
        part = samples[start : start + _PART_SAMPLES]
        frame = av.AudioFrame.from_ndarray(part[None], format="s16", layout="mono")
        frame.sample_rate = rate
        frame.pts = start
        frame.time_base = Fraction(1, rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def reencode_audio(data: bytes, end_s: float, rate: int) -> bytes:
    """Encode audio as FLAC with one channel, from timestamp 0 on, so that times stay the same."""
    return encode_audio(read_audio(data, 0.0, max(end_s, 1 / rate), rate), rate, "flac")
