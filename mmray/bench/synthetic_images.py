"""Synthetic image-text files with the decoding cost of photographs, for benchmarks without user data.

Seeded noise with the amplitude spectrum of photographs (about 1/f; Field 1987): 500 x 375 pixels, JPEG quality 95,
about 110 KB, and 35 KB re-encoded at 256 pixels.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from mmray.config import Prepare
from mmray.data.prepare.pipeline import ensure_prepared
from mmray.data.store.prepared_set import PreparedSet

VERSION = 1  # of the generator; part of the folder name
WIDTH, HEIGHT, QUALITY = 500, 375, 95
FALL = 1.35  # amplitude ~ 1 / frequency^FALL, chosen to match the file size of photographs at both sizes
CAPTIONS = "captions.jsonl"
_WORDS = ("a the red small old two dog street tree person", "sits near runs under bright water bicycle and with of")
_READ_ROWS = 64


def synthetic_photos(num: int) -> Iterator[tuple[bytes, str]]:
    """Yield `num` JPEG images with captions of 5 to 30 words; image i does not depend on `num`."""
    field = _field(np.random.default_rng(0), 4 * HEIGHT, 4 * WIDTH)
    words = " ".join(_WORDS).split()
    for number in range(num):
        draw = np.random.default_rng((1, number))
        luma, red, blue = (_random_crop(field, draw) for _ in range(3))
        grey = 128 + 55 * luma
        rgb = np.stack([grey + 22 * red, grey - 11 * red - 8 * blue, grey + 20 * blue], axis=-1)
        file = io.BytesIO()
        Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
        yield file.getvalue(), " ".join(draw.choice(words, draw.integers(5, 31)))


def sample_rows(prepared: PreparedSet, num: int) -> Iterator[tuple[bytes, str]]:
    """Yield images and first captions of `num` rows, evenly spaced over the set."""
    rows = np.unique(np.linspace(0, prepared.num_rows - 1, min(num, prepared.num_rows)).astype(np.int64))
    for start in range(0, len(rows), _READ_ROWS):
        yield from ((row.image, row.texts[0]) for row in prepared.read(rows[start : start + _READ_ROWS]))


def write_files(items: Iterable[tuple[bytes, str]], folder: Path, num: int) -> Path:
    """Write image files and a JSONL of their captions into `folder`, unless it exists."""
    if not (folder / CAPTIONS).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
        lines = []
        for number, (data, text) in enumerate(islice(items, num)):
            name = f"{number:06}.img"  # decoders detect the format by content
            (unfinished / name).write_bytes(data)
            lines.append(json.dumps({"image": name, "text": text}) + "\n")
        (unfinished / CAPTIONS).write_text("".join(lines))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def read_captions(folder: Path) -> list[tuple[str, str]]:
    """Return (image path, caption) of each row of such a folder."""
    rows = (json.loads(line) for line in (folder / CAPTIONS).read_text().splitlines())
    return [(str(folder / row["image"]), row["text"]) for row in rows]


def prepare_fixture(folder: Path, side: int, cache: Path) -> PreparedSet:
    """Prepare the files of `folder` into `cache`, re-encoded at `side` (0: original bytes); needs a running Ray."""
    settings = Prepare(image_side=side, duplicates="keep", max_bad_fraction=1.0)
    source = str(folder / CAPTIONS)
    path = ensure_prepared(source, str(cache / folder.name), settings, notify=lambda *_: None, progress=lambda _: None)
    return PreparedSet.open(str(path))


def _field(draw: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return noise [height, width] with mean 0, deviation 1 and amplitude falling with frequency."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(draw.standard_normal((height, width))) / frequency**FALL, (height, width))
    return np.asarray(field / field.std(), np.float32)


def _random_crop(field: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    top, left = draw.integers(0, field.shape[0] - HEIGHT), draw.integers(0, field.shape[1] - WIDTH)
    part = field[top : top + HEIGHT, left : left + WIDTH]
    part = part[:: draw.choice([-1, 1]), :: draw.choice([-1, 1])]
    return (part - part.mean()) / part.std()
