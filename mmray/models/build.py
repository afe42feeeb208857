"""From the `model` section to a model: a built-in kind, or a user's own by `package.module:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mmray import plugins
from mmray.errors import UsageError
from mmray.models import lora, protocol
from mmray.models.clip import Clip, Siglip
from mmray.models.fusion import Fusion
from mmray.models.generative import Generative
from mmray.models.two_tower import TwoTower

if TYPE_CHECKING:
    from mmray.config import Model as Section

BUILT_IN: dict[str, Any] = {
    "two_tower": TwoTower,
    "clip": Clip,
    "siglip": Siglip,
    "fusion": Fusion,
    "generative": Generative,
}


def build(spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> nn.Module:
    """The model that `spec.kind` names, its weights drawn from torch's generator or loaded as the spec says.

    vocab_size: tokens the tokenizer has; model.vocab_size, where it is set, is the larger number of rows that the
    embedding gets. architecture: `architecture()` of the same model when its weights will be loaded from a checkpoint;
    pretrained ones are not looked for then. Where model.lora.rank is
    set, adapters are added. A user's class gets (spec, vocab_size), and makes what protocol.py
    says. Raises UsageError naming the setting and its value.
    """
    if 0 < spec.vocab_size < vocab_size:
        raise UsageError(
            f"model.vocab_size: {spec.vocab_size} rows of embedding are too few for a tokenizer of {vocab_size} "
            "tokens; take 0, or a larger number"
        )
    model = _construct(spec, spec.vocab_size or vocab_size, architecture)
    adapters = getattr(spec, "lora", None)  # an export of an earlier version says nothing of them
    if adapters is not None and adapters.rank:
        lora.add_adapters(model, adapters)
    return model


def _construct(spec: Section, rows: int, architecture: dict[str, Any] | None) -> nn.Module:
    if spec.kind in BUILT_IN:
        built: nn.Module = BUILT_IN[spec.kind](spec, rows, architecture)
        return built
    model = plugins.load_class(spec.kind, "model.kind", tuple(BUILT_IN))(spec, rows)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model.kind: `{spec.kind}` built a {type(model).__name__}, not a torch.nn.Module")
    protocol.validate_model(model, spec.kind)
    return model


def random_init_architecture(spec: Section, vocab_size: int) -> dict[str, Any] | None:
    """An `architecture` that stands in for pretrained weights, where what they have learned does not matter."""
    if spec.kind not in BUILT_IN:
        return None
    architecture: dict[str, Any] = BUILT_IN[spec.kind].random_init_architecture(spec, vocab_size)
    return architecture
