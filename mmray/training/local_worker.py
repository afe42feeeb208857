"""The worker process of training/local.py.

It imports the engine before it waits for its arguments.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from mmray.builtin import BACKENDS
from mmray.data.stream.order import ResumePoint
from mmray.engine.worker_context import WorkerContext
from mmray.errors import DeviceError, MmrayError, OutOfMemoryError, is_device_error
from mmray.machine import (
    keep_freed_memory,
    torchrun_rank,
    torchrun_world_size,
)
from mmray.processes import Channel
from mmray.training.backend import is_lost
from mmray.training.coordinator import IMPORTING, Coordinator
from mmray.training.monitor import signal_handlers
from mmray.training.run_dir import RunDir

if TYPE_CHECKING:
    import torch

    from mmray.config import Config

_log = logging.getLogger(__name__)
START_TIMEOUT_S = 86_400.0  # for the driver to prepare the run; later collectives have their own
LINGER_S = 25.0


def run_worker(channel: Channel) -> dict[str, Any]:
    """Train in this process: the main function of the worker process of the driver.

    It imports the engine, and joins the process group under torchrun, before it waits for its
    arguments.

    Args:
        channel: Connection to the driver. The worker receives (WorkerContext, ResumePoint) once, or
            None if the driver ends without workers, and sends messages (name of a method of
            Coordinator, its argument), such as ("push", {"step": 1, ...}).

    Returns:
        The result of `train_worker`.
    """
    configure_process()
    channel.send(("push", {"stage": IMPORTING}))
    with _process_group() as broadcast:
        arguments = channel.connection.recv()
        broadcast(arguments)
        return {} if arguments is None else _train(arguments, channel.call, channel.send)


def run_rank() -> None:
    """Train as the worker of this rank of torchrun, which is not 0, and has no driver."""
    # Until the training starts this process waits in C++, where no handler of Python is called.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    configure_openmp()
    coordinator = Coordinator(set())
    with _process_group() as broadcast:
        arguments = broadcast(None)
        if arguments is None:
            return
        try:
            with signal_handlers(lambda *_: coordinator.request_stop()):
                _train(arguments, coordinator.call, lambda _: None)
        except Exception as error:
            if isinstance(error, OutOfMemoryError):
                RunDir(arguments[0].folder).save_smaller_batch(error.retry_shape)
            if isinstance(error, MmrayError):
                # The console of this rank is quiet, and rank 0 sees only that its connection ended.
                _log.error("rank %d: %s", torchrun_rank(), error)
            if is_lost(error):
                # torchrun shows the process that ends first as the cause, and ends the others
                time.sleep(LINGER_S)
            raise


def _train(
    arguments: tuple[WorkerContext, ResumePoint],
    call: Callable[[tuple[str, Any]], Any],
    send: Callable[[tuple[str, Any]], None],
) -> dict[str, Any]:
    """Train this rank; `call` and `send` pass (name of a method, its argument) to a Coordinator."""
    from mmray.data.stream.local import LocalBlocks
    from mmray.engine.heartbeat import Heartbeat, describe_process
    from mmray.engine.worker import train_worker
    from mmray.engine.worker_context import DriverHandle

    context, resume_point = arguments
    rank = torchrun_rank()
    stop = threading.Event()

    def send_heartbeat(record: dict[str, Any]) -> bool:
        stop_requested, stacks_requested, _ = call(("heartbeat", record))
        # In the heartbeat after the request: otherwise the loop stops after its step. Of several
        # ranks each needs its rows to take that step with the others.
        is_alone = torchrun_world_size() == 1
        if is_alone and stop.is_set() and record.get("state") == "waiting_for_data":
            blocks.interrupt()
        if stop_requested:
            stop.set()
        return bool(stacks_requested)

    config = context.config
    heartbeat = Heartbeat(
        send_heartbeat, describe_process(rank, "here", socket.gethostname()), context.folder
    )
    driver = DriverHandle(
        report=lambda message: send(("push", message)),
        stop_requested=stop.is_set,
        count_bad_row=lambda row: int(call(("record_bad_row", row))),
        heartbeat=heartbeat,
    )
    try:
        blocks = LocalBlocks(
            context.reader,
            resume_point,
            config.data.block_mb,
            math.ceil((context.decode_actors or 1) / torchrun_world_size()),
            warn=lambda text: driver.notify("data", text),
            rank=rank,
        )
        with heartbeat.running(resume_point.step), closing(blocks):
            return train_worker(context, resume_point, blocks, _device(config, rank), driver)
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, "on this machine") from None
        raise


def _device(config: Config, rank: int) -> torch.device:
    import torch

    return (
        torch.device("cuda", rank) if config.cluster.accelerator == "gpu" else torch.device("cpu")
    )


def measure_alone(channel: Channel, measure: Callable[..., Any], config: Config) -> Any:
    """Call `measure` in this process, the only worker; its messages are sent to the parent."""
    configure_process()
    return measure_in_rank(measure, config, _device(config, 0), channel.send)


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
    """Ignore SIGTERM, which the driver handles. Call it in a worker process before torch is
    imported.
    """
    # Slurm, systemd and torchrun send it to all processes; the driver handles it. Not SIG_IGN,
    # which data processes inherit: after a crash their pool ends the others with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    configure_openmp()


def configure_openmp() -> None:
    """Set how long OpenMP threads of torch spin when they wait."""
    # By default threads spin for milliseconds at the end of a parallel region; on two busy cores,
    # training was 8 times faster with threads that sleep, and on idle cores 25 % slower. This is in
    # between.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@contextmanager
def _process_group() -> Iterator[Callable[[Any], Any]]:
    """Context manager in which all ranks of torchrun are in a process group; it yields a function
    that returns rank 0's argument on all ranks.
    """
    import torch
    import torch.distributed as dist

    # Here, while the driver prepares the run.
    import mmray.data.stream.local
    import mmray.engine.worker  # noqa: F401
    from mmray.engine.collectives import Group, join_process_group

    if torchrun_world_size() > 1:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # torchrun keeps the store, with the addresses of the processes before its restart.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = BACKENDS["cuda" if torch.cuda.is_available() else "cpu"]
        join_process_group(backend, START_TIMEOUT_S, store=store, rank=rank, world_size=world_size)
    yield Group.current().broadcast_object
    if torchrun_world_size() > 1:  # not after an error: it may wait for a rank that is lost
        dist.destroy_process_group()
