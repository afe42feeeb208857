"""Call a function in new worker processes joined by torch.distributed, on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmray.config import Config
from mmray.engine.collectives import Group
from mmray.machine import LOOPBACK, set_network_interface
from mmray.processes import Channel, ChildProcess

Measure = Callable[[Config, Group, Path], Any]
TIMEOUT = timedelta(seconds=120)


def spawn_workers(measure: Measure, config: Config) -> Any:
    """Call a module-level function in `cluster.workers` processes; return what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            ChildProcess("worker", _run_worker, rank, measure, config, Path(folder))
            for rank in range(config.cluster.max_workers)
        ]
        try:
            results = [worker.result() for worker in workers]
            return results[0]
        finally:
            for worker in workers:
                worker.kill()


def _run_worker(
    channel: Channel, rank: int, measure: Measure, config: Config, folder: Path
) -> None:
    channel.send_outcome(lambda: _measure_rank(rank, measure, config, folder))
    # Without the end of the interpreter, in which a thread of gloo may abort the process.
    os._exit(0)


def _measure_rank(rank: int, measure: Measure, config: Config, folder: Path) -> Any:
    torch.set_num_threads(1)
    set_network_interface(LOOPBACK)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.cluster.max_workers,
        timeout=TIMEOUT,
    )
    group = Group.current(torch.device("cpu"))
    result = measure(config, group, folder)
    group.barrier()
    return result
