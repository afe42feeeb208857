"""Ray Train's trainer for a loop: its options, its process group, the thread in which it runs, and
the loop of a training worker, which connects engine/worker.py to Ray.

The process group of torch.distributed is a backend of its own, because Ray's `TorchConfig` imports
torch in the driver and in Ray Train's controller: 400 MiB in each of two processes on the head for
every run, also while it waits. Here only the workers import it.
"""

from __future__ import annotations

import io
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import ray
import ray.exceptions
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.builtin import BACKENDS
from mmray.cluster.capacity import Demand
from mmray.cluster.placement import free_address, own_node_name
from mmray.cluster.ray_internals import run_train_controller
from mmray.data.stream.actors import rank_blocks
from mmray.engine.heartbeat import describe_process
from mmray.errors import DeviceError, MmrayError, is_device_error
from mmray.machine import LOOPBACK
from mmray.storage.paths import AnyPath, RemotePath
from mmray.training.workers.coordinator import IMPORTING, Coordinator, Request
from mmray.training.workers.rank import CoordinatorClient, train_rank

if TYPE_CHECKING:
    import torch

    from mmray.config import Config

SHUTDOWN_TIMEOUT_S = 30.0


@dataclass
class ProcessGroupConfig(BackendConfig):
    """Process group of all workers, on the network interface that Ray uses, or the loopback if all
    workers are on one node.

    It names no `framework`: Ray would send its version, an object of torch, to the controller and
    to the actor with the states of runs, which then import torch on the head.
    """

    backend: str = "gloo"
    timeout_s: int = 300

    @property
    def backend_cls(self) -> type[Backend]:
        return _ProcessGroup

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _ProcessGroup(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, ProcessGroupConfig)
        ips = worker_group.execute(get_node_ip_address)
        master = worker_group.execute_single(0, free_address)
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


def _join(
    world_rank: int,
    world_size: int,
    loopback: bool,
    master: tuple[str, int],
    config: ProcessGroupConfig,
) -> None:
    """Join the process group, and set the environment variables that torchrun sets."""
    from mmray.engine.collectives import join_process_group

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
    ip = LOOPBACK if loopback else get_node_ip_address()
    join_process_group(config.backend, config.timeout_s, ip)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class ReservedTrainer(DataParallelTrainer):
    """Ray Train's trainer for workers whose resources the driver has reserved, so that a driver
    that waits for resources needs no controller of Ray Train meanwhile.
    """

    _group: PlacementGroup

    def fit_in(self, group: PlacementGroup) -> Any:
        """Run the loop on all workers in a placement group that Ray has reserved, wait for its end,
        and return what it returned on rank 0.

        Raises:
            TrainingFailedError: A worker failed (Ray Train's error).
        """
        self._group = group
        result: Any = self.fit()
        return result.return_value

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        return run_train_controller(self._group, **arguments)


def ray_storage(folder: AnyPath) -> dict[str, Any]:
    """Return the options of Ray's RunConfig with which Ray writes its files to a folder."""
    if isinstance(folder, RemotePath):
        return {"storage_path": folder.fs_path, "storage_filesystem": folder.filesystem}
    return {"storage_path": str(folder)}


def torch_trainer(
    loop: Callable[..., Any],
    timeout_s: float,
    folder: AnyPath,
    demand: Demand,
    loop_config: dict[str, Any],
    name: str | None = None,
) -> ReservedTrainer:
    """Build Ray Train's trainer for a loop, without retries.

    Args:
        timeout_s: Timeout of collectives.
        folder: Ray Train writes its small files to the subfolder `ray`.
        name: Name of Ray's run; None: a random one.
    """
    no_retries: dict[str, Any] = {
        "max_failures": 0,
        "controller_failure_limit": 0,
        "max_preemption_failures": 0,
    }
    # missing in Ray's stub
    selector: dict[str, Any] = {"label_selector": demand.label_selector or None}
    return ReservedTrainer(
        loop,
        backend_config=ProcessGroupConfig(
            backend=BACKENDS["cuda" if "GPU" in demand.per_worker else "cpu"],
            timeout_s=math.ceil(timeout_s),
        ),
        scaling_config=ScalingConfig(
            num_workers=demand.workers,
            use_gpu="GPU" in demand.per_worker,
            resources_per_worker=demand.per_worker,
            **selector,
        ),
        run_config=RunConfig(
            name=name, failure_config=FailureConfig(**no_retries), **ray_storage(folder / "ray")
        ),
        train_loop_config=loop_config,
    )


def start_coordinator(bad_rows: set[int]) -> Any:
    """Start the Coordinator as an actor on the driver's node, and return its handle."""
    driver_node = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    return (
        ray.remote(Coordinator)
        .options(num_cpus=0, scheduling_strategy=driver_node)
        .remote(bad_rows)
    )


class RankOutput(io.TextIOBase):
    """Standard output of a rank, whose lines are also sent to the driver for its console.

    Args:
        stream: The standard output of the process, Ray's log file.
        label: Label of the lines, such as `rank 1`.
        push: Called with a message for the driver, {"note": line, "label": label}.
    """

    def __init__(self, stream: TextIO, label: str, push: Callable[[dict[str, Any]], Any]) -> None:
        self._stream = stream
        self._label = label
        self._push = push
        self._line = ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._push({"note": line, "label": self._label})
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def train_loop_per_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train one rank, in the process group that Ray Train has created.

    Args:
        arguments: `context` (WorkerContext), `resume_point` (ResumePoint), `coordinator` (handle of
            the actor) and `decoders` (DecoderLimits).

    Returns:
        The result of `train_worker`.

    Raises:
        DeviceError: A GPU or its link failed; it names the rank, the GPU and the node.
    """
    context = arguments["context"]
    start = arguments["resume_point"]
    worker = ray.train.get_context()
    rank = worker.get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    actor = arguments["coordinator"]

    def send_heartbeat(record: dict[str, Any]) -> set[Request] | None:
        try:
            requests: set[Request] = ray.get(actor.heartbeat.remote(record), timeout=5)
            return requests
        except (ray.exceptions.RayError, TimeoutError):
            return None

    coordinator = CoordinatorClient(
        push=actor.push.remote,
        heartbeat=send_heartbeat,
        record_bad_row=lambda row: ray.get(actor.record_bad_row.remote(row)),
    )

    open_blocks = partial(
        rank_blocks,
        context.reader,
        start,
        rank,
        worker.get_local_world_size(),
        context.config.data.block_mb,
        arguments["decoders"],
    )

    process = describe_process(rank, node, own_node_name())
    output = RankOutput(sys.stdout, f"rank {rank}", coordinator.push)
    if rank == 0:
        coordinator.push({"stage": IMPORTING})
    try:
        with redirect_stdout(output):
            return train_rank(
                context,
                start,
                process,
                coordinator,
                open_blocks,
                lambda: get_device(context.config),
            )
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, _device_of(rank), node) from None
        if not isinstance(error, MmrayError):
            # a traceback is not sent to the driver, a note is
            error.add_note(traceback.format_exc())
        raise


def get_device(config: Config) -> torch.device:
    """Return the device of this worker, for a config in which `cluster.accelerator` is resolved."""
    import torch

    if config.cluster.accelerator == "cpu":
        return torch.device("cpu")
    import ray.train.torch  # takes 0.9 s of CPU time

    return ray.train.torch.get_device()


def _device_of(rank: int) -> str:
    """Return the rank, GPU and node of this worker, for the message of an error."""
    worker = ray.get_runtime_context()
    gpus = ", ".join(worker.get_accelerator_ids().get("GPU", [])) or "none"
    return f"rank {rank}, GPU {gpus}, node {own_node_name()}"
