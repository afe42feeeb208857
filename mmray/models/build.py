"""Build the model that the `model` section names: a built-in kind, or a user's
`package.module:Class`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mmray import plugins
from mmray.builtin import KINDS, REMOVED_KINDS
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.attention import fuse_projections
from mmray.models.pixels import use_patch_products
from mmray.models.protocol import PRETRAINED, Model, WeightSource, as_model
from mmray.models.weights import parameters_on
from mmray.plugins import packages_hidden

if TYPE_CHECKING:
    from mmray.config import Model as ModelConfig


def build(spec: ModelConfig, vocab_size: int, source: WeightSource = PRETRAINED) -> Model:
    """Build the model of a `model` section, with random or pretrained weights and LoRA adapters.

    Args:
        spec: The `model` section. If its `kind` is a `package.module:Class`, this class is called
            with (spec, vocab_size).
        vocab_size: Number of tokens of the tokenizer. The token embedding has as many rows, or
            `model.vocab_size` rows if that is set.
        source: Where weights come from; a user's class does not get it.

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
        if source.pretrained and (reasons := spec.unsupported_reasons()):
            raise UsageError("\n".join(reasons))
        model_class = plugins.load_class(KINDS[spec.kind].model, "model.kind")
        model: Model = model_class(spec, rows, source)
        use_patch_products(model)
    else:
        own = plugins.load_class(spec.kind, "model.kind", tuple(KINDS))(spec, rows)
        if not isinstance(own, nn.Module):
            raise UsageError(
                f"model.kind: `{spec.kind}` built a {type(own).__name__}, not a torch.nn.Module"
            )
        if type(own).forward in (nn.Module.forward, Model.forward):
            raise UsageError(
                f"model.kind: `{spec.kind}` has no forward(batch); see mmray/models/protocol.py"
            )
        model = as_model(own)
    if spec.lora.rank:
        lora.add_adapters(model, spec.lora)
    fuse_projections(model)
    return model


def build_on(
    device: torch.device | str,
    spec: ModelConfig,
    vocab_size: int,
    source: WeightSource = PRETRAINED,
) -> Model:
    """Build a model with its parameters on a GPU, which draws random weights faster, or on meta.

    Buffers have their values, on the CPU. A class that computes with its weights while it is built
    may fail there, and is built on the CPU (on meta only a user's class).

    Args:
        source: As in `build`; a built-in model must not read pretrained weights.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return build(spec, vocab_size, source)
    try:
        with parameters_on(device):
            return build(spec, vocab_size, source)
    except (RuntimeError, TypeError):  # TypeError: of a conversion to NumPy
        if device.type == "meta" and spec.kind in KINDS:
            raise
    return build(spec, vocab_size, source)


def import_libraries(spec: ModelConfig) -> None:
    """Import transformers, which takes seconds, for the kinds that always use it."""
    if spec.uses_transformers:
        # For losses of detection and weights that torchao quantized: 1.6 s of CPU time.
        with packages_hidden("scipy", "torchao"):
            import transformers.modeling_utils  # noqa: F401
        from transformers.utils import import_utils

        import_utils.is_scipy_available.cache_clear()
        import_utils.is_torchao_available.cache_clear()
