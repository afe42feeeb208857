"""The process group of a run; only DDP, FSDP, DCP and SyncBatchNorm have collectives other than
these methods.

Without torch.distributed it is a group of one, and each method is the identity. So the same code
runs in a notebook, under torchrun and under Ray Train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Of torch.distributed, by the type of the training device. One group has both: NCCL cannot reduce
# on the host.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Group:
    """This rank in its process group; all ranks must make the same calls in the same order."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default=torch.device("cpu"))
    timeout_s: float | None = None  # of collectives; None: as the process group was initialized

    @classmethod
    def current(cls, device: torch.device | str = "cpu", timeout_s: float | None = None) -> Group:
        """Return the default process group of torch.distributed, or a group of one.

        It must have a backend for the CPU and one for `device` (BACKENDS). timeout_s: of its
        collectives from now on.
        """
        if not dist.is_initialized():
            return cls(device=torch.device(device))
        group = cls(dist.get_rank(), dist.get_world_size(), torch.device(device), timeout_s)
        group.set_timeout(dist.group.WORLD)
        return group

    def set_timeout(self, process_group: Any) -> None:
        """Set `timeout_s` of a process group of torch.distributed; new ones have torch's
        default.
        """
        if self.timeout_s is not None:
            # before 2.15
            set_timeout = (
                getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            )
            set_timeout(timedelta(seconds=self.timeout_s), process_group)

    def all_reduce_min(self, value: int) -> int:
        """Minimum over ranks; a CPU collective that does not wait for the device."""
        if self.world_size == 1:
            return value
        minimum = torch.tensor([value])
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, written into `tensor` and returned."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, rows: Tensor) -> Tensor:
        """Rows of all ranks [world_size x B, D] in rank order from [B, D] on each."""
        if self.world_size == 1:
            return rows
        rows = rows.detach().contiguous()
        gathered = rows.new_empty(self.world_size * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        """Transpose of `all_gather`: gradients [B, D] of this rank's rows, summed over the
        gradients of all ranks.
        """
        if self.world_size == 1:
            return gradients
        local = gradients.new_empty(gradients.shape[0] // self.world_size, *gradients.shape[1:])
        dist.reduce_scatter_tensor(local, gradients.contiguous())
        return local

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in rank order, without gradient; ranks may have different numbers of
        rows.
        """
        rows = rows.detach().to(self.device)
        if self.world_size == 1:
            return rows
        counts = self.all_gather(torch.tensor([len(rows)], device=self.device)).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = self.all_gather(padded).unflatten(0, (self.world_size, max(counts)))
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host, which waits for the device and its collectives."""
        return tensor.cpu()

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that copies to the host and waits only for what is queued by now."""
        if self.device.type != "cuda":
            return lambda: self.to_host(tensor)
        event = torch.cuda.current_stream(self.device).record_event()

        def read() -> Tensor:
            stream = _side_stream(self.device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                return self.to_host(tensor)

        return read

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self.world_size > 1:
            dist.barrier()

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value in rank order; for rare, small values such as error messages."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @staticmethod
    def new_cpu_group(timeout_s: float) -> Any:
        """Create a second gloo group of all ranks, for collectives of another thread."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor, of which each rank has a shard."""
    return hasattr(tensor, "placements")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
