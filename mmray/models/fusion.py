"""Two towers with embeddings, and cross-attention between the tokens of a caption and the feature
map of its image.

Cross-attention feeds the heads: image-text matching and classification of the pair. A region head
classifies boxes over the texts of all labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.models.encoders.cross_attention import CrossEncoder, PairHeads
from mmray.models.protocol import PRETRAINED, HeadScores, Outputs, WeightSource
from mmray.models.regions import LabelTexts, RegionHead, region_label_scores, region_logits
from mmray.models.two_tower import TwoTower

if TYPE_CHECKING:
    from mmray.config import Fusion as FusionConfig
    from mmray.data.text.tokenizer import TextEncoder


class Fusion(PairHeads, TwoTower):
    """Two towers, cross-attention layers from text tokens to image positions, and the configured
    heads. The embeddings come from the towers alone; the heads of matching and classification read
    the mean over the tokens of the cross-attention, the region head the image features of a box.

    Forward takes a batch as a dict with the images `image` uint8 [B, 3, S, S] and the captions
    `input_ids` and `attention_mask` int64 [B, T], and returns `image_embed` and `text_embed` [B,
    D], L2-normalized, and the scalar `logit_scale`. The configured heads add `match` and
    `match_negative` [B], `class_logits` [B, C] and `region_logits` [B, N, C].

    Args:
        spec: The `model` section, of kind `fusion`.
        vocab_size: Rows of the token embedding, without pretrained weights.
    """

    with_features = True

    def __init__(
        self, spec: FusionConfig, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        super().__init__(spec, vocab_size, source)
        image = self.image.tower
        num_positions = image.num_positions(spec.inputs.image_side)
        widths = {"image": image.width}
        cross = CrossEncoder(spec.cross, widths, self.text.tower.width, num_positions)
        self.add_heads(spec, cross)
        self.region_head = None
        self.label_texts = None
        if spec.inputs.max_boxes:
            self.region_head = RegionHead(image.width, spec.embed_dim)
            ids = [[n % vocab_size] for n in range(len(spec.region_labels))]  # without a tokenizer
            token_ids = None if source.pretrained else source.saved.get("labels", ids)
            self.label_texts = LabelTexts(spec.region_labels, token_ids)

    def forward(self, batch: Batch) -> Outputs:
        image = self.image(batch["image"])
        text = self.text(batch["input_ids"], batch["attention_mask"])
        outputs = {"image_embed": image.embed, "text_embed": text.embed, **self.scalar_outputs()}
        outputs |= self.head_outputs({"image": image.features}, text.features, batch)
        if self.label_texts is not None and "boxes" in batch:
            outputs["region_logits"] = self._region_logits(
                self._region_embeds(image.features, batch["boxes"])
            )
        return outputs

    def embed_image(self, image: Tensor) -> Tensor:
        return self.image(image).embed

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.text(input_ids, attention_mask).embed

    def embed_pair(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features [B, W] of pairs of an image and a caption, which the heads read."""
        text = self.text(input_ids, attention_mask)
        return self.cross({"image": self.image(image).features}, text.features, attention_mask)

    def embed_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Embed boxes of images, (left, top, right, bottom) in fractions of the input image, in the
        space of the text embeddings.
        """
        return self._region_embeds(self.image(image).features, boxes)

    def classify_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Return the logits [B, N, C] of the labels in `model.region_labels` for boxes."""
        return self._region_logits(self.embed_regions(image, boxes))

    def _region_embeds(self, image_features: Tensor, boxes: Tensor) -> Tensor:
        assert self.region_head is not None
        return self.region_head(self.image.tower.grid(image_features), boxes)

    def _region_logits(self, regions: Tensor) -> Tensor:
        assert self.label_texts is not None
        texts = self.text(*self.label_texts.tokens()).embed
        return region_logits(regions, texts, self.log_scale.exp(), self.label_texts.named)

    def use_tokenizer(self, encoder: TextEncoder) -> None:
        if self.label_texts is not None and self.label_texts.token_ids is None:
            self.label_texts.tokenize(encoder)

    def head_scores(self, batch: Batch) -> dict[str, HeadScores]:
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
