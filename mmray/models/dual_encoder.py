"""What models share whose branches meet at the loss: two embeddings and a temperature from a batch.

The sample's journey: stands between data/ (uint8 pixels, token ids) and objectives/ (embeddings to a loss). Pixels stay
uint8 until here, so that a quarter of the bytes travel; they become numbers and are normalised on the training device.
Source: Radford et al. 2021 (arXiv:2103.00020); the bias is that of Zhai et al. 2023 (SigLIP, arXiv:2303.15343).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from mmray.config.model import TwoEncoders as Section

MAX_LOG_SCALE = math.log(100)  # CLIP's bound: beyond it the softmax saturates and training becomes unstable


class DualEncoder(nn.Module):
    """An image branch and a text branch with one embedding space and a learned temperature.

    image: uint8 [B, 3, S, S] -> [B, D] of length 1. text: (ids, mask) [B, T] -> [B, D] of length 1.
    """

    max_log_scale: float | None = MAX_LOG_SCALE
    logit_bias: nn.Parameter | None

    def __init__(self, image: nn.Module, text: nn.Module, spec: Section) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.log_scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))
        bias = None if spec.logit_bias is None else nn.Parameter(torch.tensor(float(spec.logit_bias)))
        self.register_parameter("logit_bias", bias)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch -> `image_embed`, `text_embed` [B, D] of length 1, `logit_scale` = 1 / temperature, a scalar.

        `logit_bias`, a scalar, where the model has one.
        """
        image_embed = self.image(batch["image"])
        text_embed = self.text(batch["input_ids"], batch["attention_mask"])
        return {"image_embed": image_embed, "text_embed": text_embed, **self.shared_outputs()}

    def shared_outputs(self) -> dict[str, Tensor]:
        """What belongs to no branch and no row: `logit_scale`, and `logit_bias` where there is one; scalars."""
        scale = {"logit_scale": self.log_scale.exp()}
        return scale if self.logit_bias is None else scale | {"logit_bias": self.logit_bias * 1}  # no leaf: an output

    def embed_image(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> embeddings [B, D] of length 1."""
        embedding: Tensor = self.image(image)
        return embedding

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> embeddings [B, D] of length 1."""
        embedding: Tensor = self.text(input_ids, attention_mask)
        return embedding

    def branches(self) -> dict[str, nn.Module]:
        """The submodules that share nothing but the loss: where placement on devices may cut."""
        return {"image": self.image, "text": self.text}

    @torch.no_grad()
    def constrain(self) -> None:
        """Keep the temperature at 0.01 or above; called after each optimizer step."""
        if self.max_log_scale is not None:
            self.log_scale.clamp_(max=self.max_log_scale)


class Pixels(nn.Module):
    """Pixels uint8 [B, 3, S, S] to normalised numbers, in the type of the model's weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        # In units of a byte, and no part of the weights: they are settings, and the spec holds them.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        normalised: Tensor = (image.to(self.mean.dtype) - self.mean) / self.std
        return normalised


def unit(embedding: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least: half precision would round away what a softmax at scale 100 shows."""
    if embedding.dtype in (torch.float16, torch.bfloat16):
        embedding = embedding.float()
    return functional.normalize(embedding, dim=-1)
