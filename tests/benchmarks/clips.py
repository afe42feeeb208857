"""Rate of the stream for clips of audio or video, compared with a plain PyTorch DataLoader.

    python -m tests.benchmarks.clips video --clips 128

The plain loader is one as in tutorials: it opens a file with PyAV, decodes the span of a text, and
converts it to float32. The stream reads the same spans from a prepared set.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from mmray.bench.baselines import MEAN, STD, TEXTBOOK_TOKENS, CaptionDataset
from mmray.bench.loader import (
    LoaderRuns,
    RunWindow,
    cache_folder,
    compare_loaders,
    prepare_in,
)
from mmray.bench.synthetic_images import synthetic_photos
from mmray.cli.bench import print_result
from mmray.config import ClipInputs, Prepare
from mmray.console.reporter import ConsoleReporter
from mmray.data.media.encode import encode_audio
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.machine import cores

VERSION = 1  # version of the generator; part of the folder name
SPANS_PER_FILE = 4
SIDE = 224
FRAMES = 8
VIDEO_S = 10
VIDEO_RATE = 25
VIDEO_SIZE = (320, 240)
AUDIO_S = 20
AUDIO_RATE = 44_100
SAMPLE_RATE = 16_000  # what the model takes, per second
ROWS = "rows.jsonl"
CLIP_S = {"audio": 10.0, "video": 2.0}
SUFFIXES = {"audio": "flac", "video": "mp4"}
GLOBAL_BATCH_SIZE = 64
EXPECTED_RATE = {"audio": 100, "video": 60}  # clips/s per actor
RATIOS = {
    "stream_vs_plain": ("stream clips", "plain clips"),
    "stream_prepared_vs_plain": ("stream prepared", "plain clips"),  # audio only
}


class ClipRow(NamedTuple):
    """A text with its span of a file: 10 s of audio or 2 s of video.

    Args:
        file: Path of the file.
        start_s: Start of the span in seconds.
        text: The caption.
    """

    file: str
    start_s: float
    text: str


def clip_inputs(modality: str) -> ClipInputs:
    """Return the `model.inputs` section of clips: 8 frames of 2 s, or 10 s of audio.

    Args:
        modality: `audio` or `video`.
    """
    return ClipInputs(
        image_side=SIDE,
        fit="crop",
        interpolation="bilinear",
        clip_s=CLIP_S[modality],
        frames=FRAMES if modality == "video" else 0,
        audio_rate=SAMPLE_RATE if modality == "audio" else 0,
    )


def write_clips(modality: str, rows: int, cache: Path) -> Path:
    """Write audio or video with texts that have spans, unless an earlier call has written them.

    Videos are H.264 of 320 x 240 pixels and 10 s, audio is FLAC of 44.1 kHz, one channel and 20 s.

    Args:
        modality: `audio` or `video`.
        rows: Number of spans; 4 are of one file.
        cache: Parent of the folder, which keeps the files for later benchmarks.

    Returns:
        The folder, with the files and rows.jsonl, a line per span: `audio` or `video` (name of the
        file), `text`, and `t0_s` and `t1_s` (start and end in seconds).
    """
    folder = cache / f"{modality}-{VERSION}-{rows}"
    if (folder / ROWS).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    num_files = -(-rows // SPANS_PER_FILE)
    length_s = AUDIO_S if modality == "audio" else VIDEO_S
    draw = np.random.default_rng(0)
    lines = []
    for number, (photo, text) in enumerate(synthetic_photos(num_files)):
        name = f"{number:04d}.{SUFFIXES[modality]}"
        if modality == "video":
            _write_video(folder / name, Image.open(io.BytesIO(photo)).convert("RGB"))
        else:
            _write_audio(folder / name, draw)
        for start_s in draw.uniform(0, length_s - CLIP_S[modality], SPANS_PER_FILE).round(2):
            row = {modality: name, "text": text, "t0_s": start_s}
            lines.append(json.dumps(row | {"t1_s": round(start_s + CLIP_S[modality], 2)}) + "\n")
    (folder / ROWS).write_text("".join(lines[:rows]))
    return folder


def read_rows(folder: Path, modality: str) -> list[ClipRow]:
    """Return each clip in a folder with rows.jsonl as a ClipRow: `file` (path), `start_s` (seconds)
    and `text` (caption).

    Args:
        folder: The folder, which `write_clips` has written.
        modality: `audio` or `video`.
    """
    rows = map(json.loads, (folder / ROWS).read_text().splitlines())
    return [ClipRow(str(folder / row[modality]), row["t0_s"], row["text"]) for row in rows]


def _write_video(file: Path, photo: Image.Image) -> None:
    """Write a video that pans over a photograph."""
    import av

    width, height = VIDEO_SIZE
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("libx264", rate=VIDEO_RATE)
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = VIDEO_RATE
        stream.options = {"preset": "veryfast", "crf": "23"}
        for index in range(VIDEO_S * VIDEO_RATE):
            progress = index / (VIDEO_S * VIDEO_RATE)
            left = round(progress * (photo.width - width))
            top = round(progress * (photo.height - height))
            image = photo.crop((left, top, left + width, top + height))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


def _write_audio(file: Path, draw: np.random.Generator) -> None:
    """Write noise with the spectrum of speech and music: less power at higher frequencies."""
    noise = draw.standard_normal(AUDIO_S * AUDIO_RATE)
    spectrum = np.fft.rfft(noise) / np.arange(1, len(noise) // 2 + 2) ** 0.5
    samples = np.fft.irfft(spectrum)
    pcm = (samples / np.abs(samples).max() * 20_000).astype(np.int16)
    file.write_bytes(encode_audio(pcm, AUDIO_RATE, "flac"))


class PlainClips(CaptionDataset):
    """PyTorch dataset of audio or video clips in plain code, the baseline.

    A row has `input_ids` and `attention_mask` int64 [512], and `video` float32 [8, 3, 224, 224], 8
    frames of 2 s normalized with the mean and deviation of ImageNet, or `audio` float32 [160,000],
    10 s with values in -1..1.

    Args:
        rows: File, start in the file in seconds, and caption of each clip.
        modality: `audio` or `video`.
        tokenizer_json: Content of tokenizer.json.
    """

    def __init__(self, rows: list[ClipRow], modality: str, tokenizer_json: str) -> None:
        super().__init__(tokenizer_json, TEXTBOOK_TOKENS, pad=True)
        self.rows = rows
        self.modality = modality
        self.transform = Compose([Resize(SIDE), CenterCrop(SIDE), ToTensor(), Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        clip = self._video(row) if self.modality == "video" else self._audio(row)
        return {self.modality: clip} | self.encode(row.text)

    def _video(self, row: ClipRow) -> Tensor:
        """Return 8 frames at equal distances inside the span."""
        clip_s = CLIP_S["video"]
        times = [row.start_s + (index + 0.5) * clip_s / FRAMES for index in range(FRAMES)]
        shown: list[Any] = []
        last: Any = None
        for frame in _decode(row.file, "video", row.start_s):
            while len(shown) < FRAMES and frame.time > times[len(shown)]:
                shown.append(last or frame)
            if len(shown) == FRAMES:
                break
            last = frame
        shown += [last] * (FRAMES - len(shown))
        return torch.stack([self.transform(frame.to_image()) for frame in shown])

    def _audio(self, row: ClipRow) -> Tensor:
        """Return the samples of the span, of one channel and 16,000 a second."""
        import av

        end_s = row.start_s + CLIP_S["audio"]
        resampler = av.AudioResampler("flt", "mono", SAMPLE_RATE)
        parts: list[np.ndarray] = []
        first_s: float | None = None
        for frame in _decode(row.file, "audio", row.start_s):
            if frame.time > end_s:
                break
            first_s = frame.time if first_s is None else first_s
            parts += [each.to_ndarray()[0] for each in resampler.resample(frame)]
        parts += [each.to_ndarray()[0] for each in resampler.resample(None)]
        skipped = round((row.start_s - (first_s or 0)) * SAMPLE_RATE)
        num_samples = round(CLIP_S["audio"] * SAMPLE_RATE)
        samples = np.concatenate(parts)[skipped : skipped + num_samples]
        return torch.from_numpy(np.pad(samples, (0, num_samples - len(samples))))


def _decode(file: str, kind: str, start_s: float) -> Iterator[Any]:
    """Yield the decoded frames of a file from the last keyframe before a time."""
    import av

    with av.open(file) as container:
        stream: Any = container.streams.video[0] if kind == "video" else container.streams.audio[0]
        stream.codec_context.thread_count = 1  # a worker has one CPU
        container.seek(int(start_s / stream.time_base), stream=stream)
        yield from container.decode(stream)


def build_loaders(
    modality: str, clips: int, window_s: float, actors: int, cache: Path
) -> dict[str, RunWindow]:
    """Write and prepare the clips and start the processes; return the loaders by name."""
    folder = write_clips(modality, clips, cache)
    source = str(folder / ROWS)
    settings = {"clips": Prepare(duplicates="keep")}
    if modality == "audio":
        settings["prepared"] = Prepare(duplicates="keep", audio_rate=SAMPLE_RATE)
    sets = {name: prepare_in(source, cache / folder.name, each) for name, each in settings.items()}
    tokenizer_json = load_tokenizer("trained", sets["clips"].tokenizer_json)
    runs = LoaderRuns(clips, GLOBAL_BATCH_SIZE, EXPECTED_RATE[modality], window_s, actors)
    inputs = clip_inputs(modality)
    readers = {
        name: RowReader(each, inputs, tokenizer_json, Prepare().max_pixels)
        for name, each in sets.items()
    }
    plain = PlainClips(read_rows(folder, modality), modality, tokenizer_json)
    return {
        "plain clips": runs.loader(plain),
        **{f"stream {name}": runs.stream(reader) for name, reader in readers.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modality", choices=("audio", "video"))
    parser.add_argument("--clips", type=int, default=512, help="at least 64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=3.0)
    options = parser.parse_args(argv)
    modality: str = options.modality
    console = ConsoleReporter()

    def build() -> dict[str, RunWindow]:
        return build_loaders(modality, options.clips, options.window_s, cores(), cache_folder())

    ratios = {name: RATIOS[name] for name in RATIOS if modality == "audio" or "prep" not in name}
    result = compare_loaders(build, cores(), options.rounds, ratios, console.log, "clips_per_s")
    for row in result["rows"]:
        row["hours_per_s"] = row["clips_per_s"] * CLIP_S[modality] / 3600
    print_result(result, console)


if __name__ == "__main__":
    # Processes of Ray import the classes of this module by its name.
    from tests.benchmarks.clips import main as main_of_module

    main_of_module()
