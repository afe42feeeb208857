"""Weights: safetensors files, pretrained models of transformers, and open_clip checkpoints."""

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


def save_weights(weights: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a state_dict as safetensors. Raises SafetensorError or OSError."""
    file.touch()
    mode = file.stat().st_mode  # of the umask; safetensors creates files that only the owner can read
    save_file(_untie(weights), file, metadata={"format": "pt"} | (metadata or {}))
    file.chmod(mode)


def load_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file to the CPU. Raises OSError or SafetensorError."""
    return load_file(file)


def read_state_dict(setting: str, file: str) -> dict[str, Tensor]:
    """Read a state_dict from a .safetensors file, or with torch.load(weights_only=True). Raises UsageError."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"{setting}: no file {path}; set `none`, `pretrained`, or a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_weights(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UsageError(f"{setting}: cannot read weights from {path}: {_first_line(error)}") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # a training checkpoint with epoch and optimizer
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"{setting}: {path} is not a state_dict (names to tensors); save `model.state_dict()`")
    return state


def _untie(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no storage: safetensors refuses tied weights, so each gets a copy."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.detach().contiguous()
        out[name] = whole.clone() if storage in seen and storage != 0 else whole
        seen.add(storage)
    return out


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def load_local_or_hub(setting: str, name: str, read: Callable[..., Any], **options: Any) -> Any:
    """Call `read` for a directory, the hub cache, or the hub, in this order. Raises UsageError."""
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path)
    elif path.is_absolute() or name.startswith((".", "~")):
        raise UsageError(f"{setting}: no directory {path}; set one written by save_pretrained")
    try:
        return read(name, local_files_only=True, **options)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
        if path.is_dir():
            detail = str(error).splitlines()[0]
            raise UsageError(f"{setting}: cannot read a saved model from {name}: {detail}") from None
    try:
        return read(name, **options)
    except OSError as error:
        raise UsageError(
            f"{setting}: `{name}` is not a directory, not in the hub cache, and cannot be downloaded "
            f"({str(error).splitlines()[0]}). Run `hf download {name} --local-dir DIR` on a machine with a network and "
            f"set {setting} to DIR, or set it to `none`"
        ) from None


def load_pretrained(setting: str, kind: Any, config_kind: Any, name: str) -> Any:
    """Load a model of class `kind` in float32. Raises UsageError for another type or missing weights."""
    model_type, expected = (
        load_local_or_hub(setting, name, config_kind.get_config_dict)[0].get("model_type"),
        config_kind.model_type,
    )
    if model_type != expected:
        raise UsageError(f"{setting}: {name} holds a model of type {model_type!r}, not `{expected}`")
    return load_complete(setting, name, kind.from_pretrained, expected, attn_implementation="sdpa")


def add_language_rows(net: Any, rows: int, language_token: str) -> Any:
    """Add embedding rows for language tokens that a pretrained model lacks, initialised as the model does."""
    text = getattr(net, "text_model", net)  # of CLIP and SigLIP
    missing = rows - text.config.vocab_size
    if language_token and 0 < missing <= MAX_LANGUAGES:
        text.resize_token_embeddings(rows, mean_resizing=False)
    return net


def load_complete(setting: str, name: str, read: Callable[..., Any], family: str, **options: Any) -> Any:
    """Load a model in float32. Raises UsageError if weights are missing."""
    net, report = load_local_or_hub(setting, name, read, dtype=torch.float32, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(f"{setting}: {name} lacks {len(missing)} weights of a {family}, first {missing[0]}")
    return net


# open_clip checkpoints (and OpenAI's CLIP) -> transformers' CLIPModel. Only ViT models with CLIP's text transformer.
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
_TENSORS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}  # x @ P, not P @ x
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
_IGNORED = ("attn_mask", "input_resolution", "context_length", "vocab_size")  # further entries of OpenAI's files


def is_checkpoint_file(name: str) -> bool:
    """Return True if `model.weights` is a checkpoint file, not a directory or a hub name."""
    return Path(name).suffix in SUFFIXES and not Path(name).expanduser().is_dir()


def open_clip_vocab_size(state: dict[str, Tensor]) -> int:
    """Embedding rows of the checkpoint; 0 if it has none."""
    rows = [tensor for name, tensor in state.items() if name.removeprefix("module.") == "token_embedding.weight"]
    return len(rows[0]) if rows else 0


def load_open_clip(net: nn.Module, state: dict[str, Tensor], setting: str, name: str) -> None:
    """Load an open_clip checkpoint into transformers' CLIPModel. Raises UsageError if names or shapes differ."""
    try:
        missing, unexpected = net.load_state_dict(open_clip_to_hf(state), strict=False)
    except KeyError as error:
        raise UsageError(f"{setting}: {name} is not an open_clip ViT checkpoint: unexpected {error.args[0]}") from None
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise UsageError(f"{setting}: {name} does not match model.image and model.text: {detail}") from None
    if missing or unexpected:
        raise UsageError(
            f"{setting}: {name} does not match model.image and model.text: {len(missing)} weights are missing and "
            f"{len(unexpected)} unexpected, first {[*missing, *unexpected][0]}"
        )


def open_clip_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename an open_clip state_dict for transformers. Raises KeyError with an unknown name."""
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = given.removeprefix("module.")  # of DDP
        if name not in _IGNORED:
            out |= _hf_tensors(name, tensor.float())
    return out


def _hf_tensors(name: str, tensor: Tensor) -> dict[str, Any]:
    if name in _TENSORS:
        return {_TENSORS[name]: tensor}
    if name in _TRANSPOSED:
        return {_TRANSPOSED[name]: tensor.T.contiguous()}
    block = _BLOCK.match(name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return {f"{_NORMS[module]}.{kind}": tensor}
    prefix = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}"
    if block[3] in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = block[3].rpartition("_")[2]
        names = [f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        return dict(zip(names, tensor.chunk(3), strict=True))
    module, _, kind = block[3].rpartition(".")
    return {f"{prefix}.{_IN_BLOCK[module]}.{kind}": tensor}


FEED_FORWARD = 4  # times the width


def transformer_config(part: Any) -> dict[str, Any]:
    """transformers' config values for the width, depth and heads of an encoder section. Raises UsageError."""
    if part.width % part.heads:
        raise UsageError(
            f"{part.path}.heads: {part.heads} heads do not divide the width of {part.width}; choose a divisor of "
            f"{part.path}.width"
        )
    return {
        "hidden_size": part.width,
        "num_hidden_layers": part.depth,
        "num_attention_heads": part.heads,
        "intermediate_size": FEED_FORWARD * part.width,
    }


def patch_config(side: int, patch: int) -> dict[str, int]:
    """transformers' config values for image and patch side in pixels. Raises UsageError."""
    if side % patch:
        raise UsageError(
            f"model.image.patch: patches of {patch} pixels do not tile an image of {side}; set model.inputs.image_side "
            f"to a multiple of {patch}"
        )
    return {"image_size": side, "patch_size": patch}
