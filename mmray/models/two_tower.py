"""Two towers chosen by name (CLIP's layout), each with a projection into the shared embedding space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmray.data.text.chat import language_token_pattern
from mmray.models.clip import DualEncoder, NormalizePixels, l2_normalize
from mmray.models.encoders.image import build_image_tower, image_architecture, random_init_image
from mmray.models.encoders.text import HfTextTower, bert_config, build_text_tower

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config.model import TowerModel


class ImageBranch(nn.Module):
    """Normalise, encode and project images."""

    def __init__(self, tower: Any, embed_dim: int, inputs: Inputs) -> None:
        super().__init__()
        self.pixels, self.tower = NormalizePixels(inputs.mean, inputs.std), tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, image: Tensor) -> Any:
        """Pixels uint8 [B, 3, S, S] -> L2-normalised embeddings [B, D]."""
        return l2_normalize(self.project(self.tower(self.pixels(image))))


class TextBranch(nn.Module):
    """Encode and project captions."""

    def __init__(self, tower: HfTextTower, embed_dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Ids and mask [B, T] -> L2-normalised embeddings [B, D]."""
        return l2_normalize(self.project(self.tower(input_ids, attention_mask)))


class TwoTower(DualEncoder):
    """An image and a text branch with one embedding space and a learned temperature. Arguments as for `build`."""

    image: ImageBranch
    text: TextBranch
    branch_classes = (ImageBranch, TextBranch)

    def __init__(self, spec: TowerModel, vocab_size: int, architecture: dict[str, Any] | None = None) -> None:
        inputs, config = spec.inputs, architecture["text"] if architecture else None
        image = build_image_tower(spec.image, inputs.image_side, spec.batch_norm, architecture)
        text = build_text_tower(spec.text, vocab_size, inputs.max_tokens, config, language_token_pattern(inputs))
        image_branch, text_branch = self.branch_classes
        super().__init__(image_branch(image, spec.embed_dim, inputs), text_branch(text, spec.embed_dim), spec)

    def architecture(self) -> dict[str, Any]:
        """The transformers configs of the towers, as JSON values."""
        return {"text": self.text.tower.net.config.to_dict()} | image_architecture(self.image.tower)

    @staticmethod
    def random_init_architecture(spec: TowerModel, vocab_size: int) -> dict[str, Any]:
        """The `architecture` of a model with random weights in the shape of the settings."""
        text = bert_config(spec.text, vocab_size, spec.inputs.max_tokens).to_dict()
        return {"text": text} | random_init_image(spec.image)
