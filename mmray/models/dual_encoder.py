"""Branches with one embedding space and a learned temperature, and their embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.models.caption_decoder import CaptionDecoder
from mmray.models.protocol import Encoded, Model, Outputs

if TYPE_CHECKING:
    from mmray.config.model_kinds import EmbeddingModel

MAX_LOG_SCALE = math.log(100)  # CLIP's bound: above it training is unstable


class MultiEncoder(Model):
    """Branches for modalities with one embedding space, and a learned temperature. The branches
    pool, project and normalize.

    A subclass implements `forward`.

    Args:
        branches: By name of the modality a module that returns L2-normalized embeddings [B, D]. It
            becomes an attribute of this name.
        spec: The `model` section, for the initial `temperature` and `logit_bias`.

    Attributes:
        modalities: Names of the branches.
        max_log_scale: Maximum of log(1 / temperature); None: no limit.
        logit_bias: Learned bias of the logits of the sigmoid loss, a scalar; None: none.
    """

    max_log_scale: float | None = MAX_LOG_SCALE
    logit_bias: nn.Parameter | None

    def __init__(self, branches: Mapping[str, nn.Module], spec: EmbeddingModel) -> None:
        super().__init__()
        self.modalities = tuple(branches)
        for name, branch in branches.items():
            self.add_module(name, branch)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(spec.temperature)))
        self.logit_bias = None
        if spec.logit_bias is not None:
            self.logit_bias = nn.Parameter(torch.tensor(float(spec.logit_bias)))

    def scalar_outputs(self) -> Outputs:
        """Return the scalar outputs that do not depend on the batch.

        They are `logit_scale` = 1 / temperature and, if configured, `logit_bias`.
        """
        outputs = {"logit_scale": self.log_scale.exp()}
        if self.logit_bias is not None:
            outputs["logit_bias"] = self.logit_bias * 1  # an output, not the leaf
        return outputs

    def branches(self) -> dict[str, nn.Module]:
        return {name: self.get_submodule(name) for name in self.modalities}

    @torch.no_grad()
    def clamp_parameters(self) -> None:
        """Clamp log(1 / temperature) to 0..`max_log_scale`."""
        if self.max_log_scale is not None:
            self.log_scale.clamp_(min=0.0, max=self.max_log_scale)


class DualEncoder(MultiEncoder):
    """An image and a text branch with one embedding space and a learned temperature, and maybe a
    decoder of captions.

    Forward takes a batch as a dict with the images `image` uint8 [B, 3, S, S] and the captions
    `input_ids` and `attention_mask` int64 [B, T]. It returns a dict with `image_embed` and
    `text_embed` [B, D], L2-normalized, and the scalars `logit_scale` and, if the model has it,
    `logit_bias`. With a decoder also `caption_losses` [B], except in training without gradients,
    because the first pass of a step (GradCache) reads only the embeddings.

    Args:
        image: Maps pixels uint8 [B, 3, S, S] to L2-normalized embeddings [B, D], or, for a decoder,
            to an `Encoded`.
        text: Maps token ids and mask, int64 [B, T], to L2-normalized embeddings [B, D].
        spec: The `model` section, for the initial `temperature` and `logit_bias`.
    """

    image: nn.Module
    text: nn.Module

    def __init__(
        self,
        image: nn.Module,
        text: nn.Module,
        spec: EmbeddingModel,
        decoder: CaptionDecoder | None = None,
    ) -> None:
        super().__init__({"image": image, "text": text}, spec)
        self.decoder = decoder

    def forward(self, batch: Batch) -> Outputs:
        tokens = batch["input_ids"], batch["attention_mask"]
        encoded = self.image(batch["image"])
        text_embed = self.text(*tokens)
        outputs = {"image_embed": Encoded.embedding(encoded), "text_embed": text_embed}
        if self.decoder is not None and (torch.is_grad_enabled() or not self.training):
            outputs["caption_losses"] = self.decoder(encoded.features, *tokens)
        return outputs | self.scalar_outputs()

    def embed_image(self, image: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of images, pixels uint8 [B, 3, S, S]."""
        return Encoded.embedding(self.image(image))

    def caption(self, image: Tensor, end_id: int) -> Tensor:
        assert self.decoder is not None
        return self.decoder.generate(self.image(image).features, end_id)

    def branches(self) -> dict[str, nn.Module]:
        decoder = {} if self.decoder is None else {"decoder": self.decoder}
        return super().branches() | decoder

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of captions."""
        return self.text(input_ids, attention_mask)


def l2_normalize(embedding: Tensor) -> Tensor:
    """Scale the vectors of the last dimension to unit length, in at least float32, because half
    precision is too coarse for a softmax at `logit_scale` 100.
    """
    return F.normalize(embedding.to(torch.promote_types(embedding.dtype, torch.float32)), dim=-1)
