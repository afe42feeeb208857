"""The ranks that train together: every collective of the package is one of these methods.

Used by step.py (gather the embeddings, count the rows), loop.py and evaluate/. Without torch.distributed it is a group
of one, and each method is the identity, so the same code runs in a notebook, under torchrun and under Ray Train.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """This process among those that train together; all ranks must make the same calls in the same order."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default=torch.device("cpu"))
    cpu_group: Any = field(
        default=None, compare=False, repr=False
    )  # gloo group of the same ranks; None: the default group

    @classmethod
    def current(cls, device: torch.device | str = "cpu", timeout_s: float = 300.0) -> Group:
        """The default process group of torch.distributed, or a group of one where there is none."""
        if not dist.is_initialized():
            return cls(device=torch.device(device))
        cpu_group = None if dist.get_backend() == "gloo" else _hosts(dist.group.WORLD, timeout_s)
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device), cpu_group)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of the ranks' values. It goes from host to host and waits for no device."""
        if self.world == 1:
            return value
        box = torch.tensor([value])
        dist.all_reduce(box, dist.ReduceOp.MIN, group=self.cpu_group)
        return int(box)

    def all_reduce_and(self, good: bool) -> bool:
        """Whether it is good on every rank; from host to host."""
        return bool(self.all_reduce_min(int(good)))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, rows: Tensor) -> Tensor:
        """Rows of all ranks [world x B, D] in rank order from [B, D] on each."""
        if self.world == 1:
            return rows
        rows = rows.detach().contiguous()
        everyone = rows.new_empty(self.world * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(everyone, rows)
        return everyone

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        """The transpose of `gather`: a row's gradient [B, D] is the sum of what the ranks gave it [world x B, D]."""
        if self.world == 1:
            return gradients
        mine = gradients.new_empty(gradients.shape[0] // self.world, *gradients.shape[1:])
        dist.reduce_scatter_tensor(mine, gradients.contiguous())
        return mine

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in rank order, without gradient; the ranks may bring different numbers of rows."""
        rows = rows.detach().to(self.device)
        if self.world == 1:
            return rows
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(rows)], device=self.device))
        counts = [int(size) for size in sizes]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everyone, padded)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])

    def ring_shift(self, tensor: Tensor) -> Tensor:
        """The previous rank's tensor of the same shape, while this rank's goes to the next: once around the ring."""
        if self.world == 1:
            return tensor
        arriving = torch.empty_like(tensor)
        moves = [
            dist.P2POp(dist.isend, tensor.contiguous(), (self.rank + 1) % self.world),
            dist.P2POp(dist.irecv, arriving, (self.rank - 1) % self.world),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        return arriving

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, which waits until the device has come to it, and what that waits for from others."""
        return tensor.cpu()

    def barrier(self) -> None:
        """Return when all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; for what is rare and small, such as the text of an error."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def new_cpu_group(self, timeout_s: float) -> Any:
        """A gloo group of the same ranks for a thread of its own: what it says meets no other collective."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]


@lru_cache(maxsize=1)
def _hosts(world: Any, timeout_s: float) -> Any:
    """A gloo group of all ranks, made once for a process group: what it says costs a device nothing."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
