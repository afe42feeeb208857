"""An example of a model kind: its settings and its torch module.

In the package, the settings are in mmray/config/model_kinds.py, which does not import torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmray.config.model_kinds import EmbedDim, EmbeddingModel
from mmray.models.dual_encoder import DualEncoder, l2_normalize
from mmray.models.protocol import PRETRAINED, WeightSource


class PixelMeansSettings(EmbeddingModel):
    """Projections of mean colors and of mean token embeddings into one space."""

    embed_dim: EmbedDim = 16


class ImageBranch(nn.Module):
    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(3, embed_dim)

    def forward(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> L2-normalized embeddings [B, D]."""
        return l2_normalize(self.project(image.float().mean(dim=(2, 3)) / 255 - 0.5))


class TextBranch(nn.Module):
    def __init__(self, vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, embed_dim)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> L2-normalized embeddings [B, D]."""
        return l2_normalize((self.tokens(input_ids) * attention_mask[..., None]).sum(dim=1))


class PixelMeans(DualEncoder):
    """The base class adds the temperature and the methods of mmray/models/protocol.py."""

    def __init__(
        self, spec: PixelMeansSettings, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        torch.manual_seed(0)
        super().__init__(ImageBranch(spec.embed_dim), TextBranch(vocab_size, spec.embed_dim), spec)
