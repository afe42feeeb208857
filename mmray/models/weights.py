"""A model's weights as a safetensors file: readable by anything, and no code runs when it is opened.

Used by train/checkpoint.py while a model is trained, and by export.py when it leaves.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmray.data.text.tokenizer import MAX_LANGUAGES
from mmray.errors import UsageError


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write a state_dict, from any device. Raises SafetensorError or OSError where the storage does not take it."""
    file.touch()
    mode = file.stat().st_mode  # as the umask has it; the library's own file is readable by its owner alone
    save_file(_untie(weights), file, metadata={"format": "pt"})
    file.chmod(mode)


def load_weights(file: Path) -> dict[str, Tensor]:
    """The state_dict, on the CPU. Raises OSError or SafetensorError where it cannot be read."""
    return load_file(file)


def read_state_dict(setting: str, file: str) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of a file that torch.load reads with weights_only. Raises UsageError."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"{setting}: there is no file {path}; give `none`, `pretrained`, or a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_weights(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UsageError(f"{setting}: {path} cannot be read as weights: {_first_line(error)}") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # beside an epoch and an optimizer, as training scripts keep it
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"{setting}: {path} is not a state_dict (names to tensors); save `model.state_dict()`")
    return state


def _untie(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, no two in one storage: safetensors refuses tied weights, so each gets its own copy."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        whole = tensor.detach().contiguous()
        out[name] = whole.clone() if place in seen and place != 0 else whole
        seen.add(place)
    return out


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Weights that transformers saved: a directory, the hub's cache, or the hub, with an error that says the next move.
def load_local_or_hub(setting: str, name: str, read: Callable[..., Any], **options: Any) -> Any:
    """What `read` finds under `name` on this machine, else on the hub. Raises UsageError naming the setting."""
    place = Path(name).expanduser()
    if place.is_dir():
        name = str(place)
    elif place.is_absolute() or name.startswith((".", "~")):
        raise UsageError(f"{setting}: there is no directory {place}; give one saved by save_pretrained")
    try:
        return read(name, local_files_only=True, **options)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
        if place.is_dir():
            detail = str(error).splitlines()[0]
            raise UsageError(f"{setting}: {name} cannot be read as a saved model: {detail}") from None
    try:
        return read(name, **options)
    except OSError as error:
        raise UsageError(
            f"{setting}: `{name}` is neither a directory nor on this machine, and the hub does not give it "
            f"({str(error).splitlines()[0]}); run `hf download {name} --local-dir DIR` where there is a network and "
            f"set {setting} to DIR, or set it to `none`"
        ) from None


def load_pretrained(setting: str, kind: Any, config_kind: Any, name: str) -> Any:
    """A model of class `kind` with the weights saved under `name`, float32. Raises UsageError for another or a part."""
    found, wanted = (
        load_local_or_hub(setting, name, config_kind.get_config_dict)[0].get("model_type"),
        config_kind.model_type,
    )
    if found != wanted:
        raise UsageError(f"{setting}: {name} holds a model of type {found!r}, not `{wanted}`")
    return load_complete(setting, name, kind.from_pretrained, wanted, attn_implementation="sdpa")


def add_language_rows(net: Any, rows: int, language_token: str) -> Any:
    """The network of saved weights, with rows of embedding for tokens of languages that its tokenizer had not.

    They are drawn as the network draws its own. Other tokens that have no row are the caller's fault to name.
    """
    text = getattr(net, "text_model", net)  # of a CLIP or SigLIP, which shares its configuration
    missing = rows - text.config.vocab_size
    if language_token and 0 < missing <= MAX_LANGUAGES:
        text.resize_token_embeddings(rows, mean_resizing=False)
    return net


def load_complete(setting: str, name: str, read: Callable[..., Any], family: str, **options: Any) -> Any:
    """What `read` makes of the weights saved under `name`, float32. Raises UsageError where some are missing."""
    net, report = load_local_or_hub(setting, name, read, dtype=torch.float32, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(f"{setting}: {name} lacks {len(missing)} weights of its {family}, first {missing[0]}")
    return net


# Checkpoints of open_clip (and OpenAI's own CLIP): their names and packed matrices as transformers' CLIP has them.
#
# Only ViT models with CLIP's text transformer: a ResNet or another tower's names are refused, not guessed at.
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
_WHOLE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "logit_scale": "logit_scale",
}
_TURNED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}  # x @ P, not P @ x
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)$")
_NOT_WEIGHTS = ("attn_mask", "input_resolution", "context_length", "vocab_size")  # what OpenAI's files hold besides


def is_checkpoint_file(name: str) -> bool:
    """Whether `model.weights` means a file and not a directory or a hub name."""
    return Path(name).suffix in SUFFIXES and not Path(name).expanduser().is_dir()


def open_clip_vocab_size(state: dict[str, Tensor]) -> int:
    """Rows of the checkpoint's embedding of tokens; 0 where it has none."""
    found = [tensor for name, tensor in state.items() if name.removeprefix("module.") == "token_embedding.weight"]
    return len(found[0]) if found else 0


def load_open_clip(net: nn.Module, state: dict[str, Tensor], setting: str, name: str) -> None:
    """Put a checkpoint into transformers' CLIPModel. Raises UsageError where names or shapes differ."""
    try:
        missing, unexpected = net.load_state_dict(open_clip_to_hf(state), strict=False)
    except KeyError as error:
        raise UsageError(f"{setting}: {name} is no CLIP of open_clip with a ViT: it holds {error.args[0]}") from None
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise UsageError(f"{setting}: {name} has another shape than model.image and model.text: {detail}") from None
    if missing or unexpected:
        raise UsageError(
            f"{setting}: {name} has another shape than model.image and model.text: {len(missing)} weights are missing "
            f"and {len(unexpected)} are too many, the first is {[*missing, *unexpected][0]}"
        )


def open_clip_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An open_clip state_dict under transformers' names. Raises KeyError with a name that CLIP does not have."""
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = given.removeprefix("module.")  # of DDP
        if name not in _NOT_WEIGHTS:
            out |= _hf_tensors(name, tensor.float())
    return out


def _hf_tensors(name: str, tensor: Tensor) -> dict[str, Any]:
    if name in _WHOLE:
        return {_WHOLE[name]: tensor}
    if name in _TURNED:
        return {_TURNED[name]: tensor.T.contiguous()}
    block = _BLOCK.match(name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return {f"{_NORMS[module]}.{kind}": tensor}
    place = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}"
    if block[3] in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = block[3].rpartition("_")[2]
        names = [f"{place}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        return dict(zip(names, tensor.chunk(3), strict=True))
    module, _, kind = block[3].rpartition(".")
    return {f"{place}.{_IN_BLOCK[module]}.{kind}": tensor}


# Settings of a drawn transformer as transformers' configurations name them, held to what must divide what.
FEED_FORWARD = 4  # times the width


def transformer_config(part: Any) -> dict[str, Any]:
    """Width, depth and heads of one encoder's section. Raises UsageError where heads do not divide the width."""
    if part.width % part.heads:
        raise UsageError(
            f"{part.path}.heads: width {part.width} cannot be shared out over {part.heads} heads; "
            f"take a number of heads that divides {part.path}.width"
        )
    return {
        "hidden_size": part.width,
        "num_hidden_layers": part.depth,
        "num_attention_heads": part.heads,
        "intermediate_size": FEED_FORWARD * part.width,
    }


def patch_config(side: int, patch: int) -> dict[str, int]:
    """Sides of image and patch, in pixels. Raises UsageError where patches do not tile the image."""
    if side % patch:
        raise UsageError(
            f"model.image.patch: patches of {patch} pixels do not tile an image of {side} (model.inputs.image_side); "
            f"take a side that {patch} divides"
        )
    return {"image_size": side, "patch_size": patch}
