"""The sample set of conversations, and the tiny model that learns it: nothing is downloaded.

Images of one shape, and rows with 0 to 3 of them: rows of text alone, several images in a message,
and several turns. Each question has one short answer, so exact match measures what was learned.
"""

from __future__ import annotations

import json
import random
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmray.data.images.sample import COLORS, draw_shape, tinted, write_once

VERSION = "v2"  # change it if the files change; it is a folder name
NUM_TRAIN = 2400
NUM_TEST = 200
SIDE = 64
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("zero", "one", "two", "three")
# A Qwen3-VL of 0.5 million parameters: config, and a processor for images of 32 to 64 pixels with a
# BPE tokenizer that was trained on the texts below.
MODEL_FILES = Path(__file__).with_name("sample_model")


def generate_conversations(out: Path) -> Path:
    """Return the JSONL file of the conversations, generated in a folder of `out` if missing."""
    return write_once(out / VERSION / "sample-vlm.jsonl", _write_conversations)


def generate_model(out: Path) -> Path:
    """Return a folder in `out` with config and processor of a tiny Qwen3-VL, without weights."""

    def copy_files(folder: Path) -> None:
        shutil.copytree(MODEL_FILES, folder, dirs_exist_ok=True)

    return write_once(out / VERSION / "config.json", copy_files).parent


def _write_conversations(folder: Path) -> None:
    (folder / "images").mkdir()
    # Each three words are in one row at most, because rows without images may be equal.
    words = list(permutations((*SHAPES, *COLORS, *NUMBERS), 3))
    random.Random("words").shuffle(words)
    lines = []
    for number in range(NUM_TRAIN + NUM_TEST):
        draw = random.Random(f"conversation {number}")
        scenes = [
            (draw.choice(SHAPES), draw.choice(tuple(COLORS))) for _ in range(draw.randrange(4))
        ]
        names = []
        for index, scene in enumerate(scenes):
            names.append(f"images/{number:05d}-{index}.png")
            _draw(*scene, draw).save(folder / names[-1])
        row = {
            "id": f"conversation-{number:05d}",
            "images": names,
            "messages": _conversation(scenes, "" if scenes else " ".join(words.pop()), draw),
            "split": "train" if number < NUM_TRAIN else "test",
        }
        lines.append(json.dumps(row))
    (folder / "sample-vlm.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _draw(shape: str, color: str, draw: random.Random) -> Image.Image:
    size = 2 * SIDE
    image = Image.new("RGB", (size, size), tinted((245, 245, 245), draw))
    x = size * draw.uniform(0.47, 0.53)
    y = size * draw.uniform(0.47, 0.53)
    radius = size * draw.uniform(0.3, 0.36)
    draw_shape(ImageDraw.Draw(image), shape, (x, y), radius, tinted(COLORS[color], draw), 0.0)
    return image.reduce(2)


def _conversation(
    scenes: list[tuple[str, str]], words: str, draw: random.Random
) -> list[dict[str, Any]]:
    """Return the messages about the shapes and colors of images, or without any about words."""
    if not scenes:
        return _turn([], f"Say {words}.", words)
    if draw.random() < 0.5:
        # All images in the first message; the questions are about all of them.
        parts = [{"type": "image"} for _ in scenes]
        messages = _turn(parts, "How many images?", NUMBERS[len(scenes)])
        shape, color = scenes[-1]
        return messages + draw.choice(
            (_turn([], "Last shape?", shape), _turn([], "Last color?", color))
        )
    messages = []
    for shape, color in scenes:
        image = [{"type": "image"}]
        messages += draw.choice((_turn(image, "Shape?", shape), _turn(image, "Color?", color)))
    return messages


def _turn(images: list[dict[str, Any]], question: str, answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*images, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
