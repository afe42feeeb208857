"""The sample set: generated shapes with captions, so that the first run needs no download and
learns something.

3,584 small images and a JSONL of captions, bit-identical with the same Pillow version. The test
split has *combinations* of shape, color, size, arrangement and background that are not in the
training split, so recall on it measures compositional generalization. Eight more rows are damaged,
to demonstrate the quarantine.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from mmray.errors import UsageError

VERSION = "v1-seed0"  # change it if the images change; it is the folder name
NUM_TRAIN = 3072
NUM_TEST = 512
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = {
    "red": (214, 32, 38),
    "orange": (250, 140, 20),
    "yellow": (245, 222, 40),
    "green": (34, 150, 60),
    "blue": (38, 70, 210),
    "purple": (140, 50, 170),
}
BACKGROUNDS = {
    "white": (250, 250, 250),
    "grey": (128, 128, 128),
    "black": (12, 12, 12),
    "pink": (250, 190, 205),
}
RADII = {"small": 0.14, "large": 0.22}  # fraction of the shorter side
CENTERS = {
    "centre": (0.5, 0.5),
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
}
CORNERS = tuple(CENTERS)[1:]
COUNTS = {"two": 2, "three": 3, "four": 4}
CANVASES = (
    (64, 64),
    (80, 64),
    (96, 72),
    (72, 96),
    (96, 96),
    (128, 96),
    (96, 128),
    (128, 128),
    (160, 120),
)
_ARM = math.atan2(0.32, 1)  # half the width of the bars of a cross is 0.32
_CROSS = (
    (math.hypot(1, 0.32), -_ARM),
    (math.hypot(1, 0.32), _ARM),
    (0.32 * math.sqrt(2), math.pi / 4),
)
OUTLINES = {  # corners as (distance from the center / radius, angle clockwise from the top)
    "square": [(1.2, math.pi * (0.25 + 0.5 * corner)) for corner in range(4)],
    "triangle": [(1.15, math.pi * 2 * corner / 3) for corner in range(3)],
    "star": [(1.15 * (0.42 if corner % 2 else 1.0), math.pi * corner / 5) for corner in range(10)],
    "cross": [
        (distance, angle + side * math.pi / 2) for side in range(4) for distance, angle in _CROSS
    ],
}
ONE = (
    "a {size} {color} {shape} at the {where} on a {background} background",
    "{background} background with one {size} {color} {shape}, {where}",
    "{where}: a {shape}, {color} and {size}, on {background}",
)
SEVERAL = (
    "{where} {size} {color} {shape}s on a {background} background",
    "{background} background with {where} {shape}s, {size} and {color}",
    "a group of {where} {size} {shape}s in {color} over {background}",
)


class Scene(NamedTuple):
    """What an image of the sample data shows.

    Attributes:
        shape: `circle`, `square`, `triangle`, `star`, `cross` or `ring`.
        color: `red`, `orange`, `yellow`, `green`, `blue` or `purple`.
        size: `small` or `large`.
        where: Position of a single shape: `centre`, `top left`, `top right`, `bottom left` or
            `bottom right`; or the number of shapes: `two`, `three` or `four`.
        background: `white`, `grey`, `black` or `pink`.
    """

    shape: str
    color: str
    size: str
    where: str
    background: str

    def captions(self) -> list[str]:
        """Return three captions; each names all attributes, so no other scene has it."""
        templates = SEVERAL if self.where in COUNTS else ONE
        return [
            template.format(**self._asdict()).replace("crosss", "crosses") for template in templates
        ]


def generate(out: Path) -> Path:
    """Return the JSONL file of the sample set, generated in a folder of `out` if missing."""
    return write_once(out / VERSION / "sample.jsonl", _draw_all)


def write_once(file: Path, write: Callable[[Path], None]) -> Path:
    """Return a file of a generated folder, after writing the folder if the file does not exist.

    The folder gets its name when it is complete.

    Args:
        file: A file that `write` creates; its parent is the generated folder.
        write: Called with an empty folder, a local pathlib.Path, which it fills.

    Returns:
        `file`.

    Raises:
        UsageError: The parent of the folder is not writable.
    """
    out = file.parent.parent
    try:
        if not file.exists():
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as temporary:
                folder = Path(temporary) / "files"
                folder.mkdir()
                write(folder)
                folder.rename(file.parent)
    except OSError as error:
        if not file.exists():  # otherwise another process has written the same files meanwhile
            raise UsageError(
                f"cannot write into {out}: {error.strerror or error}. Set "
                "data.cache to a writable folder"
            ) from None
    return file


def scenes() -> tuple[list[Scene], list[Scene]]:
    """Return the scenes (shape, color, size, place, background) of the training and of the test
    images.

    There are 3072 for training, some of which repeat, and 512 for the test; no scene is in both.
    """
    every = [
        Scene(*each)
        for each in itertools.product(SHAPES, COLORS, RADII, (*CENTERS, *COUNTS), BACKGROUNDS)
    ]
    random.Random("scenes 0").shuffle(every)
    test = every[:NUM_TEST]
    train = every[NUM_TEST:]
    return list(itertools.islice(itertools.cycle(train), NUM_TRAIN)), test


def _draw_all(folder: Path) -> None:
    (folder / "images").mkdir()
    train, test = scenes()
    pairs = [("train", scene) for scene in train] + [("test", scene) for scene in test]
    random.Random("order 0").shuffle(pairs)
    rows = []
    for number, (split, scene) in enumerate(pairs):
        rng = random.Random(f"row 0 {number}")
        name = f"images/{number:05d}.{rng.choice(('jpg', 'jpg', 'png'))}"
        options: dict[str, Any] = {"quality": 90} if name.endswith("jpg") else {"compress_level": 3}
        _draw_scene(scene, rng).save(folder / name, **options)
        texts = rng.sample(scene.captions(), rng.choice((1, 2, 3)))
        rows.append({"id": f"shapes-{number:05d}", "image": name, "texts": texts, "split": split})
    lines = [json.dumps(row) for row in rows]
    for number, line in enumerate(
        _damaged(folder, [row for row in rows if row["split"] == "train"])
    ):
        lines.insert((number + 1) * len(lines) // 10, line)
    (folder / "sample.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _damaged(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return eight lines to quarantine: five bad files, a blank caption, a repeated image and a
    truncated line.
    """
    first = [
        next(row["image"] for row in rows if row["image"].endswith(kind)) for kind in ("jpg", "png")
    ]
    jpg, png = ((folder / name).read_bytes() for name in first)
    middle = len(png) // 2
    files = {
        "truncated.jpg": jpg[: len(jpg) // 2],
        "empty.jpg": b"",
        "web-page.jpg": b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>\n",
        "flipped-byte.png": png[:middle] + bytes([png[middle] ^ 0xFF]) + png[middle + 1 :],
    }
    for name, data in files.items():
        (folder / "images" / name).write_bytes(data)
    bad = [{"id": Path(name).stem, "image": f"images/{name}"} for name in (*files, "missing.jpg")]
    bad += [rows[1] | {"id": "blank-caption", "texts": ["   "]}, rows[0] | {"id": "duplicate"}]
    lines = [
        json.dumps({"texts": ["an image"], "split": "train"} | row | {"id": f"damaged-{row['id']}"})
        for row in bad
    ]
    return [*lines, lines[0][: len(lines[0]) // 2]]


def _draw_scene(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene on a random canvas with jittered positions, angles and colors; supersampled
    twice.
    """
    width, height = rng.choice(CANVASES)
    image = Image.new("RGB", (2 * width, 2 * height), tinted(BACKGROUNDS[scene.background], rng))
    pen = ImageDraw.Draw(image)
    for position in (
        rng.sample(CORNERS, COUNTS[scene.where]) if scene.where in COUNTS else [scene.where]
    ):
        x, y = (
            2 * side * (at + rng.uniform(-0.03, 0.03))
            for side, at in zip((width, height), CENTERS[position], strict=True)
        )
        radius = 2 * min(width, height) * RADII[scene.size] * rng.uniform(0.92, 1.08)
        color = tinted(COLORS[scene.color], rng)
        draw_shape(pen, scene.shape, (x, y), radius, color, rng.uniform(-0.12, 0.12))
    return image.reduce(2)


def draw_shape(
    pen: ImageDraw.ImageDraw,
    shape: str,
    center: tuple[float, float],
    radius: float,
    color: tuple[int, ...],
    turn: float,
) -> None:
    """Draw a filled shape.

    Args:
        pen: Drawing context of the image, which is changed.
        shape: `circle`, `square`, `triangle`, `star`, `cross` or `ring`.
        center: (x, y) in pixels.
        radius: Approximate distance from the center to the outline in pixels.
        color: (red, green, blue), 0 to 255.
        turn: Clockwise rotation in radians; without effect for `circle` and `ring`.
    """
    x, y = center
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=max(2, round(radius * 0.4)))
    else:
        corners = [(distance * radius, angle + turn) for distance, angle in OUTLINES[shape]]
        pen.polygon(
            [(x + far * math.sin(angle), y - far * math.cos(angle)) for far, angle in corners],
            fill=color,
        )


def tinted(color: tuple[int, int, int], rng: random.Random) -> tuple[int, ...]:
    """Return an RGB color with each channel changed at random by at most 10 of 255."""
    return tuple(min(255, max(0, value + rng.randint(-10, 10))) for value in color)
