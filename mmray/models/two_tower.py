"""Two towers chosen by name (CLIP's layout), each with a projection into the shared embedding
space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmray.models.clip import DualEncoder, l2_normalize
from mmray.models.encoders.image import ImageEncoder, build_image_tower
from mmray.models.encoders.text import build_text_tower, masked_mean
from mmray.models.pixels import NormalizePixels
from mmray.models.protocol import Architecture

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config.model_kinds import TowerModel


class ImageBranch(nn.Module):
    """Normalize, encode and project images.

    Forward takes pixels uint8 [B, 3, S, S] and returns L2-normalized embeddings [B, D]; with
    `with_features` a pair of the features [B, N, W] of the positions and the embeddings.

    Args:
        tower: Maps normalized pixels [B, 3, S, S] to features [B, N, W] by `features`, and these to
            [B, W] by `pool`.
        embed_dim: Size D of the embeddings.
        inputs: The `model.inputs` section, for mean and standard deviation of the pixels.
        with_features: Return the features of each position too.
    """

    def __init__(
        self, tower: ImageEncoder, embed_dim: int, inputs: Inputs, with_features: bool
    ) -> None:
        super().__init__()
        self.pixels = NormalizePixels(inputs.mean, inputs.std)
        self.tower = tower
        self.with_features = with_features
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, image: Tensor) -> Any:
        """Embed images.

        Args:
            image: Pixels uint8 [B, 3, S, S].

        Returns:
            L2-normalized embeddings [B, D]; built `with_features` a pair of the features of each
            position [B, N, W] and the embeddings.
        """
        features = self.tower.features(self.pixels(image))
        embedding = l2_normalize(self.project(self.tower.pool(features)))
        return (features, embedding) if self.with_features else embedding


class TextBranch(nn.Module):
    """Encode and project captions.

    Forward takes token ids and an attention mask (1 for a token, 0 for padding), both int64 [B, T],
    and returns L2-normalized embeddings [B, D]; with `with_features` a pair of the features [B, T,
    W] of the tokens and the embeddings.

    Args:
        tower: Module with an attribute `width`, called with the token ids and the mask; it returns
            features of each token [B, T, width].
        embed_dim: Size D of the embeddings.
        with_features: Return the features of each token too.
    """

    def __init__(self, tower: Any, embed_dim: int, with_features: bool) -> None:
        super().__init__()
        self.tower = tower
        self.with_features = with_features
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Embed captions by the mean over their tokens.

        Args:
            input_ids: Token ids int64 [B, T], right-padded.
            attention_mask: int64 [B, T], 1 for a token and 0 for padding.

        Returns:
            L2-normalized embeddings [B, D]; built `with_features` a pair of the features of each
            token [B, T, W] and the embeddings.
        """
        features = self.tower(input_ids, attention_mask)
        embedding = l2_normalize(self.project(masked_mean(features, attention_mask)))
        return (features, embedding) if self.with_features else embedding


class TwoTower(DualEncoder):
    """An image and a text branch with one embedding space and a learned temperature.

    Forward takes a batch as a dict with the images `image` uint8 [B, 3, S, S] and the captions
    `input_ids` and `attention_mask` int64 [B, T], and returns `image_embed` and `text_embed` [B,
    D], L2-normalized, and the scalar `logit_scale`.

    Args:
        spec: The `model` section, of kind `two_tower` or `fusion`.
        vocab_size: Rows of the token embedding, without pretrained weights.
        architecture: None: read the pretrained weights that `spec` names, if any. Otherwise the
            weights are random, because the caller loads them: the dict that `architecture()` of the
            same model returned, or {} for the sizes in `spec`.
    """

    image: ImageBranch
    text: TextBranch
    with_features = False  # argument of the branches

    def __init__(
        self, spec: TowerModel, vocab_size: int, architecture: Architecture = None
    ) -> None:
        inputs = spec.inputs
        image = build_image_tower(spec.image, inputs.image_side, spec.batch_norm, architecture)
        text = build_text_tower(
            spec.text, vocab_size, inputs.max_tokens, architecture, inputs.language_token
        )
        super().__init__(
            ImageBranch(image, spec.embed_dim, inputs, self.with_features),
            TextBranch(text, spec.embed_dim, self.with_features),
            spec,
        )

    def architecture(self) -> dict[str, Any]:
        """Return the transformers configs of the towers that have one, as JSON values by `text` and
        `image`.

        They are enough to build the model without its pretrained files.
        """
        return tower_configs({"text": self.text.tower, "image": self.image.tower})


def tower_configs(towers: dict[str, nn.Module]) -> dict[str, Any]:
    """Return the transformers configs of the towers that have one, as JSON values by name.

    Args:
        towers: Encoders by name; a wrapper of a transformers model has it as `net`.
    """
    configs = {
        name: getattr(getattr(tower, "net", None), "config", None) for name, tower in towers.items()
    }
    return {name: config.to_dict() for name, config in configs.items() if config is not None}
