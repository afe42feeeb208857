"""Video encoder: frames of a clip to features of each frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.encoders.image import build_image_tower
from mmray.models.encoders.text import INIT_STD, TransformerLayers, length_mask
from mmray.models.protocol import PRETRAINED, WeightSource

if TYPE_CHECKING:
    from mmray.config.model_kinds import Towers


class FrameEncoder(nn.Module):
    """Encode the frames of a video as images, and relate them by a transformer.

    Forward takes normalized pixels, float [B, F, 3, S, S], and the number of frames of each row,
    int64 [B], and returns one feature vector for each frame, [B, F, width], and a mask int64 [B,
    F], 0 for padding. The image tower pools the positions of a frame to one vector; the transformer
    attends over the frames.

    Args:
        spec: The `model` section, with the image tower `image` and the transformer `video`, whose
            `depth` may be 0.
        source: Its part `image` is the transformers config of the image tower, if it has one.

    Raises:
        UsageError: `model.video.heads` does not divide the width of the image tower.
    """

    def __init__(self, spec: Towers, source: WeightSource = PRETRAINED) -> None:
        super().__init__()
        inputs = spec.inputs
        video = spec.video
        self.image = build_image_tower(spec.image, inputs.image_side, spec.batch_norm, source)
        self.width = self.image.width
        if video.depth and self.width % video.heads:
            raise UsageError(
                f"model.video.heads: {video.heads} heads do not divide the width of the image "
                f"tower, {self.width}; change one of them"
            )
        self.layers = TransformerLayers(self.width, video)
        self.positions: nn.Parameter | None = None
        if video.depth:  # without layers the order of the frames has no effect
            positions = torch.empty(inputs.frames, self.width)
            self.positions = nn.Parameter(positions.normal_(std=INIT_STD))

    def forward(self, pixels: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        features = self.image(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
        mask = length_mask(num_frames, pixels.shape[1])
        if self.positions is not None:
            features = features + self.positions[: pixels.shape[1]]
        return self.layers(features, mask), mask
