"""Learned positions of pretrained transformers, for other image sizes and longer texts than theirs.

Sources: bicubic interpolation of image positions as in open_clip and timm, linear interpolation of
text positions as in open_clip, and the first of them kept as in Long-CLIP (Zhang et al. 2024,
arXiv:2403.15378).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.errors import UsageError


def resize_vision_model(model: Any, side: int, weights: str) -> str | None:
    """Interpolate the learned positions of a vision model for images of another size.

    Args:
        model: The vision model of transformers' CLIP or SigLIP, whose embeddings `PatchEmbeddings`
            replaces, or a ViTModel. It is changed in place, and its config gets the new size.
        side: Height and width of the images in pixels.
        weights: Name of the weights, for errors and the returned line.

    Returns:
        A line for the console about the interpolation; None if the model has this size already.

    Raises:
        UsageError: Patches do not tile an image of this size.
    """
    config = model.config
    old_side = config.image_size
    if old_side == side:
        return None
    patch = config.patch_size
    if side % patch:
        raise UsageError(
            f"model.inputs.image_side: {weights} has patches of {patch} pixels, which do not tile "
            f"an image of {side} pixels; use a multiple of {patch}"
        )
    grid = side // patch
    embeddings = model.embeddings
    if config.model_type != "vit":  # CLIP, SigLIP
        positions = image_positions(embeddings.position_embedding.weight, grid)
        embeddings.position_embedding = _embedding(positions)
    else:
        positions = image_positions(embeddings.position_embeddings[0], grid)
        embeddings.position_embeddings = nn.Parameter(positions[None])
        embeddings.image_size = (side, side)
        embeddings.patch_embeddings.image_size = (side, side)
    config.image_size = side
    old_grid = old_side // patch
    return (
        f"image positions of {weights} interpolated from {old_grid} x {old_grid} to "
        f"{grid} x {grid} patches, for images of {side} pixels"
    )


def lengthen_text_model(model: Any, length: int, kept: int, weights: str) -> str | None:
    """Interpolate the learned positions of a text model of transformers for longer texts, in place.

    Args:
        length: Maximum number of tokens of a text.
        kept: Number of leading positions that keep their values.
        weights: Name of the weights, for the returned line.

    Returns:
        A line for the console; None if the model has enough positions already.
    """
    embeddings = model.embeddings
    table = embeddings.position_embedding
    old_length = len(table.weight)
    if length <= old_length:
        return None
    embeddings.position_embedding = _embedding(text_positions(table.weight, length, kept))
    embeddings.position_ids = torch.arange(length).expand(1, -1)
    model.config.max_position_embeddings = length
    but_first = f", but the first {kept}" if kept else ""
    return (
        f"text positions of {weights} interpolated from {old_length} to {length} tokens{but_first}"
    )


@torch.no_grad()
def image_positions(weight: Tensor, grid: int) -> Tensor:
    """Return position embeddings [prefix + grid x grid, W] for another number of patches; those of
    the class token and registers, which come first, are kept.
    """
    old_grid = math.isqrt(len(weight))
    num_prefix = len(weight) - old_grid**2
    patches = weight[num_prefix:].float().T.unflatten(1, (old_grid, old_grid))[None]
    resized = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True)
    rows = resized[0].flatten(1).T.to(weight.dtype)
    return torch.cat([weight[:num_prefix], rows]).contiguous()


@torch.no_grad()
def text_positions(weight: Tensor, length: int, kept: int) -> Tensor:
    """Return position embeddings [length, W] for another number of tokens; the first are kept."""
    rest = weight[kept:].float().T[None]
    resized = F.interpolate(rest, length - kept, mode="linear")[0].T.to(weight.dtype)
    return torch.cat([weight[:kept], resized]).contiguous()


def grid_positions(weight: Tensor, grids: Tensor, length: int) -> Tensor:
    """Return position embeddings [B, length, W] for images with grids of patches of their own.

    They are resized bilinearly with antialiasing, as in transformers' Siglip2Model.

    Args:
        weight: Position embeddings of a square grid [G x G, W].
        grids: Numbers of rows and columns of patches of each image, int64 [B, 2], at least 1.
        length: Number of positions; those after the patches of an image are padding.
    """
    side = math.isqrt(len(weight))
    rows, columns = grids.split(1, dim=1)
    index = torch.arange(length, device=grids.device).minimum(rows * columns - 1)
    axes = torch.stack([index // columns, index % columns], dim=2)
    # Units of the square grid, in at least float32. The filter is a triangle.
    scale = side / grids[:, None].to(torch.promote_types(weight.dtype, torch.float32))
    source = torch.arange(side, device=grids.device) + 0.5
    distance = (source - ((axes + 0.5) * scale)[..., None]).abs()
    factors = (1 - distance / scale.clamp(min=1)[..., None]).clamp(min=0)
    factors = factors / factors.sum(dim=3, keepdim=True)
    factors = factors[:, :, 0, :, None] * factors[:, :, 1, None]
    return factors.flatten(2).to(weight.dtype) @ weight


def _embedding(weight: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight, freeze=False)
