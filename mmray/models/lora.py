"""Low-rank adapters: small matrices that learn beside weights that stay as they are, and fold into them at the end.

The adapters are those of peft, put into a model that is built already: build.py adds them, export merges them. A
checkpoint holds both, so that a run goes on without the weights it began with.
Source: Hu et al. 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Lora as Section


def add_adapters(model: nn.Module, section: Section) -> None:
    """Give each linear layer that `section.targets` names an adapter; nothing but adapters learns from here on.

    A new adapter changes nothing: one of its two matrices is zero. Layers that do not learn (no output of theirs is
    read) get none. Raises UsageError for a pattern that fits no layer, and where peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError(
            f"model.lora.rank: adapters need peft ({error}); install it on every node with "
            '`pip install "mmray[lora]"`, or set it to 0'
        ) from None
    layers = _target_layers(model, section.targets)
    config = LoraConfig(r=section.rank, lora_alpha=section.alpha, lora_dropout=section.dropout, target_modules=layers)
    inject_adapter_in_model(config, model)


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters folded into the weights, so that nothing of them is left; without any, as it was."""
    for name, layer in [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]:
        adapted: Any = layer
        adapted.merge(safe_merge=True)
        model.set_submodule(name, adapted.get_base_layer())
    return model


def _target_layers(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the linear layers that learn and fit a pattern."""
    linear = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer.weight.requires_grad
    ]
    if not linear:
        raise UsageError("model.lora: the model has no linear layer that learns, so there is nothing to adapt")
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise UsageError(
                f"model.lora.targets: `{pattern}` fits no linear layer of the model; their names are like "
                f"{linear[0]} and {linear[-1]}"
            )
    return [name for name in linear if any(fnmatchcase(name, pattern) for pattern in targets)]
