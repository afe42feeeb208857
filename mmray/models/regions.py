"""Classification of boxes over the texts of labels, for models with a feature map of the image.

A model without regions has none of these parts, and its batches have no box columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmray.data.images.boxes import clip_boxes, to_model_coords
from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.collate import Batch
from mmray.errors import DataError, UsageError
from mmray.models.clip import l2_normalize
from mmray.models.protocol import HeadScores

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.data.text.tokenizer import TextEncoder

SAMPLES_PER_SIDE = 7  # sampling points of RoIAlign per side of a box
UNNAMED_LOGIT = -1e4  # logit of a label without a name: zero in any softmax, but finite


class RegionHead(nn.Module):
    """Project the features of boxes into the space of the text embeddings, so that new labels need
    no training.

    Sources: RoIAlign (He et al. 2017, arXiv:1703.06870), ViLD (Gu et al. 2022, arXiv:2104.13921),
    RegionCLIP (Zhong et al. 2022, arXiv:2112.09106).

    Forward takes feature maps [B, width, H, H] and boxes [B, N, 4], (left, top, right, bottom) in
    fractions of the image, and returns L2-normalized embeddings [B, N, embed_dim]: the projected
    mean features of each box by RoIAlign.

    Args:
        width: Channels of the feature map.
        embed_dim: Size of the embeddings.
    """

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, embed_dim, bias=False)

    def forward(self, grid: Tensor, boxes: Tensor) -> Tensor:
        return l2_normalize(self.project(region_features(grid, boxes))).unflatten(
            0, boxes.shape[:2]
        )


def region_features(grid: Tensor, boxes: Tensor) -> Tensor:
    """Return the mean features of each box, by RoIAlign.

    Args:
        grid: Feature maps of the images [B, W, H, H], where W is the number of channels and H the
            number of positions per side.
        boxes: [B, N, 4], (left, top, right, bottom) in fractions of the input image.

    Returns:
        [B x N, W], row by row.
    """
    from torchvision.ops import roi_align

    # half precision cannot represent large indices
    precise = grid.to(torch.promote_types(grid.dtype, torch.float32))
    row = torch.arange(len(boxes), device=boxes.device).repeat_interleave(boxes.shape[1])
    rois = torch.cat([row[:, None].to(precise.dtype), boxes.flatten(0, 1).to(precise.dtype)], dim=1)
    features: Tensor = roi_align(
        precise,
        rois,
        output_size=1,
        spatial_scale=grid.shape[-1],
        sampling_ratio=SAMPLES_PER_SIDE,
        aligned=True,
    )
    return features.flatten(1).to(grid.dtype)


def boxes_on_square(
    boxes: Sequence[Sequence[float]], image_size: tuple[int, int], inputs: Inputs
) -> Tensor:
    """Convert boxes in pixels of an image to fractions of the square that the model gets.

    Args:
        boxes: N boxes (left, top, width, height) in pixels of the image.
        image_size: (width, height) of the image in pixels.

    Returns:
        float32 [N, 4], (left, top, right, bottom) in fractions of the square, clipped to it.

    Raises:
        DataError: A box is outside the part of the image that the model gets.
    """
    width, height = image_size
    corners = np.reshape([[x, y, x + w, y + h] for x, y, w, h in boxes], (-1, 4))
    fractions = corners / [width, height, width, height]
    square, is_visible = clip_boxes(to_model_coords(fractions, image_size, inputs, None, None))
    if not is_visible.all():
        first = int(np.flatnonzero(~is_visible)[0])
        raise DataError(
            f"box {first} {tuple(boxes[first])} is outside the part of the {width} x {height} "
            f"image that the model gets (model.inputs.fit {inputs.fit})"
        )
    return torch.from_numpy(square.astype(np.float32))


class LabelTexts(nn.Module):
    """Token ids of the names of C labels: settings, not weights.

    It has no forward: `tokens` returns token ids and attention mask, int64 [C, T].

    Args:
        names: Name of each label; empty for a label without one.
        token_ids: Token ids of each name, as JSON values; None: call `tokenize` before the first
            forward.

    Attributes:
        ids: Token ids, right-padded, int64 [C, T].
        mask: Attention mask, 1 for a token and 0 for padding, int64 [C, T].
        named: Whether each label has a name, bool [C].
    """

    ids: Tensor
    mask: Tensor
    named: Tensor

    def __init__(self, names: Sequence[str], token_ids: list[list[int]] | None) -> None:
        super().__init__()
        self._names = tuple(names)
        self.register_buffer(
            "named", torch.tensor([bool(name) for name in names]), persistent=False
        )
        self._set(token_ids)

    def tokenize(self, encoder: TextEncoder) -> None:
        """Tokenize the label names."""
        ids, num_tokens = encoder.encode([*map(encoder.format_caption, self._names)])
        self._set([row[:length].tolist() for row, length in zip(ids, num_tokens, strict=True)])

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return token ids and attention mask (1 is a token) of the C label names, int64 [C, T].

        Raises:
            UsageError: The names have no token ids yet, because `tokenize` was not called.
        """
        if self.token_ids is None:
            raise UsageError(
                "model.region_labels: names are not tokenized; call "
                "`model.label_texts.tokenize(encoder)`"
            )
        return self.ids, self.mask

    def _set(self, token_ids: list[list[int]] | None) -> None:
        self.token_ids = token_ids
        rows = [torch.tensor(row, dtype=torch.long) for row in token_ids or [[]]]
        for name, column in {"ids": rows, "mask": [torch.ones_like(row) for row in rows]}.items():
            self.register_buffer(
                name, pad_sequence(column, batch_first=True).to(self.named.device), persistent=False
            )


def region_logits(
    regions: Tensor, texts: Tensor, scale: Tensor, named: Tensor | None = None
) -> Tensor:
    """Return the logits [B, N, C] of labels for boxes, scale times the dot product of their
    embeddings; those of labels that are not `named` are -1e4.
    """
    # half precision is too coarse at scale 100
    with torch.autocast(regions.device.type, enabled=False):
        logits = scale.to(regions.dtype) * regions @ texts.to(regions.dtype).T
    return logits if named is None else logits.masked_fill(~named, UNNAMED_LOGIT)


def region_label_scores(logits: Tensor, batch: Batch, label_texts: LabelTexts) -> HeadScores:
    """Return the scores of the boxes of a batch over the named labels, for the evaluation."""
    label = torch.where(batch["box_mask"], batch["box_labels"], NO_LABEL)
    num_named = int(label_texts.named.sum())
    return HeadScores(logits.flatten(0, 1), label.flatten(), num_named, "boxes")
