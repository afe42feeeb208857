"""Run a measurement in new worker processes (so that memory is not inherited) joined by
torch.distributed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mmray.builtin import BACKENDS
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import keep_freed_memory
from mmray.errors import ResourceError, TrainingError, is_out_of_memory
from mmray.machine import LOOPBACK, cores, set_network_interface
from mmray.processes import Channel, ChildDied, ChildProcess

if TYPE_CHECKING:
    from mmray.config import Cluster, Config

# called on every rank
Measure = Callable[["Config", Group, Path], Any]


class WorkerFailed(TrainingError):
    """A process of a benchmark died, or the measured function raised an error in it."""


def select_device(cluster: Cluster) -> torch.device:
    """Return the type of device that a run would use on this machine.

    Args:
        cluster: The `cluster` section, of which `accelerator` and `workers` are read.

    Returns:
        `cuda:0` if there is a GPU for each worker, otherwise `cpu`.

    Raises:
        ResourceError: `cluster.accelerator` is `gpu`, and there are fewer GPUs than workers.
    """
    num_gpus = torch.cuda.device_count()
    workers = cluster.max_workers
    if cluster.accelerator == "cpu" or (cluster.accelerator == "auto" and num_gpus < workers):
        return torch.device("cpu")
    if num_gpus < workers:
        raise ResourceError(
            f"{workers} workers need a GPU each, this machine has {num_gpus}: "
            "lower --cluster.workers"
        )
    return torch.device("cuda", 0)


def spawn_workers(measure: Measure, config: Config) -> Any:
    """Run a function in `cluster.workers` new processes of this machine, joined by
    torch.distributed.

    Args:
        measure: Module-level function, called in each process with (config, group, folder): its
            Group of ranks, and a temporary folder that all processes share.
        config: Passed to `measure`; gives the number of processes.

    Returns:
        What `measure` returned in the process of rank 0, unchanged.

    Raises:
        WorkerFailed: A process died, or `measure` raised an error in it.
        ResourceError: There are fewer GPUs than `cluster.accelerator` `gpu` needs.
    """
    device_type = select_device(config.cluster).type
    with tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
        workers = [
            ChildProcess("worker", _run_worker, rank, measure, config, device_type, Path(folder))
            for rank in range(config.cluster.max_workers)
        ]
        try:
            return _wait_for_results(workers)[0]
        finally:
            for worker in workers:
                worker.kill()


def _wait_for_results(workers: list[ChildProcess]) -> list[Any]:
    """Return the results of all ranks. Raises WorkerFailed as soon as one has failed."""
    results: list[Any] = [None] * len(workers)
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    failures: list[Exception] = []
    while ranks and not failures:
        for connection in wait(list(ranks)):
            rank = ranks.pop(connection)  # type: ignore[call-overload]
            try:
                results[rank] = workers[rank].result()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
    if failures:
        # Out of memory first, because the other ranks only see a broken connection.
        failure = max(failures, key=is_out_of_memory)
        reason = str(failure)
        if not isinstance(failure, ChildDied):
            reason = f"{type(failure).__name__}: {failure}"
        raise WorkerFailed(reason.splitlines()[0])
    return results


def _run_worker(
    channel: Channel, rank: int, measure: Measure, config: Config, device_type: str, folder: Path
) -> None:
    channel.send_outcome(lambda: _measure_rank(rank, measure, config, device_type, folder))
    # Skip interpreter shutdown, during which a gloo thread may release a tensor and abort the
    # process.
    os._exit(0)


def _measure_rank(
    rank: int, measure: Measure, config: Config, device_type: str, folder: Path
) -> Any:
    """Join the group of workers, and return the measurement of this rank."""
    torch.set_num_threads(max(1, int(config.cluster.resolve_cpus(cores()))))
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()  # as in a training worker
    set_network_interface(LOOPBACK)
    dist.init_process_group(
        BACKENDS[device_type],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.cluster.max_workers,
        timeout=timedelta(seconds=config.cluster.group_timeout_s),
    )
    group = Group.current(device)
    result = measure(config, group, folder)
    group.barrier()
    return result
