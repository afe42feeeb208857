"""Features of media for two conversations about them: those with the chosen and with the rejected
answer of dpo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

# Methods of transformers' models, and the fields of their outputs that have a value for each token.
_ENCODE = MappingProxyType(
    {
        "get_image_features": ("pooler_output", "deepstack_features"),
        "get_video_features": ("pooler_output", "deepstack_features"),
        "get_audio_features": ("last_hidden_state",),
    }
)


@contextmanager
def features_repeated(model: nn.Module) -> Iterator[None]:
    """Scope in which a model of transformers computes the features of media once for a batch whose
    second half of conversations has the same media as its first half.

    Args:
        model: The `model` of an AutoModelForMultimodalLM.
    """
    names = [name for name in _ENCODE if hasattr(model, name)]

    def encode(name: str, *args: Any, **options: Any) -> Any:
        # The method for videos may call the one for images.
        restore()
        output = getattr(model, name)(*args, **options)
        replace()
        for field in _ENCODE[name]:
            if (features := output.get(field)) is not None:
                by_layer = field == "deepstack_features"
                output[field] = [*map(_repeat, features)] if by_layer else _repeat(features)
        return output

    def replace() -> None:
        for name in names:
            setattr(model, name, partial(encode, name))

    def restore() -> None:
        for name in names:
            vars(model).pop(name, None)

    replace()
    try:
        yield
    finally:
        restore()


def _repeat(features: Any) -> Any:
    """Return features of media twice: a tensor for all of them, or a sequence with one of each."""
    return torch.cat([features, features]) if isinstance(features, Tensor) else [*features] * 2
