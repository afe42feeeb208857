"""Embed images and texts with an exported model, read as in training."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from mmray.data.images.decode import MAX_PIXELS, decode
from mmray.data.images.transform import transform
from mmray.data.rows import BadRow
from mmray.data.stream.collate import Batch, token_columns
from mmray.data.text.tokenizer import TextEncoder, clean_caption
from mmray.errors import DataError, UsageError, os_reason

if TYPE_CHECKING:
    from mmray.config import Inputs

_PNG_MODES = ("1", "L", "LA", "P", "I", "I;16", "I;16B", "RGB", "RGBA")
MediaInput = bytes | str | Path
ImageInput = Image.Image | MediaInput


class Embedder:
    """Embeds images and texts in one space; the dot product of two embeddings is their similarity.

    `embed_images` and `embed_texts` take lists of N inputs and return L2-normalized tensors float32
    [N, D]. `match` and `classify` return probabilities of the heads of a model that has them, and
    `caption` the captions of its decoder.
    Images are PIL images, encoded bytes, or paths. Methods raise DataError with the index of the
    first unreadable image or text.

    Args:
        model: A module with `embed_image`, from pixels uint8 [B, 3, S, S], and `embed_text`, from
            token ids and attention mask int64 [B, T]; both return L2-normalized embeddings [B, D].
        inputs: The `model.inputs` section.
        encoder: Tokenizes the texts.
    """

    def __init__(self, model: Any, inputs: Inputs, encoder: TextEncoder, device: torch.device):
        self.model = model
        self.inputs = inputs
        self.device = device
        self._encoder = encoder

    def embed_images(self, images: Sequence[ImageInput], batch: int = 64) -> Tensor:
        """Embed N images: PIL images, encoded bytes or paths; float32 [N, D] on the CPU.

        Raises DataError with the index of an image that is unreadable.
        """

        def embed(start: int, part: Sequence[ImageInput]) -> Tensor:
            return self.model.embed_image(self._pixels(start, part))

        return self._in_batches(embed, batch, images)

    def embed_texts(self, texts: Sequence[str], batch: int = 256) -> Tensor:
        """Embed N captions: float32 [N, D] on the CPU.

        Raises DataError with the index of a caption that is unusable.
        """

        def embed(start: int, part: Sequence[str]) -> Tensor:
            return self.model.embed_text(**self._tokens(start, part))

        return self._in_batches(embed, batch, texts)

    def caption(self, images: Sequence[ImageInput], batch: int = 64) -> list[str]:
        """Return a caption of each of N images, by the most likely token at each position.

        Raises:
            UsageError: The model has no decoder of captions.
            DataError: An image is unreadable; the message has its index.
        """
        if getattr(self.model, "decoder", None) is None:
            raise UsageError(
                "this model has no decoder of captions; train one of kind `two_tower`, `clip` or "
                "`siglip` with --model.decoder.depth N --objective.kind 'contrastive + captioning'"
            )

        def generate(start: int, part: Sequence[ImageInput]) -> Tensor:
            return self.model.caption(self._pixels(start, part), self._encoder.end_id)

        ids = self._in_batches(generate, batch, images).long().tolist()
        return [self._encoder.decode(row) for row in ids]

    def match(self, images: Sequence[ImageInput], texts: Sequence[str], batch: int = 64) -> Tensor:
        """Return the probability that image i and text i match, from the matching head: float32 [N]
        on the CPU. Images of a model of clips are files of audio or video.

        Raises:
            UsageError: The model has no matching head, or the numbers of images and texts differ.
            DataError: An image or a text is unreadable; the message has its index.
        """
        head = self._require_head("match_head", "model.matching True")
        return self._pair_logits(head, images, texts, batch).sigmoid().squeeze(1)

    def classify(
        self, images: Sequence[ImageInput], texts: Sequence[str], batch: int = 64
    ) -> Tensor:
        """Return the probabilities of the C classes of the training for pairs of an image and a
        caption: float32 [N, C] on the CPU. Arguments and errors are those of `match`.
        """
        head = self._require_head("class_head", "model.classes")
        return self._pair_logits(head, images, texts, batch).softmax(dim=1)

    def _require_head(self, name: str, setting: str) -> nn.Module:
        head = dict(self.model.named_children()).get(name)
        if head is None:
            raise UsageError(
                f"this model has no {name}; train one of kind `towers` with {setting}, for images "
                "with the recipe fusion"
            )
        return head

    def _pair_logits(
        self, head: nn.Module, images: Sequence[ImageInput], texts: Sequence[str], batch: int
    ) -> Tensor:
        if len(images) != len(texts):
            raise UsageError(
                f"got {len(images)} images and {len(texts)} texts: pass as many of each"
            )

        def logits(start: int, images: Sequence[ImageInput], texts: Sequence[str]) -> Tensor:
            return head(self._pair_features(start, images, self._tokens(start, texts)))

        return self._in_batches(logits, batch, images, texts)

    def _pair_features(self, start: int, images: Sequence[Any], tokens: Batch) -> Tensor:
        """Return the features of images and texts, which the heads read."""
        return self.model.embed_pair({"image": self._pixels(start, images)} | tokens)

    @torch.no_grad()
    def _in_batches(
        self, compute: Callable[..., Tensor], batch: int, *columns: Sequence[Any]
    ) -> Tensor:
        """Concatenate `compute(start, *slices of the columns)`, float32 on the CPU.

        Without rows it is called once, for the shape: `_pixels` and `_tokens` then return one row.
        """
        if any(isinstance(column, str | bytes) for column in columns):
            raise TypeError("pass a list, even for a single item")
        results = []
        for start in range(0, max(1, len(columns[0])), batch):
            parts = [column[start : start + batch] for column in columns]
            results.append(compute(start, *parts).float().cpu())
        return torch.cat(results)[: len(columns[0])]

    def _pixels(self, start: int, images: Sequence[ImageInput]) -> Tensor:
        images = list(images) or [Image.new("RGB", (8, 8))]
        return load_images(images, self.inputs, start).to(self.device)

    def _tokens(self, start: int, texts: Sequence[str]) -> Batch:
        """Columns of texts on the device; `start` is the index of the first text, for errors."""
        captions = []
        for index, text in enumerate(list(texts) or ["a"], start):
            try:
                captions.append(self._encoder.format_caption(clean_caption(text)))
            except BadRow as bad:
                raise DataError(f"text {index}: {bad.reason}: {bad.detail}") from bad
        tokens = token_columns(*self._encoder.encode(captions))
        return {name: column.to(self.device) for name, column in tokens.items()}


def load_images(images: Sequence[ImageInput], inputs: Inputs, first: int = 0) -> Tensor:
    """Decode images, and fit them to the inputs of a model: uint8 [N, 3, S, S]."""
    pixels = [
        transform(decode_image(index, image), inputs) for index, image in enumerate(images, first)
    ]
    return torch.from_numpy(np.stack(pixels))


def decode_image(index: int, image: ImageInput) -> np.ndarray:
    """Return an upright image, RGB uint8 [H, W, 3], decoded as in training.

    Args:
        index: Its number, for errors.
        image: A PIL image, encoded bytes or the path of a file.

    Raises:
        DataError: It is unreadable.
    """
    try:
        if isinstance(image, Image.Image):
            upright = ImageOps.exif_transpose(image)
            file = io.BytesIO()
            if upright.mode not in _PNG_MODES:
                upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
            # lossless; `decode` handles transparency and 16-bit images
            upright.save(file, "PNG", compress_level=0)
            image = file.getvalue()
        return decode(image if isinstance(image, bytes) else Path(image).read_bytes(), MAX_PIXELS)
    except (OSError, ValueError) as error:
        raise unreadable("image", index, image, error) from error


def unreadable(kind: str, index: int, medium: ImageInput, error: Exception) -> DataError:
    """Return the error of a medium that cannot be decoded: its index, its path, and the reason."""
    name = f" ({medium})" if isinstance(medium, str | Path) else ""
    return DataError(f"{kind} {index}{name}: {os_reason(error)}")
