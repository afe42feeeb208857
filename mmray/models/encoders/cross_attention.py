"""Cross-attention between the tokens of a text and other modalities, and the heads that read it:
matching and classification.

Source: the multimodal encoder of ALBEF (Li et al. 2021, arXiv:2107.07651, section 3.1), with
pre-norm layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.models.encoders.text import mask_with_first, masked_mean
from mmray.models.protocol import Outputs
from mmray.models.weights import transformer_config

if TYPE_CHECKING:
    from mmray.config import CrossAttention
    from mmray.config.model_kinds import PairModel


class CrossEncoder(nn.Module):
    """Layers of self-attention over text tokens and cross-attention from text tokens to features of
    other modalities.

    Forward takes the features of the other modalities by name, [B, N, width] each, text features
    [B, T, text_width], the attention mask of the text, int64 [B, T], and optionally masks of the
    other modalities by name, int64 [B, N], 0 for padding. It returns one feature vector for each
    pair (a text and the other modalities of its row), [B, W]: the mean over the tokens.

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
        self.layers = nn.ModuleList(
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
        self.norm = nn.LayerNorm(spec.width)

    def forward(
        self,
        features: Mapping[str, Tensor],
        text_features: Tensor,
        attention_mask: Tensor,
        masks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        padding = ~mask_with_first(attention_mask)
        hidden = self.from_text(text_features)
        memory = torch.cat(
            [self.get_submodule(f"from_{name}")(each) for name, each in features.items()], dim=1
        )
        if self.position is not None:
            memory = memory + self.position
        absent = None
        if masks is not None:
            # A position of zeros, so that a row without other modalities has no empty softmax.
            memory = F.pad(memory, (0, 0, 1, 0))
            present = torch.cat([masks[name] for name in features], dim=1)
            absent = ~mask_with_first(F.pad(present, (1, 0)))
        for layer in self.layers:
            hidden = layer(
                hidden, memory, tgt_key_padding_mask=padding, memory_key_padding_mask=absent
            )
        return masked_mean(self.norm(hidden), attention_mask)


class PairHeads:
    """Heads on the cross-attention of a model with a text branch; a mixin of torch modules.

    A model sets `text`, calls `add_heads` when it is built, and `head_outputs` in its forward.

    Attributes:
        text: Text branch, called with token ids and attention mask, int64 [B, T]; its result has
            the `features` [B, T, W] of the tokens.
        cross: The cross-attention, from the features of texts and other modalities to one feature
            [B, W] of each pair.
        match_head: From [B, W] to the logit [B, 1] that text and other modalities match; None: no
            such head.
        class_head: From [B, W] to the logits [B, C] of the classes of the pair; None: no such head.
    """

    text: Any
    cross: CrossEncoder
    match_head: nn.Linear | None
    class_head: nn.Linear | None

    def add_heads(self, spec: PairModel, cross: CrossEncoder) -> None:
        """Set the attributes `cross`, `match_head` and `class_head` of this module: the
        cross-attention, and linear heads on its features [B, W].

        Args:
            spec: The `model` section: with `matching` there is a head to one logit, with `classes`
                (their number C, not 0) a head to C logits; otherwise the head is None.
        """
        self.cross = cross
        width = spec.cross.width
        self.match_head = nn.Linear(width, 1) if spec.matching else None
        self.class_head = nn.Linear(width, spec.classes) if spec.classes else None

    def head_outputs(
        self,
        features: Mapping[str, Tensor],
        text_features: Tensor,
        batch: Mapping[str, Tensor],
        masks: Mapping[str, Tensor] | None = None,
    ) -> Outputs:
        """Return the outputs of the heads.

        Args:
            features: Features of each position of the other modalities [B, N, width], by name, such
                as `image`.
            text_features: Features of each token of the texts [B, T, W].
            batch: `attention_mask` int64 [B, T]. Optional: `negative_ids` and `negative_mask` int64
                [B, T], texts that do not match.
            masks: int64 [B, N] of each modality by name, 0 for padding and for rows that lack it;
                None: no row lacks any.

        Returns:
            With a classification head `class_logits` [B, C]. With a matching head and negatives
            `match` and `match_negative` [B], the logits that a row matches its own and its negative
            text.
        """
        outputs: Outputs = {}
        matching = self.match_head is not None and "negative_ids" in batch
        if matching or self.class_head is not None:
            pair = self.cross(features, text_features, batch["attention_mask"], masks)
            if self.class_head is not None:
                outputs["class_logits"] = self.class_head(pair)
        if self.match_head is not None and matching:
            other = self.text(batch["negative_ids"], batch["negative_mask"]).features
            negative = self.cross(features, other, batch["negative_mask"], masks)
            outputs["match"] = self.match_head(pair).squeeze(1)
            outputs["match_negative"] = self.match_head(negative).squeeze(1)
        return outputs
