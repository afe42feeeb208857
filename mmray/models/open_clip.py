"""Checkpoints of open_clip (and OpenAI's own CLIP): their names and packed matrices as transformers' CLIP has them.

Only ViT models with CLIP's text transformer: a ResNet or another tower's names are refused, not guessed at.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmray.errors import UsageError

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


def is_file(name: str) -> bool:
    """Whether `model.weights` means a file and not a directory or a hub name."""
    return Path(name).suffix in SUFFIXES and not Path(name).expanduser().is_dir()


def num_tokens(state: dict[str, Tensor]) -> int:
    """Rows of the checkpoint's embedding of tokens; 0 where it has none."""
    found = [tensor for name, tensor in state.items() if name.removeprefix("module.") == "token_embedding.weight"]
    return len(found[0]) if found else 0


def load(net: nn.Module, state: dict[str, Tensor], setting: str, name: str) -> None:
    """Put a checkpoint into transformers' CLIPModel. Raises UsageError where names or shapes differ."""
    try:
        missing, unexpected = net.load_state_dict(to_transformers(state), strict=False)
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


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An open_clip state_dict under transformers' names. Raises KeyError with a name that CLIP does not have."""
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = given.removeprefix("module.")  # of DDP
        if name not in _NOT_WEIGHTS:
            out |= _renamed(name, tensor.float())
    return out


def _renamed(name: str, tensor: Tensor) -> dict[str, Any]:
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
