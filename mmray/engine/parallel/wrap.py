"""How a model is spread over devices: one door to DDP, FSDP and branches, for step.py and loop.py.

Here stand the plain strategies (`ddp`, `single`) and what the step asks of any of them: the module inside, a forward
whose gradients stay local, what is left to do before the optimizer and after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mmray.engine.collectives import Group
from mmray.engine.parallel import fsdp as sharding
from mmray.engine.parallel.branches import BranchParallel
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Train

BUCKET_MB = 25.0  # of gradients per all-reduce (DDP)
HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


@dataclass(frozen=True)
class ParallelConfig:
    """The strategy and its choices, as in the `train` section."""

    kind: str = "ddp"
    grad_compression: str = "none"
    shard_dtype: torch.dtype | None = None  # of weights while they are whole (fsdp); None: their own
    devices: tuple[torch.device, ...] = ()  # of one worker (branches)
    slower: str = "image"  # the branch that has a replica (branches)

    @classmethod
    def of(
        cls, train: Train, dtype: torch.dtype | None, devices: tuple[torch.device, ...], slower: str
    ) -> ParallelConfig:
        """From the settings, and what the worker found out."""
        chosen = (train.parallel, train.grad_compression)
        return cls(*chosen, dtype, devices, slower)


def init_device(kind: str, device: torch.device) -> torch.device:
    """Where a model lies until it is wrapped: under `fsdp` in the host's memory, where each rank cuts its part."""
    return torch.device("cpu") if kind == "fsdp" else device


def wrap(module: nn.Module, group: Group, layout: ParallelConfig | None = None) -> nn.Module:
    """The module as all ranks train it; rank 0's weights win under DDP, all bring the same under FSDP.

    In a group of one, `ddp` and `fsdp` are the module itself.
    """
    layout = layout or ParallelConfig()
    if layout.kind == "branches":
        return BranchParallel(module, layout.devices, layout.slower)
    if group.world == 1:
        return module.to(group.device)
    if layout.kind == "fsdp":
        if layout.shard_dtype == torch.float16:
            raise UsageError("train.parallel fsdp takes fp32 or bf16, and this device's best is fp16; set one of them")
        return sharding.shard(module, group, layout.shard_dtype)
    return _replicated(module, layout)


def _replicated(module: nn.Module, layout: ParallelConfig) -> DistributedDataParallel:
    """DDP. Buffers are not broadcast: running statistics are each worker's own.

    `static_graph` stays off, it asserts inside torch when used together with `no_sync`.
    """
    # Tied to the buckets from the first backward on: one that meets no gradient makes a set of its own beside them.
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    # 1x1 convolutions on a CPU bring such gradients; what torch warns of is one copy of a small weight.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    with warnings.catch_warnings():
        # The name that takes its place is not yet in torch 2.11.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        model = DistributedDataParallel(
            module,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            bucket_cap_mb=BUCKET_MB,
        )
    if layout.grad_compression != "none":
        model.register_comm_hook(None, HOOKS[layout.grad_compression])
    return model


def rewrap(model: nn.Module, group: Group, layout: ParallelConfig) -> nn.Module:
    """The model as before a step that was given up, on all ranks together: DDP still waits for its backward."""
    if isinstance(model, BranchParallel):
        model.drop_gradients()
    if not isinstance(model, DistributedDataParallel):
        return model
    model._remove_autograd_hooks()  # else the old reducer would answer to the gradients of the new one
    return wrap(model.module, group, layout)


def has_inner_collectives(model: nn.Module) -> bool:
    """Whether a forward holds collectives of its own: a rank that cannot finish it leaves the others waiting."""
    return sharding.is_sharded(model) or any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside a wrapped model."""
    return model.module if isinstance(model, DistributedDataParallel | BranchParallel) else model


def without_sync(model: nn.Module) -> nn.Module:
    """What to call for a forward that no backward follows: it talks to no other rank, unless the weights lie there."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def maybe_no_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Scope of one micro-batch's forward and backward; gradients meet over ranks in the last one only.

    Under FSDP they meet in each: kept whole until the last, they would take the memory that sharding gave.
    """
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def finalize_gradients(model: nn.Module, group: Group) -> None:
    """After the last backward: gradients that the strategy left in other places come to where the optimizer looks."""
    if isinstance(model, BranchParallel):
        model.collect_gradients()
    elif sharding.is_sharded(model):
        sharding.average_replicated_gradients(model, group)


def zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    """Gradients as before a step: none, or nought where they live in DDP's buckets, which lie there all the time.

    DDP has each weight that learns take part in each step, so that none is taken for one with a gradient of nought.
    """
    tied = isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    optimizer.zero_grad(set_to_none=not tied)


def on_weights_loaded(model: nn.Module) -> None:
    """After other weights were loaded into the module inside: copies of them follow."""
    if isinstance(model, BranchParallel):
        model.copy_anew()


def post_step(model: nn.Module) -> None:
    """After the optimizer's step: copies of weights follow."""
    if isinstance(model, BranchParallel):
        model.spread_weights()


@contextmanager
def summon_full_params(module: nn.Module) -> Iterator[None]:
    """Scope in which any rank may forward the bare module as often as it likes, as an evaluation does."""
    with sharding.unsharded(module) if sharding.is_sharded(module) else nullcontext():
        yield


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers (running statistics of BatchNorm) come out as they went in, whatever is forwarded inside.

    Copies stand in meanwhile; writing the old values back would disturb graphs that already saved the originals.
    """
    originals = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part, buffers in originals:
        part._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for part, buffers in originals:
            part._buffers.update(buffers)
