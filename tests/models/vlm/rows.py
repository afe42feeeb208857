"""Rows with 0, 1 and 3 images for tests of vision-language models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import EncodedRow, ProcessorEncoder
from mmray.data.vlm.families import FAMILIES, read_config
from mmray.data.vlm.video import Clip
from tests.made import encode, image_media

IMAGE = {"type": "image", "text": None}
VIDEO = {"type": "video", "text": None}
AUDIO = {"type": "audio", "text": None}
FRAME_PIXELS = 64 * 64  # of families with larger frames


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


def clip(width: int, height: int, times_s: list[float]) -> Clip:
    """A smooth video that moves."""
    wide = photo(width + 5 * len(times_s), height)
    frames = [wide[:, 5 * number : 5 * number + width] for number in range(len(times_s))]
    return Clip(np.stack(frames), times_s)


# With ROWS: a video alone, and images and videos in turn.
VIDEO_ROWS: tuple[tuple[list[dict[str, Any]], list[Any]], ...] = (
    *ROWS,
    (
        [
            {"role": "user", "content": [VIDEO, text("Which shape?")]},
            {"role": "assistant", "content": [text("circle")]},
        ],
        [clip(70, 50, [0.25, 0.75, 1.25, 1.75])],
    ),
    (
        [
            {"role": "user", "content": [IMAGE, VIDEO, text("What color?")]},
            {"role": "assistant", "content": [text("red")]},
            {"role": "user", "content": [VIDEO, IMAGE]},
            {"role": "assistant", "content": [text("blue")]},
        ],
        [
            photo(60, 40),
            clip(40, 40, [9.0, 11.5]),
            clip(64, 96, [0.1, 0.4, 0.7, 1.0]),
            photo(30, 30),
        ],
    ),
)


def tone(length_s: float, pitch: float) -> np.ndarray:
    """Samples int16 of 16,000 a second."""
    times = np.arange(round(16000 * length_s)) / 16000
    return (9999 * np.sin(2 * np.pi * pitch * times)).astype(np.int16)


AUDIO_ROWS: tuple[tuple[list[dict[str, Any]], list[Any]], ...] = tuple(
    (
        [
            message
            | {
                "content": [
                    part | {"type": "audio"} if part["type"] == "image" else part
                    for part in message["content"]
                ]
            }
            if not isinstance(message["content"], str)
            else message
            for message in messages
        ],
        media,
    )
    for (messages, _), media in zip(
        ROWS,
        ([], [tone(0.7, 440)], [tone(2.0, 200), tone(0.111, 3000), tone(1.3, 900)]),
        strict=True,
    )
)


# The last but one has several media of each kind.
OMNI_ROWS: tuple[tuple[list[dict[str, Any]], list[Any]], ...] = (
    *VIDEO_ROWS[:4],
    (
        [
            {"role": "user", "content": [AUDIO, text("What color?"), IMAGE]},
            {"role": "assistant", "content": [text("red")]},
            {"role": "user", "content": [VIDEO, AUDIO, IMAGE, text("no"), VIDEO]},
            {"role": "assistant", "content": [text("blue")]},
        ],
        [
            tone(1.1, 440),
            photo(60, 40),
            clip(40, 40, [9.0, 11.5]),
            tone(1.7, 200),
            photo(30, 30),
            clip(64, 96, [0.1, 0.4, 0.7, 1.0]),
        ],
    ),
    (
        [
            {"role": "user", "content": [text("What color?"), AUDIO]},
            {"role": "assistant", "content": [text("blue")]},
        ],
        [tone(2.0, 900)],
    ),
)


def settings(weights: Any, **inputs: Any) -> Any:
    """The `model` section."""
    values = {"max_tokens": 500, "max_pixels": None, "min_pixels": None} | inputs
    return SimpleNamespace(weights=str(weights), inputs=SimpleNamespace(**values))


def all_media(weights: Any) -> Any:
    """The `model` section of a model that takes all media of its family."""
    family = FAMILIES[read_config(str(weights))["model_type"]]
    limits = {"frame_pixels": FRAME_PIXELS} if family.audio and family.video else {}
    return settings(weights, frames=4 if family.video else 0, **limits)


def double_model(weights: Any) -> Any:
    """A model that takes all media of its family, in float64, which grouped_mm does not take."""
    from mmray.models.vlm.model import Vlm

    model = Vlm(all_media(weights)).double()
    if hasattr(model.text_config, "num_experts"):
        model.net.set_experts_implementation("eager")
    return model


def rows_of(encoder: ProcessorEncoder) -> Any:
    """Messages and media of the rows for a model."""
    if "audio" in encoder.kinds:
        return OMNI_ROWS if "video" in encoder.kinds else AUDIO_ROWS
    return VIDEO_ROWS if "video" in encoder.kinds else ROWS


def encode_rows(encoder: ProcessorEncoder) -> list[EncodedRow]:
    return [encoder.encode(messages, media) for messages, media in rows_of(encoder)]


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
