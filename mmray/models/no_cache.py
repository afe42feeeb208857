"""A cache of transformers that keeps nothing: what generative.py gives a language model that is trained.

A module of its own, since it imports transformers, which not everyone who imports generative.py needs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class _Unkept(DynamicLayer):
    """Each layer has the keys and values it was just given."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def no_cache() -> Cache:
    """A cache that is empty, and stays so."""
    return Cache(layer_class_to_replicate=_Unkept)
