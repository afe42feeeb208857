"""Cross-attention between the words of a caption and the places of its image: a model that looks at both at once.

Two towers as in two_tower.py give an embedding each, for retrieval and for the choice of hard negatives; then several
layers let each word attend to the other words and to the image's feature map. What comes out says whether the two
match, and of which class the pair is. Where rows have boxes, each is set beside the texts of all labels (regions.py).
Rows never see each other: attention is within a row, padding is masked.
Source: the multimodal encoder of ALBEF (Li et al. 2021, arXiv:2107.07651, section 3.1), with pre-norm layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mmray.data.text.chat import language_token_pattern
from mmray.errors import UsageError
from mmray.models.clip import DualEncoder, NormalizePixels, l2_normalize
from mmray.models.encoders import image as image_towers
from mmray.models.encoders.text import HfTextTower, build_text_tower, mask_with_first, random_init_config

if TYPE_CHECKING:
    from mmray.config import CrossAttention as CrossSection
    from mmray.config import Fusion as Section


# Boxes of an image and the texts of their labels, in one space: the region-text head of fusion.py.
#
# A box's features are the mean of the image's feature map inside it; what it is called is read by the text branch, so
# that a trained model can be asked about words that no label had. Sources: RoIAlign (He et al. 2017, arXiv:1703.06870),
# region embeddings against texts of labels (Gu et al. 2022, ViLD, arXiv:2104.13921; Zhong et al. 2022, RegionCLIP,
# arXiv:2112.09106).
SAMPLES_PER_SIDE = 7  # points of the feature map a side of a box, whose mean its features are
UNNAMED_LOGIT = -1e4  # logit of a label without a name: no share of the softmax in any format, and finite


class RegionHead(nn.Module):
    """Boxes of a feature map to embeddings in the space of the texts."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, embed_dim, bias=False)

    def forward(self, grid: Tensor, boxes: Tensor) -> Tensor:
        """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the square -> [B, N, D] of length 1."""
        num_rows, num_boxes = boxes.shape[:2]
        features = self.project(region_features(grid, boxes))
        return l2_normalize(features).view(num_rows, num_boxes, self.project.out_features)


def region_features(grid: Tensor, boxes: Tensor) -> Tensor:
    """Feature map [B, W, H, H] and boxes [B, N, 4] in fractions of the square -> mean inside each box [B x N, W]."""
    from torchvision.ops import roi_align

    num_rows, num_boxes = boxes.shape[:2]
    precise = grid.to(torch.promote_types(grid.dtype, torch.float32))  # a row's number has no room in half precision
    row = torch.arange(num_rows, device=boxes.device).repeat_interleave(num_boxes)
    placed = torch.cat([row[:, None].to(precise.dtype), boxes.flatten(0, 1).to(precise.dtype)], dim=1)
    found: Tensor = roi_align(
        precise, placed, output_size=1, spatial_scale=grid.shape[-1], sampling_ratio=SAMPLES_PER_SIDE, aligned=True
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
    return logits if named is None else logits.masked_fill(~named, UNNAMED_LOGIT)


FEED_FORWARD = 4  # width of the feed-forward layer over the width of a token


class Fusion(DualEncoder):
    """Two towers, the layers between them, and the heads that the section asks for.

    spec: the `model` section. vocab_size: tokens the tokenizer has. architecture: what `architecture()` of the same
    model gave; no pretrained weights are looked for then, the caller loads them. Raises UsageError.
    """

    image: FusionImage
    text: FusionText

    def __init__(self, spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> None:
        inputs, shape = spec.inputs, architecture["text"] if architecture else None
        image = image_towers.build_image_tower(spec.image, inputs.image_side, spec.batch_norm, architecture)
        text = build_text_tower(spec.text, vocab_size, inputs.max_tokens, shape, language_token_pattern(inputs))
        pixels = NormalizePixels(inputs.mean, inputs.std)
        super().__init__(FusionImage(pixels, image, spec.embed_dim), FusionText(text, spec.embed_dim), spec)
        num_places = _num_image_tokens(image, inputs.image_side)
        self.cross = CrossEncoder(spec.cross, cast("int", image.width), num_places, text.width)
        self.match_head = nn.Linear(spec.cross.width, 1) if spec.matching else None
        self.class_head = nn.Linear(spec.cross.width, spec.classes) if spec.classes else None
        regions = getattr(spec, "regions", False)  # an export of an earlier version says nothing of them
        self.region_head = RegionHead(cast("int", image.width), spec.embed_dim) if regions else None
        self.labels = LabelTexts(spec.region_labels, (architecture or {}).get("labels")) if regions else None

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch -> `image_embed`, `text_embed` [B, D] of length 1, `logit_scale`, a scalar; and by the heads:

        `class_logits` [B, C]; where the batch brings `negative_ids`, `negative_mask` [B, T] also `match` and
        `match_negative` [B], the logits of each image with its own caption and with that one; where it brings `boxes`
        [B, N, 4] also `region_logits` [B, N, C], of each box with the text of each label.
        """
        places, image_embed = self.image(batch["image"])
        words, text_embed = self.text(batch["input_ids"], batch["attention_mask"])
        outputs = {"image_embed": image_embed, "text_embed": text_embed, **self.scalar_outputs()}
        matching = self.match_head is not None and "negative_ids" in batch
        if matching or self.class_head is not None:
            pair = self.cross(places, words, batch["attention_mask"])
            if self.class_head is not None:
                outputs["class_logits"] = self.class_head(pair)
        if self.match_head is not None and matching:
            other, _ = self.text(batch["negative_ids"], batch["negative_mask"])
            negative = self.cross(places, other, batch["negative_mask"])
            outputs["match"] = self.match_head(pair).squeeze(1)
            outputs["match_negative"] = self.match_head(negative).squeeze(1)
        if self.labels is not None and "boxes" in batch:
            outputs["region_logits"] = self._named(self._regions(places, batch["boxes"]))
        return outputs

    def embed_image(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> embeddings [B, D] of length 1."""
        embedding: Tensor = self.image(image)[1]
        return embedding

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> embeddings [B, D] of length 1."""
        embedding: Tensor = self.text(input_ids, attention_mask)[1]
        return embedding

    def embed_pair(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Pixels and captions of the same rows -> what the heads read, [B, W]."""
        words, _ = self.text(input_ids, attention_mask)
        pair: Tensor = self.cross(self.image(image)[0], words, attention_mask)
        return pair

    def embed_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] in fractions of the square -> embeddings [B, N, D] of length 1."""
        return self._regions(self.image(image)[0], boxes)

    def classify_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] in fractions of the square -> logits [B, N, C] of the labels."""
        return self._named(self.embed_regions(image, boxes))

    def _regions(self, places: Tensor, boxes: Tensor) -> Tensor:
        assert self.region_head is not None
        regions: Tensor = self.region_head(self.image.tower.grid(places), boxes)
        return regions

    def _named(self, regions: Tensor) -> Tensor:
        """Embeddings [B, N, D] -> logits [B, N, C] of the labels, whose texts the text branch reads."""
        assert self.labels is not None
        texts = self.text(*self.labels.tokens())[1]
        return region_logits(regions, texts, self.log_scale.exp(), self.labels.named)

    def branches(self) -> dict[str, nn.Module]:
        """The two towers, and the layers that need both."""
        return {"image": self.image, "text": self.text, "cross": self.cross}

    def architecture(self) -> dict[str, Any]:
        """What the spec leaves open, as JSON values: the encoders' own configurations, the tokens of labels."""
        labels = {} if self.labels is None else {"labels": self.labels.plain()}
        return {"text": self.text.tower.shape()} | image_towers.image_architecture(self.image.tower) | labels

    @staticmethod
    def random_init_architecture(spec: Section, vocab_size: int) -> dict[str, Any]:
        """The `architecture` of a model with drawn weights in the spec's own shape; a label is one token then."""
        labels = {"labels": [[number % vocab_size] for number in range(len(spec.region_labels))]}
        towers = {"text": random_init_config(spec.text, vocab_size, spec.inputs.max_tokens)}
        return towers | image_towers.random_init_architecture(spec.image) | (labels if spec.regions else {})


class FusionImage(nn.Module):
    """Normalises pixels and encodes them to a feature map, and to an embedding."""

    def __init__(self, pixels: NormalizePixels, tower: Any, embed_dim: int) -> None:
        super().__init__()
        self.pixels, self.tower = pixels, tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels uint8 [B, 3, S, S] -> places [B, N, W] and embeddings [B, D] of length 1."""
        places = self.tower.places(self.pixels(image))
        return places, l2_normalize(self.project(self.tower.pool(places)))


class FusionText(nn.Module):
    """Encodes captions to features of each word, and to an embedding."""

    def __init__(self, tower: HfTextTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T] -> words [B, T, W] and embeddings [B, D] of length 1."""
        words = self.tower.words(input_ids, attention_mask)
        return words, l2_normalize(self.project(self.tower.pool(words, attention_mask)))


class CrossEncoder(nn.Module):
    """Layers of self-attention over the words and cross-attention from words to places."""

    def __init__(self, spec: CrossSection, image_width: int, num_places: int, text_width: int) -> None:
        super().__init__()
        self.from_image, self.from_text = nn.Linear(image_width, spec.width), nn.Linear(text_width, spec.width)
        self.position = nn.Parameter(0.02 * torch.randn(1, num_places, spec.width))  # a feature map does not know it
        self.layers = nn.ModuleList(_layer(spec) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, places: Tensor, words: Tensor, attention_mask: Tensor) -> Tensor:
        """places [B, N, W], words [B, T, W] and their mask [B, T] -> the mean over the words that are there, [B, W]."""
        there = mask_with_first(attention_mask)
        hidden, memory = self.from_text(words), self.from_image(places) + self.position
        for layer in self.layers:
            hidden = layer(hidden, memory, tgt_key_padding_mask=~there)
        weight = there.unsqueeze(-1).to(hidden.dtype)
        return (self.norm(hidden) * weight).sum(1) / weight.sum(1)


def _layer(spec: CrossSection) -> nn.TransformerDecoderLayer:
    if spec.width % spec.heads:
        raise UsageError(
            f"model.cross.heads: width {spec.width} cannot be shared out over {spec.heads} heads; "
            f"take a number of heads that divides model.cross.width"
        )
    return nn.TransformerDecoderLayer(
        spec.width,
        spec.heads,
        FEED_FORWARD * spec.width,
        spec.dropout,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )


@torch.no_grad()
def _num_image_tokens(tower: Any, image_side: int) -> int:
    """How many places the feature map of an image has; statistics are left alone."""
    was_training = tower.training
    tower.eval()
    places: Tensor = tower.places(torch.zeros(1, 3, image_side, image_side))
    tower.train(was_training)
    return places.shape[1]
