"""How a model is spread over ranks: replicated with DDP, gradients summed once a step.

step.py asks here for the module inside, for a forward whose gradients stay local, and for buffers left as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmray.train.group import Group


def wrap(module: nn.Module, group: Group) -> nn.Module:
    """The module as all ranks train it: DDP (rank 0's weights win), or itself in a group of one.

    Buffers are not broadcast: running statistics are each worker's own. `static_graph` stays off, it asserts inside
    torch when used together with `no_sync`.
    """
    if group.world == 1:
        return module
    # 1x1 convolutions on a CPU bring such gradients; what torch warns of is one copy of a small weight.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    with warnings.catch_warnings():
        # The name that takes its place is not yet in torch 2.11.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside a wrapped model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Scope of one micro-batch's forward and backward; gradients meet over ranks in the last one only."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
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
