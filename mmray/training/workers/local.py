"""The worker of a run in a process of this machine, without Ray: it starts in seconds, and is
replaced when it is lost.

Under torchrun the process of rank 0 is the driver of its worker, and the process of each other rank
is a worker itself. These are no processes of the driver, so a failure ends the run, and torchrun
restarts all of them.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from mmray.builtin import BACKENDS
from mmray.config import Config
from mmray.data.stream.order import ResumePoint
from mmray.engine.heartbeat import describe_process
from mmray.engine.worker_context import WorkerContext
from mmray.errors import (
    DeviceError,
    Log,
    MmrayError,
    OutOfMemoryError,
    ResourceError,
    TrainingError,
    UsageError,
    first_line,
    is_device_error,
)
from mmray.machine import cores, torchrun_rank, torchrun_world_size
from mmray.processes import Channel, ChildDied, ChildProcess
from mmray.training.monitor import Workers, signal_handlers
from mmray.training.run_dir import RunDir
from mmray.training.workers.backend import (
    Attempt,
    WorkerFailed,
    format_counts,
    is_lost,
    is_process_lost,
    resume_point,
    run_in_thread,
    select_cause,
)
from mmray.training.workers.coordinator import IMPORTING, Coordinator, Request, Updates
from mmray.training.workers.rank import (
    CoordinatorClient,
    configure_process,
    measure_in_rank,
    train_rank,
)

if TYPE_CHECKING:
    import torch

    from mmray.config import Model as ModelConfig
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, HeartbeatRecord
    from mmray.training.resolve import ResolvedRun

START_TIMEOUT_S = 86_400.0  # for the driver to prepare the run; later collectives have their own
EXIT_TIMEOUT_S = 60.0
# Of a worker with a GPU: one for the thread that launches kernels, one for the thread that moves
# rows and for those of the metrics.
TRAINING_CORES = 2
T = TypeVar("T")
LocalArguments = tuple[WorkerContext, ResumePoint, int]  # the last: decode processes of a rank
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: of CUDA, of CUDA under WSL, of ROCm


class LocalBackend:
    """Starts the worker of a run in a new process of this machine, without Ray, and again after a
    failure. It implements the protocol `Backend`.

    The first process imports what the model needs while the driver prepares the run.

    Args:
        model: Section `model` of the config.
        world_size: Number of workers; under torchrun it has started those of ranks 1 and up.
    """

    errors: tuple[type[Exception], ...] = (WorkerFailed, MmrayError, OSError)

    def __init__(self, model: ModelConfig, world_size: int = 1) -> None:
        self._model = model
        self._world_size = world_size
        self._next: ChildProcess | None = ChildProcess("worker", run_worker, model)

    def check(self, config: Config, reporter: RunReporter) -> None:
        check_gpus(config, self._world_size)

    def resolve(self, config: Config) -> Config:
        return resolve_on_this_machine(config)

    def check_inputs(self, resolved: ResolvedRun) -> None:
        pass  # the workers are on this machine, which has opened the files

    def num_local(self, device: str) -> int | None:
        if self._world_size > 1:
            return None  # torchrun has started the processes of all workers
        return count_gpus() if device == "gpu" else cores()

    def choose_world_size(self, config: Config) -> int:
        return self._world_size

    def start(self, attempt: Attempt) -> LocalWorkers:
        worker = self._next or ChildProcess("worker", run_worker, self._model)
        self._next = None
        return LocalWorkers(worker, attempt)

    def exclude_node(self, config: Config, node: str) -> bool:
        return False  # this machine is the only one

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> WorkerFailed:
        return error if isinstance(error, WorkerFailed) else WorkerFailed("raised", error)

    def close(self) -> None:
        """End the process that was started in advance for the worker, if it was not used."""
        if self._next is None:
            return
        if self._world_size > 1:  # the other ranks end with it, without an error
            self._next.send(None)
            self._next.process.join(EXIT_TIMEOUT_S)
        self._next.kill()


def count_gpus() -> int:
    """Return the number of GPUs that torch can use.

    It imports torch, which takes seconds, only if the machine has a GPU driver.
    """
    if not any(next(Path("/dev").glob(name), None) for name in GPU_DEVICES):
        return 0
    import torch

    return torch.cuda.device_count()


def check_gpus(config: Config, workers: int = 1) -> None:
    """Check that this machine has the GPUs of the workers: `cluster.accelerator` `gpu` requires
    them, and `auto` one for each of several workers if there are any.

    Raises:
        ResourceError: torch can use fewer.
    """
    num_needed = workers * config.train.gpus_per_worker
    num_gpus = count_gpus()
    accelerator = config.cluster.accelerator
    must_have = accelerator == "gpu" or (accelerator == "auto" and num_gpus and workers > 1)
    if must_have and num_gpus < num_needed:
        raise ResourceError(
            f"cluster.accelerator {accelerator}: {workers} worker{'s' * (workers > 1)} need "
            f"{num_needed} GPU{'s' * (num_needed > 1)} and torch sees {num_gpus} on this machine; "
            "set it to cpu, start fewer workers, or give --cluster.address"
        )


def resolve_on_this_machine(config: Config) -> Config:
    """Return the settings with values in place of `auto` for one worker on this machine.

    `cluster.accelerator` becomes `gpu` or `cpu`, and `cluster.cpus_per_worker` a number.
    """
    cluster = config.cluster
    device = "gpu" if cluster.accelerator != "cpu" and count_gpus() else "cpu"
    return config.with_cluster(
        accelerator=device, cpus_per_worker=cluster.resolve_cpus(cores() if device == "cpu" else 1)
    )


def measure_in_worker(
    measure: Callable[..., T], config: Config, on_message: Callable[[Any], Any] | None = None
) -> T:
    """Call a module-level function in a new process of this machine, in a group of its own, so that
    memory is not inherited.

    Args:
        measure: Called with the config without `auto` in `cluster`, its Group, and a function that
            passes a message to `on_message`.

    Raises:
        TrainingError: The process died, or `measure` raised an error that is not mmray's.
        ResourceError: `cluster.accelerator` is `gpu`, and there is none.
    """
    check_gpus(config)
    worker = ChildProcess("worker", _measure_alone, measure, resolve_on_this_machine(config))
    try:
        result: T = worker.result(on_message)
        return result
    except MmrayError:
        raise
    except ChildDied as error:
        raise TrainingError(str(error)) from None
    except Exception as error:
        raise TrainingError(f"{type(error).__name__}: {first_line(error)}") from error
    finally:
        worker.kill()


def _measure_alone(channel: Channel, measure: Callable[..., Any], config: Config) -> Any:
    """Call `measure` in this process, the only worker; its messages are sent to the parent."""
    configure_process()
    return measure_in_rank(measure, config, _device(config), channel.send)


def _device(config: Config) -> torch.device:
    import torch

    if config.cluster.accelerator == "gpu":
        return torch.device("cuda", torchrun_rank())
    return torch.device("cpu")


def run_worker(channel: Channel, model: ModelConfig) -> dict[str, Any]:
    """Train in this process: the main function of the worker process.

    It imports the engine, and the libraries of the model, before it waits for its arguments, while
    the driver prepares the run.

    Args:
        channel: Connection to the driver. The worker receives LocalArguments once, or None if the
            driver ends without workers, and sends messages (name of a method of Coordinator, its
            argument), such as ("push", {"step": 1, ...}).

    Returns:
        The result of `train_worker`.
    """
    configure_process()
    channel.send(("push", {"stage": IMPORTING}))
    import mmray.data.stream.local  # noqa: F401
    from mmray.engine.worker import import_libraries, limit_compile_workers

    limit_compile_workers()  # inductor reads this when it is imported, which libraries do
    import_libraries(model)
    coordinator = CoordinatorClient(
        push=lambda message: channel.send(("push", message)),
        heartbeat=lambda record: channel.call(("heartbeat", record)),
        record_bad_row=lambda row: channel.call(("record_bad_row", row)),
    )
    arguments = _join(channel.connection.recv())
    return {} if arguments is None else _train(arguments, coordinator)


def run_rank() -> None:
    """Train as the worker of this rank of torchrun, which is not 0, and has no driver."""
    configure_process()
    # Until the training starts this process waits in C++, where no handler of Python is called.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    coordinator = Coordinator(set())
    arguments = _join(None)
    if arguments is None:
        return
    client = CoordinatorClient(lambda _: None, coordinator.heartbeat, coordinator.record_bad_row)
    try:
        with signal_handlers(lambda *_: coordinator.request("stop")):
            _train(arguments, client)
    except MmrayError as error:
        if isinstance(error, OutOfMemoryError) and error.retry_shape is not None:
            RunDir(arguments[0].folder).save_smaller_batch(error.retry_shape)
        # The console of this rank is quiet, and rank 0 sees only that its connection ended.
        print(f"rank {torchrun_rank()}: {error}", file=sys.stderr)
        raise


def _join(arguments: LocalArguments | None) -> LocalArguments | None:
    """Join the process group under torchrun, and return what rank 0 passes, None if its driver ends
    without workers; without torchrun the same arguments.
    """
    if torchrun_world_size() == 1:
        return arguments
    import torch.distributed as dist

    from mmray.engine.collectives import Group, join_process_group

    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps the store, with the addresses of the processes before its restart.
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = BACKENDS["cuda" if count_gpus() else "cpu"]
    join_process_group(backend, START_TIMEOUT_S, store=store, rank=rank, world_size=world_size)
    return Group.current().broadcast_object(arguments)


def _train(arguments: LocalArguments, coordinator: CoordinatorClient) -> dict[str, Any]:
    """Train this rank, and leave the process group, unless an error is raised: leaving may wait for
    a rank that is lost.
    """
    import torch.distributed as dist

    from mmray.data.stream.local import LocalBlocks

    context, start, num_decoders = arguments
    config = context.config

    rank = torchrun_rank()
    block_mb = config.data.block_mb
    process = describe_process(rank, "here", socket.gethostname())
    try:
        outcome = train_rank(
            context,
            start,
            process,
            coordinator,
            lambda log, _: LocalBlocks(context.reader, start, block_mb, num_decoders, log, rank),
            lambda: _device(config),
        )
    except Exception as error:
        if is_device_error(error):
            raise DeviceError.from_error(error, "on this machine") from None
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcome


class LocalWorkers(Workers):
    """The worker process of a run on this machine, and the thread that receives its messages.

    Args:
        process: A process that runs `run_worker` and waits for its arguments.
    """

    def __init__(self, process: ChildProcess, attempt: Attempt) -> None:
        self._process = process
        self._coordinator = Coordinator(attempt.bad_rows)
        resolved = attempt.resolved
        start = resume_point(resolved, attempt.checkpoint)
        world_size = resolved.batch_shape.world_size
        self._is_lost = is_process_lost if world_size == 1 else is_lost
        num_decoders = num_decode_processes(resolved.config, world_size)
        self._arguments = attempt.worker_context(), start, num_decoders

    def _serve(self) -> dict[str, Any]:
        """Send the arguments, and serve the calls of the worker until it ends."""
        try:
            # in a thread: it waits for the worker's imports, and fails if it has died
            self._process.send(self._arguments)
            outcome: dict[str, Any] = self._process.result(self._coordinator.call)
        except Exception as error:  # noqa: BLE001 - raised with its kind
            raise select_cause([error], self._is_lost) from None
        self._process.close()
        return outcome

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        return run_in_thread(self._serve, poll)

    def drain(self, num_received: int) -> Updates:
        return self._coordinator.drain(num_received)

    def request(self, name: Request) -> None:
        self._coordinator.request(name)

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        self.close()

    def describe_data(self) -> str:
        states: list[str] = []
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self._process.process.pid)
            states = [child.status() for child in worker.children()]
        return f"processes of the worker: {format_counts(states)}"

    def close(self) -> None:
        self._process.kill()


def num_decode_processes(config: Config, workers: int) -> int:
    """Return the number of processes that read and decode rows for each worker on this machine.

    It is the largest number of `data.workers`, divided by the workers. If that is `auto`, it is
    one; with GPUs the share of the machine's cores less 2, but at least one.
    """
    if config.data.worker_range is not None:
        return math.ceil(config.data.worker_range[1] / workers)
    if config.cluster.accelerator != "gpu":
        return 1
    return max(1, cores() // workers - TRAINING_CORES)


def with_workers_of_torchrun(config: Config, log: Log) -> Config:
    """Return the settings of a run with one worker in each process that torchrun started.

    Raises:
        UsageError: torchrun started processes on several machines.
    """
    workers = torchrun_world_size()
    on_this_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    if on_this_machine < workers:
        raise UsageError(
            f"torchrun started {on_this_machine} of {workers} processes on this machine, but mmray "
            "trains on several machines with Ray only. Start Ray on them and one command, `mmray "
            f"train ... --cluster.address HEAD:6379 --cluster.workers {workers}`"
        )
    log(
        f"{workers} workers, one in each process; cluster.workers and what else `cluster` requests "
        "from Ray have no effect",
        "torchrun",
    )
    return config.with_cluster(
        workers=workers, address=None, resources_per_worker={}, wait_for_nodes=False
    )
