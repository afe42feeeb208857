"""Weights that transformers saved: a directory, the hub's cache, or the hub, with an error that says the next move."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmray.data.text.language import MOST_LANGUAGES
from mmray.errors import UsageError


def fetch(setting: str, name: str, read: Callable[..., Any], **options: Any) -> Any:
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


def saved_network(setting: str, kind: Any, config_kind: Any, name: str) -> Any:
    """A model of class `kind` with the weights saved under `name`, float32. Raises UsageError for another or a part."""
    found, wanted = fetch(setting, name, config_kind.get_config_dict)[0].get("model_type"), config_kind.model_type
    if found != wanted:
        raise UsageError(f"{setting}: {name} holds a model of type {found!r}, not `{wanted}`")
    return whole_network(setting, name, kind.from_pretrained, wanted, attn_implementation="sdpa")


def with_languages(net: Any, rows: int, language_token: str) -> Any:
    """The network of saved weights, with rows of embedding for tokens of languages that its tokenizer had not.

    They are drawn as the network draws its own. Other tokens that have no row are the caller's fault to name.
    """
    text = getattr(net, "text_model", net)  # of a CLIP or SigLIP, which shares its configuration
    missing = rows - text.config.vocab_size
    if language_token and 0 < missing <= MOST_LANGUAGES:
        text.resize_token_embeddings(rows, mean_resizing=False)
    return net


def whole_network(setting: str, name: str, read: Callable[..., Any], family: str, **options: Any) -> Any:
    """What `read` makes of the weights saved under `name`, float32. Raises UsageError where some are missing."""
    net, report = fetch(setting, name, read, dtype=torch.float32, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(f"{setting}: {name} lacks {len(missing)} weights of its {family}, first {missing[0]}")
    return net
