"""The worker process of training/local.py.

It imports the engine before it waits for its arguments.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

from mmray.builtin import BACKENDS
from mmray.errors import DeviceError, is_device_error
from mmray.machine import (
    LOOPBACK,
    keep_freed_memory,
    set_network_interface,
    torchrun_rank,
    torchrun_world_size,
)
from mmray.processes import Channel
from mmray.training.coordinator import IMPORTING

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mmray.config import Config

DriverAddress = tuple[str, int, str]  # host, port, and the key of connections in hexadecimal


def run_worker(channel: Channel, driver_address: DriverAddress | None = None) -> dict[str, Any]:
    """Train in this process: the main function of the worker process.

    It imports the engine before it waits for its arguments.

    Args:
        channel: Connection to the driver. The worker receives (WorkerContext, ResumePoint)
            once, and sends messages (name of a method of Coordinator, its argument), such as
            ("push", {"step": 1, ...}).
        driver_address: Where the driver listens for the workers of other ranks of torchrun, which
            this process passes on to them; None: it does not listen.

    Returns:
        Fields of result.json: `status` (`finished` or `stopped`), `steps`, `rows_consumed`,
        `skipped_steps`, and the dicts `metrics` and `scores`, values by name.
    """
    configure_process()
    rank = torchrun_rank()

    def report(message: dict[str, Any]) -> None:
        if rank == 0:
            channel.send(("push", message))

    report({"stage": IMPORTING})
    import torch

    if driver_address is not None:
        _torchrun_store().set(_address_key(), json.dumps(driver_address))
    from mmray.data.stream.local import LocalBlocks
    from mmray.engine.heartbeat import Heartbeat, describe_process
    from mmray.engine.worker import train_worker
    from mmray.engine.worker_context import DriverHandle

    context, resume_point = channel.connection.recv()
    stop = threading.Event()

    def send_heartbeat(record: dict[str, Any]) -> bool:
        stop_requested, stacks_requested, _ = channel.call(("heartbeat", record))
        # In the heartbeat after the request: otherwise the loop stops after its step. Of several
        # ranks each needs its rows to take that step with the others.
        is_alone = torchrun_world_size() == 1
        if is_alone and stop.is_set() and record.get("state") == "waiting_for_data":
            blocks.interrupt()
        if stop_requested:
            stop.set()
        return bool(stacks_requested)

    config = context.config
    heartbeat = Heartbeat(send_heartbeat, describe_process(rank, "here"), context.folder)
    driver = DriverHandle(
        report=report,
        stop_requested=stop.is_set,
        count_bad_row=lambda row: int(channel.call(("record_bad_row", row))),
        heartbeat=heartbeat,
    )
    device = torch.device("cpu")
    if config.cluster.accelerator == "gpu":
        device = torch.device("cuda", rank)
    try:
        blocks = LocalBlocks(
            context.reader,
            resume_point,
            config.data.block_mb,
            math.ceil(context.decode_actors / torchrun_world_size()),
            warn=lambda text: channel.send(("push", {"note": text, "label": "data"})),
            rank=rank,
        )
        with (
            heartbeat.running(resume_point.step),
            closing(blocks),
            _process_group(device.type, context.fencing_token, config.cluster.group_timeout_s),
        ):
            return train_worker(context, resume_point, blocks, device, driver)
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, "on this machine") from None
        raise


def measure_alone(channel: Channel, measure: Callable[..., Any], config: Config) -> Any:
    """Call `measure` in this process, the only worker; its messages are sent to the parent."""
    configure_process()
    import torch

    on_gpu = config.cluster.accelerator == "gpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return measure_in_rank(measure, config, device, channel.send)


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
    """Ignore SIGTERM, which the driver handles, and set how long OpenMP threads of torch spin when
    they wait. Call it in a worker process before torch is imported.
    """
    # Slurm, systemd and torchrun send it to all processes; the driver handles it. Not SIG_IGN,
    # which data processes inherit: after a crash their pool ends the others with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # By default threads spin for milliseconds at the end of a parallel region; on two busy cores,
    # training was 8 times faster with threads that sleep, and on idle cores 25 % slower. This is in
    # between.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@contextmanager
def _process_group(device_type: str, attempt: int, timeout_s: float) -> Iterator[None]:
    """Context manager in which all ranks of torchrun are in a process group; without torchrun it
    has no effect.

    Args:
        device_type: Type of the training device, `cpu` or `cuda`.
        attempt: A number that differs for each attempt of the run.
        timeout_s: Timeout of the collectives in seconds, also to form the group.
    """
    if torchrun_world_size() == 1:
        yield
        return
    import torch.distributed as dist

    # torch 2.14 renamed collectives whose old names torch 2.11 needs.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    set_network_interface(LOOPBACK)
    dist.init_process_group(
        BACKENDS[device_type],
        store=dist.PrefixStore(f"mmray/attempt-{attempt}", _torchrun_store()),
        rank=torchrun_rank(),
        world_size=torchrun_world_size(),
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    dist.destroy_process_group()  # not after an error: it may wait for a rank that is lost


def serve_driver(channel: Channel) -> None:
    """Connect to the driver, and be its worker of this rank of torchrun until the driver ends: the
    main function of the worker process of a rank other than 0.

    Args:
        channel: Connection to the parent process, to which a message is sent when this process is
            connected to the driver.
    """
    configure_process()
    host, port, key = json.loads(_torchrun_store().get(_address_key()))
    with suppress(EOFError, OSError):  # the driver has ended
        connection = Client((host, port), authkey=bytes.fromhex(key))
        connection.send((torchrun_rank(), os.getpid()))
        channel.send("connected")
        driver = _DriverChannel(connection)
        driver.send_outcome(lambda: run_worker(driver))
        connection.recv()  # until the driver ends, or kills this process for another attempt


class _DriverChannel(Channel):
    """Connection to the driver of another process, with which this process ends."""

    def call(self, message: Any) -> Any:
        try:
            return super().call(message)
        except (EOFError, OSError):
            os._exit(1)


def _torchrun_store() -> Store:
    """Connect to the store of torchrun, in which its processes find each other."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _address_key() -> str:
    """Return the key of the driver's address, which differs after a restart by torchrun."""
    return f"mmray/driver-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
