"""Settings of a drawn transformer as transformers' configurations name them, held to what must divide what."""

from __future__ import annotations

from typing import Any

from mmray.errors import UsageError

FEED_FORWARD = 4  # times the width


def encoder_shape(part: Any) -> dict[str, Any]:
    """Width, depth and heads of one encoder's section. Raises UsageError where heads do not divide the width."""
    if part.width % part.heads:
        raise UsageError(
            f"{part.path}.heads: width {part.width} cannot be shared out over {part.heads} heads; "
            f"take a number of heads that divides {part.path}.width"
        )
    return {
        "hidden_size": part.width,
        "num_hidden_layers": part.depth,
        "num_attention_heads": part.heads,
        "intermediate_size": FEED_FORWARD * part.width,
    }


def tiles(side: int, patch: int) -> dict[str, int]:
    """Sides of image and patch, in pixels. Raises UsageError where patches do not tile the image."""
    if side % patch:
        raise UsageError(
            f"model.image.patch: patches of {patch} pixels do not tile an image of {side} (model.inputs.image_side); "
            f"take a side that {patch} divides"
        )
    return {"image_size": side, "patch_size": patch}
