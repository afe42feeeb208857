"""Build the model that the `model` section names: a built-in kind, or a user's
`package.module:Class`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mmray import plugins
from mmray.builtin import KINDS, REMOVED_KINDS
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.attention import fuse_projections
from mmray.models.pixels import use_patch_products
from mmray.models.protocol import Architecture

if TYPE_CHECKING:
    from mmray.config import Model as ModelConfig


def build(spec: ModelConfig, vocab_size: int, architecture: Architecture = None) -> nn.Module:
    """Build the model of a `model` section, with random or pretrained weights and LoRA adapters.

    Args:
        spec: The `model` section. If its `kind` is a `package.module:Class`, this class is called
            with (spec, vocab_size).
        vocab_size: Number of tokens of the tokenizer. The token embedding has as many rows, or
            `model.vocab_size` rows if that is set.
        architecture: None: read the pretrained weights that `spec` names, if any. A dict: build the
            model with random weights, which the caller then replaces. The dict describes the
            layers, as `architecture()` of the same model returned it; {}: the sizes are those in
            `spec`.

    Returns:
        A module whose forward takes a batch (dict of tensors by column) and returns a dict of
        outputs by name, as its class describes: of most kinds `image_embed` and `text_embed` [B, D]
        and the scalar `logit_scale`, of `vlm` the scalars `loss_sum` and `num_correct`.

    Raises:
        UsageError: The settings are not supported, or the weights or the class cannot be read.
    """
    if spec.kind in REMOVED_KINDS:  # an export of an earlier version
        raise UsageError(REMOVED_KINDS[spec.kind])
    rows = spec.vocab_size or vocab_size
    if spec.kind in KINDS:
        # training/validate.py checks this earlier
        if architecture is None and (reasons := spec.unsupported_reasons()):
            raise UsageError("\n".join(reasons))
        model_class = plugins.load_class(KINDS[spec.kind].model, "model.kind")
        model: nn.Module = model_class(spec, rows, architecture)
        use_patch_products(model)
    else:
        model = plugins.load_class(spec.kind, "model.kind", tuple(KINDS))(spec, rows)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model.kind: `{spec.kind}` built a {type(model).__name__}, not a torch.nn.Module"
            )
        if type(model).forward is nn.Module.forward:
            raise UsageError(
                f"model.kind: `{spec.kind}` has no forward(batch); see mmray/models/protocol.py"
            )
    if spec.lora.rank:
        lora.add_adapters(model, spec.lora)
    fuse_projections(model)
    return model


def build_without_weights(
    spec: ModelConfig, vocab_size: int, architecture: Architecture = None
) -> nn.Module:
    """Build the model of a `model` section with its parameters on the meta device, without memory.

    Buffers have their values. A user's class that computes with its weights while it is built
    raises RuntimeError on the meta device; it is then built with real weights.

    Args:
        spec: The `model` section.
        vocab_size: Number of tokens of the tokenizer. The token embedding has as many rows, or
            `model.vocab_size` rows if that is set.
        architecture: Description of the layers, as `architecture()` of the same model returned it;
            {}: the sizes are those in `spec`. None only for a user's class, which does not get it.

    Returns:
        The module, to load a checkpoint into; its forward is that of `build`.

    Raises:
        UsageError: The settings are not supported, or the weights or the class cannot be read.
    """

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return (
            None
            if parameter.is_meta
            else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        )

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        return build(spec, vocab_size, architecture)
    except RuntimeError:
        if spec.kind in KINDS:
            raise
    finally:
        handle.remove()
    return build(spec, vocab_size, architecture)
