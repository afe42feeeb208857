"""Images of examples.json with captions, for experiment trackers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from mmray.evaluation import DIRECTIONS


class ShownImage(NamedTuple):
    """An image of an evaluation.

    Attributes:
        title: What it shows: DIRECTION/hit or DIRECTION/miss, such as `image_to_text/hit`, or
            `answers/correct` or `answers/wrong`.
        caption: Caption and rank, or the question with the generated and the correct answers.
        image: A thumbnail in RGB.
    """

    title: str
    caption: str
    image: Image.Image


def shown_images(examples: Mapping[str, Any]) -> list[ShownImage]:
    """Return the images of an evaluation: hits, misses, and generated answers.

    Args:
        examples: Content of examples.json, as `RetrievalExamples.values` or `answer_examples`
            returns it.

    Returns:
        A ShownImage for each query or conversation: `title` (such as `image_to_text/hit`),
        `caption` and `image` (PIL). Those without a readable image are omitted.
    """
    results = []
    for direction in DIRECTIONS:
        for item in examples.get(direction, ()):
            data = examples.get("images", {}).get(str(item["row"]))
            title = f"{direction}/{'hit' if item['rank'] == 1 else 'miss'}"
            if data:
                caption = f"{item['caption']} (rank {item['rank']})"
                results.append(ShownImage(title, caption, _decode(data)))
    for answer in examples.get("answers", ()):
        parts = [part for turn in answer["turns"] for part in turn["parts"]]
        images = [part["image"] for part in parts if part.get("image")]
        question = " ".join(part["text"] for part in parts if "text" in part)
        caption = f"{question} -> {answer['answer']} (correct: {' | '.join(answer['references'])})"
        title = f"answers/{'correct' if answer['correct'] else 'wrong'}"
        results += [ShownImage(title, caption, _decode(data)) for data in images[:1]]
    return results


def _decode(data_uri: str) -> Image.Image:
    """Decode a thumbnail that is a data URI."""
    content = base64.b64decode(data_uri.partition(",")[2])
    return Image.open(io.BytesIO(content)).convert("RGB")
