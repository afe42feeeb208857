"""From uint8 pixels to the first layer of an image tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.models.encoders.positions import grid_positions


class NormalizePixels(nn.Module):
    """Normalize pixels uint8, and cast them to the dtype in which the first layer computes.

    That is the dtype of autocast, or without it the dtype of the model's weights. The arithmetic is
    in the dtype of the weights.

    Forward takes pixels uint8 [..., 3, S, S], of images or of frames, and returns (pixels / 255 -
    mean) / std in the same shape.

    Args:
        mean: Mean of each of the three channels, for pixels in 0..1.
        std: Standard deviation of each channel, for pixels in 0..1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        # In units of 1 / 255; settings, not weights.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return self.normalize(image)

    def normalize(self, image: Tensor) -> Tensor:
        """Return (image / 255 - mean) / std of pixels uint8 [..., 3, S, S], in the dtype in which
        the first layer computes.
        """
        pixels = (image.to(self.mean.dtype) - self.mean) / self.std
        return pixels.to(autocast_dtype(pixels))


class EmbedPixels(NormalizePixels):
    """Module from uint8 pixels to the input of the blocks of an image tower.

    torch.compile reads the pixels once: it can fuse the normalization with the first layers of the
    tower, such as the convolution, BatchNorm and pooling of a ResNet. Forward takes pixels uint8
    [B, 3, S, S] and returns what `embed` returns for them.

    Args:
        embed: Method of the tower, which has the weights: from normalized pixels [B, 3, S, S] to
            hidden states.
        mean: Mean of each of the three channels, for pixels in 0..1.
        std: Standard deviation of each channel, for pixels in 0..1.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__(mean, std)
        self._embed = embed

    def forward(self, image: Tensor) -> Tensor:
        return self._embed(self.normalize(image))


class PatchConv2d(nn.Conv2d):
    """A convolution whose kernel is its stride, computed as a matrix product of the patches.

    cuDNN takes an order of magnitude longer for such kernels, above all for the gradient of the
    weight. The weight has the shape of the convolution, [D, C, P, P]. Forward takes images [B, C,
    H, W] and returns patches [B, D, H / P, W / P].
    """

    def forward(self, pixels: Tensor) -> Tensor:
        height, width = self.kernel_size
        rows = pixels.shape[2] // height
        columns = pixels.shape[3] // width
        pixels = pixels[:, :, : rows * height, : columns * width]
        patches = pixels.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchEmbeddings(NormalizePixels):
    """Module from uint8 pixels to the input hidden states of transformers' CLIP or SigLIP vision
    model.

    Forward takes pixels uint8 [B, 3, S, S] and returns hidden states [B, N, W] of N positions:
    CLIP's class token, if there is one, then the patches, with position embeddings added. It has
    the weights of their `embeddings` under the same names. Normalization of pixels, CLIP's
    LayerNorm before the first block and the casts are part of it, so torch.compile can fuse them:
    the pixels are read once, and float32 hidden states are written at most once.

    Args:
        embeddings: The module `embeddings` of the vision model, whose weights are used.
        mean: Mean of each of the three channels, for pixels in 0..1.
        std: Standard deviation of each channel, for pixels in 0..1.
    """

    class_embedding: nn.Parameter | None
    patch_embedding: nn.Conv2d | nn.Linear
    position_embedding: nn.Embedding

    def __init__(self, embeddings: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(mean, std)
        self.register_parameter("class_embedding", embeddings._parameters.get("class_embedding"))
        self.patch_embedding = embeddings.patch_embedding
        self.position_embedding = embeddings.position_embedding

    def forward(self, image: Tensor, norm: nn.Module | None = None) -> Tensor:
        hidden = self.patch_embedding(self.normalize(image)).flatten(2).transpose(1, 2)
        if self.class_embedding is not None:
            class_token = self.class_embedding.expand(len(hidden), 1, -1)
            hidden = torch.cat([class_token, hidden], dim=1)
        hidden = hidden + self.position_embedding.weight
        return residual_stream(hidden if norm is None else norm(hidden))

    def attention_mask(self, image: Tensor) -> Tensor | None:
        """Return a mask bool [B, 1, 1, N], False for padding; None: no image has any."""
        return None


class NaflexEmbeddings(PatchEmbeddings):
    """Module from images as patches to the input hidden states of transformers' Siglip2 vision
    model.

    Forward takes uint8 [B, 1 + N, 3 P P] (mmray/data/images/patches.py) and returns hidden states
    [B, N, W] with position embeddings added, which are arbitrary for padding.
    """

    def forward(self, image: Tensor, norm: nn.Module | None = None) -> Tensor:
        pixels = self.normalize(image[:, 1:].unflatten(2, (-1, 3, 1, 1))).flatten(2)
        weight = self.position_embedding.weight
        positions = grid_positions(weight, _patch_grids(image), pixels.shape[1])
        return residual_stream(self.patch_embedding(pixels) + positions)

    def attention_mask(self, image: Tensor) -> Tensor:
        index = torch.arange(image.shape[1] - 1, device=image.device)
        return (index < _patch_grids(image).prod(dim=1, keepdim=True))[:, None, None]


def _patch_grids(image: Tensor) -> Tensor:
    """Return the numbers of rows and columns of patches, int64 [B, 2]; at least 1, also of rows
    without an image, because attention to no patch would be NaN.
    """
    return image[:, 0, :2].long().clamp(min=1)


def use_patch_products(model: nn.Module) -> None:
    """Compute the patch embeddings of a model as matrix products instead of convolutions."""
    for layer in model.modules():
        if type(layer) is nn.Conv2d and _is_patch_embedding(layer):
            layer.__class__ = PatchConv2d


def _is_patch_embedding(layer: nn.Conv2d) -> bool:
    """Return True for a convolution of images (three channels) into patches that do not overlap."""
    return (
        layer.in_channels == 3
        and layer.kernel_size == layer.stride
        and layer.kernel_size != (1, 1)
        and layer.padding in ("valid", (0, 0))
        and layer.dilation == (1, 1)
        and layer.groups == 1
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of a tensor under autocast; its own dtype without
    autocast on its device type.
    """
    device_type = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(device_type):
        return tensor.dtype
    return torch.get_autocast_dtype(device_type)


def residual_stream(hidden: Tensor) -> Tensor:
    """Cast hidden states to bf16 under autocast to bf16, to halve the memory traffic of each layer.

    fp16 lacks the range for a sum over all layers.
    """
    return hidden.bfloat16() if autocast_dtype(hidden) == torch.bfloat16 else hidden
