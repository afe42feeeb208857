"""The ranks that train together: every collective of the package is one of these methods.

Used by step.py (gather the embeddings, count the rows), loop.py and evaluate/. Without torch.distributed it is a group
of one, and each method is the identity, so the same code runs in a notebook, under torchrun and under Ray Train.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

    @classmethod
    def current(cls, device: torch.device | str = "cpu") -> Group:
        """The default process group of torch.distributed, or a group of one where there is none."""
        if not dist.is_initialized():
            return cls(device=torch.device(device))
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of all ranks [world x B, D] in rank order from [B, D] on each; gradients flow back to their ranks."""
        if self.world == 1:
            return rows
        gathered: Tensor = _Gather.apply(rows, self.world)
        return gathered

    def gather_plain(self, rows: Tensor) -> Tensor:
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

    def barrier(self) -> None:
        """Return when all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]


class _Gather(torch.autograd.Function):
    """All-gather whose backward is its transpose: rows get the gradients that the losses of all ranks gave them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: int) -> Tensor:
        everyone = rows.new_empty(world * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(everyone, rows.contiguous())
        ctx.mine = rows.shape
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mine = gradients[0].new_empty(ctx.mine)
        dist.reduce_scatter_tensor(mine, gradients[0].contiguous())
        return mine, None
