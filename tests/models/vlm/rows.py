"""Rows with 0, 1 and 3 images for tests of vision-language models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import EncodedRow, ProcessorEncoder
from tests.made import encode, image_media

IMAGE = {"type": "image", "text": None}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def photo(width: int, height: int) -> np.ndarray:
    """A smooth image, on which the resampling of all backends agrees."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 17 + shift) + np.cos(y / 23 - shift) for shift in (0, 1, 2)]
    return (127 + 60 * np.stack(waves, axis=-1)).astype(np.uint8)


ROWS: tuple[tuple[list[dict[str, Any]], list[np.ndarray]], ...] = (
    (
        [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "two red"},
        ],
        [],
    ),
    (
        [
            {"role": "user", "content": [IMAGE, text("Which shape?")]},
            {"role": "assistant", "content": [text("a circle and a triangle")]},
        ],
        [photo(60, 60)],
    ),
    (
        [
            {"role": "user", "content": [IMAGE, text("Which shape?"), IMAGE]},
            {"role": "assistant", "content": [text("circle")]},
            {"role": "user", "content": [IMAGE, text("What color?")]},
            {"role": "assistant", "content": [text("blue")]},
        ],
        [photo(60, 40), photo(30, 90), photo(50, 50)],
    ),
)


def settings(weights: Any, **inputs: Any) -> Any:
    """The `model` section."""
    values = {"max_tokens": 500, "max_pixels": None, "min_pixels": None} | inputs
    return SimpleNamespace(weights=str(weights), inputs=SimpleNamespace(**values))


def encode_rows(encoder: ProcessorEncoder) -> list[EncodedRow]:
    return [encoder.encode(messages, images) for messages, images in ROWS]


def stored_rows(count: int) -> list[Row]:
    """The rows of ROWS in turn, as a prepared set has them."""
    rows = []
    for number in range(count):
        messages, images = ROWS[number % 3]
        media = [image_media(encode(Image.fromarray(image))) for image in images]
        parts = [
            turn | {"content": [text(turn["content"])]}
            if isinstance(turn["content"], str)
            else turn
            for turn in messages
        ]
        rows.append(Row(f"row-{number}", media, [], messages=parts, source=f"a.jsonl:{number}"))
    return rows
