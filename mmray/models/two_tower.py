"""Two towers chosen by name (CLIP's layout), each with a projection into the shared embedding space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from mmray.data.text.chat import language_token_pattern
from mmray.models.clip import DualEncoder, NormalizePixels, l2_normalize
from mmray.models.encoders import image as image_towers
from mmray.models.encoders.text import HfTextTower, build_text_tower, random_init_config

if TYPE_CHECKING:
    from mmray.config import TwoTower as Section


class TwoTower(DualEncoder):
    """An image branch and a text branch with one embedding space and a learned temperature.

    spec: the `model` section. vocab_size: tokens of the tokenizer. architecture: `architecture()` of the same model;
    the caller then loads its weights. Raises UsageError.
    """

    image: ImageBranch
    text: TextBranch

    def __init__(self, spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> None:
        inputs, config = spec.inputs, architecture["text"] if architecture else None
        image = image_towers.build_image_tower(spec.image, inputs.image_side, spec.batch_norm, architecture)
        text = build_text_tower(spec.text, vocab_size, inputs.max_tokens, config, language_token_pattern(inputs))
        super().__init__(
            ImageBranch(image, spec.embed_dim, inputs.mean, inputs.std), TextBranch(text, spec.embed_dim), spec
        )

    def architecture(self) -> dict[str, Any]:
        """The transformers configs of the towers, as JSON values."""
        return {"text": self.text.tower.config()} | image_towers.image_architecture(self.image.tower)

    @staticmethod
    def random_init_architecture(spec: Section, vocab_size: int) -> dict[str, Any]:
        """The `architecture` of a model with random weights in the shape of the settings."""
        text = random_init_config(spec.text, vocab_size, spec.inputs.max_tokens)
        return {"text": text} | image_towers.random_init_architecture(spec.image)


class ImageBranch(nn.Module):
    """Normalise, encode and project images."""

    def __init__(self, tower: nn.Module, embed_dim: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.pixels, self.tower = NormalizePixels(mean, std), tower
        self.project = nn.Linear(cast("int", tower.width), embed_dim, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> L2-normalised embeddings [B, D]."""
        return l2_normalize(self.project(self.tower(self.pixels(image))))


class TextBranch(nn.Module):
    """Encode and project captions."""

    def __init__(self, tower: HfTextTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> L2-normalised embeddings [B, D]."""
        return l2_normalize(self.project(self.tower(input_ids, attention_mask)))
