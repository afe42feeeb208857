"""The sample set of clips: moving shapes with tones, and captions with spans, all generated.

A recording has two scenes, one after the other, each with its caption and span, so a clip outside
its span has another caption. Shape, color, movement and background of a scene are the number of its
beeps, their pitch, its change, and their timbre.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from mmray.data.images.sample import COLORS, draw_shape, tinted, write_once
from mmray.data.media.decode import require_decoder
from mmray.data.media.encode import write_samples

VERSION = "v2"  # change it if the files change; it is a folder name
NUM_TRAIN = 480  # recordings
NUM_TEST = 100
SIDE = 48
FRAME_RATE = 10
KEYFRAME_EVERY = 16  # frames, so that the second scene is not decoded from the start of the first
SAMPLE_RATE = 8_000
DURATION_S = 3.2
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0), "still": (0, 0)}
BACKGROUNDS = {"white": (245, 245, 245), "black": (12, 12, 12)}
LOWEST_HZ = 300


class Scene(NamedTuple):
    """One scene of the generated sample clips: a moving shape and its sound.

    Attributes:
        shape: `circle`, `square`, `triangle` or `cross`; it determines the number of beeps.
        color: `red`, `orange`, `yellow`, `green`, `blue` or `purple`; it determines the pitch.
        movement: `up`, `down`, `left`, `right` or `still`; it determines how pitch or volume
            change.
        background: `white` (a pure tone) or `black` (a harsh tone).
        start_s: Start in the recording in seconds.
        end_s: End in seconds.
    """

    shape: str
    color: str
    movement: str
    background: str
    start_s: float
    end_s: float

    def caption(self) -> str:
        """Return a caption of the clip that names its shape, color, movement and background."""
        moves = "rests" if self.movement == "still" else f"moves {self.movement}"
        return f"a {self.color} {self.shape} {moves} on {self.background}"


def generate_clips(out: Path) -> Path:
    """Return the JSONL file of the sample clips, generated in a folder of `out` if missing."""
    require_decoder("sample-av")
    return write_once(out / VERSION / "sample-av.jsonl", _write_clips)


def _write_clips(folder: Path) -> None:
    (folder / "videos").mkdir()
    every = list(product(SHAPES, COLORS, DIRECTIONS, BACKGROUNDS))
    lines = []
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        draw = random.Random(f"clips of {split}")
        # Each kind of scene once, then again: the held-out clips have different captions.
        kinds: list[tuple[str, str, str, str]] = []
        for number in range(count):
            if len(kinds) < 2:
                kinds = draw.sample(every, len(every))
            first = draw.uniform(0.05, 0.4)
            second = draw.uniform(1.65, 2.0)
            scenes = [
                Scene(*kinds.pop(), start, start + draw.uniform(1.0, 1.2))
                for start in (first, second)
            ]
            name = f"videos/{split}-{number:04d}.mp4"
            _write_video(folder / name, scenes, draw)
            texts = [
                {
                    "text": each.caption(),
                    "t0_s": round(each.start_s, 3),
                    "t1_s": round(each.end_s, 3),
                }
                for each in scenes
            ]
            row = {"id": name, "video": name, "texts": texts, "split": split}
            lines.append(json.dumps(row) + "\n")
    (folder / "sample-av.jsonl").write_text("".join(lines))


def _write_video(file: Path, scenes: list[Scene], draw: random.Random) -> None:
    import av

    samples = np.zeros(round(DURATION_S * SAMPLE_RATE))
    for scene in scenes:
        sound = _sound(scene, draw)
        at = round(scene.start_s * SAMPLE_RATE)
        samples[at : at + len(sound)] = sound[: len(samples) - at]
    samples += np.random.default_rng(draw.randrange(2**32)).normal(0, 0.003, len(samples))
    jitters = [(draw.uniform(-0.06, 0.06), draw.uniform(-0.06, 0.06)) for _ in scenes]
    colors = [tinted(COLORS[scene.color], draw) for scene in scenes]
    with av.open(str(file), "w") as container:
        video = container.add_stream("libx264", rate=FRAME_RATE)
        video.width = video.height = SIDE
        video.pix_fmt = "yuv420p"
        video.codec_context.gop_size = KEYFRAME_EVERY
        video.codec_context.thread_count = 1  # more take longer for such small frames
        video.options = {"preset": "ultrafast", "crf": "20"}
        # FLAC is encoded in a tenth of the time of AAC, and decoded in half of it.
        audio = container.add_stream("flac", rate=SAMPLE_RATE, layout="mono")
        for index in range(round(DURATION_S * FRAME_RATE)):
            time = index / FRAME_RATE
            image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
            for scene, jitter, color in zip(scenes, jitters, colors, strict=True):
                if scene.start_s <= time < scene.end_s:
                    _draw_frame(image, scene, time, jitter, color)
            container.mux(video.encode(av.VideoFrame.from_image(image)))
        container.mux(video.encode(None))
        pcm = (samples.clip(-1, 1) * 32767).astype(np.int16)
        write_samples(container, audio, pcm, SAMPLE_RATE)


def _draw_frame(
    image: Image.Image,
    scene: Scene,
    time: float,
    jitter: tuple[float, float],
    color: tuple[int, ...],
) -> None:
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, SIDE, SIDE), fill=BACKGROUNDS[scene.background])
    progress = (time - scene.start_s) / (scene.end_s - scene.start_s) - 0.5
    right, down = DIRECTIONS[scene.movement]
    x = SIDE * (0.5 + jitter[0] + 0.5 * progress * right)
    y = SIDE * (0.5 + jitter[1] + 0.5 * progress * down)
    draw_shape(pen, scene.shape, (x, y), SIDE * 0.2, color, 0.0)


def _sound(scene: Scene, draw: random.Random) -> np.ndarray:
    """Return the samples of a scene, float64 in -1..1."""
    length = round((scene.end_s - scene.start_s) * SAMPLE_RATE)
    progress = np.arange(length) / length
    pitch = LOWEST_HZ * 2 ** (0.5 * tuple(COLORS).index(scene.color) + draw.uniform(-0.05, 0.05))
    change = {
        "up": 1 + 0.35 * (progress - 0.5),
        "down": 1 - 0.35 * (progress - 0.5),
        "left": 1 + 0.12 * np.sin(2 * np.pi * 5 * progress),
    }
    frequency = pitch * change.get(scene.movement, np.ones(length))
    tone = np.sin(2 * np.pi * np.cumsum(frequency) / SAMPLE_RATE)
    if scene.background == "white":
        tone = np.tanh(6 * tone)  # odd harmonics
    if scene.movement == "right":
        tone *= 0.6 + 0.4 * np.sin(2 * np.pi * 16 * progress)
    beeps = SHAPES.index(scene.shape) + 1
    is_on = (progress * beeps) % 1 < 0.75
    return draw.uniform(0.2, 0.4) * tone * is_on
