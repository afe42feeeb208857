"""Shard a model with FSDP2 (Zhao et al. 2023).

torch's FSDP2 is imported when used: it takes 0.6 s, with DTensor and sympy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from mmray.engine.collectives import Group, is_dtensor
from mmray.errors import UsageError
from mmray.models.protocol import EMBEDDING_METHODS, as_model, find_blocks, is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def shard(
    module: nn.Module, group: Group, dtype: torch.dtype | None, hybrid: bool = False
) -> nn.Module:
    """Shard a module in place with FSDP2 (Zhao et al. 2023).

    The weights of each block are gathered and freed together, then those of the rest of each
    branch, and the rest of the model.

    The weights are rank 0's, sent part by part, so parameters of other ranks may be on the meta
    device. If those of rank 0 are too, the weights become zeros, to load a checkpoint into.
    Gradients are averaged in float32. Scalars such as the temperature cannot be sharded and are
    replicated.

    Args:
        dtype: Dtype of the gathered weights in a forward; None: that of the weights.
        hybrid: Shard within a node and replicate across nodes; otherwise shard over all ranks.

    Returns:
        The same module.

    Raises:
        UsageError: For `hybrid`, the nodes do not have equally many consecutive ranks, two or more.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = _device_mesh(group, hybrid)
    reduce_dtype = None if dtype is None else torch.float32
    has_weights = group.broadcast_object(
        not any(parameter.is_meta for parameter in module.parameters())
    )
    # Without single layers, such as a BatchNorm in a Sequential: too small for collectives of their
    # own.
    blocks = [block for block in find_blocks(module) if next(block.children(), None) is not None]
    model = as_model(module)
    branches = model.branches().values() if model.shards_branches else ()
    # inner ones first: fully_shard skips sharded weights
    for part in [*reversed(blocks), *branches, module]:
        full = {
            name: weight.detach()
            for name, weight in part.named_parameters()
            if not is_dtensor(weight)
        }
        if part is not module and not full:
            continue
        # Kernels of BatchNorm refuse bf16 weights with float32 running statistics; autocast casts
        # the other weights.
        has_batch_norm = any(
            isinstance(part.get_submodule(name.rpartition(".")[0]), _BatchNorm) for name in full
        )
        policy = MixedPrecisionPolicy(
            None if has_batch_norm else dtype, reduce_dtype, cast_forward_inputs=False
        )
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=set(replicated(part)))
        part._apply(
            lambda t: torch.zeros_like(t, device=group.device) if t.is_meta else t.to(group.device)
        )
        for name, weight in part.named_parameters():
            if has_weights and name in full:
                _copy_from_rank0(weight, full.pop(name), group)
    buffers = dict(module.named_buffers())
    for name, value in module.state_dict().items():
        if has_weights and name in buffers:
            group.broadcast(value)
    # Evaluation calls these instead of forward.
    for name in (*EMBEDDING_METHODS, "head_scores", "caption", "answer"):
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def _device_mesh(group: Group, hybrid: bool) -> DeviceMesh:
    """All ranks in one dimension; hybrid: (replicas, shards), where the ranks of a replica are on
    one node.
    """
    shards = group.world_size
    if hybrid:
        shards = group.ranks_on_node
        local_rank = int(os.environ.get("LOCAL_RANK", group.rank % shards))
        # The first rank and the number of ranks of each rank's node. A replica that spans nodes
        # would gather each block over the network.
        nodes = group.all_gather_objects((group.rank - local_rank, shards))
        expected = [(rank - rank % shards, shards) for rank in range(group.world_size)]
        if nodes != expected or shards == 1:
            raise UsageError(
                "train.parallel hsdp shards within a node: each node needs as many consecutive "
                f"workers, two or more (got {sorted({number for _, number in nodes})}); use fsdp, "
                "or other --cluster.workers"
            )
    if shards == group.world_size:
        return init_device_mesh(group.device.type, (shards,))
    shape = group.world_size // shards, shards
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for process_group in mesh.get_all_groups():
        group.set_timeout(process_group)
    return mesh


def _copy_from_rank0(weight: Tensor, full: Tensor, group: Group) -> None:
    """Set a weight, or this rank's shard of it, to that of rank 0;

    `full` has the shape, on rank 0 also the values.
    """
    full = full.to(group.device) if group.rank == 0 else torch.empty_like(full, device=group.device)
    if is_dtensor(weight):
        from torch.distributed.tensor import distribute_tensor

        weight.to_local().copy_(
            distribute_tensor(full, weight.device_mesh, weight.placements).to_local()
        )
    else:
        weight.copy_(group.broadcast(full))


def replicated(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 0]


def parameter_storages(module: nn.Module) -> Callable[[], set[int]]:
    """Return a function that returns the memory addresses of a module's unsharded weights.

    Returns:
        A function without arguments. For a sharded module it returns the addresses at the time of
        its call, because weights are gathered and freed; for another module always the addresses at
        the time of `parameter_storages`.
    """
    slots = [
        (submodule._parameters, name)
        for submodule in module.modules()
        for name in submodule._parameters
    ]

    def current() -> set[int]:
        weights = (parameters[name] for parameters, name in slots)
        return {
            w.untyped_storage().data_ptr() for w in weights if w is not None and not is_dtensor(w)
        }

    fixed = current()
    return current if is_sharded(module) else lambda: fixed
