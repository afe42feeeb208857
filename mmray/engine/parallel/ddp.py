"""DistributedDataParallel: all weights on every rank, gradients all-reduced in buckets."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

from mmray.engine.parallel.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from mmray.config import Config

BUCKET_MB = 25.0  # MiB of gradients per all-reduce


class DDP(Strategy):
    """Replicates the model; one worker trains it as it is."""

    @classmethod
    def unsupported_reasons(cls, config: Config) -> list[str]:
        return []

    def wrap(self, model: nn.Module) -> nn.Module:
        model = super().wrap(model)
        return model if self.group.world_size == 1 else replicate(model)

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        return model.no_sync() if not last and is_replicated(model) else nullcontext()

    def keeps_gradients(self, model: nn.Module) -> bool:
        return is_replicated(model)


def is_replicated(model: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether a model is wrapped in DDP: not with one rank, nor in a dry run."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


def replicate(module: nn.Module) -> nn.Module:
    """Wrap in DDP without broadcasting buffers, so each worker has its own running statistics.

    `static_graph` is off, because together with `no_sync` it fails an assertion in torch.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    # DDP makes existing gradients views of its buckets; the first backward would otherwise allocate
    # a second set.
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    # 1x1 convolutions on a CPU produce such gradients; the cost is one copy of a small weight.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    with warnings.catch_warnings():
        # torch 2.11 does not have the replacement yet.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=BUCKET_MB
        )
