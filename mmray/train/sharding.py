"""Weights, gradients and optimizer state cut over the ranks (`fully_shard`, Zhao et al. 2023), and whole again at rest.

parallel.py shards through here; loop.py asks for state that any strategy and any number of ranks can load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mmray.train.group import Group

METHODS = ("embed_image", "embed_text")  # what evaluation calls beside forward


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
    for name in METHODS:
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


def average_replicated(module: nn.Module, group: Group) -> None:
    """Gradients of what every rank keeps, averaged as those of the shards were."""
    for parameter in _replicated(module):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= group.world


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """All weights on every rank inside, so that a forward talks to nobody; costs the memory of the whole model."""
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


def gathered(state: Any, keep: bool = True) -> Any:
    """The state of a module or an optimizer with every tensor whole; a collective where it was cut.

    What was cut is kept on the CPU, or (`keep` False, for ranks that write nothing) goes again: None.
    """
    if isinstance(state, DTensor):
        whole = state.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(state, dict):
        return {key: gathered(value, keep) for key, value in state.items()}
    return [gathered(value, keep) for value in state] if isinstance(state, list) else state


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `gathered` gave, cut as this optimizer's own weights are, whatever it was cut like before."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cut = {
        index: {name: _cut_like(parameters[index], value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": cut})


def _cut_like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
