"""Compare decoders of audio and video: speed, accuracy of a seek, damaged files, start of a
process.

Run in an environment that also has `soundfile` and `torchcodec`, which are not needed by mmray:

    python -m tests.benchmarks.media_decoders

torchcodec needs the shared libraries of FFmpeg on the machine; if they are missing it is left out.
"""

from __future__ import annotations

import io
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from mmray.data.media.decode import read_audio, read_frames, verify_media
from tests.data.media.synthetic import (
    encode_audio,
    encode_video,
    read_clock,
    time_of_sweep,
)

DURATION_S = 60.0
CLIP_S = 1.0
NUM_CLIPS = 20
NUM_DAMAGED = 60
STARTS = {
    "PyAV": "import av",
    "torchcodec": "from torchcodec.decoders import VideoDecoder",
    "soundfile": "import soundfile",
}
AudioReader = Callable[[bytes, float, float], tuple[np.ndarray, int]]
FrameReader = Callable[[bytes, list[float]], np.ndarray]


def _audio_pyav(data: bytes, start: float, end: float) -> tuple[np.ndarray, int]:
    return read_audio(data, start, end, 24000), 24000


def _audio_soundfile(data: bytes, start: float, end: float) -> tuple[np.ndarray, int]:
    import soundfile

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        file.seek(round(start * file.samplerate))
        samples = file.read(round((end - start) * file.samplerate), dtype="float32", always_2d=True)
        return samples.mean(axis=1), file.samplerate


def _audio_torchcodec(data: bytes, start: float, end: float) -> tuple[np.ndarray, int]:
    from torchcodec.decoders import AudioDecoder

    samples = AudioDecoder(data).get_samples_played_in_range(start, end)
    return samples.data.mean(dim=0).numpy(), samples.sample_rate


def _frames_pyav(data: bytes, times: list[float]) -> np.ndarray:
    return read_frames(data, times)[0]


def _frames_torchcodec(data: bytes, times: list[float]) -> np.ndarray:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1)
    return decoder.get_frames_played_at(times).data.numpy()


def _compare_audio(name: str, read: AudioReader, suffix: str, data: bytes) -> None:
    draw = random.Random(0)
    starts = [draw.uniform(0, DURATION_S - CLIP_S) for _ in range(NUM_CLIPS)]
    try:
        start_s = time.perf_counter()
        clips = [read(data, start, start + CLIP_S) for start in starts]
        elapsed = time.perf_counter() - start_s
    except Exception as error:  # noqa: BLE001 - a format that it does not read
        print(f"{name:10} {suffix:5} {type(error).__name__}: {str(error)[:80]}")
        return
    errors = []
    for start, (samples, rate) in zip(starts, clips, strict=True):
        piece = samples[: rate // 10]
        errors.append(abs(time_of_sweep(piece, rate) - start - len(piece) / rate / 2))
    print(
        f"{name:10} {suffix:5} {elapsed / NUM_CLIPS * 1000:7.2f} ms a clip of {CLIP_S} s, largest "
        f"error {max(errors) * 1000:.1f} ms"
    )


def _compare_video(name: str, read: FrameReader, label: str, data: bytes) -> None:
    draw = random.Random(0)
    errors = []
    elapsed = []
    try:
        for _ in range(NUM_CLIPS):
            start = draw.uniform(0, DURATION_S - 4)
            times = [start + 0.5 * index for index in range(8)]
            start_s = time.perf_counter()
            frames = read(data, times)
            elapsed.append(time.perf_counter() - start_s)
            errors += [
                abs(read_clock(frame) / 1000 + 0.02 - at)
                for frame, at in zip(frames, times, strict=True)
            ]
    except Exception as error:  # noqa: BLE001 - torchcodec without FFmpeg
        print(f"{name:10} {label:12} {type(error).__name__}: {str(error)[:80]}")
        return
    print(
        f"{name:10} {label:12} {statistics.median(elapsed) * 1000:7.1f} ms for 8 frames of 4 s, "
        f"largest error {max(errors) * 1000:.0f} ms"
    )


def _damage(name: str, check: Callable[[bytes], object], data: bytes) -> None:
    """Count how many truncated and bit-flipped files a decoder refuses."""
    try:
        check(data)
    except Exception as error:  # noqa: BLE001 - each package has its own errors
        print(f"{name:10} {type(error).__name__}: {str(error)[:80]}")
        return
    draw = random.Random(1)
    results: Counter[str] = Counter()
    for number in range(NUM_DAMAGED):
        damaged = bytearray(data)
        if number % 2:
            damaged = damaged[: draw.randrange(len(data) // 10, len(data) - 200)]
        else:
            for _ in range(20):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        kind = "truncated" if number % 2 else "flipped"
        try:
            check(bytes(damaged))
            results[f"{kind} accepted"] += 1
        except Exception:  # noqa: BLE001 - each package has its own errors
            results[f"{kind} refused"] += 1
    print(f"{name:10} {dict(sorted(results.items()))}")


def _soundfile_all(data: bytes) -> object:
    return _audio_soundfile(data, 0, DURATION_S)


def _torchcodec_all(data: bytes) -> object:
    from torchcodec.decoders import VideoDecoder

    return list(VideoDecoder(data))


def main() -> None:
    """Print the comparison."""
    for name, code in STARTS.items():
        code = (
            f"import time, resource; t = time.time(); {code}; print(f'{{time.time() - t:.2f}} s, ' "
            "f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB')"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        print(f"{name:10} import: {result.stdout.strip() or result.stderr.strip()[-100:]}")
    readers = {
        "PyAV": _audio_pyav,
        "soundfile": _audio_soundfile,
        "torchcodec": _audio_torchcodec,
    }
    for suffix in ("wav", "flac", "mp3", "ogg", "m4a"):
        data = encode_audio(suffix, DURATION_S, 48000 if suffix == "ogg" else 24000)
        for name, read in readers.items():
            _compare_audio(name, read, suffix, data)
    times = range(0, int(DURATION_S * 1000), 40)
    for label, options in (
        ("h264 gop 25", {"gop": 25, "b_frames": 2}),
        ("h264 gop 250", {"gop": 250, "b_frames": 2}),
        ("vp9 webm", {"suffix": "webm"}),
    ):
        data = encode_video(times_ms=times, size=256, **options)
        _compare_video("PyAV", _frames_pyav, label, data)
        _compare_video("torchcodec", _frames_torchcodec, label, data)
    flac = encode_audio("flac", 3.0)
    _damage("PyAV", lambda data: verify_media(data, "audio"), flac)
    _damage("soundfile", _soundfile_all, flac)
    video = encode_video()
    _damage("PyAV", lambda data: verify_media(data, "video"), video)
    _damage("torchcodec", _torchcodec_all, video)


if __name__ == "__main__":
    main()
