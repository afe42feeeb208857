"""Load an exported model: the decoder, preprocessing and tokenizer are those of training, so
embeddings are equal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn

from mmray.data.images.decode import MAX_PIXELS, decode
from mmray.data.images.transform import transform
from mmray.data.media.clips import has_clips
from mmray.data.rows import BadRow
from mmray.data.stream.collate import Batch, token_columns
from mmray.data.text.tokenizer import TextEncoder, clean_caption
from mmray.errors import DataError, UsageError, os_reason
from mmray.models import lora
from mmray.models.build import build
from mmray.models.caption_decoder import DECODER_FILE
from mmray.models.export import open_clip as open_clip_files
from mmray.models.export.export import CONFIG, TOKENIZER, WEIGHTS, from_hf_state
from mmray.models.export.vlm import as_section, load_vlm, read_spec
from mmray.models.open_clip import rename_to_hf
from mmray.models.protocol import saved_layers
from mmray.storage.paths import AnyPath, local_copy, to_path

if TYPE_CHECKING:
    from mmray.config import Inputs

_PNG_MODES = ("1", "L", "LA", "P", "I", "I;16", "I;16B", "RGB", "RGBA")
MediaInput = bytes | str | Path
ImageInput = Image.Image | MediaInput


def load(folder: str | AnyPath, device: torch.device | str = "cpu") -> Any:
    """Load an exported model.

    Args:
        folder: Local path of the export, or a URI such as `s3://bucket/model`.
        device: Where the model computes, such as `cuda`.

    Returns:
        An Embedder, with `embed_images` and `embed_texts`; for a model of clips a ClipEmbedder,
        with `embed_audio` and `embed_video` too; for a vision-language model a Conversations, with
        `answer(messages, images)`.

    Raises:
        UsageError: The folder has no export.
    """
    path = to_path(folder)
    vlm_spec = read_spec(path)
    if vlm_spec is not None:
        return load_vlm(path, vlm_spec, torch.device(device))
    try:
        config = json.loads((path / CONFIG).read_text())
        tokenizer_json = (path / TOKENIZER).read_text()
        if (path / lora.ADAPTERS).exists():
            raise ValueError("it has adapters only; open it with peft, or export the merged model")
        is_open_clip = (path / open_clip_files.CONFIG).exists()
        with local_copy(path / (open_clip_files.WEIGHTS if is_open_clip else WEIGHTS)) as file:
            weights = rename_to_hf(load_file(file)) if is_open_clip else load_file(file)
        if (path / DECODER_FILE).exists():
            with local_copy(path / DECODER_FILE) as file:
                weights |= load_file(file)
        spec = as_section(config["model"])
        spec.settings = config["model"].get("settings", {})  # free settings of a user's own model
        encoder = TextEncoder(tokenizer_json, spec.inputs.max_tokens)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UsageError(
            f"{path} is not a model exported by `mmray export RUN {path}`: {os_reason(error)}"
        ) from error
    model = build(spec, spec.vocab_size or encoder.vocab_size, saved_layers(config["architecture"]))
    in_hf_names = is_open_clip or "model_type" in config
    model.load_state_dict(from_hf_state(model, weights) if in_hf_names else weights)
    wrapper = Embedder
    if has_clips(spec.inputs):
        from mmray.models.export.clips import ClipEmbedder

        wrapper = ClipEmbedder
    return wrapper(model.to(device).eval(), spec.inputs, encoder, torch.device(device))


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
