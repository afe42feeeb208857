"""A trained model leaves the run: a folder that `mmray.load` opens, with all that embedding an image or a text takes.

    config.json               the model's spec and what pretrained weights settled of it
    model.safetensors         weights
    tokenizer.json            of the `tokenizers` package; transformers reads it as well
    tokenizer_config.json     how transformers is to use it
    preprocessor_config.json  pixels, in transformers' words where it has any (not for `fit: pad`)
    README.md                 the model card, with the lines that load it

A CLIP, SigLIP or LLaVA leaves as transformers' own (hf_format.py): its `AutoModel`, `AutoTokenizer` and
`AutoImageProcessor` open the same folder, without mmray; a LLaVA has a processor_config.json as well.

`load` is the inverse: the same decoder, the same pixels, the same tokens as in training, hence the same embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from mmray.data.text.tokenizer import TextEncoder, clean
from mmray.data.text.words import encoder_of
from mmray.errors import DataError, UsageError
from mmray.models.build import build
from mmray.models.export import hf_format
from mmray.models.export.card import model_card, preprocessor_config
from mmray.models.export.export_folder import CONFIG, MADE_BY, check_free, replacing
from mmray.models.export.load import Answerer
from mmray.models.export.pictures import Picture, boxed, stacked
from mmray.models.regions import region_logits
from mmray.models.weights import load_weights, save_weights
from mmray.storage.file_ops import fetched
from mmray.storage.remote_path import Folder, folder_at

if TYPE_CHECKING:
    from mmray.config import Inputs

WEIGHTS, PREPROCESSOR, CARD = "model.safetensors", "preprocessor_config.json", "README.md"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, PREPROCESSOR, hf_format.PROCESSOR, CARD}

Item = TypeVar("Item")


def export(model: Any, spec: dict[str, Any], tokenizer_json: str, out: str | Folder) -> Folder:
    """Write `model` to the folder `out`, whole or not at all, and return it; an earlier export there is replaced.

    model: an nn.Module with embed_image and embed_text, or one that writes. spec: its `model` section as plain values,
    vocab_size settled. out: a path, or an address (s3://...).
    Raises UsageError where `out` holds something else or cannot be written.
    """
    out = folder_at(out)
    try:
        check_free(out, FILES)
    except OSError as error:
        raise UsageError(f"cannot read the folder {out}: {error}; choose another one") from error
    weights, texts = _contents(model, spec, tokenizer_json)
    card = model_card(out.name, spec, sum(p.numel() for p in model.parameters()))
    texts = {CARD: card} | texts
    try:
        with replacing(out, [WEIGHTS, *texts]) as here:
            save_weights(weights, here / WEIGHTS)
            for name, values in texts.items():
                (here / name).write_text(values if isinstance(values, str) else json.dumps(values, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write the exported model {out}: {error}; choose another folder") from error
    return out


def _contents(model: Any, spec: dict[str, Any], tokenizer_json: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and by their names all files but those and the card, config.json last: text, or values of JSON."""
    architecture = model.architecture() if hasattr(model, "architecture") else None
    config = {MADE_BY: version("mmray"), "model": spec, "architecture": architecture}
    theirs = hf_format.config(model, tokenizer_json)
    weights = model.state_dict() if theirs is None else hf_format.to_hf(model)
    tokenizer, settings = hf_format.tokenizer(model, tokenizer_json, spec["inputs"]["max_tokens"])
    texts = {TOKENIZER: tokenizer, TOKENIZER_CONFIG: settings} | hf_format.processor(model)
    if (pixels := preprocessor_config(spec["inputs"])) is not None:
        texts[PREPROCESSOR] = pixels
    return weights, texts | {CONFIG: (theirs or {}) | config}


def load(folder: str | Folder, device: torch.device | str = "cpu") -> Any:
    """An exported model: an Embedder of images and texts, or an Answerer where the model writes.

    folder: a path, or an address (s3://...). Raises UsageError where the folder holds none.
    """
    path = folder_at(folder)
    try:
        config = json.loads((path / CONFIG).read_text())
        tokenizer_json = (path / TOKENIZER).read_text()
        with fetched(path / WEIGHTS) as file:
            weights = load_weights(file)
        spec = _attributes(config["model"])
        encoder = encoder_of(tokenizer_json, spec.inputs)
    except Exception as error:  # the tokenizers package raises bare Exception for what it cannot parse
        raise UsageError(f"{path} is not a model exported by `mmray export RUN {path}`: {error}") from error
    model = build(spec, spec.vocab_size or encoder.vocab_size, config["architecture"])
    model.load_state_dict(hf_format.from_hf(model, weights) if "model_type" in config else weights)
    kind = Answerer if hasattr(spec.inputs, "chat") else Embedder
    return kind(model.to(device).eval(), spec.inputs, encoder, torch.device(device))


class Embedder:
    """Images and texts to embeddings of length 1 in one space: their dot product says how well they go together."""

    def __init__(self, model: Any, inputs: Inputs, encoder: TextEncoder, device: torch.device):
        self.model, self.inputs, self.device = model, inputs, device
        self._encoder = encoder

    def embed_images(self, images: Sequence[Picture], batch: int = 64) -> Tensor:
        """Embeddings float32 [N, D], on the CPU, of pictures: PIL images, encoded bytes, or paths.

        Raises DataError naming the first picture that cannot be read.
        """
        return self._embed(images, batch, self._embed_pictures)

    def embed_texts(self, texts: Sequence[str], batch: int = 256, language: str | None = None) -> Tensor:
        """Embeddings float32 [N, D], on the CPU. `language`: of the texts, where the model has tokens of languages.

        Raises DataError naming the first text that cannot be used, UsageError for a language without a token.
        """
        return self._embed(texts, batch, partial(self._embed_captions, language=language))

    @torch.no_grad()
    def match(
        self, images: Sequence[Picture], texts: Sequence[str], batch: int = 64, language: str | None = None
    ) -> Tensor:
        """Probability float32 [N] that each image and the text of the same place belong together (model.kind fusion).

        Raises UsageError where the model has no head for it, and DataError as the others do.
        """
        return self._pairs("match_head", images, texts, batch, language).sigmoid().squeeze(1)

    @torch.no_grad()
    def classify(
        self, images: Sequence[Picture], texts: Sequence[str], batch: int = 64, language: str | None = None
    ) -> Tensor:
        """Probability float32 [N, C] of each class for each pair of image and text; raises as `match` does."""
        return self._pairs("class_head", images, texts, batch, language).softmax(dim=1)

    @torch.no_grad()
    def name_boxes(
        self, image: Picture, boxes: Sequence[Sequence[float]], texts: Sequence[str] | None = None
    ) -> Tensor:
        """Probability float32 [N, C] that each box of an image shows what each text says (model.kind fusion).

        boxes: (left, top, width, height) in pixels. texts: any; none: the labels of the training set, in their order.
        Raises UsageError where the model has no head for it, and DataError naming what cannot be used.
        """
        if getattr(self.model, "region_head", None) is None:
            raise UsageError("this model has no region_head: it was not trained to name boxes")
        pixels, placed = (part.to(self.device) for part in boxed(image, boxes, self.inputs))
        if texts is None:
            logits = self.model.name_regions(pixels, placed)
        else:
            regions = self.model.embed_regions(pixels, placed)
            words = self.embed_texts(texts).to(self.device)
            logits = region_logits(regions, words, self.model.shared_outputs()["logit_scale"])
        probability: Tensor = logits[0].softmax(dim=1).float().cpu()
        return probability

    def _pairs(
        self, head: str, images: Sequence[Picture], texts: Sequence[str], batch: int, language: str | None
    ) -> Tensor:
        read = getattr(self.model, head, None)
        if read is None:
            raise UsageError(f"this model has no {head}: it was not trained to judge pairs")
        if len(images) != len(texts):
            raise UsageError(f"{len(images)} images and {len(texts)} texts are no pairs: give as many of each")
        parts = [torch.zeros(0, read.out_features)]
        for start in range(0, len(images), batch):
            pixels = self._stacked(start, images[start : start + batch])
            pair = self.model.embed_pair(pixels, *self._tokens(start, texts[start : start + batch], language))
            parts.append(read(pair).float().cpu())
        return torch.cat(parts)

    @torch.no_grad()
    def _embed(self, items: Sequence[Item], batch: int, embed: Callable[[int, Sequence[Item]], Tensor]) -> Tensor:
        if isinstance(items, str | bytes):
            raise TypeError("give a list, also for a single one")
        parts = [embed(start, items[start : start + batch]) for start in range(0, len(items), batch)]
        return torch.cat(parts).float().cpu() if parts else torch.zeros(0, self._width())

    def _embed_pictures(self, start: int, images: Sequence[Picture]) -> Tensor:
        embedding: Tensor = self.model.embed_image(self._stacked(start, images))
        return embedding

    def _stacked(self, start: int, images: Sequence[Picture]) -> Tensor:
        return stacked(images, self.inputs, start).to(self.device)

    def _embed_captions(self, start: int, texts: Sequence[str], language: str | None = None) -> Tensor:
        embedding: Tensor = self.model.embed_text(*self._tokens(start, texts, language))
        return embedding

    def _tokens(self, start: int, texts: Sequence[str], language: str | None) -> list[Tensor]:
        """Ids and mask [B, T] on the device."""
        said = [self._encoder.said(_caption(number, text), language) for number, text in enumerate(texts, start)]
        ids, num_tokens = self._encoder.encode(said)
        mask = np.arange(ids.shape[1]) < num_tokens[:, None]
        return [torch.from_numpy(array.astype(np.int64)).to(self.device) for array in (ids, mask)]

    def _width(self) -> int:
        return self._embed_captions(0, ["a"]).shape[1]


def _caption(number: int, text: str) -> str:
    try:
        return clean(text)
    except ValueError as error:
        raise DataError(f"text {number}: {error}") from error


def _attributes(values: Any) -> Any:
    """Plain values as the attributes of a config section; a user's own settings stay a dict, as they were."""
    if isinstance(values, dict):
        named = {name: value if name == "settings" else _attributes(value) for name, value in values.items()}
        return SimpleNamespace(**named)
    return values
