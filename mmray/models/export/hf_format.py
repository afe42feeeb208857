"""A CLIP, SigLIP or LLaVA as transformers itself saves it, so that an export loads where mmray is not installed.

For export.py. Other models have no class there; of them only the tokenizer and the pixels are said in their words.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from mmray.data.text.chat import ChatEncoder
from mmray.data.text.tokenizer import TextEncoder

PROCESSOR = "processor_config.json"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def config(model: Any, tokenizer_json: str) -> dict[str, Any] | None:
    """config.json for transformers; None where it has no class for this model, or none that would compute the same."""
    if not hasattr(model, "hf_config"):
        return None
    if hasattr(model, "chat"):
        marks = ChatEncoder(tokenizer_json, model.chat, 8)
        written: dict[str, Any] = model.hf_config(marks.end_id, marks.pad_id, marks.image_id)
        return written
    values: dict[str, Any] | None = model.hf_config(_end_id(tokenizer_json), TextEncoder(tokenizer_json, 8).pad_id)
    return values


def to_hf(model: Any) -> dict[str, Tensor]:
    """The model's weights under transformers' names."""
    state = {_renamed(name, model.hf_names): tensor for name, tensor in model.state_dict().items()}
    if "logit_bias" in state:  # SigLIP's two scalars are vectors of one there
        state |= {name: state[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    return state


def from_hf(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hf`."""
    names = tuple((their, own) for own, their in model.hf_names)
    found = {_renamed(name, names): tensor for name, tensor in state.items()}
    scalars = ("log_scale", "logit_bias")
    return {name: tensor.reshape(()) if name in scalars else tensor for name, tensor in found.items()}


def tokenizer(model: Any, tokenizer_json: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
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


def processor(model: Any) -> dict[str, dict[str, Any]]:
    """processor_config.json by its name, where transformers has a class that lays out image and text together."""
    return {PROCESSOR: model.hf_processor()} if hasattr(model, "hf_processor") else {}


def _end_id(tokenizer_json: str) -> int | None:
    """The token that the tokenizer puts behind each caption and nowhere else; None where there is no such token."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    caption = tokenizer.encode("a")
    ids, added = caption.ids, caption.special_tokens_mask
    return ids[-1] if 0 in added and added[-1] and ids.index(ids[-1]) == len(ids) - 1 else None


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for own, their in prefixes:
        if name.startswith(own):
            return their + name.removeprefix(own)
    return name
