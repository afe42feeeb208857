"""The process group of a run; only DDP, FSDP, DCP and SyncBatchNorm have collectives other than
these methods.

Without torch.distributed it is a group of one, and each method is the identity. So the same code
runs in a notebook, under torchrun and under Ray Train.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mmray.errors import UsageError
from mmray.machine import LOOPBACK, set_network_interface

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Group:
    """This rank in its process group; all ranks must make the same calls in the same order.

    `Group.current(device)` returns it for the process group of torch.distributed; `Group()` is a
    process alone, on the CPU.

    Methods such as `all_gather` (rows [B, ...] to [world_size x B, ...]), `all_reduce_sum` and
    `broadcast` take and return tensors; with one rank they return their argument.
    `all_gather_objects` takes any object.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank.
        timeout_s: Timeout of collectives in seconds; None: as the process group was initialized.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default=torch.device("cpu"))
    timeout_s: float | None = None

    @classmethod
    def current(cls, device: torch.device | str = "cpu", timeout_s: float | None = None) -> Group:
        """Return the default process group of torch.distributed; a group of this process alone if
        it is not initialized.
        """
        if not dist.is_initialized():
            return cls(device=torch.device(device))
        group = cls(dist.get_rank(), dist.get_world_size(), torch.device(device), timeout_s)
        group.set_timeout(dist.group.WORLD)
        return group

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on this node: LOCAL_WORLD_SIZE, which Ray Train and torchrun set, or the
        world size without it.
        """
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def set_timeout(self, process_group: ProcessGroup | None) -> None:
        """Set the timeout of a process group of torch.distributed to `timeout_s` of this group, if
        it has one.

        Args:
            process_group: A new one has torch's default.
        """
        if self.timeout_s is not None:
            # torch before 2.15 has only the private function.
            set_timeout = (
                getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            )
            set_timeout(timedelta(seconds=self.timeout_s), process_group)

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of an int over all ranks.

        The collective runs on the CPU and does not wait for a GPU.
        """
        if self.world_size == 1:
            return value
        minimum = torch.tensor([value])
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with rank 0's values, and return it."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return rows [B, ...] (equal B) of all ranks in rank order, without gradient."""
        if self.world_size == 1:
            return rows
        rows = rows.detach().contiguous()
        gathered = rows.new_empty(self.world_size * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        """Return this rank's rows of the gradients summed over ranks: backward of `all_gather`."""
        if self.world_size == 1:
            return gradients
        local = gradients.new_empty(gradients.shape[0] // self.world_size, *gradients.shape[1:])
        dist.reduce_scatter_tensor(local, gradients.contiguous())
        return local

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        """Return rows [B, ...] of all ranks in rank order, where B may differ, without gradient."""
        rows = rows.detach().to(self.device)
        if self.world_size == 1:
            return rows
        counts = self.all_gather(torch.tensor([len(rows)], device=self.device)).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = self.all_gather(padded).unflatten(0, (self.world_size, max(counts)))
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host; this waits until the device has computed it."""
        return tensor.cpu()

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that copies a tensor to the host, without waiting for kernels queued
        later.

        Args:
            tensor: On the device of the group.

        Returns:
            A function without arguments that returns the tensor on the CPU. On a GPU it waits only
            for the kernels that were queued before this call.
        """
        if self.device.type != "cuda":
            return lambda: self.to_host(tensor)
        event = torch.cuda.current_stream(self.device).record_event()

        def read() -> Tensor:
            stream = _side_stream(self.device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                return self.to_host(tensor)

        return read

    def all_gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @staticmethod
    def new_cpu_group(timeout_s: float) -> Any:
        """Create a second gloo group of all ranks, for collectives of another thread."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def broadcast_object(self, value: object) -> Any:
        """Return rank 0's value, which must be picklable, on every rank; the values of other ranks
        are not used.
        """
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def call_on_rank0(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns on rank 0, on every rank; the others do not call it.

        Raises:
            UsageError: The function raised it; on every rank.
        """
        own: Result | UsageError | None = None
        if self.rank == 0:
            try:
                own = function()
            except UsageError as error:
                own = error
        outcome: Result | UsageError = self.broadcast_object(own)
        if isinstance(outcome, UsageError):
            raise outcome
        return outcome


def join_process_group(backend: str, timeout_s: float, ip: str = LOOPBACK, **where: Any) -> None:
    """Join the process group of torch.distributed."""
    # torch 2.14 renamed collectives whose old names torch 2.11 needs.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    set_network_interface(ip)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a failed collective ends a rank
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor, which is split or copied over ranks."""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
