"""Seeded noise with the spectrum of photographs (1/f; Field 1987) and captions, for benchmarks
without user data.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from mmray.data.store.prepared_set import PreparedSet
from mmray.storage.paths import write_atomic

VERSION = 1  # version of the generator; part of the folder name
WIDTH = 500
HEIGHT = 375
QUALITY = 95
# Amplitude ~ 1 / frequency^SPECTRUM_EXPONENT, chosen to match the file size of photographs at both
# sizes.
SPECTRUM_EXPONENT = 1.35
CAPTIONS = "captions.jsonl"
WORDS = (
    "a the red small old two dog street tree person sits near runs under bright water bicycle "
    "and with of"
)


def synthetic_photos(num: int) -> Iterator[tuple[bytes, str]]:
    """Generate images with the spectrum of photographs and captions of 5 to 30 random words.

    Args:
        num: Number of images. An image depends on its number only.

    Yields:
        JPEG bytes of 500 x 375 pixels, and the caption.
    """
    height = 4 * HEIGHT
    width = 4 * WIDTH
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    noise = np.random.default_rng(0).standard_normal((height, width))
    # mean 0
    field = np.fft.irfft2(np.fft.rfft2(noise) / frequency**SPECTRUM_EXPONENT, (height, width))
    field = np.asarray(field / field.std(), np.float32)
    for number in range(num):
        rng = np.random.default_rng((1, number))
        layers = []  # luma and two chroma channels: random crops, flipped, of deviation 1
        for _ in range(3):
            top = rng.integers(0, height - HEIGHT)
            left = rng.integers(0, width - WIDTH)
            crop = field[top : top + HEIGHT, left : left + WIDTH][
                :: rng.choice([-1, 1]), :: rng.choice([-1, 1])
            ]
            layers.append((crop - crop.mean()) / crop.std())
        luma, red, blue = layers
        gray = 128 + 55 * luma
        rgb = np.stack([gray + 22 * red, gray - 11 * red - 8 * blue, gray + 20 * blue], axis=-1)
        file = io.BytesIO()
        Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
        yield file.getvalue(), " ".join(rng.choice(WORDS.split(), rng.integers(5, 31)))


def sample_rows(prepared: PreparedSet, num: int) -> Iterator[tuple[bytes, str]]:
    """Yield image bytes and first caption of `num` rows, evenly spaced over a set."""
    rows = np.unique(
        np.linspace(0, prepared.num_rows - 1, min(num, prepared.num_rows)).astype(np.int64)
    )
    for part in np.array_split(rows, -(-len(rows) // 64)):
        yield from ((row.image, row.texts[0]) for row in prepared.read(part))


def write_files(items: Iterable[tuple[bytes, str]], folder: Path) -> Path:
    """Write image files and then captions.jsonl, a line {image: name of the file, text: caption}
    for each, into a folder; without effect if it is complete.
    """
    if not (folder / CAPTIONS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, (data, text) in enumerate(items):
            name = f"{number:06}.img"  # decoders detect the format by content
            (folder / name).write_bytes(data)
            lines.append(json.dumps({"image": name, "text": text}) + "\n")
        write_atomic(folder / CAPTIONS, "".join(lines))
    return folder


def read_captions(folder: Path) -> list[tuple[str, str]]:
    """Return (path of the image file, caption) of each image that `write_files` has written."""
    rows = (json.loads(line) for line in (folder / CAPTIONS).read_text().splitlines())
    return [(str(folder / row["image"]), row["text"]) for row in rows]
