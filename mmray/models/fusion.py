"""Two towers with embeddings, and cross-attention between the tokens of a caption and the feature
map of its image.

Cross-attention feeds the heads: image-text matching and classification of the pair. A region head
classifies boxes over the texts of all labels.
Source: the multimodal encoder of ALBEF (Li et al. 2021, arXiv:2107.07651, section 3.1), with
pre-norm layers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.models.encoders.text import mask_with_first, masked_mean
from mmray.models.protocol import Architecture, HeadScores
from mmray.models.regions import LabelTexts, RegionHead, region_label_scores, region_logits
from mmray.models.two_tower import TwoTower
from mmray.models.weights import transformer_config

if TYPE_CHECKING:
    from mmray.config import CrossAttention
    from mmray.config import Fusion as FusionConfig


class CrossEncoder(nn.Module):
    """Layers of self-attention over text tokens and cross-attention from text tokens to image
    features.
    """

    def __init__(
        self, spec: CrossAttention, image_width: int, num_positions: int, text_width: int
    ) -> None:
        super().__init__()
        self.from_image = nn.Linear(image_width, spec.width)
        self.from_text = nn.Linear(text_width, spec.width)
        # feature maps have no positions
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
        self, image_features: Tensor, text_features: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """Let captions attend to images.

        Args:
            image_features: [B, N, W].
            text_features: [B, T, W].
            attention_mask: [B, T], 1 is a token.

        Returns:
            Mean over the text tokens [B, W].
        """
        padding = ~mask_with_first(attention_mask)
        hidden = self.from_text(text_features)
        memory = self.from_image(image_features) + self.position
        for layer in self.layers:
            hidden = layer(hidden, memory, tgt_key_padding_mask=padding)
        return masked_mean(self.norm(hidden), attention_mask)


class Fusion(TwoTower):
    """Two towers, cross-attention layers, and the configured heads."""

    with_features = True

    def __init__(
        self, spec: FusionConfig, vocab_size: int, architecture: Architecture = None
    ) -> None:
        super().__init__(spec, vocab_size, architecture)
        image = self.image.tower
        side = spec.inputs.image_side
        # A forward of a copy on the meta device, without memory; the weights of the image tower may
        # be on it too.
        on_meta = copy.deepcopy(
            image, {id(it): it.to("meta") for it in (*image.parameters(), *image.buffers())}
        )
        with torch.no_grad():
            num_positions = (
                on_meta.eval().features(torch.zeros(1, 3, side, side, device="meta")).shape[1]
            )
        self.cross = CrossEncoder(spec.cross, image.width, num_positions, self.text.tower.width)
        self.match_head = nn.Linear(spec.cross.width, 1) if spec.matching else None
        self.class_head = nn.Linear(spec.cross.width, spec.classes) if spec.classes else None
        self.region_head = RegionHead(image.width, spec.embed_dim) if spec.regions else None
        # `{}`: without a tokenizer
        placeholder_ids = [[n % vocab_size] for n in range(len(spec.region_labels))]
        token_ids = None if architecture is None else architecture.get("labels", placeholder_ids)
        self.label_texts = LabelTexts(spec.region_labels, token_ids) if spec.regions else None

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `image_embed`, `text_embed` [B, D], `logit_scale`, and the outputs of the heads.

        Classification: `class_logits` [B, C]. Matching, with `negative_ids` and `negative_mask` [B,
        T]: `match` and `match_negative` [B], logits of each image with its caption and with the
        negative one. Regions, with `boxes` [B, N, 4]: `region_logits` [B, N, C], each box against
        each label text.
        """
        image_features, image_embed = self.image(batch["image"])
        text_features, text_embed = self.text(batch["input_ids"], batch["attention_mask"])
        outputs = {"image_embed": image_embed, "text_embed": text_embed, **self.scalar_outputs()}
        matching = self.match_head is not None and "negative_ids" in batch
        if matching or self.class_head is not None:
            pair = self.cross(image_features, text_features, batch["attention_mask"])
            if self.class_head is not None:
                outputs["class_logits"] = self.class_head(pair)
        if self.match_head is not None and matching:
            other, _ = self.text(batch["negative_ids"], batch["negative_mask"])
            negative = self.cross(image_features, other, batch["negative_mask"])
            outputs["match"] = self.match_head(pair).squeeze(1)
            outputs["match_negative"] = self.match_head(negative).squeeze(1)
        if self.label_texts is not None and "boxes" in batch:
            outputs["region_logits"] = self._region_logits(
                self._region_embeds(image_features, batch["boxes"])
            )
        return outputs

    def embed_image(self, image: Tensor) -> Tensor:
        return self.image(image)[1]

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.text(input_ids, attention_mask)[1]

    def embed_pair(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features of pairs that the heads read.

        Args:
            image: Pixels [B, 3, S, S].
            input_ids: Captions of the same rows [B, T].
            attention_mask: [B, T], 1 is a token.

        Returns:
            [B, W].
        """
        text_features, _ = self.text(input_ids, attention_mask)
        return self.cross(self.image(image)[0], text_features, attention_mask)

    def embed_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Embed boxes of images.

        Args:
            image: Pixels [B, 3, S, S].
            boxes: [B, N, 4] in fractions of the input image.

        Returns:
            L2-normalized embeddings [B, N, D].
        """
        return self._region_embeds(self.image(image)[0], boxes)

    def classify_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Return the logits of the labels of training for boxes of images.

        Args:
            image: Pixels [B, 3, S, S].
            boxes: [B, N, 4] in fractions of the input image.

        Returns:
            Logits [B, N, C].
        """
        return self._region_logits(self.embed_regions(image, boxes))

    def _region_embeds(self, image_features: Tensor, boxes: Tensor) -> Tensor:
        assert self.region_head is not None
        return self.region_head(self.image.tower.grid(image_features), boxes)

    def _region_logits(self, regions: Tensor) -> Tensor:
        assert self.label_texts is not None
        texts = self.text(*self.label_texts.tokens())[1]
        return region_logits(regions, texts, self.log_scale.exp(), self.label_texts.named)

    def use_tokenizer(self, encoder: Any) -> None:
        """Tokenize the label names, unless their ids come from a checkpoint."""
        if self.label_texts is not None and self.label_texts.token_ids is None:
            self.label_texts.tokenize(encoder)

    def head_scores(self, batch: dict[str, Tensor]) -> dict[str, HeadScores]:
        """Return the scores of the classification head and of the region head."""
        scores = {}
        if self.class_head is not None:
            pair = self.embed_pair(batch["image"], batch["input_ids"], batch["attention_mask"])
            classes = self.class_head.out_features
            scores["classification"] = HeadScores(self.class_head(pair), batch["label"], classes)
        if self.label_texts is not None and "boxes" in batch:
            logits = self.classify_regions(batch["image"], batch["boxes"])
            scores["regions"] = region_label_scores(logits, batch, self.label_texts)
        return scores

    def branches(self) -> dict[str, nn.Module]:
        return super().branches() | {"cross": self.cross}

    def architecture(self) -> dict[str, Any]:
        return super().architecture() | (
            {} if self.label_texts is None else {"labels": self.label_texts.token_ids}
        )
