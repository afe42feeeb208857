"""Two towers with embeddings, and cross-attention between the tokens of a caption and the feature
map of its image.

Cross-attention feeds the heads: image-text matching and classification of the pair. A region head
classifies boxes over the texts of all labels.
Source: the multimodal encoder of ALBEF (Li et al. 2021, arXiv:2107.07651, section 3.1), with
pre-norm layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmray.errors import UsageError
from mmray.models.clip import l2_normalize
from mmray.models.encoders.text import mask_with_first, masked_mean
from mmray.models.protocol import Architecture
from mmray.models.two_tower import TwoTower
from mmray.models.weights import transformer_config

if TYPE_CHECKING:
    from mmray.config import CrossAttention
    from mmray.config import Fusion as FusionConfig


SAMPLES_PER_SIDE = 7  # sampling points of RoIAlign per side of a box
UNNAMED_LOGIT = -1e4  # logit of a label without a name: zero in any softmax, but finite


class RegionHead(nn.Module):
    """Project the features of boxes into the space of the text embeddings, so that new labels need
    no training.

    Sources: RoIAlign (He et al. 2017, arXiv:1703.06870), ViLD (Gu et al. 2022, arXiv:2104.13921),
    RegionCLIP (Zhong et al. 2022, arXiv:2112.09106).
    """

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, embed_dim, bias=False)

    def forward(self, grid: Tensor, boxes: Tensor) -> Tensor:
        """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the input image ->
        L2-normalized [B, N, D].
        """
        return l2_normalize(self.project(region_features(grid, boxes))).unflatten(
            0, boxes.shape[:2]
        )


def region_features(grid: Tensor, boxes: Tensor) -> Tensor:
    """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the input image -> mean of each
    box [B x N, W].
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


class LabelTexts(nn.Module):
    """Token ids of the label names 0, 1, ...: settings, not weights; a label may have no name.

    token_ids: ids of each name, as JSON values; None: call `tokenize` before the first forward.
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

    def tokenize(self, encoder: Any) -> None:
        """Tokenize the names with a TextEncoder (data/text/tokenizer.py)."""
        ids, num_tokens = encoder.encode(list(self._names))
        self._set([row[:length].tolist() for row, length in zip(ids, num_tokens, strict=True)])

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Ids and mask [C, T]. Raises UsageError before `tokenize`."""
        if self.token_ids is None:
            raise UsageError(
                "model.region_labels: names are not tokenized; call "
                "`model.label_texts.tokenize(encoder)`"
            )
        return self.ids, self.mask

    def _set(self, token_ids: list[list[int]] | None) -> None:
        self.token_ids, rows = (
            token_ids,
            [torch.tensor(row, dtype=torch.long) for row in token_ids or [[]]],
        )
        for name, column in {"ids": rows, "mask": [torch.ones_like(row) for row in rows]}.items():
            self.register_buffer(
                name, pad_sequence(column, batch_first=True).to(self.named.device), persistent=False
            )


def region_logits(
    regions: Tensor, texts: Tensor, scale: Tensor, named: Tensor | None = None
) -> Tensor:
    """Embeddings [B, N, D] and [C, D], and 1 / temperature -> logits [B, N, C]; unnamed labels are
    masked.
    """
    # half precision is too coarse at scale 100
    with torch.autocast(regions.device.type, enabled=False):
        logits = scale.to(regions.dtype) * regions @ texts.to(regions.dtype).T
    return logits if named is None else logits.masked_fill(~named, UNNAMED_LOGIT)


class CrossEncoder(nn.Module):
    """Layers of self-attention over text tokens and cross-attention from text tokens to image
    features.
    """

    def __init__(
        self, spec: CrossAttention, image_width: int, num_positions: int, text_width: int
    ) -> None:
        super().__init__()
        self.from_image, self.from_text = (
            nn.Linear(image_width, spec.width),
            nn.Linear(text_width, spec.width),
        )
        # feature maps have no positions
        self.position = nn.Parameter(0.02 * torch.randn(1, num_positions, spec.width))
        sizes = spec.width, spec.heads, transformer_config(spec)["intermediate_size"], spec.dropout
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(*sizes, **options) for _ in range(spec.depth)
        )
        self.norm = nn.LayerNorm(spec.width)

    def forward(
        self, image_features: Tensor, text_features: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """Image features [B, N, W], text features and mask [B, T, W], [B, T] -> mean over the text
        tokens [B, W].
        """
        padding = ~mask_with_first(attention_mask)
        hidden, memory = (
            self.from_text(text_features),
            self.from_image(image_features) + self.position,
        )
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
        image, side = self.image.tower, spec.inputs.image_side
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
        """Pixels and captions of the same rows -> features that the heads read [B, W]."""
        text_features, _ = self.text(input_ids, attention_mask)
        return self.cross(self.image(image)[0], text_features, attention_mask)

    def embed_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] in fractions of the input image -> L2-normalized embeddings
        [B, N, D].
        """
        return self._region_embeds(self.image(image)[0], boxes)

    def classify_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] in fractions of the input image -> logits [B, N, C] of the
        labels.
        """
        return self._region_logits(self.embed_regions(image, boxes))

    def _region_embeds(self, image_features: Tensor, boxes: Tensor) -> Tensor:
        assert self.region_head is not None
        return self.region_head(self.image.tower.grid(image_features), boxes)

    def _region_logits(self, regions: Tensor) -> Tensor:
        assert self.label_texts is not None
        texts = self.text(*self.label_texts.tokens())[1]
        return region_logits(regions, texts, self.log_scale.exp(), self.label_texts.named)

    def branches(self) -> dict[str, nn.Module]:
        return super().branches() | {"cross": self.cross}

    def architecture(self) -> dict[str, Any]:
        return super().architecture() | (
            {} if self.label_texts is None else {"labels": self.label_texts.token_ids}
        )
