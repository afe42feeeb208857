"""A state as a nest of dicts, lists and tuples: its tensors by where they stand, and the names of the ranks' files.

For checkpoint.py and shards.py; what all may know of a sharded checkpoint without torch's part for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

At = tuple[Any, ...]  # keys from the top of a state to one of its tensors


class Part(NamedTuple):
    """What rank 0 hears of a file that another rank wrote."""

    digest: str
    num_bytes: int


def names(world: int) -> tuple[str, ...]:
    """The files of `world` ranks."""
    return tuple(f"shard-{rank + 1}-of-{world}.safetensors" for rank in range(world))


def mapped(nest: Any, change: Callable[[At, Tensor], Any], at: At = ()) -> Any:
    """The same nest of dicts, lists and tuples, each tensor changed by one who is told where it stands."""
    if isinstance(nest, Tensor):
        return change(at, nest)
    if isinstance(nest, dict):
        return type(nest)((key, mapped(value, change, (*at, key))) for key, value in nest.items())
    if isinstance(nest, (list, tuple)):
        return type(nest)(mapped(value, change, (*at, index)) for index, value in enumerate(nest))
    return nest


def outline(at: At, tensor: Tensor) -> Tensor:
    """A tensor's whole size and type, without its values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def key_of(at: At) -> str:
    """A place as text, the name of its tensor in the ranks' files."""
    return "/".join(map(str, at))
