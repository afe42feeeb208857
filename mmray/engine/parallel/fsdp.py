"""Weights, gradients and optimizer state cut over the ranks (`fully_shard`, Zhao et al. 2023), in use and at rest.

parallel.py shards through here; loop.py has state read back cut as its own is, whatever it was cut like before.
"""

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
    """Whether `shard` made it."""
    return isinstance(module, FSDPModule)


def shard(module: nn.Module, group: Group, dtype: torch.dtype | None) -> nn.Module:
    """The module itself, each block, each branch and the rest cut over all ranks; gathered in `dtype` for its use.

    Gradients are averaged in float32. Scalars, such as the temperature, cannot be cut: every rank keeps them.
    """
    mesh = init_device_mesh(group.device.type, (group.world,))
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    kept = set(_replicated(module))
    for parameter in kept:
        parameter.data = parameter.data.to(group.device)  # the rest goes there as it is cut
    for part in [*_parts(module), module]:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=kept)
    for name in EMBEDDING_METHODS:  # what evaluation calls beside forward
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def _parts(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: the blocks of each list of blocks, then each branch with what is left of it."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    blocks = [block for part in lists for block in part if next(block.parameters(), None) is not None]
    branches = list(module.branches().values()) if hasattr(module, "branches") else []  # type: ignore[operator]
    return [*reversed(blocks), *branches]  # the inner ones first: what is sharded already is not sharded again


def _replicated(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 0]


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of it: its part where it is cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_storages(module: nn.Module) -> Callable[[], set[int]]:
    """Where weights lie whole on this rank at the moment it is asked: what is cut is gathered for its use only."""
    places = [(part._parameters, name) for part in module.modules() for name in part._parameters]

    def now() -> set[int]:
        weights = (parameters[name] for parameters, name in places)
        return {w.untyped_storage().data_ptr() for w in weights if w is not None and not isinstance(w, DTensor)}

    always = now()
    return now if is_sharded(module) else lambda: always


def average_replicated_gradients(module: nn.Module, group: Group) -> None:
    """Gradients of what every rank keeps, averaged as those of the shards were."""
    for parameter in _replicated(module):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= group.world


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """All weights on every rank inside, so that a forward talks to nobody; costs the memory of the whole model.

    For evaluations: gathered block by block, a rank with a batch, a prompt or a token of an answer more than the others
    would wait for them for ever, and what calls a part of the model past its forward would find this rank's cut.
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
