"""Freezing, activation checkpointing, torch.compile and memory format, applied before the model is wrapped.

Parameter names do not change, so a checkpoint can be loaded with other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmray.engine.optimizer import freeze_parameters
from mmray.engine.parallel.strategy import place_branches, preserve_buffers
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Optimizer, Train


def apply_transforms(model: nn.Module, train: Train, optimizer: Optimizer, device: torch.device) -> nn.Module:
    """Move the model to its device and apply the settings. Raises UsageError with the setting at fault."""
    freeze_parameters(model, optimizer.freeze)
    if device.type == "cpu" and any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise UsageError("model.batch_norm: `synced` needs GPUs; take `local` or `frozen` on a CPU")
    model.to("cpu" if train.parallel == "fsdp" else device)  # the full model may not fit on a GPU
    if train.parallel == "branches":
        place_branches(model, device)
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    branches = _branches(model)
    for name in train.activation_checkpointing:
        if name not in branches:
            raise UsageError(
                f"train.activation_checkpointing: the model has no branch `{name}`; it has "
                f"{', '.join(branches) or 'none'}"
            )
        checkpoint_activations(branches[name])
    return compile_branches(model, train)


def _branches(model: nn.Module) -> dict[str, nn.Module]:
    return model.branches() if hasattr(model, "branches") else {}  # type: ignore[operator]


def compile_branches(model: nn.Module, train: Train) -> nn.Module:
    """Compile the branches if `train.compile` is set; bench/step.py repeats it, because a deep copy is not compiled."""
    if train.compile != "none":
        for branch in _branches(model).values():
            branch.compile(backend=train.compile)
    return model


def checkpoint_activations(branch: nn.Module) -> None:
    """Save only the inputs of a branch's blocks and recompute them in backward (Chen et al. 2016).

    Blocks are the members of its outermost lists; without lists, the branch itself. The recomputation draws the same
    dropout masks and does not update running statistics. torch.compile requires that it equals the forward, so blocks
    with running statistics are excluded from its graphs.
    """
    for block in list(_blocks(branch)) or [branch]:
        if next(block.buffers(), None) is None:
            block.forward = partial(_recomputed, block.forward, {})
        else:
            settings = {"context_fn": partial(_contexts, block)}  # partials: deepcopy (EMA) binds them to the copy
            block.forward = partial(torch.compiler.disable(_recomputed), block.forward, settings)


def _recomputed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), preserve_buffers(block)


def _blocks(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _blocks(child)
