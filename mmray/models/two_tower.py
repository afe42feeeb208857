"""Two encoders that meet at the loss (CLIP's layout): a batch in, two embeddings and a temperature out.

The sample's journey: stands between data/ (uint8 pixels, token ids) and objectives/ (embeddings to a loss). Pixels stay
uint8 until here, so that a quarter of the bytes travel; they become numbers and are normalised on the training device.
Source: Radford et al. 2021 (arXiv:2103.00020).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mmray.errors import UsageError
from mmray.models.image_towers import build_image_tower
from mmray.models.text_towers import BertTower, build_text_tower

if TYPE_CHECKING:
    from mmray.config import TwoTower as Section

MAX_LOG_SCALE = math.log(100)  # CLIP's bound: beyond it the softmax saturates and training becomes unstable


class TwoTower(nn.Module):
    """An image branch and a text branch with one embedding space and a learned temperature.

    spec: the `model` section. vocab_size: tokens the tokenizer has. architecture: what `architecture()` of the same
    model gave; no pretrained weights are looked for then, the caller loads them. Raises UsageError.
    """

    def __init__(self, spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> None:
        super().__init__()
        inputs, shape = spec.inputs, architecture["text"] if architecture else None
        image = build_image_tower(spec.image, inputs.image_side, spec.batch_norm, fetch=architecture is None)
        text = build_text_tower(spec.text, vocab_size, inputs.max_tokens, shape)
        self.image = ImageBranch(image, spec.embed_dim, inputs.mean, inputs.std)
        self.text = TextBranch(text, spec.embed_dim)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch -> `image_embed`, `text_embed` [B, D] of length 1, `logit_scale` = 1 / temperature, a scalar."""
        return {
            "image_embed": self.image(batch["image"], batch.get("valid")),
            "text_embed": self.text(batch["input_ids"], batch["attention_mask"]),
            "logit_scale": self.log_scale.exp(),
        }

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

    def architecture(self) -> dict[str, Any]:
        """What the spec leaves to pretrained weights, as JSON values: the text encoder's own configuration."""
        return {"text": self.text.tower.shape()}

    @torch.no_grad()
    def constrain(self) -> None:
        """Keep the temperature at 0.01 or above; called after each optimizer step."""
        self.log_scale.clamp_(max=MAX_LOG_SCALE)


class ImageBranch(nn.Module):
    """Normalises pixels, encodes and projects them."""

    mean: Tensor
    std: Tensor

    def __init__(self, tower: nn.Module, embed_dim: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(cast("int", tower.width), embed_dim, bias=False)
        # In units of a byte, and no part of the weights: they are settings, and the spec holds them.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)
        self._norms = [layer for layer in tower.modules() if isinstance(layer, _BatchNorm)]

    def forward(self, image: Tensor, valid: Tensor | None = None) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> embeddings [B, D] of length 1; rows not valid may come back as zeros."""
        rows = self._rows_for_statistics(valid) if any(norm.training for norm in self._norms) else None
        pixels = (image if rows is None else image[rows]).to(self.mean.dtype)
        embedding = _unit(self.project(self.tower((pixels - self.mean) / self.std)))
        if rows is None:
            return embedding
        return embedding.new_zeros(len(image), embedding.shape[1]).index_copy(0, rows, embedding)

    def _rows_for_statistics(self, valid: Tensor | None) -> Tensor | None:
        """Rows to encode, so that padding does not reach BatchNorm's statistics; None for all of them.

        A batch of nothing but padding goes through whole, for the collectives that other ranks wait in.
        """
        if any(isinstance(norm, nn.SyncBatchNorm) for norm in self._norms) and not self.mean.is_cuda:
            raise UsageError("model.batch_norm: `synced` needs GPUs; take `local` or `frozen` on a CPU")
        if valid is None:
            return None
        rows = valid.nonzero().flatten()
        return rows if 0 < len(rows) < len(valid) else None


class TextBranch(nn.Module):
    """Encodes and projects captions."""

    def __init__(self, tower: BertTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> embeddings [B, D] of length 1."""
        return _unit(self.project(self.tower(input_ids, attention_mask)))


def _unit(embedding: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least: half precision would round away what a softmax at scale 100 shows."""
    if embedding.dtype in (torch.float16, torch.bfloat16):
        embedding = embedding.float()
    return functional.normalize(embedding, dim=-1)
