"""One rank of a run, on Ray (ray_trainer.py) or in a process of this machine (local.py)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmray.engine.heartbeat import Heartbeat
from mmray.engine.worker_context import DriverHandle
from mmray.machine import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from mmray.config import Config
    from mmray.data.stream.order import ResumePoint
    from mmray.data.stream.stream import RankBlocks
    from mmray.engine.worker_context import WorkerContext
    from mmray.training.workers.coordinator import Message, Request


@dataclass(frozen=True)
class CoordinatorClient:
    """The methods of the Coordinator that a rank calls, from its process.

    `heartbeat` returns None if the Coordinator does not answer.
    """

    push: Callable[[Message], Any]
    heartbeat: Callable[[dict[str, Any]], set[Request] | None]
    record_bad_row: Callable[[int], int]


def train_rank(
    context: WorkerContext,
    start: ResumePoint,
    process: dict[str, Any],
    coordinator: CoordinatorClient,
    open_blocks: Callable[[Callable[[str], None], Callable[[], bool]], RankBlocks],
    get_device: Callable[[], torch.device],
) -> dict[str, Any]:
    """Train a rank with heartbeats from its first import on, and return the result of
    `train_worker`.

    Args:
        process: What `describe_process` returns in this process.
        open_blocks: Called with a function that logs a line, and one that returns whether other
            jobs wait for CPUs; starts the rank's stream.
        get_device: Called when torch may be imported.
    """
    stop = threading.Event()
    must_yield = threading.Event()

    def send_heartbeat(record: dict[str, Any]) -> bool:
        requests = coordinator.heartbeat(record)
        if requests is None:
            return False
        # In the heartbeat after the request: otherwise the loop stops after its step. Of several
        # ranks each needs its rows to take that step with the others.
        is_alone = start.plan.world_size == 1
        if is_alone and stop.is_set() and record.get("state") == "waiting_for_data":
            blocks.interrupt()
        if "stop" in requests:
            stop.set()
        if "yield" in requests:
            must_yield.set()
            blocks.update_pool()  # the rank may be evaluating
        else:
            must_yield.clear()
        return "stacks" in requests

    heartbeat = Heartbeat(send_heartbeat, process, context.folder)
    driver = DriverHandle(
        report=coordinator.push if process["rank"] == 0 else (lambda _: None),
        stop_requested=stop.is_set,  # the ranks agree on it in the next step
        count_bad_row=coordinator.record_bad_row,
        heartbeat=heartbeat,
    )

    def log_data(text: str) -> None:
        coordinator.push({"note": text, "label": "data"})

    # Before the imports, so that the processes that decode start meanwhile.
    blocks = open_blocks(log_data, must_yield.is_set)
    with heartbeat.running(start.step), closing(blocks):
        # Imported here: the driver and Ray Train's controller import this module without torch,
        # which takes 2 s of CPU time and 400 MiB in each.
        from mmray.engine.worker import train_worker

        return train_worker(context, start, blocks, get_device(), driver)


def measure_in_rank(
    measure: Callable[..., Any],
    config: Config,
    device: torch.device,
    report: Callable[[dict[str, Any]], Any],
) -> Any:
    """Call `measure(config, group, report)` with the threads and memory of a training worker."""
    import torch

    from mmray.engine.collectives import Group

    torch.set_num_threads(config.cluster.num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    return measure(config, Group.current(device, config.cluster.group_timeout_s), report)


def configure_process() -> None:
    """Ignore SIGTERM, which the driver handles, and set how long OpenMP threads spin. Call it in a
    worker process before torch is imported.
    """
    # Slurm and systemd send it to all processes; the driver handles it. Not SIG_IGN, which data
    # processes inherit: after a crash their pool ends the others with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # By default threads spin for milliseconds at the end of a parallel region; on two busy cores,
    # training was 8 times faster with threads that sleep, and on idle cores 25 % slower. This is in
    # between.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
