"""Frames and samples at a time are those of that time, for the timelines that files have."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmray.data.media.decode import (
    BadMedia,
    read_audio,
    read_frames,
    read_header,
    verify_media,
)
from tests.data.media.synthetic import (
    AUDIO_CODECS,
    encode_audio,
    encode_video,
    read_clock,
    time_of_sweep,
)

VIDEOS: dict[str, dict[str, Any]] = {
    "constant rate": {},
    "B-frames": {"b_frames": 3},
    "B-frames with references across keyframes": {
        "b_frames": 3,
        "options": {"x264-params": "open-gop=1:keyint=12:bframes=3"},
    },
    "one keyframe": {"gop": 1000, "b_frames": 2},
    "variable rate": {"times_ms": [0, 30, 100, 500, 520, 1400, 2000, 2010, 2500]},
    "start above zero": {"times_ms": range(1000, 3000, 40)},
    "edit list: start below zero": {"times_ms": range(-200, 2000, 40), "b_frames": 2},
    "Matroska": {"suffix": "mkv", "audio": "libopus"},
    "Matroska, start above zero": {"suffix": "mkv", "times_ms": range(1000, 3000, 40)},
    "WebM": {"suffix": "webm", "audio": "libopus"},
    "MP4 with AAC": {"audio": "aac", "b_frames": 2},
    "fragmented MP4": {"muxer_options": {"movflags": "frag_keyframe+empty_moov"}},
}


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_those_shown_at_their_time(name: str) -> None:
    options = VIDEOS[name]
    data = encode_video(**options)
    shown = [time for time in options.get("times_ms", range(0, 3000, 40)) if time >= 0]
    info = verify_media(data, "video")
    assert info.start_s == pytest.approx(shown[0] / 1000, abs=1e-3)
    times = np.linspace(info.start_s, info.end_s, 23)[:-1] + 0.004
    for first, count in ((0, 22), (0, 1), (5, 3), (15, 2), (21, 1)):
        wanted = times[first : first + count]
        frames, at = read_frames(data, wanted.tolist())
        expected = [max(t for t in shown if t <= time * 1000 + 1e-6) for time in wanted]
        assert [read_clock(frame) for frame in frames] == expected
        np.testing.assert_allclose(at, np.array(expected) / 1000, atol=1e-3)


@pytest.mark.parametrize("b_frames", [0, 2, 3])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_video_of_variable_rate_ends_with_its_last_frame(suffix: str, b_frames: int) -> None:
    for times_ms in (
        [0, 40, 80, 2080, 2120, 2160, 2200],
        [*range(0, 1000, 40), 3000, 3040, 3080],
        # The header of an MP4 with B-frames ends before the last of these.
        [0, 40, 80, 120, 500, 540, 1300, 1340, 1380, 2000, 2040, 2900, 2940],
    ):
        data = encode_video(suffix, times_ms, b_frames=b_frames)
        assert verify_media(data, "video").end_s == pytest.approx(times_ms[-1] / 1000 + 0.04)


def test_before_the_first_and_after_the_last_frame_these_are_shown() -> None:
    data = encode_video(times_ms=range(1000, 2000, 40))
    frames, _ = read_frames(data, [0.2, 1.02, 7.0])
    assert [read_clock(frame) for frame in frames] == [1000, 1000, 1960]


@pytest.mark.parametrize("suffix", AUDIO_CODECS)
def test_samples_are_those_of_their_time(suffix: str) -> None:
    rate = 48000 if suffix == "ogg" else 24000
    data = encode_audio(suffix, 6.0, rate, channels=2)
    info = verify_media(data, "audio")
    assert (info.rate, info.channels) == (rate, 2)
    assert info.start_s == 0 and info.duration_s == pytest.approx(6.0, abs=0.05)
    for start in (0.0, 0.51, 1.5, 2.93, 4.1, 5.8):
        samples = read_audio(data, start, start + 0.1, 16000)
        assert samples.dtype == np.int16 and samples.shape == (1600,)
        # A hop of the spectrograms of speech models is 10 ms.
        assert time_of_sweep(samples, 16000) == pytest.approx(start + 0.05, abs=0.005)
    assert np.abs(read_audio(data, 2.0, 3.0, 8000)).max() > 8000


@pytest.mark.parametrize("name", ["Matroska", "WebM", "MP4 with AAC"])
def test_sound_of_a_video_is_aligned_with_its_frames(name: str) -> None:
    data = encode_video(**VIDEOS[name])
    for start in (0.1, 1.3, 2.6):
        samples = read_audio(data, start, start + 0.1, 16000)
        assert time_of_sweep(samples, 16000) == pytest.approx(start + 0.05, abs=0.005)
        frames, _ = read_frames(data, [start + 0.05])
        assert abs(read_clock(frames[0]) / 1000 + 0.02 - start - 0.05) <= 0.021


def test_samples_outside_the_audio_are_zeros() -> None:
    data = encode_audio("wav", 1.0)
    samples = read_audio(data, -0.5, 2.0, 16000)
    assert not samples[:7900].any() and not samples[24100:].any()
    assert np.abs(samples[8000:24000]).max() > 10000


@pytest.mark.parametrize(
    ("matrix", "operations"),
    [
        ((0, 1, -1, 0), [Image.Transpose.ROTATE_270]),  # clockwise by 90 degrees
        ((-1, 0, 0, -1), [Image.Transpose.ROTATE_180]),
        ((0, -1, 1, 0), [Image.Transpose.ROTATE_90]),
        ((-1, 0, 0, 1), [Image.Transpose.FLIP_LEFT_RIGHT]),
        ((1, 0, 0, -1), [Image.Transpose.FLIP_TOP_BOTTOM]),
        ((0, 1, 1, 0), [Image.Transpose.TRANSPOSE]),
        ((0, -1, -1, 0), [Image.Transpose.TRANSVERSE]),
    ],
)
def test_rotated_and_mirrored_videos_are_as_players_show_them(
    matrix: tuple[int, ...], operations: list[Image.Transpose]
) -> None:
    data = encode_video(times_ms=range(0, 400, 40))
    frame = Image.fromarray(read_frames(data, [0.2])[0][0])
    for operation in operations:
        frame = frame.transpose(operation)
    np.testing.assert_array_equal(
        read_frames(with_display_matrix(data, matrix), [0.2])[0][0], np.asarray(frame)
    )
    wide = verify_media(with_display_matrix(uniform_video(32, 1), matrix), "video")
    assert (wide.width, wide.height) == ((32, 64) if matrix[0] == 0 else (64, 32))


def with_display_matrix(data: bytes, matrix: tuple[int, ...]) -> bytes:
    """Return an MP4 whose track header has a matrix (a, b, c, d)."""
    upright = struct.pack(">5i", 1 << 16, 0, 0, 0, 1 << 16)
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(upright, data.index(b"tkhd"))
    return data[:at] + struct.pack(">5i", a, b, 0, c, d) + data[at + len(upright) :]


def test_limits_name_their_numbers() -> None:
    with pytest.raises(BadMedia, match="64 x 64 is over 4000 pixels"):
        read_header(encode_video(times_ms=[0, 40]), "video", 4000)
    eight = io.BytesIO()
    with av.open(eight, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="22.2")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 24 * 800), np.int16), format="s16", layout="22.2"
        )
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(BadMedia, match="24 channels; the limit is 8"):
        read_header(eight.getvalue(), "audio")
    wav = encode_audio("wav", 0.1)
    fast = wav.replace((24000).to_bytes(4, "little"), (400_000).to_bytes(4, "little"), 1)
    with pytest.raises(BadMedia, match="400,000 samples a second"):
        read_header(fast, "audio")
    long = bytearray(encode_audio("wav", 1.0, 24000))
    # Rate and bytes a second of the header: 24,000 samples at one a second.
    long[24:32] = (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
    with pytest.raises(BadMedia, match=r"24,000.0 s; the limit is 14,400 s"):
        read_header(bytes(long), "audio")


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (b"", "video", "empty"),
        (b"<!DOCTYPE html><html></html>", "video", "format"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "video", "format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "audio", "format"),
        (encode_audio("m4a", 0.5), "video", "no-video"),
        (encode_video(times_ms=[0, 40]), "audio", "no-audio"),
    ],
)
def test_files_that_are_no_media_are_refused(data: bytes, kind: str, reason: str) -> None:
    with pytest.raises(BadMedia) as bad:
        verify_media(data, kind)
    assert bad.value.reason == reason


@pytest.mark.parametrize("suffix", ["wav", "flac", "m4a", "mp4", "mkv", "webm"])
def test_truncated_files_are_refused(suffix: str) -> None:
    if suffix in AUDIO_CODECS:
        data = encode_audio(suffix, 3.0)
        kind = "audio"
    else:
        data = encode_video(suffix)
        kind = "video"
    verify_media(data, kind)
    for part in (0.3, 0.6, 0.9):
        with pytest.raises(BadMedia) as bad:
            verify_media(data[: int(len(data) * part)], kind)
        assert bad.value.reason in ("truncated", "corrupt")


GRAY = (110, 100, 150)  # Y, U and V of 8 bits
RGB_601 = (145, 103, 53)
RGB_709 = (149, 104, 50)


def uniform_video(height: int, matrix: int, transfer: int = 2, full_range: bool = False) -> bytes:
    """Return a video of the color GRAY."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "qp": "0"}
        context = stream.codec_context
        context.colorspace, context.color_trc = matrix, transfer
        context.color_range = 2 if full_range else 1
        frame = av.VideoFrame(64, height, "yuv420p")
        for plane, value in zip(frame.planes, GRAY, strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        frame.pts = 0
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


@pytest.mark.parametrize(
    ("height", "matrix", "full_range", "expected"),
    [
        (64, 2, False, RGB_601),
        (720, 2, False, RGB_709),
        (720, 5, False, RGB_601),
        (64, 1, False, RGB_709),
        (64, 2, True, (141, 104, 60)),
        (720, 2, True, (145, 105, 58)),
    ],
)
def test_colors_are_those_of_players(
    height: int, matrix: int, full_range: bool, expected: tuple[int, int, int]
) -> None:
    """Without a matrix in the file: BT.709 from 720p on, otherwise BT.601."""
    frames, _ = read_frames(uniform_video(height, matrix, full_range=full_range), [0.0])
    assert frames[0, 9, 9].tolist() == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(("transfer", "is_hdr"), [(1, False), (16, True), (18, True)])
def test_hdr_videos_are_noted(transfer: int, is_hdr: bool) -> None:
    data = uniform_video(64, 9, transfer)
    for info in (read_header(data, "video"), verify_media(data, "video")):
        assert len(info.notices) == is_hdr and all("HDR" in text for text in info.notices)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"aspect": "16/11"}, "a video whose pixels are not square is not stretched"),
        ({"aspect": "1/1"}, None),
        ({"x264-params": "tff=1"}, "an interlaced video is not deinterlaced"),
    ],
)
def test_shapes_of_frames_that_players_change_are_noted(
    options: dict[str, str], text: str | None
) -> None:
    data = encode_video(times_ms=[0, 40], options=options)
    for info in (read_header(data, "video"), verify_media(data, "video")):
        assert info.notices == [text] * (text is not None)


def test_streams_that_are_not_used_are_noted() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        streams: Any = [
            container.add_stream("pcm_s16le", rate=8000, layout="mono") for _ in range(2)
        ]
        for stream in streams:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
            frame.sample_rate, frame.pts = 8000, 0
            container.mux([*stream.encode(frame), *stream.encode(None)])
    assert read_header(file.getvalue(), "audio").notices == [
        "audio streams of a file after the first are not used"
    ]
    data = encode_video(audio="aac")
    assert read_header(data, "audio").notices == [
        "the video of a file in the column `audio` is not used"
    ]
    assert read_header(data, "video").notices == []
