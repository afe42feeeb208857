"""The worker process of training/local.py.

It imports the engine before it waits for its arguments.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import psutil

from mmray.errors import DeviceError, MmrayError, first_line, is_device_error
from mmray.processes import init_child
from mmray.training.coordinator import IMPORTING


def run_worker(connection: Connection) -> None:
    """Receive the arguments of an attempt, train, and send the outcome; the driver serves all other
    messages.
    """
    init_child()
    # Slurm and systemd send it to all processes; the driver handles it. Not SIG_IGN, which data
    # processes inherit: after a crash their pool ends the others with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    connection.send(("push", {"stage": IMPORTING}))
    # Read when torch is imported. By default threads spin for milliseconds at the end of a parallel
    # region; on two busy cores, training was 8 times faster with threads that sleep, and on idle
    # cores 25 % slower. This is in between.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    import torch

    from mmray.data.stream.local import LocalBlocks
    from mmray.engine.heartbeat import Heartbeat
    from mmray.engine.worker import train_worker
    from mmray.engine.worker_context import DriverHandle

    context, resume_point, config = connection.recv()
    lock, stop = threading.Lock(), threading.Event()

    def call(name: str, argument: Any) -> Any:
        with lock:
            connection.send((name, argument))
            return connection.recv()

    def report(message: dict[str, Any]) -> None:
        with lock:
            connection.send(("push", message))

    def send_heartbeat(record: dict[str, Any]) -> bool:
        stop_requested, stacks_requested = call("heartbeat", record)
        if stop_requested:
            stop.set()
        return bool(stacks_requested)

    process = {
        "rank": 0,
        "node": "here",
        "pid": os.getpid(),
        "started_s": psutil.Process().create_time(),
    }
    heartbeat = Heartbeat(send_heartbeat, process, context.folder)
    driver = DriverHandle(
        report, stop.is_set, lambda row: int(call("record_bad_row", row)), heartbeat
    )
    device = torch.device("cuda", 0) if config.cluster.accelerator == "gpu" else torch.device("cpu")
    try:
        args = context.reader, resume_point, config.data.block_mb, context.decode_actors
        blocks = LocalBlocks(*args, warn=lambda text: driver.notify("data", text))
        with heartbeat.running(resume_point.step), closing(blocks):
            answer: tuple[str, Any] = (
                "returned",
                train_worker(context, resume_point, blocks, device, driver),
            )
    except Exception as error:  # noqa: BLE001 - raised again in the driver
        if is_device_error(error):
            error = DeviceError(f"{first_line(error)} (on this machine)")
        if isinstance(error, DeviceError) or not isinstance(error, MmrayError):
            error.add_note(traceback.format_exc())
        answer = "raised", pickled(error)
    with lock:
        connection.send(answer)


def pickled(error: Exception) -> bytes:
    """Pickle an error, or its text if its class cannot be pickled."""
    try:
        pickle.loads(data := pickle.dumps(error))
        return data
    except Exception:  # noqa: BLE001 - a user's class that cannot be pickled
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return pickle.dumps(plain)
