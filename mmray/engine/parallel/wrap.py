"""Wrap a model in its parallel strategy (DDP, FSDP or branches), and the operations of a step that depend on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mmray.engine.collectives import Group
from mmray.engine.parallel import fsdp
from mmray.engine.parallel.branches import BranchParallel
from mmray.errors import UsageError

BUCKET_MB = 25.0  # MiB of gradients per all-reduce (DDP)
HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


@dataclass(frozen=True)
class ParallelConfig:
    """The strategy and its choices, as in the `train` section."""

    kind: str = "ddp"
    grad_compression: str = "none"
    shard_dtype: torch.dtype | None = None  # of gathered weights (fsdp); None: unchanged
    devices: tuple[torch.device, ...] = ()  # of one worker (branches)


def wrap(module: nn.Module, group: Group, layout: ParallelConfig | None = None) -> nn.Module:
    """Wrap the module for training on all ranks; in a group of one, `ddp` and `fsdp` return the module itself.

    DDP broadcasts rank 0's weights; under FSDP all ranks must pass equal weights. Raises UsageError for `fsdp` in fp16.
    """
    layout = layout or ParallelConfig()
    if layout.kind == "fsdp" and group.world > 1:
        if layout.shard_dtype == torch.float16:
            raise UsageError("train.parallel fsdp takes fp32 or bf16, and this device's best is fp16; set one of them")
        return fsdp.shard(module, group, layout.shard_dtype)
    module.to(group.device)
    if layout.kind == "branches":
        return BranchParallel(module, layout.devices)
    return module if group.world == 1 else _replicate(module, layout.grad_compression)


def _replicate(module: nn.Module, grad_compression: str) -> DistributedDataParallel:
    """Wrap in DDP without broadcasting buffers, so each worker has its own running statistics.

    `static_graph` is off, because together with `no_sync` it fails an assertion in torch.
    """
    # DDP makes existing gradients views of its buckets; the first backward would otherwise allocate a second set.
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    # 1x1 convolutions on a CPU produce such gradients; the cost is one copy of a small weight.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    with warnings.catch_warnings():
        # torch 2.11 does not have the replacement yet.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=BUCKET_MB
        )
    if grad_compression != "none":
        model.register_comm_hook(None, HOOKS[grad_compression])
    return model


def rewrap(model: nn.Module, group: Group, layout: ParallelConfig) -> nn.Module:
    """Reset the wrapper on all ranks after an abandoned step, because DDP still waits for its backward."""
    if not isinstance(model, DistributedDataParallel):
        return model
    model._remove_autograd_hooks()  # otherwise the old reducer's hooks would also run
    return wrap(model.module, group, layout)


def has_inner_collectives(model: nn.Module) -> bool:
    """Return True if a forward has collectives (FSDP, SyncBatchNorm), so no rank may skip it."""
    return fsdp.is_sharded(model) or any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapped model."""
    return model.module if isinstance(model, DistributedDataParallel | BranchParallel) else model


def without_sync(model: nn.Module) -> nn.Module:
    """Return the module for a forward without backward; only FSDP still communicates, to gather weights."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def maybe_no_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Scope of the forward and backward of one micro-batch; DDP reduces gradients only in the last one.

    FSDP reduces them in each, because unreduced gradients would be unsharded and need the memory that sharding saves.
    """
    return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Scope in which forwards do not change the buffers (running statistics of BatchNorm).

    Forwards use copies. Restoring the old values in place would invalidate graphs that saved the originals.
    """
    originals = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part, buffers in originals:
        part._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for part, buffers in originals:
            part._buffers.update(buffers)
