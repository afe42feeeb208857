"""Cross-attention between the tokens of a text and other modalities.

Source: the multimodal encoder of ALBEF (Li et al. 2021, arXiv:2107.07651, section 3.1), with
pre-norm layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.models.encoders.text import mask_with_first, masked_mean
from mmray.models.weights import transformer_config

if TYPE_CHECKING:
    from mmray.config import CrossAttention
    from mmray.config.model_kinds import DropoutTransformer
    from mmray.models.protocol import Encoded


class CrossEncoder(nn.Module):
    """Layers of self-attention over text tokens and cross-attention from text tokens to features of
    other modalities.

    Forward takes what the branches of the other modalities returned, by name, and what the branch
    of the text returned: features [B, N, width] and masks int64 [B, N], 0 for padding (None for
    images). It returns one feature vector for each pair (a text and the other modalities of its
    row), [B, W]: the mean over the tokens.

    Args:
        spec: The `model.cross` section: width W, depth, heads and dropout.
        widths: Width of the features of each other modality by its name, such as `image`.
        text_width: Width of the text features.
        num_positions: Number of positions N of features that have no positions of their own, such
            as the feature map of an image; 0: the features have them.

    Attributes:
        position: Learned positions of the other modalities [1, N, W]; None if `num_positions` is 0.
    """

    position: nn.Parameter | None

    def __init__(
        self,
        spec: CrossAttention,
        widths: Mapping[str, int],
        text_width: int,
        num_positions: int = 0,
    ) -> None:
        super().__init__()
        for name, width in widths.items():
            self.add_module(f"from_{name}", nn.Linear(width, spec.width))
        self.from_text = nn.Linear(text_width, spec.width)
        self.position = None
        if num_positions:
            self.position = nn.Parameter(0.02 * torch.randn(1, num_positions, spec.width))
        self.layers = cross_attention_layers(spec)
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, media: Mapping[str, Encoded], text: Encoded) -> Tensor:
        assert text.mask is not None
        padding = ~mask_with_first(text.mask)
        hidden = self.from_text(text.features)
        projected = []
        masks = []
        for name, encoded in media.items():
            projected.append(self.get_submodule(f"from_{name}")(encoded.features))
            if encoded.mask is not None:
                masks.append(encoded.mask)
        memory = torch.cat(projected, dim=1)
        if self.position is not None:
            memory = memory + self.position
        absent = None
        if masks:
            # A position of zeros, so that a row without other modalities has no empty softmax.
            memory = F.pad(memory, (0, 0, 1, 0))
            absent = ~mask_with_first(F.pad(torch.cat(masks, dim=1), (1, 0)))
        for layer in self.layers:
            hidden = layer(
                hidden, memory, tgt_key_padding_mask=padding, memory_key_padding_mask=absent
            )
        return masked_mean(self.norm(hidden), text.mask)


def cross_attention_layers(spec: DropoutTransformer) -> nn.ModuleList:
    """Return pre-norm layers of self-attention, cross-attention and an MLP, for a section with
    width, depth, heads and dropout.
    """
    return nn.ModuleList(
        nn.TransformerDecoderLayer(
            spec.width,
            spec.heads,
            dim_feedforward=transformer_config(spec)["intermediate_size"],
            dropout=spec.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        for _ in range(spec.depth)
    )
