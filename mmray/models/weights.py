"""A model's weights as a safetensors file: readable by anything, and no code runs when it is opened.

Used by train/checkpoint.py while a model is trained, and by export.py when it leaves.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write a state_dict, from any device. Raises SafetensorError where the storage does not take it."""
    save_file(_unshared(weights), file, metadata={"format": "pt"})


def load_weights(file: Path) -> dict[str, Tensor]:
    """The state_dict, on the CPU. Raises OSError or SafetensorError where it cannot be read."""
    return load_file(file)


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
