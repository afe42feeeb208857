"""An exported model that writes, ready to be asked about pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mmray.data.images.boxes import clip_boxes, to_model_coords
from mmray.data.images.decode import MAX_PIXELS, decode
from mmray.data.images.transform import transform
from mmray.data.text.chat import ChatEncoder
from mmray.errors import DataError

if TYPE_CHECKING:
    from mmray.config import ChatInputs, Inputs


# Pictures that a person hands over, as the pixels that a model was trained on.
_PNG_MODES = ("1", "L", "LA", "P", "I", "I;16", "I;16B", "RGB", "RGBA")
ImageInput = Image.Image | bytes | str | Path


def load_images(images: Sequence[ImageInput], inputs: Inputs, first: int = 0) -> Tensor:
    """Pixels uint8 [N, 3, S, S] of PIL images, encoded bytes, or paths.

    Raises DataError naming the first that cannot be read, by its number, counted from `first`.
    """
    pixels = [_pixels(number, image, inputs) for number, image in enumerate(images, first)]
    return torch.from_numpy(np.stack(pixels))


def load_image_and_boxes(image: ImageInput, boxes: Sequence[Sequence[float]], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [1, 3, S, S] of a picture, and its boxes float32 [1, N, 4] in fractions of that square.

    boxes: (left, top, width, height) in pixels of the upright picture, as COCO has them. Raises DataError for a picture
    that cannot be read, and for a box of which the model sees too little.
    """
    pixels = load_images([image], inputs)
    height, width = _to_rgb(image).shape[:2]
    corners = [[x / width, y / height, (x + w) / width, (y + h) / height] for x, y, w, h in boxes]
    fractions = np.array(corners, np.float64).reshape(-1, 4)
    placed, shows = clip_boxes(to_model_coords(fractions, (width, height), inputs, None, None))
    if not shows.all():
        first = int(np.flatnonzero(~shows)[0])
        raise DataError(
            f"box {first} {tuple(boxes[first])} lies outside of what the model sees of an image of {width} x {height} "
            f"pixels (model.inputs.fit {inputs.fit})"
        )
    return pixels, torch.from_numpy(placed.astype(np.float32))[None]


def _pixels(number: int, image: ImageInput, inputs: Inputs) -> np.ndarray:
    try:
        return transform(_to_rgb(image), inputs)
    except (OSError, ValueError) as error:
        name = f" ({image})" if isinstance(image, str | Path) else ""
        raise DataError(f"image {number}{name}: {error}") from error


def _to_rgb(image: ImageInput) -> np.ndarray:
    """Upright RGB uint8 [H, W, 3], as training saw it."""
    if isinstance(image, str | Path):
        return decode(Path(image).read_bytes(), MAX_PIXELS)
    if isinstance(image, bytes):
        return decode(image, MAX_PIXELS)
    upright = ImageOps.exif_transpose(image)
    if upright.mode not in _PNG_MODES:
        upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    if upright.mode == "RGB" and "transparency" not in upright.info:
        return np.asarray(upright)
    file = io.BytesIO()
    upright.save(file, "PNG")  # lossless, and then read by the one function that decides about alpha and 16 bits
    return decode(file.getvalue(), MAX_PIXELS)


class Generator:
    """Questions about pictures to answers: at each token the likeliest, until the model ends its answer."""

    def __init__(self, model: Any, inputs: ChatInputs, encoder: ChatEncoder, device: torch.device):
        self.model, self.inputs, self.device = model, inputs, device
        self._encoder = encoder

    def answer(
        self, images: Sequence[ImageInput], question: str | Sequence[str] | None = None, max_new_tokens: int = 64
    ) -> list[str]:
        """What the model says of each picture (PIL image, encoded bytes, or path).

        question: one for all, or one for each; none: what it was asked in training about captions. Raises DataError
        naming the first picture that cannot be read.
        """
        asked = question if question is not None else self.inputs.chat.question
        questions = [asked] * len(images) if isinstance(asked, str) else list(asked)
        pairs = zip(images, questions, strict=True)
        return [
            generate_answer(self.model, self._encoder, load_images([image], self.inputs, number), text, max_new_tokens)
            for number, (image, text) in enumerate(pairs)
        ]


@torch.no_grad()
def generate_answer(model: Any, encoder: ChatEncoder, pixels: Tensor, question: str, most: int) -> str:
    """The model's answer to a question about one image, uint8 [1, 3, S, S], of `most` tokens at the longest."""
    device = next(model.parameters()).device
    ids, at = (torch.from_numpy(array.astype(np.int64)).to(device) for array in encoder.encode_prompt(question))
    said = model.text.greedy_decode(model.image(pixels.to(device)), ids, at, encoder.end_id, most)
    return str(encoder.tokenizer.decode(said)).strip()
