"""Low-rank adapters (LoRA) through peft: added to a built model, merged into its weights at export.

A checkpoint holds the adapters and the base weights, so a run resumes without the pretrained files.
Source: Hu et al. 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mmray.errors import UsageError
from mmray.plugins import check_installed

if TYPE_CHECKING:
    from mmray.config import Lora


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Add LoRA adapters to the linear layers that match a pattern, and freeze all other weights.

    In a vision-language model only layers of the language model get adapters, and the projector
    stays trainable.

    Args:
        model: Changed in place; a new adapter adds zero to the outputs of its layer.
        lora: The `model.lora` section: `rank`, `alpha`, and `targets`, patterns of layer names such
            as `*.q_proj`. Frozen layers get no adapter.

    Raises:
        UsageError: A pattern matches no trainable linear layer, or peft is not installed.
    """
    check_installed("peft", "model.lora.rank", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    parts = model.parameter_parts() if hasattr(model, "parameter_parts") else {}  # type: ignore[operator]
    adaptable = set(parts["language"]) if parts else None
    trained = [
        weight
        for weight in map(model.get_parameter, parts.get("projector", ()))
        if weight.requires_grad
    ]
    linear = [
        name
        for name, part in model.named_modules()
        # nn.MultiheadAttention reads the weight of its output layer without calling it, so an
        # adapter had no effect.
        if isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
        if part.weight.requires_grad and (adaptable is None or f"{name}.weight" in adaptable)
    ]
    layers: list[str] = []
    for pattern in lora.targets:
        if not (matching := [name for name in linear if fnmatchcase(name, pattern)]):
            raise UsageError(
                f"model.lora.targets: `{pattern}` matches no linear layer of the model; trainable "
                "ones are "
                f"{', '.join(linear[:3]) or 'none'}"
            )
        layers += matching
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers), model
    )
    for weight in trained:
        weight.requires_grad_(True)


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add the LoRA adapters to the weights of their layers, and remove them.

    Args:
        model: Changed in place.

    Returns:
        The same model.
    """
    for name, layer in [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")
    ]:
        adapted: Any = layer
        adapted.merge(safe_merge=True)
        model.set_submodule(name, adapted.get_base_layer())
    return model
