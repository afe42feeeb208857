"""The `train_loop_per_worker` of Ray Train: connects engine/worker.py, which does not import Ray,
to Ray.
"""

from __future__ import annotations

import io
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from typing import Any, TextIO

import ray
import ray.exceptions
import ray.train

from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.stream import RankBlocks
from mmray.engine.heartbeat import Heartbeat, describe_process
from mmray.engine.worker_context import DriverHandle
from mmray.errors import DeviceError, MmrayError, is_device_error
from mmray.training.coordinator import IMPORTING


class RankOutput(io.TextIOBase):
    """Standard output of a rank, whose lines are also sent to the driver for its console.

    Args:
        stream: The standard output of the process, Ray's log file.
        label: Label of the lines, such as `rank 1`.
        push: Called with a message for the driver.
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
        arguments: `context` (WorkerContext: settings, folder and data of the run), `resume_point`
            (ResumePoint: first step and checkpoint), `coordinator` (handle of the actor that passes
            messages to the driver) and `decoders` (DecoderLimits: how many processes may read and
            decode rows for a rank).

    Returns:
        Fields of result.json, such as `status` and `steps`.

    Raises:
        DeviceError: A GPU or its link failed; it names the rank, the GPU and the node.
    """
    coordinator = arguments["coordinator"]
    context = arguments["context"]
    start = arguments["resume_point"]
    rank = ray.train.get_context().get_world_rank()
    stop = threading.Event()
    must_yield = threading.Event()
    streams: list[RankBlocks] = []  # that of this rank, once it has started

    def send_heartbeat(record: dict[str, Any]) -> bool:
        """Send a heartbeat, and read the driver's requests; none if it does not answer."""
        try:
            stop_requested, stacks_requested, yield_requested = ray.get(
                coordinator.heartbeat.remote(record), timeout=5
            )
        except (ray.exceptions.RayError, TimeoutError):
            return False
        if stop_requested:
            stop.set()
        if yield_requested:
            must_yield.set()
            for stream in streams:
                stream.update_pool()  # the rank may be evaluating
        else:
            must_yield.clear()
        return bool(stacks_requested)

    node = ray.get_runtime_context().get_node_id()
    heartbeat = Heartbeat(send_heartbeat, describe_process(rank, node), context.folder)
    driver = DriverHandle(
        report=coordinator.push.remote if rank == 0 else (lambda _: None),
        stop_requested=stop.is_set,  # the ranks agree on it in the next step
        count_bad_row=lambda row: ray.get(coordinator.record_bad_row.remote(row)),
        heartbeat=heartbeat,
    )
    try:
        # Before the imports, so that the decode actors start meanwhile.
        blocks = rank_blocks(
            context.reader,
            start,
            rank,
            ray.train.get_context().get_local_world_size(),
            context.config.data.block_mb,
            arguments["decoders"],
            lambda text: coordinator.push.remote({"note": text, "label": "data"}),
            must_yield.is_set,
        )
        streams.append(blocks)
        output = RankOutput(sys.stdout, f"rank {rank}", coordinator.push.remote)
        with heartbeat.running(start.step), closing(blocks), redirect_stdout(output):
            driver.stage(IMPORTING)
            # Imported here: the driver and Ray Train's controller import this module without torch,
            # which takes 2 s of CPU time and 400 MiB in each.
            from ray.train.torch import get_device

            from mmray.engine.worker import train_worker

            device = get_device()
            return train_worker(context, start, blocks, device, driver)
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, _device_of(rank), node) from None
        if not isinstance(error, MmrayError):
            # a traceback is not sent to the driver, a note is
            error.add_note(traceback.format_exc())
        raise


def _device_of(rank: int) -> str:
    """Return the rank, GPU and node of this worker, for the message of an error."""
    worker = ray.get_runtime_context()
    gpus = ", ".join(worker.get_accelerator_ids().get("GPU", [])) or "none"
    node = worker.get_node_id()
    return f"rank {rank}, GPU {gpus}, node {node[:8]} at {ray.util.get_node_ip_address()}"
