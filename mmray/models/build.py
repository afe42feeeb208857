"""From the `model` section to a model: the built-in two towers, or a user's own by `package.module:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mmray import plug
from mmray.errors import UsageError
from mmray.models.two_tower import TwoTower

if TYPE_CHECKING:
    from mmray.config import TwoTower as Section


def build(spec: Section, vocab_size: int, architecture: dict[str, Any] | None = None) -> nn.Module:
    """The model that `spec.kind` names, its weights drawn from torch's generator or loaded as the spec says.

    vocab_size: tokens the tokenizer has. architecture: `architecture()` of the same model when its weights will be
    loaded from a checkpoint; pretrained ones are not looked for then. A user's class gets (spec, vocab_size).
    Raises UsageError naming the setting and its value.
    """
    if spec.kind == "two_tower":
        return TwoTower(spec, vocab_size, architecture)
    model = plug.load(spec.kind, "model.kind", ("two_tower",))(spec, vocab_size)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model.kind: `{spec.kind}` built a {type(model).__name__}, not a torch.nn.Module")
    return model
