"""Export a trained model to a folder that `mmray.load` opens.

    config.json               the `model` section, and the architecture of pretrained parts
    model.safetensors         weights
    tokenizer.json            of the `tokenizers` package
    tokenizer_config.json     for transformers
    preprocessor_config.json  image preprocessing for transformers (not for `fit: pad`)
    processor_config.json     LLaVA only
    README.md                 model card

CLIP, SigLIP and LLaVA are exported in transformers' format: its `AutoModel`, `AutoTokenizer` and `AutoImageProcessor`
open the same folder without mmray.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from mmray.data.text.chat import ChatEncoder
from mmray.data.text.tokenizer import TextEncoder
from mmray.errors import UsageError
from mmray.models.export.card import model_card, preprocessor_config
from mmray.models.weights import save_weights
from mmray.storage.paths import AnyPath, RemotePath, move_tree, staged_upload, to_path

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
EXPORT_FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, PREPROCESSOR, PROCESSOR, CARD}
MADE_BY = "mmray"  # key in config.json that marks a folder as an export


def export(model: Any, spec: dict[str, Any], tokenizer_json: str, out: str | AnyPath) -> AnyPath:
    """Write `model` to the folder `out` atomically and return it; an earlier export there is replaced.

    model: an nn.Module with embed_image and embed_text, or a generative one. spec: its `model` section as JSON values,
    with vocab_size set. out: a path or an address (s3://...). Raises UsageError if `out` contains anything else or is
    not writable.
    """
    out = to_path(out)
    try:
        if out.exists() and not (out.is_dir() and _is_export_or_empty(out)):
            raise UsageError(f"{out} exists and is not an exported model: choose another folder")
    except OSError as error:
        raise UsageError(f"cannot read the folder {out}: {error}; choose another one") from error
    weights, files = _contents(model, spec, tokenizer_json)
    files = {CARD: model_card(out.name, spec, sum(p.numel() for p in model.parameters()))} | files
    try:
        with _replace_dir(out, [WEIGHTS, *files]) as folder:
            save_weights(weights, folder / WEIGHTS)
            for name, values in files.items():
                (folder / name).write_text(values if isinstance(values, str) else json.dumps(values, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write the exported model {out}: {error}; choose another folder") from error
    return out


def _contents(model: Any, spec: dict[str, Any], tokenizer_json: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and the text or JSON values of all files but the card by name, config.json last."""
    architecture = model.architecture() if hasattr(model, "architecture") else None
    config = {MADE_BY: version("mmray"), "model": spec, "architecture": architecture}
    hf = hf_config(model, tokenizer_json)
    weights = model.state_dict() if hf is None else to_hf_state(model)
    tokenizer, settings = hf_tokenizer(model, tokenizer_json, spec["inputs"]["max_tokens"])
    files = {TOKENIZER: tokenizer, TOKENIZER_CONFIG: settings}
    if hasattr(model, "hf_processor"):
        files[PROCESSOR] = model.hf_processor()
    if (preprocessor := preprocessor_config(spec["inputs"])) is not None:
        files[PREPROCESSOR] = preprocessor
    return weights, files | {CONFIG: (hf or {}) | config}


@contextmanager
def _replace_dir(out: AnyPath, names: Sequence[str]) -> Iterator[Path]:
    """Yield a local folder for the files `names`, and move it to `out` at the end. Raises OSError.

    After a kill, the old files are complete at `out` or in .NAME.replaced. Object stores cannot rename: there,
    config.json is invalidated first and uploaded last.
    """
    if isinstance(out, RemotePath):
        with staged_upload(out, names) as folder:
            yield folder
            (out / CONFIG).write_text(json.dumps({MADE_BY: "uploading"}))
            for file in out.iterdir():
                if file.name not in names:
                    file.unlink()
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
    shutil.rmtree(old, ignore_errors=True)  # the next export removes what remains


def _is_export_or_empty(folder: AnyPath) -> bool:
    names = {path.name for path in folder.iterdir()}
    if not names or not (names <= EXPORT_FILES and CONFIG in names):
        return not names
    try:
        values = json.loads((folder / CONFIG).read_text())
    except ValueError:
        return False
    return isinstance(values, dict) and MADE_BY in values  # a config.json of transformers has no such key


def hf_config(model: Any, tokenizer_json: str) -> dict[str, Any] | None:
    """config.json for transformers; None if it has no class that computes the same."""
    if not hasattr(model, "hf_config"):
        return None
    values: dict[str, Any] | None
    if hasattr(model, "chat"):
        chat = ChatEncoder(tokenizer_json, model.chat, 8)
        values = model.hf_config(chat.end_id, chat.pad_id, chat.image_id)
    else:
        values = model.hf_config(_end_id(tokenizer_json), TextEncoder(tokenizer_json, 8).pad_id)
    return values


def to_hf_state(model: Any) -> dict[str, Tensor]:
    """The model's weights under transformers' names."""
    state = {_replace_prefix(name, model.hf_names): tensor for name, tensor in model.state_dict().items()}
    if "logit_bias" in state:  # SigLIP stores its two scalars as vectors of one
        state |= {name: state[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    return state


def from_hf_state(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hf_state`."""
    names = tuple((hf, own) for own, hf in model.hf_names)
    own_state = {_replace_prefix(name, names): tensor for name, tensor in state.items()}
    scalars = ("log_scale", "logit_bias")
    return {name: tensor.reshape(()) if name in scalars else tensor for name, tensor in own_state.items()}


def hf_tokenizer(model: Any, tokenizer_json: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; padded to a fixed length for a model that attends to its padding."""
    encoder, tokenizer = TextEncoder(tokenizer_json, max_tokens), Tokenizer.from_str(tokenizer_json)
    length, pad_id = getattr(model, "padded_to", (max_tokens, encoder.pad_id))
    pad = tokenizer.id_to_token(pad_id)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "pad_token": pad,
    }
    if hasattr(model, "chat"):
        settings |= {"eos_token": model.chat.end, "image_token": model.chat.image}
    if not hasattr(model, "padded_to"):
        return tokenizer_json, settings
    tokenizer.enable_padding(length=length, pad_id=pad_id, pad_token=pad)
    return str(tokenizer.to_str()), settings


def _end_id(tokenizer_json: str) -> int | None:
    """The token that the tokenizer adds at the end of each caption and nowhere else; None if there is none."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    caption = tokenizer.encode("a")
    ids, special = caption.ids, caption.special_tokens_mask
    return ids[-1] if 0 in special and special[-1] and ids.index(ids[-1]) == len(ids) - 1 else None


def _replace_prefix(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
