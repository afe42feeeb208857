"""Call a function in new worker processes joined by torch.distributed, on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmray.config import Config
from mmray.engine.collectives import Group, join_process_group
from mmray.processes import Channel, ChildProcess

Measure = Callable[[Config, Group, Path], Any]


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
    store = f"file://{folder}/store"
    world_size = config.cluster.max_workers
    join_process_group("gloo", 120, init_method=store, rank=rank, world_size=world_size)
    group = Group.current(torch.device("cpu"))
    result = measure(config, group, folder)
    group.all_gather_objects(None)
    return result
