"""Checkpoints of open_clip and OpenAI -> config and weights of transformers' CLIPModel.

Shapes come from the tensors, activation and heads from open_clip_config.json or config.json next to the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from mmray.errors import UsageError

# Names in checkpoints -> transformers' CLIPModel, replaced in this order. Only ViT models with CLIP's text
# transformer; projections are transposed and q, k and v are one tensor.
OPEN_CLIP_NAMES = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
_TRANSPOSED = ("visual_projection.weight", "text_projection.weight")  # x @ P, not P @ x
_OPENAI_ENTRIES = ("input_resolution", "context_length", "vocab_size")  # further entries of OpenAI's files
HEAD_WIDTH = 64  # of all published models up to width 1024; wider image encoders have 16 heads
FIT = {"shortest": "crop", "squash": "squash", "longest": "pad"}  # open_clip's resize_mode


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of open_clip_config.json, or of config.json, next to the file; {} without one."""
    for name in ("open_clip_config.json", "config.json"):
        path = file.with_name(name)
        try:
            if path.is_file():
                return dict(json.loads(path.read_text(encoding="utf-8")).items())
        except (ValueError, AttributeError) as error:
            raise UsageError(f"model.weights: {path} is not a JSON object: {error}") from None
    return {}


def preprocessing(file: Path) -> dict[str, Any]:
    """The settings of `model.inputs` that `preprocess_cfg` of open_clip_config.json defines."""
    given = read_config(file).get("preprocess_cfg", {})
    inputs = {name: given[name] for name in ("mean", "std", "interpolation") if name in given}
    return inputs | ({"fit": FIT[given["resize_mode"]]} if given.get("resize_mode") in FIT else {})


def rename_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a state_dict for transformers; unknown names are kept."""
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = given.removeprefix("module.")  # of DDP
        if name in (*_OPENAI_ENTRIES, "attn_mask"):
            continue
        for theirs, ours in OPEN_CLIP_NAMES.items():
            name = name.replace(theirs, ours)
        prefix, packed, suffix = name.partition("in_proj_")
        if packed:
            out |= zip((f"{prefix}{part}_proj.{suffix}" for part in "qkv"), tensor.float().chunk(3), strict=True)
        else:
            out[name] = tensor.float().T.contiguous() if name in _TRANSPOSED else tensor.float()
    return out


def infer_sizes(weights: str, hf: dict[str, Tensor]) -> dict[str, int]:
    """`image_side`, `patch`, `max_tokens` and `vocab_size` of a renamed state_dict. Raises UsageError."""
    names = (*(OPEN_CLIP_NAMES[f"{name}positional_embedding"] for name in ("visual.", "")), "visual_projection.weight")
    names += (
        f"{OPEN_CLIP_NAMES['visual.conv1.']}weight",
        OPEN_CLIP_NAMES["token_embedding.weight"],
        "text_projection.weight",
    )
    if missing := [name for name in names if name not in hf]:
        renamed = [name for name in hf if not name.startswith(("vision_model.", "text_model."))]
        raise UsageError(
            f"model.weights: {weights} is not an open_clip ViT checkpoint: it lacks {missing[0]}, and has "
            f"{', '.join(renamed[:1]) or 'no other names'}. Give a model of transformers by its folder"
        )
    class_and_patches, max_tokens, _, patch, rows = (hf[name].shape for name in names[:5])
    side = patch[-1] * math.isqrt(class_and_patches[0] - 1)
    return {"image_side": side, "patch": patch[-1], "max_tokens": max_tokens[0], "vocab_size": rows[0]}


def hf_config(state: dict[str, Tensor], hf: dict[str, Tensor], spec: Any) -> dict[str, Any]:
    """Values of CLIPConfig for a state_dict of open_clip and its renamed form. Raises UsageError.

    spec: the `model` section; its `heads` count if its `width` is that of the checkpoint.
    """
    size, config = infer_sizes(spec.weights, hf), read_config(Path(spec.weights).expanduser())
    model = config.get("model_cfg", config)
    embed_dim = len(hf["text_projection.weight"])
    shared = {"hidden_act": _activation(state, spec, config, model), "projection_dim": embed_dim}

    def tower(part: str, section: Any, most_heads: int | None) -> dict[str, Any]:
        width = hf[f"{part}_model.embeddings.position_embedding.weight"].shape[1]
        first = f"{part}_model.encoder.layers.0.mlp.fc1.weight"
        return shared | {
            "hidden_size": width,
            "num_hidden_layers": sum(n.startswith(part) and n.endswith(".layer_norm1.weight") for n in hf),
            "num_attention_heads": _num_heads(section, width, model.get(f"{part}_cfg", {}), most_heads),
            "intermediate_size": len(hf[first]) if first in hf else 4 * width,
        }

    text = {"vocab_size": size["vocab_size"], "max_position_embeddings": size["max_tokens"]}
    return {
        "vision_config": tower("vision", spec.image, 16)
        | {"image_size": size["image_side"], "patch_size": size["patch"]},
        "text_config": tower("text", spec.text, None) | text | {"bos_token_id": None, "eos_token_id": None},
        "projection_dim": embed_dim,
    }


def _num_heads(section: Any, width: int, given: dict[str, Any], most: int | None) -> int:
    """Heads of a tower: of the config file, of settings with this width, or by open_clip's convention."""
    if "heads" in given:
        return int(given["heads"])
    if "head_width" in given:
        return width // int(given["head_width"])
    if section.width == width:
        return int(section.heads)
    if width % HEAD_WIDTH:
        raise UsageError(
            f"{section.settings_prefix}.heads: the weights have width {width}, which is no multiple of {HEAD_WIDTH}, "
            f"so set {section.settings_prefix}.width {width} and {section.settings_prefix}.heads"
        )
    return min(width // HEAD_WIDTH, most or width)


def _activation(state: dict[str, Tensor], spec: Any, config: dict[str, Any], model: dict[str, Any]) -> str:
    """The activation of a checkpoint. Raises UsageError if nothing defines it, or the setting differs."""
    stored = config.get("text_config", {}).get("hidden_act")  # of transformers
    if "vision_cfg" in model:
        stored = "quick_gelu" if model.get("quick_gelu") else "gelu"
    if all(name in state for name in _OPENAI_ENTRIES):
        stored = "quick_gelu"
    check_activation(spec, stored)
    if (activation := stored or spec.activation) is None:
        raise UsageError(
            f"model.activation: {spec.weights} does not define it, and no open_clip_config.json is next to it; set "
            "quick_gelu for OpenAI's and DFN's weights and open_clip models named -quickgelu, gelu for other models"
        )
    return str(activation)


def check_activation(spec: Any, stored: str | None) -> None:
    """Raise UsageError if `model.activation` is set to another activation than that of the weights."""
    given = getattr(spec, "activation", None)
    if stored is not None and given not in (None, stored):
        raise UsageError(f"model.activation: {spec.weights} was trained with {stored}, not {given}; remove the setting")
