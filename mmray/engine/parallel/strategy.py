"""Wrap a model in its parallel strategy (DDP, FSDP, HSDP, branches), and operations of a step that
depend on it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from mmray.engine.collectives import Group, is_dtensor
from mmray.errors import UsageError
from mmray.models.protocol import EMBEDDING_METHODS, find_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SHARDED = ("fsdp", "hsdp")  # values of train.parallel
BUCKET_MB = 25.0  # MiB of gradients per all-reduce (DDP)


def wrap_model(
    module: nn.Module,
    group: Group,
    parallel: str = "ddp",
    shard_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Wrap the module for training on all ranks, with rank 0's weights.

    With a single rank, and if it is already sharded, the module itself is returned.

    Args:
        module: The model; on ranks other than 0 its weights are overwritten.
        group: All ranks.
        parallel: Value of `train.parallel`: `ddp`, `fsdp`, `hsdp`, `branches` (image and text
            encoder on different GPUs) or `single`.
        shard_dtype: Dtype of the gathered weights under `fsdp` and `hsdp`; None: that of the
            weights.

    Returns:
        For `ddp` a DistributedDataParallel module. For `fsdp` and `hsdp` the module, sharded in
        place; for `branches` and `single` the module itself.

    Raises:
        UsageError: `fsdp` or `hsdp` in fp16, or the ranks do not suit `hsdp`.
    """
    if parallel in SHARDED and group.world_size > 1:
        if shard_dtype == torch.float16:
            problem = f"train.precision is fp16, which {parallel} does not support"
            raise UsageError(f"{problem}: set --train.precision bf16 or fp32")
        if is_sharded(module):
            return module
        return shard(module, group, shard_dtype, hybrid=parallel == "hsdp")
    if parallel == "branches":
        return module  # apply_transforms moved its branches to their devices
    module.to(group.device)
    return module if group.world_size == 1 else _replicate(module)


def _replicate(module: nn.Module) -> DistributedDataParallel:
    """Wrap in DDP without broadcasting buffers, so each worker has its own running statistics.

    `static_graph` is off, because together with `no_sync` it fails an assertion in torch.
    """
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


def has_inner_collectives(model: nn.Module) -> bool:
    """Return True if a forward of the model has collectives, so that no rank may skip it.

    That is so if the model is sharded (FSDP) or has SyncBatchNorm.
    """
    return is_sharded(model) or any(
        isinstance(submodule, nn.SyncBatchNorm) for submodule in model.modules()
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a model that DDP wraps; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def maybe_no_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return a context manager for forward and backward of one micro-batch, in which gradients are
    reduced over ranks only if it is the last.

    FSDP reduces them in each, because unreduced gradients would be unsharded and need the memory
    that sharding saves. HSDP adds up the shards of other nodes only in the last one.

    Args:
        model: The model, wrapped in DDP or sharded.
        last: Whether this is the last micro-batch of the step.
    """
    if is_sharded(model):
        sharded: Any = model
        sharded.set_requires_all_reduce(last)
        return nullcontext()
    return (
        nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()
    )


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Context manager in which forwards do not change the buffers (running statistics of
    BatchNorm).

    Forwards use copies. Restoring the old values in place would invalidate graphs that saved the
    originals.

    Args:
        module: The module, with all its submodules.
    """
    originals = [
        (submodule, dict(submodule._buffers))
        for submodule in module.modules()
        if submodule._buffers
    ]
    for submodule, buffers in originals:
        submodule._buffers.update(
            {name: None if value is None else value.clone() for name, value in buffers.items()}
        )
    try:
        yield
    finally:
        for submodule, buffers in originals:
            submodule._buffers.update(buffers)


# --- two devices of one worker


def two_devices(device: torch.device) -> tuple[torch.device, torch.device]:
    """Return the two GPUs of a worker for `train.parallel` `branches`, or the CPU twice.

    The image encoder is on the first GPU and the text encoder on the second.

    Args:
        device: The worker's first GPU, or the CPU.

    Raises:
        UsageError: There is only one GPU.
    """
    if device.type != "cuda":
        return device, device
    if torch.cuda.device_count() < 2:
        raise UsageError(
            "train.parallel branches: a worker needs two GPUs, and torch sees one. "
            "Use --train.parallel ddp"
        )
    return device, torch.device("cuda", 1 - (device.index or 0))


def place_branches(module: nn.Module, device: torch.device) -> None:
    """Move the text branch of a model to the second GPU; inputs and outputs of the model stay on
    the first.

    Kernels are launched asynchronously, and autograd has a thread per device, so both branches run
    at the same time.

    Args:
        module: The model, with `branches()`, on the first GPU; changed in place.
        device: The worker's first GPU, or the CPU, on which nothing moves.

    Raises:
        UsageError: There is only one GPU.
    """
    first, second = two_devices(device)
    columns = ("input_ids", "attention_mask")

    def copy_inputs(text: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            value.to(next(text.parameters()).device, non_blocking=True) for value in inputs
        )

    def copy_captions(
        model: nn.Module, inputs: tuple[dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor]]:
        # Before any kernel of the step is queued, because a copy between devices waits for the
        # queues of both.
        text = model.branches()["text"]  # type: ignore[operator]
        copies = copy_inputs(text, tuple(inputs[0][name] for name in columns))
        return (inputs[0] | dict(zip(columns, copies, strict=True)),)

    text = module.branches()["text"].to(second)  # type: ignore[operator]
    module.register_forward_pre_hook(copy_captions)
    # The embedding methods bypass the forward of the model, and so its hook.
    text.register_forward_pre_hook(copy_inputs)
    text.register_forward_hook(lambda _, inputs, output: output.to(first))


# --- FSDP2, imported when used: it takes 0.6 s, with DTensor and sympy


def is_sharded(module: nn.Module) -> bool:
    """Return True if FSDP2 shards this module, because `shard` was applied to it."""
    return hasattr(module, "set_reshard_after_forward")


@torch.no_grad()
def shard(
    module: nn.Module, group: Group, dtype: torch.dtype | None, hybrid: bool = False
) -> nn.Module:
    """Shard a module in place with FSDP2 (Zhao et al. 2023).

    The weights of each block (such as a transformer layer) are gathered and freed together, then
    those of the rest of each branch (such as the image encoder), and the rest of the model.

    The weights are rank 0's, sent part by part, so parameters of other ranks may be on the meta
    device. If those of rank 0 are too, the weights become zeros, to load a checkpoint into.
    Gradients are averaged in float32. Scalars such as the temperature cannot be sharded and are
    replicated.

    Args:
        module: The model.
        group: All ranks.
        dtype: Dtype of the gathered weights in a forward; None: that of the weights.
        hybrid: Shard within a node and replicate across nodes; otherwise shard over all ranks.

    Returns:
        The same module.

    Raises:
        UsageError: For `hybrid`, the numbers of ranks on the nodes have no common divisor of 2 or
            more, or the ranks of a node do not follow one another.
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
    branches = (
        module.branches().values()  # type: ignore[operator]
        if hasattr(module, "branches") and getattr(module, "shards_branches", True)
        else ()
    )
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
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=set(_replicated(part)))
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
    for name in (*EMBEDDING_METHODS, "head_scores", "answer"):
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def _device_mesh(group: Group, hybrid: bool) -> DeviceMesh:
    """All ranks in one dimension; hybrid: (replicas, shards), where the ranks of a replica are on
    one node.
    """
    shards = group.world_size
    if hybrid:
        size = group.ranks_on_node
        local_rank = int(os.environ.get("LOCAL_RANK", group.rank % size))
        # The first rank and the number of ranks of each rank's node.
        nodes = group.all_gather_objects((group.rank - local_rank, size))
        _check_contiguous(nodes)
        ranks_on_node = [number for _, number in nodes]
        shards = math.gcd(*ranks_on_node)
        if shards == 1:
            text = ", ".join(map(str, sorted(set(ranks_on_node))))
            raise UsageError(
                "train.parallel hsdp shards within a node: the numbers of workers on the nodes "
                f"({text}) need a common divisor of 2 or more; use fsdp, or other "
                "--cluster.workers"
            )
    if shards == group.world_size:
        return init_device_mesh(group.device.type, (shards,))
    shape = group.world_size // shards, shards
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for process_group in mesh.get_all_groups():
        group.set_timeout(process_group)
    return mesh


def _check_contiguous(nodes: list[tuple[int, int]]) -> None:
    """Raise UsageError unless the ranks of each node follow one another.

    The mesh has consecutive ranks in one replica. Otherwise a replica would span nodes, and the
    collectives of each block would cross the network.

    Args:
        nodes: First rank and number of ranks of each rank's node.
    """
    first = 0
    while first < len(nodes):
        size = nodes[first][1]
        if nodes[first : first + size] != [(first, size)] * size:
            raise UsageError(
                f"train.parallel hsdp needs consecutive ranks on each node, but the node of rank "
                f"{first} does not have the ranks {first} to {first + size - 1}; use fsdp, or "
                "start the ranks node by node"
            )
        first += size


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


def _replicated(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 0]


def parameter_storages(module: nn.Module) -> Callable[[], set[int]]:
    """Return a function that returns the memory addresses of a module's unsharded weights.

    Args:
        module: The module.

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


def average_replicated_gradients(module: nn.Module, group: Group) -> None:
    """Average the gradients of a sharded model's replicated scalars over ranks, because FSDP does
    not.

    Args:
        module: The model; without effect if it is not sharded.
        group: All ranks, which call this together.
    """
    for parameter in _replicated(module) if is_sharded(module) else ():
        if parameter.grad is not None:
            group.all_reduce_sum(parameter.grad).div_(group.world_size)


@contextmanager
def freed_afterwards(module: nn.Module) -> Iterator[None]:
    """Context manager that frees the gathered weights of a sharded model at its end.

    FSDP keeps those of the outermost module after a forward, for the backward pass, and would use
    them in the next step although the weights have changed.

    Args:
        module: The model; without effect if it is not sharded.
    """
    try:
        yield
    finally:
        if is_sharded(module):
            sharded: Any = module
            sharded.reshard()
