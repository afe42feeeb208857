"""A model's weights as a safetensors file: readable by anything, and no code runs when it is opened.

Used by train/checkpoint.py while a model is trained, and by export.py when it leaves.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmray.errors import UsageError


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write a state_dict, from any device. Raises SafetensorError or OSError where the storage does not take it."""
    file.touch()
    mode = file.stat().st_mode  # as the umask has it; the library's own file is readable by its owner alone
    save_file(_unshared(weights), file, metadata={"format": "pt"})
    file.chmod(mode)


def load_weights(file: Path) -> dict[str, Tensor]:
    """The state_dict, on the CPU. Raises OSError or SafetensorError where it cannot be read."""
    return load_file(file)


def read_state(setting: str, file: str) -> dict[str, Tensor]:
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


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
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
