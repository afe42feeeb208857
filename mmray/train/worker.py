"""What runs on each Ray Train worker: its stream, and the work that train/worker.py knows without Ray.

A module of its own, so that the driver does not import the engine to start it (two seconds of a core).
"""

from __future__ import annotations

import os
import traceback
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch

from mmray.data.stream.stream import iter_blocks
from mmray.engine.worker_context import DriverHandle
from mmray.errors import MmrayError
from mmray.train.coordinator import StopFlag


def train_loop_per_worker(given: dict[str, Any]) -> dict[str, Any]:
    """Trains in a process group that Ray has made; what it is given stands in attempt.py."""
    coordinator, start = given["coordinator"], given["start"]
    from mmray.engine.worker import work  # late: the driver imports this module, and needs no engine

    rank = ray.train.get_context().get_world_rank()
    line = DriverHandle(
        report=coordinator.push.remote if rank == 0 else (lambda _: None),
        stop=StopFlag(coordinator) if rank == 0 else (lambda: False),
        bad_row=lambda row: ray.get(coordinator.bad_row.remote(row)),
        beat=partial(_send_heartbeat, coordinator),
        about={"rank": rank, "node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()},
    )
    try:
        blocks = iter_blocks(ray.train.get_dataset_shard("train"))
        return work(given["job"], start, blocks, ray.train.torch.get_device(), line)
    except Exception as error:
        if not isinstance(error, MmrayError):
            error.add_note(traceback.format_exc())  # a traceback does not travel to the driver, a note does
        raise


def _send_heartbeat(coordinator: Any, beat: dict[str, Any]) -> bool:
    """Send a heartbeat; a board that is busy, or gone, wants no stacks."""
    try:
        return bool(ray.get(coordinator.beat.remote(beat), timeout=5))
    except (ray.exceptions.RayError, TimeoutError):
        return False
