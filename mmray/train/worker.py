"""The `train_loop_per_worker` of Ray Train: connects engine/worker.py, which does not import Ray, to Ray."""

from __future__ import annotations

import os
import traceback
from functools import partial
from typing import Any

import psutil
import ray
import ray.exceptions
import ray.train
import ray.train.torch

from mmray.data.stream.stream import iter_blocks
from mmray.engine.worker_context import DriverHandle
from mmray.errors import MmrayError
from mmray.train.coordinator import StopFlag


def train_loop_per_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train in the process group that Ray Train made. `arguments` come from worker_group.build_trainer."""
    coordinator, start = arguments["coordinator"], arguments["start"]
    from mmray.engine.worker import work  # here: the driver imports this module without the engine, 2 s of CPU time

    rank = ray.train.get_context().get_world_rank()
    about = {
        "rank": rank,
        "node": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
        "started_s": psutil.Process().create_time(),
    }
    line = DriverHandle(
        report=coordinator.push.remote if rank == 0 else (lambda _: None),
        stop=StopFlag(coordinator) if rank == 0 else (lambda: False),
        bad_row=lambda row: ray.get(coordinator.bad_row.remote(row)),
        beat=partial(_send_heartbeat, coordinator),
        about=about,
    )
    try:
        blocks = iter_blocks(ray.train.get_dataset_shard("train"))
        return work(arguments["job"], start, blocks, ray.train.torch.get_device(), line)
    except Exception as error:
        if not isinstance(error, MmrayError):
            error.add_note(traceback.format_exc())  # a traceback is not sent to the driver, a note is
        raise


def _send_heartbeat(coordinator: Any, record: dict[str, Any]) -> bool:
    """Send a heartbeat; return whether stacks are requested (no, if the coordinator does not answer)."""
    try:
        return bool(ray.get(coordinator.heartbeat.remote(record), timeout=5))
    except (ray.exceptions.RayError, TimeoutError):
        return False
