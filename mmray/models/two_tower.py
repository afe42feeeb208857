"""Two towers chosen by name (CLIP's layout), each with a projection into the shared embedding
space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmray.models.caption_decoder import build_decoder
from mmray.models.dual_encoder import DualEncoder, l2_normalize
from mmray.models.encoders.image import ImageEncoder, build_image_tower
from mmray.models.encoders.text import build_text_tower, masked_mean
from mmray.models.pixels import EmbedPixels, NormalizePixels
from mmray.models.protocol import PRETRAINED, Encoded, WeightSource

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config.model_kinds import TwoTower as TwoTowerConfig


class Branch(nn.Module):
    """Encode and project one modality: images, videos, audio or texts. Images are pooled by their
    tower, others by the mean over the positions that are not padding.

    Forward takes (media, lengths): pixels uint8 of images [B, 3, S, S] without lengths; pixels of
    videos [B, F, 3, S, S] or samples int16 [B, N] with the number of frames or samples of each row,
    int64 [B]; or token ids with their attention mask, int64 [B, T]. It returns L2-normalized
    embeddings [B, D]; with `with_features` an `Encoded`, which has them as `embed`, and `features`
    and `mask`.

    Args:
        tower: Module with an attribute `width`. One of images is an ImageEncoder: `embed` takes
            normalized pixels, `encode` its result, and `pool` that of `encode`. Others are called
            with (media, lengths) and return features [B, N, width] and their mask int64 [B, N].
        embed_dim: Size D of the embeddings.
        inputs: The `model.inputs` section, for mean and standard deviation of pixels; None: the
            branch takes no pixels.
        with_features: Return `Encoded` with the features of each position too. Branches that return
            one tensor can run as CUDA graphs.
    """

    def __init__(
        self,
        tower: Any,
        embed_dim: int,
        inputs: Inputs | None = None,
        with_features: bool = False,
    ) -> None:
        super().__init__()
        self.pixels: nn.Module | None = None
        if inputs is not None and isinstance(tower, ImageEncoder):
            self.pixels = EmbedPixels(tower.embed, inputs.mean, inputs.std)
        elif inputs is not None:
            self.pixels = NormalizePixels(inputs.mean, inputs.std)
        self.tower = tower
        self.with_features = with_features
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, media: Tensor, lengths: Tensor | None = None) -> Any:
        if self.pixels is not None:
            media = self.pixels(media)
        if lengths is None:
            mask = None
            features = self.tower.encode(media)
            pooled = self.tower.pool(features)
        else:
            features, mask = self.tower(media, lengths)
            pooled = masked_mean(features, mask)
        embed = l2_normalize(self.project(pooled))
        return Encoded(features, mask, embed) if self.with_features else embed


class TwoTower(DualEncoder):
    """An image and a text branch with one embedding space and a learned temperature. The image
    tower pools images; texts are pooled by the mean over their tokens; both are projected linearly.

    Args:
        spec: The `model` section, of kind `two_tower`.
        vocab_size: Rows of the token embedding, without pretrained weights.
    """

    image: Branch
    text: Branch

    def __init__(
        self, spec: TwoTowerConfig, vocab_size: int, source: WeightSource = PRETRAINED
    ) -> None:
        inputs = spec.inputs
        image = build_image_tower(spec.image, inputs.image_side, spec.batch_norm, source)
        text = build_text_tower(spec.text, vocab_size, inputs.max_tokens, source)
        decoder = build_decoder(spec, image.width, vocab_size, source, image)
        super().__init__(
            Branch(image, spec.embed_dim, inputs, with_features=decoder is not None),
            Branch(text, spec.embed_dim),
            spec,
            decoder,
        )

    def architecture(self) -> dict[str, Any]:
        return tower_configs({"text": self.text.tower, "image": self.image.tower})


def tower_configs(towers: dict[str, nn.Module]) -> dict[str, Any]:
    """Return the transformers configs of encoders that wrap a model of transformers as `net`."""
    nets = {name: dict(tower.named_children()).get("net") for name, tower in towers.items()}
    configs = {name: vars(net).get("config") for name, net in nets.items() if net is not None}
    return {name: config.to_dict() for name, config in configs.items() if config is not None}
