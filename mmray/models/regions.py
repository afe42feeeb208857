"""Boxes of an image and the texts of their labels, in one space: the region-text head of fusion.py.

A box's features are the mean of the image's feature map inside it; what it is called is read by the text branch, so
that a trained model can be asked about words that no label had. Sources: RoIAlign (He et al. 2017, arXiv:1703.06870),
region embeddings against texts of labels (Gu et al. 2022, ViLD, arXiv:2104.13921; Zhong et al. 2022, RegionCLIP,
arXiv:2112.09106).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.dual_encoder import unit

SAMPLES = 7  # points of the feature map a side of a box, whose mean its features are
NAMELESS = -1e4  # logit of a label without a name: no share of the softmax in any format, and finite


class RegionHead(nn.Module):
    """Boxes of a feature map to embeddings in the space of the texts."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, embed_dim, bias=False)

    def forward(self, grid: Tensor, boxes: Tensor) -> Tensor:
        """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the square -> [B, N, D] of length 1."""
        num_rows, num_boxes = boxes.shape[:2]
        features = self.project(region_features(grid, boxes))
        return unit(features).view(num_rows, num_boxes, self.project.out_features)


def region_features(grid: Tensor, boxes: Tensor) -> Tensor:
    """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the square -> mean inside each box [B x N, W]."""
    from torchvision.ops import roi_align

    num_rows, num_boxes = boxes.shape[:2]
    precise = grid.to(torch.promote_types(grid.dtype, torch.float32))  # a row's number has no room in half precision
    row = torch.arange(num_rows, device=boxes.device).repeat_interleave(num_boxes)
    placed = torch.cat([row[:, None].to(precise.dtype), boxes.flatten(0, 1).to(precise.dtype)], dim=1)
    found: Tensor = roi_align(
        precise, placed, output_size=1, spatial_scale=grid.shape[-1], sampling_ratio=SAMPLES, aligned=True
    )
    return found.flatten(1).to(grid.dtype)


class LabelTexts(nn.Module):
    """Tokens of the names of labels 0, 1, ...: settings, no weights; a label may have no name.

    ids: what `plain()` gave; None: `read` is to be called before the first forward.
    """

    ids: Tensor
    mask: Tensor
    named: Tensor

    def __init__(self, names: Sequence[str], ids: list[list[int]] | None) -> None:
        super().__init__()
        self._names = tuple(names)
        self.known = ids is not None
        for name in ("ids", "mask", "named"):
            self.register_buffer(name, torch.zeros(0), persistent=False)
        if ids is not None:
            self._set(ids)

    def read(self, encoder: Any) -> None:
        """Take the names' tokens from an encoder (data/text.py)."""
        found, num_tokens = encoder.encode(list(self._names))
        self._set([row[:length].tolist() for row, length in zip(found, num_tokens, strict=True)])

    def plain(self) -> list[list[int]] | None:
        """Tokens of each name, as JSON values."""
        if not self.known:
            return None
        return [row[there].tolist() for row, there in zip(self.ids, self.mask.bool(), strict=True)]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Ids and mask [C, T]. Raises UsageError where they are not known."""
        if not self.known:
            raise UsageError("model.region_labels: the names were not read; call `model.labels.read(encoder)` first")
        return self.ids, self.mask

    def _set(self, ids: list[list[int]]) -> None:
        longest = max((len(row) for row in ids), default=1)
        self.ids = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=self.ids.device)
        self.mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=self.mask.device)
        self.named = torch.tensor([bool(name) for name in self._names], device=self.named.device)
        self.known = True


def region_logits(regions: Tensor, texts: Tensor, scale: Tensor, named: Tensor | None = None) -> Tensor:
    """Embeddings [B, N, D] and [C, D] and 1 / temperature -> logits [B, N, C], those of nameless texts out of play."""
    with torch.autocast(regions.device.type, enabled=False):  # at scale 100 half precision would round them away
        logits = scale.to(regions.dtype) * regions @ texts.to(regions.dtype).T
    return logits if named is None else logits.masked_fill(~named, NAMELESS)
