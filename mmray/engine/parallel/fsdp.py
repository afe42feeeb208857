"""FSDP2 (`fully_shard`, Zhao et al. 2023): weights, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mmray.engine.collectives import Group
from mmray.models.protocol import EMBEDDING_METHODS


def is_sharded(module: nn.Module) -> bool:
    """Return True if `shard` was applied to the module."""
    return isinstance(module, FSDPModule)


def shard(module: nn.Module, group: Group, dtype: torch.dtype | None) -> nn.Module:
    """Shard the module in place, by block, by branch, and the rest; weights are gathered in `dtype`.

    Gradients are averaged in float32. Scalars such as the temperature cannot be sharded and are replicated.
    """
    mesh = init_device_mesh(group.device.type, (group.world,))
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    replicated = set(_replicated(module))
    for parameter in replicated:
        parameter.data = parameter.data.to(group.device)  # fully_shard moves the others
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    blocks = [block for part in lists for block in part if next(block.parameters(), None) is not None]
    branches = module.branches().values() if hasattr(module, "branches") else ()  # type: ignore[operator]
    for part in [*reversed(blocks), *branches, module]:  # inner ones first: fully_shard skips sharded weights
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=replicated)
    for name in EMBEDDING_METHODS:  # called by evaluation instead of forward
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def _replicated(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 0]


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_storages(module: nn.Module) -> Callable[[], set[int]]:
    """Return a function that returns the storages of unsharded weights at the time of the call."""
    places = [(part._parameters, name) for part in module.modules() for name in part._parameters]

    def now() -> set[int]:
        weights = (parameters[name] for parameters, name in places)
        return {w.untyped_storage().data_ptr() for w in weights if w is not None and not isinstance(w, DTensor)}

    always = now()
    return now if is_sharded(module) else lambda: always


def average_replicated_gradients(module: nn.Module, group: Group) -> None:
    """Average the gradients of a sharded model's replicated scalars over ranks, because FSDP does not."""
    for parameter in _replicated(module) if is_sharded(module) else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= group.world


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Scope of an evaluation with all weights of a sharded model on every rank; needs the memory of the full model.

    With collectives, a rank with more batches or tokens than the others would wait forever. Calls that
    bypass a module's forward would see only this rank's shard.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not module, recurse=False)
            part.reshard()
