"""Image-text files to measure with, where a user brings none: drawn pictures that cost a decoder what photographs do.

The amplitude of a photograph falls with spatial frequency (about 1/f; Field 1987), and so does that of these: 500 x
375, JPEG of quality 95, about 110 KB, and 35 KB once re-encoded at 256. Drawn from a seed, the same each time.
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

VERSION = 1  # of the drawing; a change in what is drawn takes another folder
WIDTH, HEIGHT, QUALITY = 500, 375, 95
FALL = 1.35  # amplitude ~ 1 / frequency^FALL; with it the bytes are those of photographs, at both sizes
CAPTIONS = "captions.jsonl"
_WORDS = ("a the red small old two dog street tree person", "sits near runs under bright water bicycle and with of")
_READ_ROWS = 64


def photos(num: int) -> Iterator[tuple[bytes, str]]:
    """`num` pictures with captions of 5 to 30 words; picture i is the same whatever `num` is."""
    field = _field(np.random.default_rng(0), 4 * HEIGHT, 4 * WIDTH)
    words = " ".join(_WORDS).split()
    for number in range(num):
        draw = np.random.default_rng((1, number))
        luma, red, blue = (_cut(field, draw) for _ in range(3))
        grey = 128 + 55 * luma
        rgb = np.stack([grey + 22 * red, grey - 11 * red - 8 * blue, grey + 20 * blue], axis=-1)
        file = io.BytesIO()
        Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
        yield file.getvalue(), " ".join(draw.choice(words, draw.integers(5, 31)))


def rows_of(prepared: PreparedSet, num: int) -> Iterator[tuple[bytes, str]]:
    """First images and captions of `num` rows of a set, evenly from all of it."""
    rows = np.unique(np.linspace(0, prepared.num_rows - 1, min(num, prepared.num_rows)).astype(np.int64))
    for start in range(0, len(rows), _READ_ROWS):
        yield from ((row.images[0], row.texts[0]) for row in prepared.read(rows[start : start + _READ_ROWS]))


def write_files(items: Iterable[tuple[bytes, str]], folder: Path, num: int) -> Path:
    """A folder of image files and a JSONL that names them, as a user brings them; written once, then found again."""
    if not (folder / CAPTIONS).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
        lines = []
        for number, (data, text) in enumerate(islice(items, num)):
            name = f"{number:06}.img"  # decoders go by content
            (unfinished / name).write_bytes(data)
            lines.append(json.dumps({"image": name, "text": text}) + "\n")
        (unfinished / CAPTIONS).write_text("".join(lines))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def read_captions(folder: Path) -> list[tuple[str, str]]:
    """(path of the image, caption) of each row of such a folder."""
    rows = (json.loads(line) for line in (folder / CAPTIONS).read_text().splitlines())
    return [(str(folder / row["image"]), row["text"]) for row in rows]


def repeated(folder: Path, num: int) -> Path:
    """A JSONL beside the files of `folder` that names them over and over, `num` rows with keys of their own."""
    path, rows = folder / f"repeated-{num}.jsonl", read_captions(folder)
    if not path.exists():
        named = ((number, *rows[number % len(rows)]) for number in range(num))
        lines = (json.dumps({"id": str(at), "image": Path(file).name, "text": text}) for at, file, text in named)
        path.write_text("\n".join(lines) + "\n")
    return path


def prepared(folder: Path, side: int, place: Path) -> PreparedSet:
    """The files of `folder` as a prepared set in `place`, re-encoded at `side` (0: as they are); Ray must be there."""
    settings = Prepare(image_side=side, duplicates="keep", max_bad_fraction=1.0)
    source, cache = str(folder / CAPTIONS), str(place / folder.name)
    path = ensure_prepared(source, cache, settings, notify=lambda *_: None, progress=lambda _: None)
    return PreparedSet.open(str(path))


def _field(draw: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Noise [height, width] of mean 0 and deviation 1 whose amplitude falls with frequency."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(draw.standard_normal((height, width))) / frequency**FALL, (height, width))
    return np.asarray(field / field.std(), np.float32)


def _cut(field: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    top, left = draw.integers(0, field.shape[0] - HEIGHT), draw.integers(0, field.shape[1] - WIDTH)
    part = field[top : top + HEIGHT, left : left + WIDTH]
    part = part[:: draw.choice([-1, 1]), :: draw.choice([-1, 1])]
    return (part - part.mean()) / part.std()
