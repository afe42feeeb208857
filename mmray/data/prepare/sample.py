"""The sample set: generated shapes with captions, so that the first run needs no download and learns something.

3,584 small images and a JSONL of captions are generated from a seed, bit-identical with the same Pillow version. The
test split has *combinations* of shape, colour, size, arrangement and background that are not in the training split, so
recall on it measures compositional generalization. Eight more rows are damaged, to demonstrate the quarantine.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmray.errors import UsageError

VERSION = 1  # increment it if the images change; it is part of the folder name
NUM_TRAIN, NUM_TEST = 3072, 512
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = {
    "red": (214, 32, 38),
    "orange": (250, 140, 20),
    "yellow": (245, 222, 40),
    "green": (34, 150, 60),
    "blue": (38, 70, 210),
    "purple": (140, 50, 170),
}
BACKGROUNDS = {"white": (250, 250, 250), "grey": (128, 128, 128), "black": (12, 12, 12), "pink": (250, 190, 205)}
RADII = {"small": 0.14, "large": 0.22}  # fraction of the shorter side
CENTRES = {
    "centre": (0.5, 0.5),
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
}
_BAR = 0.32  # half the width of the bars of a cross
_CROSS = [
    (math.hypot(1, _BAR), -math.atan2(_BAR, 1)),
    (math.hypot(1, _BAR), math.atan2(_BAR, 1)),
    (_BAR * math.sqrt(2), math.pi / 4),
]
OUTLINES = {  # corners as (distance from the centre / radius, angle clockwise from the top)
    "square": [(1.2, math.pi * (0.25 + 0.5 * corner)) for corner in range(4)],
    "triangle": [(1.15, math.pi * 2 * corner / 3) for corner in range(3)],
    "star": [(1.15 * (0.42 if corner % 2 else 1.0), math.pi * corner / 5) for corner in range(10)],
    "cross": [(distance, angle + turn * math.pi / 2) for turn in range(4) for distance, angle in _CROSS],
}
CORNERS = tuple(CENTRES)[1:]
COUNTS = {"two": 2, "three": 3, "four": 4}
SAVE_OPTIONS: dict[str, dict[str, Any]] = {"jpg": {"quality": 90}, "png": {"compress_level": 3}}
CANVASES = ((64, 64), (80, 64), (96, 72), (72, 96), (96, 96), (128, 96), (96, 128), (128, 128), (160, 120))

ONE = (
    "a {size} {colour} {shape} at the {where} on a {background} background",
    "{background} background with one {size} {colour} {shape}, {where}",
    "{where}: a {shape}, {colour} and {size}, on {background}",
)
SEVERAL = (
    "{where} {size} {colour} {shape}s on a {background} background",
    "{background} background with {where} {shape}s, {size} and {colour}",
    "a group of {where} {size} {shape}s in {colour} over {background}",
)


@dataclass(frozen=True)
class Scene:
    """One combination; `where` is the position of a single shape, or a number word for a group."""

    shape: str
    colour: str
    size: str
    where: str
    background: str

    def captions(self) -> list[str]:
        """Return three captions; each names all attributes, so it is unique to the scene."""
        templates = SEVERAL if self.where in COUNTS else ONE
        return [template.format(**vars(self)).replace("crosss", "crosses") for template in templates]


def generate(out: Path, seed: int = 0) -> Path:
    """Return the JSONL of the sample set under `out`; generate the set if it does not exist (3 s on one core).

    The set is written to a temporary folder and renamed, so an existing folder is complete. Raises UsageError if `out`
    is not writable.
    """
    folder = out / f"v{VERSION}-seed{seed}"
    jsonl = folder / "sample.jsonl"
    try:
        if not jsonl.exists():
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out, prefix=".drawing-") as scratch:
                _draw_all(Path(scratch) / "set", seed)
                (Path(scratch) / "set").rename(folder)
    except OSError as error:
        if not jsonl.exists():  # otherwise another process has generated the same set meanwhile
            raise UsageError(
                f"cannot draw the sample set into {out}: {error.strerror or error}. Set data.cache to a writable folder"
            ) from None
    return jsonl


def scenes(seed: int) -> tuple[list[Scene], list[Scene]]:
    """Return scenes of the train rows (some repeat) and of the test rows, without overlap."""
    every = [Scene(*each) for each in itertools.product(SHAPES, COLORS, RADII, (*CENTRES, *COUNTS), BACKGROUNDS)]
    random.Random(f"scenes {seed}").shuffle(every)
    test, train = every[:NUM_TEST], every[NUM_TEST:]
    return list(itertools.islice(itertools.cycle(train), NUM_TRAIN)), test


def _draw_all(folder: Path, seed: int) -> None:
    (folder / "images").mkdir(parents=True)
    train, test = scenes(seed)
    rows = [("train", scene) for scene in train] + [("test", scene) for scene in test]
    random.Random(f"order {seed}").shuffle(rows)
    lines = []
    for number, (split, scene) in enumerate(rows):
        rng = random.Random(f"row {seed} {number}")
        name = f"images/{number:05d}.{rng.choice(('jpg', 'jpg', 'png'))}"
        _draw_scene(scene, rng).save(folder / name, **SAVE_OPTIONS[name[-3:]])
        texts = rng.sample(scene.captions(), rng.choice((1, 2, 3)))
        lines.append(_line(f"shapes-{number:05d}", name, texts, split))
    for number, line in enumerate(_damaged(folder, lines)):
        lines.insert((number + 1) * len(lines) // 10, line)
    (folder / "sample.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _line(key: str, image: str, texts: list[str], split: str = "train") -> str:
    return json.dumps({"id": key, "image": image, "texts": texts, "split": split})


def _damaged(folder: Path, lines: list[str]) -> Iterator[str]:
    """Yield eight lines to quarantine: five bad files, a blank caption, a truncated line and a repeated image."""
    rows = [json.loads(line) for line in lines if '"train"' in line]
    jpg = (folder / next(row["image"] for row in rows if row["image"].endswith("jpg"))).read_bytes()
    png = bytearray((folder / next(row["image"] for row in rows if row["image"].endswith("png"))).read_bytes())
    png[len(png) // 2] ^= 0xFF
    files = {
        "truncated.jpg": jpg[: len(jpg) // 2],
        "empty.jpg": b"",
        "web-page.jpg": b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>\n",
        "flipped-byte.png": bytes(png),
    }
    for name, data in files.items():
        (folder / "images" / name).write_bytes(data)
    for name in (*files, "missing.jpg"):
        yield _line(f"damaged-{Path(name).stem}", f"images/{name}", ["a picture that cannot be read"])
    yield _line("damaged-blank-caption", rows[1]["image"], ["   "])
    yield lines[2][: len(lines[2]) // 2]
    yield _line("damaged-duplicate", rows[0]["image"], rows[0]["texts"])


def _draw_scene(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene on a random canvas with jittered positions, angles and colours; supersampled twice."""
    width, height = rng.choice(CANVASES)
    image = Image.new("RGB", (2 * width, 2 * height), _tinted(BACKGROUNDS[scene.background], rng))
    pen = ImageDraw.Draw(image)
    positions = rng.sample(CORNERS, COUNTS[scene.where]) if scene.where in COUNTS else [scene.where]
    for position in positions:
        x, y = (
            2 * side * (at + rng.uniform(-0.03, 0.03))
            for side, at in zip((width, height), CENTRES[position], strict=True)
        )
        radius = 2 * min(width, height) * RADII[scene.size] * rng.uniform(0.92, 1.08)
        _draw_shape(pen, scene.shape, x, y, radius, _tinted(COLORS[scene.colour], rng), rng.uniform(-0.12, 0.12))
    return image.reduce(2)


def _tinted(colour: tuple[int, int, int], rng: random.Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + rng.randint(-10, 10))) for value in colour)


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: tuple[int, ...], turn: float
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=max(2, round(radius * 0.4)))
    else:
        corners = [(distance * radius, angle + turn) for distance, angle in OUTLINES[shape]]
        pen.polygon([(x + far * math.sin(angle), y - far * math.cos(angle)) for far, angle in corners], fill=colour)
