"""The process group of torch.distributed as a backend of Ray Train.

Ray's `TorchConfig` imports torch in the driver and in Ray Train's controller: 400 MiB in each of
two processes on the head for every run, also while it waits. Here only the workers import it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.util import get_node_ip_address

from mmray.cluster.ray_internals import torch_framework
from mmray.machine import LOOPBACK, set_network_interface

SHUTDOWN_TIMEOUT_S = 30.0


@dataclass
class ProcessGroupConfig(BackendConfig):
    """Process group of all workers, on the network interface that Ray uses, or the loopback if all
    workers are on one node.

    Args:
        backend: Backend of torch.distributed, such as `gloo`.
        timeout_s: Timeout of collectives, which neither gloo nor NCCL has by default.
    """

    backend: str = "gloo"
    timeout_s: int = 300

    @property
    def backend_cls(self) -> type[Backend]:
        return _ProcessGroup

    @property
    def train_func_context(self) -> Any:
        return _own_device

    @property
    def framework(self) -> Any:
        return torch_framework()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def _own_device() -> Iterator[None]:
    """Make the GPU of this worker the current one for its loop, without which code that names no
    device would use the first.
    """
    import torch
    from ray.train.torch import get_device

    if torch.cuda.is_available():
        torch.cuda.set_device(get_device())
    yield


class _ProcessGroup(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, ProcessGroupConfig)
        ips = worker_group.execute(get_node_ip_address)
        master = worker_group.execute_single(0, _free_address)
        joins = [
            worker_group.execute_single_async(
                rank,
                _join,
                world_rank=rank,
                world_size=len(ips),
                loopback=len(set(ips)) == 1,
                master=master,
                config=backend_config,
            )
            for rank in range(len(ips))
        ]
        ray.get(joins)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        leaving = worker_group.execute_async(_leave)
        ray.wait(leaving, num_returns=len(leaving), timeout=SHUTDOWN_TIMEOUT_S)


def _free_address() -> tuple[str, int]:
    address = get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as free:
        free.bind(("", 0))
        return address, int(free.getsockname()[1])


def _join(
    world_rank: int,
    world_size: int,
    loopback: bool,
    master: tuple[str, int],
    config: ProcessGroupConfig,
) -> None:
    """Join the process group, with the environment variables of torchrun."""
    import torch.distributed as dist

    set_network_interface(LOOPBACK if loopback else get_node_ip_address())
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "RANK": str(world_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a failed collective ends a rank
    dist.init_process_group(
        backend=config.backend,
        rank=world_rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout_s),
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
