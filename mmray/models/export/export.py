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
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from mmray.data.text.chat import ChatEncoder, build_encoder
from mmray.data.text.tokenizer import TextEncoder, clean_caption
from mmray.errors import DataError, UsageError
from mmray.models.build import build
from mmray.models.export.card import model_card, preprocessor_config
from mmray.models.export.load import Generator, ImageInput, load_image_and_boxes, load_images
from mmray.models.fusion import region_logits
from mmray.models.weights import load_weights, save_weights
from mmray.storage.paths import AnyPath, RemotePath, local_copy, move_tree, staged_upload, to_path

if TYPE_CHECKING:
    from mmray.config import Inputs


# Where an exported model is written: whole or not at all, in place of an earlier export and of nothing else.
#
# On an object store, which has no renaming, config.json first says that the rest is on its way, and comes again last.
CONFIG, MADE_BY = "config.json", "mmray"  # the file that says what a folder holds, and the key by which it is ours


def check_output_dir(out: AnyPath, files: Collection[str]) -> None:
    """Raise UsageError unless `out` is not there, is empty, or is an export of mmray with no file but `files`."""
    if out.exists() and not (out.is_dir() and _is_export_or_empty(out, files)):
        raise UsageError(f"{out} exists and is not an exported model: choose another folder")


@contextmanager
def replace_dir(out: AnyPath, names: Sequence[str]) -> Iterator[Path]:
    """A folder of this machine for the files `names`, config.json last; when the block ends well they are `out`.

    Killed on the way, what was there is still whole on a disk: at its place, or beside it under .NAME.replaced. On an
    object store `out` is no model then, and can be written again. Raises OSError.
    """
    if isinstance(out, RemotePath):
        with staged_upload(out, names) as here:
            yield here
            (out / CONFIG).write_text(json.dumps({MADE_BY: "on its way"}))
            for there in out.iterdir():
                if there.name not in names:
                    there.unlink()
        return
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("exporting", "replaced"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if out.exists():
            move_tree(out, old)
        move_tree(new, out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            move_tree(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)  # what is left of it, the next export removes


def _is_export_or_empty(folder: AnyPath, files: Collection[str]) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or (names <= set(files) and CONFIG in names and _is_export_config(folder / CONFIG))


def _is_export_config(config: AnyPath) -> bool:
    """Whether mmray wrote it: transformers' own has the same name."""
    try:
        values = json.loads(config.read_text())
    except ValueError:
        return False
    return isinstance(values, dict) and MADE_BY in values


# A CLIP, SigLIP or LLaVA as transformers itself saves it, so that an export loads where mmray is not installed.
#
# For export.py. Other models have no class there; of them only the tokenizer and the pixels are said in their words.
PROCESSOR = "processor_config.json"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def hf_config(model: Any, tokenizer_json: str) -> dict[str, Any] | None:
    """config.json for transformers; None where it has no class for this model, or none that would compute the same."""
    if not hasattr(model, "hf_config"):
        return None
    if hasattr(model, "chat"):
        marks = ChatEncoder(tokenizer_json, model.chat, 8)
        written: dict[str, Any] = model.hf_config(marks.end_id, marks.pad_id, marks.image_id)
        return written
    values: dict[str, Any] | None = model.hf_config(_end_id(tokenizer_json), TextEncoder(tokenizer_json, 8).pad_id)
    return values


def to_hf_state(model: Any) -> dict[str, Tensor]:
    """The model's weights under transformers' names."""
    state = {_replace_prefix(name, model.hf_names): tensor for name, tensor in model.state_dict().items()}
    if "logit_bias" in state:  # SigLIP's two scalars are vectors of one there
        state |= {name: state[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    return state


def from_hf_state(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hf`."""
    names = tuple((their, own) for own, their in model.hf_names)
    found = {_replace_prefix(name, names): tensor for name, tensor in state.items()}
    scalars = ("log_scale", "logit_bias")
    return {name: tensor.reshape(()) if name in scalars else tensor for name, tensor in found.items()}


def hf_tokenizer(model: Any, tokenizer_json: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; a model that looks at its padding gets captions filled up."""
    encoder, tokens = TextEncoder(tokenizer_json, max_tokens), Tokenizer.from_str(tokenizer_json)
    length, pad_id = getattr(model, "padded_to", (max_tokens, encoder.pad_id))
    pad = tokens.id_to_token(pad_id)
    settings: dict[str, Any] = {"tokenizer_class": TOKENIZER_CLASS, "model_max_length": length, "pad_token": pad}
    if hasattr(model, "chat"):
        settings |= {"eos_token": model.chat.end, "image_token": model.chat.image}
    if not hasattr(model, "padded_to"):
        return tokenizer_json, settings
    tokens.enable_padding(length=length, pad_id=pad_id, pad_token=pad)
    return str(tokens.to_str()), settings


def hf_processor(model: Any) -> dict[str, dict[str, Any]]:
    """processor_config.json by its name, where transformers has a class that lays out image and text together."""
    return {PROCESSOR: model.hf_processor()} if hasattr(model, "hf_processor") else {}


def _end_id(tokenizer_json: str) -> int | None:
    """The token that the tokenizer puts behind each caption and nowhere else; None where there is no such token."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    caption = tokenizer.encode("a")
    ids, added = caption.ids, caption.special_tokens_mask
    return ids[-1] if 0 in added and added[-1] and ids.index(ids[-1]) == len(ids) - 1 else None


def _replace_prefix(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for own, their in prefixes:
        if name.startswith(own):
            return their + name.removeprefix(own)
    return name


WEIGHTS, PREPROCESSOR, CARD = "model.safetensors", "preprocessor_config.json", "README.md"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
EXPORT_FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, PREPROCESSOR, PROCESSOR, CARD}

Item = TypeVar("Item")


def export(model: Any, spec: dict[str, Any], tokenizer_json: str, out: str | AnyPath) -> AnyPath:
    """Write `model` to the folder `out`, whole or not at all, and return it; an earlier export there is replaced.

    model: an nn.Module with embed_image and embed_text, or one that writes. spec: its `model` section as plain values,
    vocab_size settled. out: a path, or an address (s3://...).
    Raises UsageError where `out` holds something else or cannot be written.
    """
    out = to_path(out)
    try:
        check_output_dir(out, EXPORT_FILES)
    except OSError as error:
        raise UsageError(f"cannot read the folder {out}: {error}; choose another one") from error
    weights, texts = _contents(model, spec, tokenizer_json)
    card = model_card(out.name, spec, sum(p.numel() for p in model.parameters()))
    texts = {CARD: card} | texts
    try:
        with replace_dir(out, [WEIGHTS, *texts]) as here:
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
    theirs = hf_config(model, tokenizer_json)
    weights = model.state_dict() if theirs is None else to_hf_state(model)
    tokenizer, settings = hf_tokenizer(model, tokenizer_json, spec["inputs"]["max_tokens"])
    texts = {TOKENIZER: tokenizer, TOKENIZER_CONFIG: settings} | hf_processor(model)
    if (pixels := preprocessor_config(spec["inputs"])) is not None:
        texts[PREPROCESSOR] = pixels
    return weights, texts | {CONFIG: (theirs or {}) | config}


def load(folder: str | AnyPath, device: torch.device | str = "cpu") -> Any:
    """An exported model: an Embedder of images and texts, or an Answerer where the model writes.

    folder: a path, or an address (s3://...). Raises UsageError where the folder holds none.
    """
    path = to_path(folder)
    try:
        config = json.loads((path / CONFIG).read_text())
        tokenizer_json = (path / TOKENIZER).read_text()
        with local_copy(path / WEIGHTS) as file:
            weights = load_weights(file)
        spec = _to_namespace(config["model"])
        encoder = build_encoder(tokenizer_json, spec.inputs)
    except Exception as error:  # the tokenizers package raises bare Exception for what it cannot parse
        raise UsageError(f"{path} is not a model exported by `mmray export RUN {path}`: {error}") from error
    model = build(spec, spec.vocab_size or encoder.vocab_size, config["architecture"])
    model.load_state_dict(from_hf_state(model, weights) if "model_type" in config else weights)
    kind = Generator if hasattr(spec.inputs, "chat") else Embedder
    return kind(model.to(device).eval(), spec.inputs, encoder, torch.device(device))


class Embedder:
    """Images and texts to embeddings of length 1 in one space: their dot product says how well they go together."""

    def __init__(self, model: Any, inputs: Inputs, encoder: TextEncoder, device: torch.device):
        self.model, self.inputs, self.device = model, inputs, device
        self._encoder = encoder

    def embed_images(self, images: Sequence[ImageInput], batch: int = 64) -> Tensor:
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
        self, images: Sequence[ImageInput], texts: Sequence[str], batch: int = 64, language: str | None = None
    ) -> Tensor:
        """Probability float32 [N] that each image and the text of the same place belong together (model.kind fusion).

        Raises UsageError where the model has no head for it, and DataError as the others do.
        """
        return self._pairs("match_head", images, texts, batch, language).sigmoid().squeeze(1)

    @torch.no_grad()
    def classify(
        self, images: Sequence[ImageInput], texts: Sequence[str], batch: int = 64, language: str | None = None
    ) -> Tensor:
        """Probability float32 [N, C] of each class for each pair of image and text; raises as `match` does."""
        return self._pairs("class_head", images, texts, batch, language).softmax(dim=1)

    @torch.no_grad()
    def name_boxes(
        self, image: ImageInput, boxes: Sequence[Sequence[float]], texts: Sequence[str] | None = None
    ) -> Tensor:
        """Probability float32 [N, C] that each box of an image shows what each text says (model.kind fusion).

        boxes: (left, top, width, height) in pixels. texts: any; none: the labels of the training set, in their order.
        Raises UsageError where the model has no head for it, and DataError naming what cannot be used.
        """
        if getattr(self.model, "region_head", None) is None:
            raise UsageError("this model has no region_head: it was not trained to name boxes")
        pixels, placed = (part.to(self.device) for part in load_image_and_boxes(image, boxes, self.inputs))
        if texts is None:
            logits = self.model.classify_regions(pixels, placed)
        else:
            regions = self.model.embed_regions(pixels, placed)
            words = self.embed_texts(texts).to(self.device)
            logits = region_logits(regions, words, self.model.scalar_outputs()["logit_scale"])
        probability: Tensor = logits[0].softmax(dim=1).float().cpu()
        return probability

    def _pairs(
        self, head: str, images: Sequence[ImageInput], texts: Sequence[str], batch: int, language: str | None
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

    def _embed_pictures(self, start: int, images: Sequence[ImageInput]) -> Tensor:
        embedding: Tensor = self.model.embed_image(self._stacked(start, images))
        return embedding

    def _stacked(self, start: int, images: Sequence[ImageInput]) -> Tensor:
        return load_images(images, self.inputs, start).to(self.device)

    def _embed_captions(self, start: int, texts: Sequence[str], language: str | None = None) -> Tensor:
        embedding: Tensor = self.model.embed_text(*self._tokens(start, texts, language))
        return embedding

    def _tokens(self, start: int, texts: Sequence[str], language: str | None) -> list[Tensor]:
        """Ids and mask [B, T] on the device."""
        said = [
            self._encoder.format_caption(_caption(number, text), language) for number, text in enumerate(texts, start)
        ]
        ids, num_tokens = self._encoder.encode(said)
        mask = np.arange(ids.shape[1]) < num_tokens[:, None]
        return [torch.from_numpy(array.astype(np.int64)).to(self.device) for array in (ids, mask)]

    def _width(self) -> int:
        return self._embed_captions(0, ["a"]).shape[1]


def _caption(number: int, text: str) -> str:
    try:
        return clean_caption(text)
    except ValueError as error:
        raise DataError(f"text {number}: {error}") from error


def _to_namespace(values: Any) -> Any:
    """Plain values as the attributes of a config section; a user's own settings stay a dict, as they were."""
    if isinstance(values, dict):
        named = {name: value if name == "settings" else _to_namespace(value) for name, value in values.items()}
        return SimpleNamespace(**named)
    return values
