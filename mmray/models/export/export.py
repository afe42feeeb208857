"""Export a trained model to a folder that `mmray.load` opens; CLIP and SigLIP in the format of
transformers or open_clip.

config.json also has the `model` section and the architecture of pretrained parts.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn

from mmray.data.text.tokenizer import TextEncoder, is_clip_bpe
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.caption_decoder import DECODER_FILE
from mmray.models.export import open_clip as open_clip_files
from mmray.models.open_clip import rename_from_hf
from mmray.models.pretrained import EXPORT_MARKER, RESAMPLING
from mmray.models.protocol import Model, as_model
from mmray.models.weights import save_weights
from mmray.storage.paths import AnyPath, RemotePath, copy_file, move_tree, temp_dir, to_path
from mmray.version import VERSION

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PREPROCESSOR = "preprocessor_config.json"
EXPORT_FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, PREPROCESSOR, CARD}
ExportFormat = Literal["transformers", "open_clip"]
FILE_NAMES = "mmray_files"  # key in config.json with the names of all files of an export


_SIGLIP_TOKENS = 64
_CARD = """---
library_name: mmray
tags: [retrieval, zero-shot]
---

# {name}

A model of kind {kind}, trained and exported by mmray. Similarities are dot products of embeddings.

```python
import mmray
model = mmray.load("{name}")
scores = {call}
```

Preprocessing of images and media, and the maximum number of tokens: `model.inputs` in
`config.json`.
"""
_IMAGE_CALL = """\
model.embed_images(["photo.jpg"]) @ model.embed_texts(["a red circle", "a blue square"]).T"""
_MEDIA_CALL = """\
model.embed_{kind}(["clip.mp4"], [(0.0, {seconds:g})]) @ model.embed_texts(["a red circle"]).T"""
_TRANSFORMERS_CALL = """
In transformers pixels agree up to rounding and half a pixel of a crop:

```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, PreTrainedTokenizerFast

texts = PreTrainedTokenizerFast.from_pretrained("{name}")(
    ["a red circle", "a blue square"],
    padding="max_length",
    truncation=True,
    return_tensors="pt",
)
processor = AutoImageProcessor.from_pretrained("{name}")
images = processor(Image.open("photo.jpg"), return_tensors="pt")
outputs = AutoModel.from_pretrained("{name}")(**texts, **images)
scores = outputs.image_embeds @ outputs.text_embeds.T
```
"""
_REPAIRED_TEXTS = """
Texts with HTML entities, typographic quotes or decoding errors: first `ftfy.fix_text(text)`, then
`html.unescape` twice, as OpenAI's tokenizer and `mmray.load` do.
"""
_PIPELINE_CALL = """
```python
from transformers import pipeline

classify = pipeline("zero-shot-image-classification", model="{name}")
texts = ["a red circle", "a blue square"]
labels = classify("photo.jpg", candidate_labels=texts, hypothesis_template="{{}}")
```
"""


def export(
    module: nn.Module,
    spec: dict[str, Any],
    tokenizer_json: str,
    out: str | AnyPath,
    adapters_only: bool = False,
    format: ExportFormat = "transformers",
) -> AnyPath:
    """Write a model to a folder that `mmray.load` opens; an earlier export is replaced at the end.

    Args:
        module: A module with `embed_image`, from pixels uint8 [B, 3, S, S], and `embed_text`, from
            token ids and mask int64 [B, T], both to embeddings [B, D].
        spec: Its `model` section as JSON values, {field: value}, with `vocab_size` set.
        tokenizer_json: Its tokenizer, the text of a tokenizer.json.
        out: Local path, or URI such as `s3://bucket/model`, of the folder.
        adapters_only: Write the adapters and the fully trained layers as peft does, without the
            weights that the run started with; for a model of transformers' CLIP or SigLIP.
        format: Library that opens the folder, besides mmray.

    Returns:
        The folder.

    Raises:
        UsageError: The folder contains something else, or is not writable. The model has trained
            weights that peft cannot save, or open_clip has no such model.
    """
    out = to_path(out)
    model = as_model(module)
    if adapters_only and "decoder" in model.branches():
        raise UsageError("--adapters: peft cannot save the decoder of captions; leave it out")
    encoder = TextEncoder(tokenizer_json, spec["inputs"]["max_tokens"])
    hf = model.export_hf_config(encoder.end_id, encoder.pad_id)
    tokenizer, tokenizer_config = hf_tokenizer(model, tokenizer_json, spec["inputs"]["max_tokens"])
    config = {EXPORT_MARKER: VERSION, "model": spec, "architecture": model.architecture()}
    files: dict[str, Any] = {TOKENIZER: tokenizer, TOKENIZER_CONFIG: tokenizer_config}
    if format == "open_clip":
        files |= {
            CARD: open_clip_files.CARD.format(name=out.name, kind=spec["kind"]),
            open_clip_files.CONFIG: open_clip_files.model_config(spec, hf, tokenizer),
            CONFIG: config,
        }
    else:
        repairs_texts = is_clip_bpe(Tokenizer.from_str(tokenizer))
        files |= {
            CARD: _model_card(out.name, spec, hf is not None, repairs_texts),
            PREPROCESSOR: preprocessor_config(spec["inputs"]),
            CONFIG: (hf or {}) | config,
        }
    with replace_export(out) as folder:
        if adapters_only:
            rename = partial(_rename, model.hf_names)
            lora.save_adapters(model, spec["lora"], spec["weights"], folder, rename)
        else:
            state = model.state_dict() if hf is None else to_hf_state(model)
            _write_weights(dict(state), folder, format)
        for name, content in files.items():
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
                (folder / name).write_text(text)
    return out


def _write_weights(state: dict[str, Tensor], folder: Path, format: ExportFormat) -> None:
    """Write the weights of a model, and those of its decoder of captions to a file of their own."""
    decoder = {name: state.pop(name) for name in [*state] if name.startswith("decoder.")}
    if decoder:
        save_weights(decoder, folder / DECODER_FILE)
    if format == "open_clip":
        save_weights(rename_from_hf(state), folder / open_clip_files.WEIGHTS)
    else:
        save_weights(state, folder / WEIGHTS)


@contextmanager
def replace_export(out: AnyPath) -> Iterator[Path]:
    """Return a context manager with an empty local folder, whose files replace an export.

    An earlier export at this path is complete until the block has ended.

    Args:
        out: Folder of the export, on a disk or an object store. The block must write a config.json
            with the key `mmray`, which marks the folder as an export.

    Raises:
        UsageError: The folder contains something else, or is not writable.
    """
    try:
        if out.exists() and not (out.is_dir() and _is_export_or_empty(out)):
            raise UsageError(f"{out} exists and is not an exported model: choose another folder")
        if isinstance(out, RemotePath):
            with temp_dir() as folder:
                yield folder
                _upload(folder, out, _add_file_names(folder))
            return
        # Next to the target, so that renaming it is atomic; with the mode of the umask.
        staging = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
        staging.mkdir(parents=True)
        try:
            yield staging
            _add_file_names(staging)
            move_tree(staging, out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"cannot write the exported model {out}: {error}; choose another folder"
        ) from error


def _add_file_names(folder: Path) -> list[str]:
    """Write the names of the files of an export into its config.json, and return them."""
    names = sorted(file.name for file in folder.iterdir())
    config = json.loads((folder / CONFIG).read_text()) | {FILE_NAMES: names}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return names


def _upload(folder: Path, out: RemotePath, names: list[str]) -> None:
    """Upload an export. A store has no rename, so it is invalid until config.json is uploaded."""
    (out / CONFIG).write_text(json.dumps({EXPORT_MARKER: "uploading", FILE_NAMES: names}))
    for file in out.iterdir():
        if file.name not in names:
            file.unlink()
    for name in [*(name for name in names if name != CONFIG), CONFIG]:
        copy_file(folder / name, out / name)


def _is_export_or_empty(folder: AnyPath) -> bool:
    names = {path.name for path in folder.iterdir()}
    if CONFIG not in names:
        return not names
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError:
        return False
    # config.json of transformers has no such key.
    if not isinstance(config, dict) or EXPORT_MARKER not in config:
        return False
    return names <= EXPORT_FILES | set(config.get(FILE_NAMES, ()))


def _rename(prefixes: Mapping[str, str], name: str) -> str:
    """Return a name with another prefix; unchanged if none matches."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def to_hf_state(model: Model) -> dict[str, Tensor]:
    """Return the weights of a model under the names of transformers; they are not copied."""
    state = {_rename(model.hf_names, name): each for name, each in model.state_dict().items()}
    if "logit_bias" in state:  # SigLIP stores its two scalars as vectors of one
        state |= {name: state[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    return state


def from_hf_state(model: Model, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers to those of the model.

    Returns:
        Tensors by their names in the model, for `load_state_dict`.
    """
    prefixes = {hf: ours for ours, hf in model.hf_names.items()}
    out = {_rename(prefixes, name): each for name, each in state.items()}
    return out | {
        name: out[name].reshape(()) for name in ("log_scale", "logit_bias") if name in out
    }


def hf_tokenizer(model: Model, tokenizer_json: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the tokenizer of an exported model in the format of transformers.

    Args:
        model: The model to export; if it attends to its padding (SigLIP), captions get a fixed
            length.
        tokenizer_json: Its tokenizer, the text of a tokenizer.json.
        max_tokens: Maximum number of tokens of a text.

    Returns:
        The text of tokenizer.json, and the values of tokenizer_config.json by name:
        `tokenizer_class`, `model_max_length`, `pad_token` and, if the model attends to its padding,
        `model_input_names`.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    padding = model.padding_length_and_id
    length, pad_id = padding or (max_tokens, TextEncoder(tokenizer_json, max_tokens).pad_id)
    pad = tokenizer.id_to_token(pad_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "pad_token": pad,
    }
    if padding is not None:
        # The model attends to its padding, so transformers must not pass it a mask.
        settings |= {"model_input_names": ["input_ids"]}
        tokenizer.enable_padding(length=length, pad_id=pad_id, pad_token=pad)
        tokenizer_json = tokenizer.to_str()
    return tokenizer_json, settings


def preprocessor_config(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values of preprocessor_config.json, the image processor of transformers.

    Args:
        inputs: The `model.inputs` section as JSON values.

    Returns:
        The values by name, such as `size` and `image_mean`, of a CLIPImageProcessor (fit `crop`), a
        ViTImageProcessor or a Siglip2ImageProcessor (patches); None for the fit
        `pad`, because transformers does not support padding with white.
    """
    fit = inputs.get("fit")
    if fit == "pad":
        return None
    side = inputs.get("image_side")
    square = {"height": side, "width": side}
    shape: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": square}
    if fit is None:
        budget = {"patch_size": inputs["patch"], "max_num_patches": inputs["max_patches"]}
        shape = {"image_processor_type": "Siglip2ImageProcessor", **budget}
    elif fit == "crop":
        crop = {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": square}
        shape = {"image_processor_type": "CLIPImageProcessor", **crop}
    resize = {"do_resize": True, "resample": RESAMPLING[inputs["interpolation"]]}
    rescale = {"do_rescale": True, "rescale_factor": 1 / 255}
    normalize = {
        "do_normalize": True,
        "image_mean": list(inputs["mean"]),
        "image_std": list(inputs["std"]),
    }
    return shape | {"do_convert_rgb": True} | resize | rescale | normalize


def _model_card(
    name: str, spec: dict[str, Any], opens_in_transformers: bool, repairs_texts: bool
) -> str:
    """Return the text of the README.md of an exported model."""
    inputs = spec["inputs"]
    call = _IMAGE_CALL
    if inputs.get("clip_s"):
        kind = "audio" if inputs["audio_rate"] else "video"
        call = _MEDIA_CALL.format(kind=kind, seconds=inputs["clip_s"])
    card = _CARD.format(name=name, kind=spec["kind"], call=call)
    if opens_in_transformers and inputs.get("fit") != "pad":
        card += _TRANSFORMERS_CALL.format(name=name)
        card += _REPAIRED_TEXTS if repairs_texts else ""
        # Its pipeline cuts texts of SigLIP at 64 tokens, and takes no fewer.
        length = {"clip": inputs["max_tokens"], "siglip": _SIGLIP_TOKENS}.get(spec["kind"])
        if inputs["max_tokens"] == length:
            card += _PIPELINE_CALL.format(name=name)
    return card
