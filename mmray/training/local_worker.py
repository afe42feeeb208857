"""The worker process of training/local.py.

It imports the engine before it waits for its arguments.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Any

from mmray.errors import DeviceError, is_device_error
from mmray.processes import Channel
from mmray.training.coordinator import IMPORTING


def run_worker(channel: Channel) -> dict[str, Any]:
    """Train in this process: the main function of the worker process.

    It imports the engine before it waits for its arguments.

    Args:
        channel: Connection to the driver. The worker receives (WorkerContext, ResumePoint, Config)
            once, and sends messages (name of a method of Coordinator, its argument), such as
            ("push", {"step": 1, ...}).

    Returns:
        Fields of result.json, such as `status` and `steps`.
    """
    # Slurm and systemd send it to all processes; the driver handles it. Not SIG_IGN, which data
    # processes inherit: after a crash their pool ends the others with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    channel.send(("push", {"stage": IMPORTING}))
    # Read when torch is imported. By default threads spin for milliseconds at the end of a parallel
    # region; on two busy cores, training was 8 times faster with threads that sleep, and on idle
    # cores 25 % slower. This is in between.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    import torch

    from mmray.data.stream.local import LocalBlocks
    from mmray.engine.heartbeat import Heartbeat, describe_process
    from mmray.engine.worker import train_worker
    from mmray.engine.worker_context import DriverHandle

    context, resume_point, config = channel.connection.recv()
    stop = threading.Event()

    def send_heartbeat(record: dict[str, Any]) -> bool:
        stop_requested, stacks_requested, _ = channel.call(("heartbeat", record))
        # In the heartbeat after the request: otherwise the loop stops after its step.
        if stop.is_set() and record.get("state") == "waiting_for_data":
            blocks.interrupt()
        if stop_requested:
            stop.set()
        return bool(stacks_requested)

    heartbeat = Heartbeat(send_heartbeat, describe_process(0, "here"), context.folder)
    driver = DriverHandle(
        report=lambda message: channel.send(("push", message)),
        stop_requested=stop.is_set,
        count_bad_row=lambda row: int(channel.call(("record_bad_row", row))),
        heartbeat=heartbeat,
    )
    device = torch.device("cuda", 0) if config.cluster.accelerator == "gpu" else torch.device("cpu")
    try:
        blocks = LocalBlocks(
            context.reader,
            resume_point,
            config.data.block_mb,
            context.decode_actors,
            warn=lambda text: driver.notify("data", text),
        )
        with heartbeat.running(resume_point.step), closing(blocks):
            return train_worker(context, resume_point, blocks, device, driver)
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, "on this machine") from None
        raise
