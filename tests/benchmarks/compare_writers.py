"""`mmray prepare` against LitData's `optimize` and MosaicML's `MDSWriter`: CPU time of the same
images, resized to a shorter side of 256 pixels and written as JPEGs of quality 90.

    python -m tests.benchmarks.compare_writers --images 8000 --rounds 3

The peers (`pip install litdata mosaicml-streaming`) get the transform as their users write it, with
Pillow, and write the caption too. mmray also verifies each image, removes duplicates, makes splits
and trains a tokenizer. CPU time is that of a process and of its children.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmray.bench.synthetic_images import CAPTIONS, read_captions, synthetic_photos, write_files
from mmray.data.store.prepared_set import PreparedSet

SIDE = 256
QUALITY = 90
NUM_WORKERS = 2
SHARD_BYTES = 64 << 20
PEERS = ("litdata", "mosaic")
NUM_COMPARED = 64  # images
MAX_DIFFERENCE = 3.0  # mean of 256 levels, of pixels that both JPEG encoders have rounded


def transform(item: tuple[str, str]) -> dict[str, Any]:
    """Return the row of an image and its caption, as the READMEs of the peers show it."""
    path, text = item
    image = Image.open(path).convert("RGB")
    scale = SIDE / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    buffer = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=QUALITY)
    return {"image": buffer.getvalue(), "text": text}


def write_litdata(items: list[tuple[str, str]], out: Path) -> None:
    """Write the rows with `litdata.optimize`."""
    import litdata

    litdata.optimize(transform, items, f"{out}", num_workers=NUM_WORKERS, chunk_bytes=SHARD_BYTES)


def write_mosaic(items: list[tuple[str, str]], out: Path) -> None:
    """Write the rows with an `MDSWriter` a process, and merge their indexes."""
    from streaming.base.util import merge_index

    parts = [(items[number::NUM_WORKERS], f"{out}/{number}") for number in range(NUM_WORKERS)]
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        pool.starmap(_write_mosaic_part, parts)
    merge_index(f"{out}", keep_local=True)


def _write_mosaic_part(items: Sequence[tuple[str, str]], out: str) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "text": "str"}
    with MDSWriter(out=out, columns=columns, size_limit=SHARD_BYTES) as writer:
        for item in items:
            writer.write(transform(item))


def read_rows(tool: str, out: Path) -> Sequence[dict[str, Any]]:
    """Return the rows that a tool has written, {image, text}, in its order."""
    if tool == "litdata":
        import litdata

        return litdata.StreamingDataset(f"{out}", shuffle=False)
    if tool == "mosaic":
        from streaming import StreamingDataset

        return StreamingDataset(local=f"{out}", shuffle=False, batch_size=1)
    prepared = PreparedSet.open(f"{out}")
    rows = prepared.read(np.arange(prepared.num_rows))
    return [{"image": row.image, "text": row.texts[0]} for row in rows]


def check_rows(tool: str, images: Path, out: Path) -> None:
    """Compare what a tool has written with the transform of each image.

    Raises:
        SystemExit: Rows are missing, or the pixels of one differ.
    """
    paths = {text: path for path, text in read_captions(images)}
    rows = read_rows(tool, out)
    if len(rows) != len(paths):
        raise SystemExit(f"{tool} wrote {len(rows)} of {len(paths)} rows")
    for number in range(0, len(rows), max(1, len(rows) // NUM_COMPARED)):
        row = rows[number]
        expected = transform((paths[row["text"]], row["text"]))
        pixels = [
            np.asarray(Image.open(io.BytesIO(each["image"])), np.float32)
            for each in (row, expected)
        ]
        difference = np.abs(pixels[0] - pixels[1]).mean()
        if difference > MAX_DIFFERENCE:
            raise SystemExit(f"row {number} of {tool} differs by {difference:.1f} levels")


def measure(tool: str, images: Path, out: Path) -> float:
    """Run a tool in a process of its own, and return its CPU time in seconds."""
    shutil.rmtree(out, ignore_errors=True)
    if tool == "mmray":
        command = ["mmray", "prepare", f"{images / CAPTIONS}", f"{out}", "--image-side", f"{SIDE}"]
    else:
        command = ["tests.benchmarks.compare_writers", "--write", tool, "--folder", f"{images}"]
        command += ["--out", f"{out}"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"`python -m {' '.join(command)}` failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the CPU time of each tool and the ratio of the best peer to mmray."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the images; kept if given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", choices=PEERS, help="run one peer only")
    arguments = parser.parse_args()
    if arguments.write:
        write = write_litdata if arguments.write == "litdata" else write_mosaic
        write(read_captions(arguments.folder), arguments.out)
        return
    with tempfile.TemporaryDirectory() as temporary:
        images = arguments.folder or Path(temporary) / "images"
        write_files(synthetic_photos(arguments.images), images)
        seconds: dict[str, list[float]] = {tool: [] for tool in ("mmray", *PEERS)}
        for number in range(arguments.rounds):
            for tool in seconds if number % 2 == 0 else reversed(seconds):
                out = Path(temporary) / tool
                seconds[tool].append(measure(tool, images, out))
                check_rows(tool, images, out)
    for tool, values in seconds.items():
        print(
            f"{tool:<8} {statistics.median(values):7.1f} s of CPU ({min(values):.1f} to "
            f"{max(values):.1f})"
        )
    ratios = [
        min(seconds[peer][number] for peer in PEERS) / seconds["mmray"][number]
        for number in range(arguments.rounds)
    ]
    median = statistics.median(ratios)
    print(f"best peer : mmray {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
