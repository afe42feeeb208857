"""Workers in processes of this machine, without Ray: they start in seconds, and lost ones are
replaced.

A run has one worker, a child process of the driver. Under torchrun (`torchrun --nproc-per-node 2 -m
mmray train`) the process of rank 0 is the driver, and the process of each other rank starts a
worker too, which connects to the driver and then serves it as the driver's own worker does. So
restarts, hang detection, stops and files are those of every run.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from mmray.config import Config
from mmray.errors import MmrayError, ResourceError, TrainingError, UsageError, first_line
from mmray.machine import LOOPBACK, cores, torchrun_world_size
from mmray.processes import EXIT_TIMEOUT_S, ChildDied, ChildProcess, ConnectedProcess
from mmray.training.backend import (
    Attempt,
    WorkerFailed,
    format_counts,
    is_lost,
    is_process_lost,
    resume_point,
    select_cause,
)
from mmray.training.coordinator import Coordinator
from mmray.training.local_worker import DriverAddress, measure_alone, run_worker, serve_driver
from mmray.training.monitor import Workers, signal_handlers

if TYPE_CHECKING:
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, HeartbeatRecord

POLL_INTERVAL_S = 0.1
# For all ranks to report errors after the first one, which may only follow from another's.
ERROR_WAIT_S = 2.0
CONNECT_TIMEOUT_S = 60.0
# Of a worker with a GPU: one for the thread that launches kernels, one for the thread that moves
# rows and for those of the metrics.
TRAINING_CORES = 2
T = TypeVar("T")
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: of CUDA, of CUDA under WSL, of ROCm


class RankProcess(ConnectedProcess):
    """The worker process of a rank other than 0, as the driver sees it.

    `result(on_message)` waits for the worker's end and returns its result, fields of result.json;
    meanwhile `on_message` is called with each message of the worker: (name of a method of
    Coordinator, its argument).

    Args:
        pid: Its process ID.
        connection: Connection to it.
    """

    def __init__(self, rank: int, pid: int, connection: Connection) -> None:
        super().__init__(f"rank {rank}", connection)
        self.process = psutil.Process(pid)

    def close(self) -> None:
        """Close the connection, with which the process ends."""
        self.connection.close()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self.process.kill()
            self.process.wait(EXIT_TIMEOUT_S)


class RankListener:
    """Accepts the connections of the workers of ranks 1 to N - 1 to the driver.

    `wait(timeout_s)` waits until all have connected, and `take()` returns them as RankProcess.

    Args:
        world_size: Number of ranks N.

    Attributes:
        address: Host, port and secret key (hexadecimal) with which a worker connects.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        key = secrets.token_bytes(32)
        self._listener = Listener((LOOPBACK, 0), backlog=world_size, authkey=key)
        host, port = self._listener.address
        self.address: DriverAddress = (str(host), int(port), key.hex())
        self._connected: dict[int, RankProcess] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="mmray-ranks", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                rank, pid = connection.recv()
                process = RankProcess(rank, pid, connection)
            except (AuthenticationError, EOFError, OSError, psutil.NoSuchProcess):
                continue  # no worker, or one that has ended
            with self._changed:
                if self._closed:
                    process.close()
                    continue
                self._connected[rank] = process  # in place of one that has ended
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the workers of all ranks have connected.

        Args:
            timeout_s: Longest wait in seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._connected) == self._world_size - 1, timeout_s
            )

    def take(self) -> list[RankProcess]:
        """Return the connected workers in the order of their ranks, for one start of the run's
        workers; later calls do not return them again.
        """
        with self._changed:
            connected = sorted(self._connected.items())
            self._connected = {}
        return [process for _, process in connected]

    def close(self) -> None:
        """Close the connections of workers that `take` has not returned, also of those that connect
        later; these workers end.
        """
        with self._changed:
            self._closed = True
            for process in self._connected.values():
                process.close()


class LocalBackend:
    """Starts the worker of a run in a new process of this machine, without Ray, and again after a
    failure. It implements the protocol `Backend`.

    The first process imports torch while the driver prepares the run.

    `start(attempt)` starts the workers and returns a Workers.

    Args:
        world_size: Number of workers. The processes that torchrun started for ranks 1 and up start
            theirs themselves, which connect to this process.

    Attributes:
        errors: Types of errors of a worker or of storage, after which the workers may be restarted.
    """

    errors: tuple[type[Exception], ...] = (WorkerFailed, MmrayError, OSError)

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._ranks = RankListener(world_size) if world_size > 1 else None
        self._next: ChildProcess | None = self._start_worker()

    def _start_worker(self) -> ChildProcess:
        """Start a process that waits for its arguments after it has imported what it needs."""
        return ChildProcess("worker", run_worker, self._ranks and self._ranks.address)

    def check(self, config: Config, reporter: RunReporter) -> None:
        check_gpus(config, self._world_size)

    def resolve(self, config: Config) -> Config:
        return resolve_on_this_machine(config)

    def num_local(self, device: str) -> int | None:
        if self._ranks is not None:
            return None  # torchrun has started the processes of all workers
        return count_gpus() if device == "gpu" else cores()

    def choose_world_size(self, config: Config) -> int:
        return self._world_size

    def start(self, attempt: Attempt) -> LocalWorkers:
        self._next = self._next or self._start_worker()
        processes: list[ChildProcess | RankProcess] = [self._next]
        if self._ranks is not None:
            limit_s = attempt.resolved.config.cluster.start_timeout_s
            end_s = time.monotonic() + limit_s
            # They cannot connect if the worker of rank 0 has died.
            while not self._ranks.wait(POLL_INTERVAL_S) and self._next.process.is_alive():
                if time.monotonic() > end_s:
                    raise ResourceError(
                        "the workers of torchrun's other processes did not start within "
                        f"{limit_s:g} s (cluster.start_timeout_s)"
                    )
            processes += self._ranks.take()
        self._next = None
        return LocalWorkers(processes, attempt)

    def exclude_node(self, config: Config, node: str) -> bool:
        return False  # this machine is the only one

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> WorkerFailed:
        return error if isinstance(error, WorkerFailed) else WorkerFailed("raised", error)

    def close(self) -> None:
        """End the processes that were started in advance for workers, if they were not used."""
        if self._ranks is not None:
            if self._next is not None and sys.exception() is None:
                # The run had finished before. The other ranks end without an error once they have
                # connected.
                self._ranks.wait(CONNECT_TIMEOUT_S)
            self._ranks.close()
        if self._next is not None:
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
    """Check that this machine has the GPUs of the workers.

    Args:
        config: Settings of the run. `cluster.accelerator` `gpu` requires GPUs, and `auto` requires
            one for each of several workers if there are any.

    Raises:
        ResourceError: torch can use fewer.
    """
    num_needed = workers * config.train.gpus_per_worker
    num_gpus = count_gpus()
    accelerator = config.cluster.accelerator
    if num_gpus >= num_needed:
        return
    if accelerator == "gpu" or (accelerator == "auto" and num_gpus and workers > 1):
        who = "a worker needs" if workers == 1 else f"{workers} workers need"
        needed = f"{num_needed} GPU{'s' * (num_needed > 1)}"
        fix = "auto or cpu, or give --cluster.address" if workers == 1 else "cpu, or start fewer"
        raise ResourceError(
            f"cluster.accelerator {accelerator}: {who} {needed} and torch sees {num_gpus} on this "
            f"machine; set it to {fix}"
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
    worker = ChildProcess("worker", measure_alone, measure, resolve_on_this_machine(config))
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


class LocalWorkers(Workers):
    """The worker processes of a run on this machine, and the threads that receive their messages.

    It implements the protocol `Workers`: the driver waits for them, reads their messages and stops
    them.

    Args:
        processes: By rank, processes that run `run_worker` and wait for their arguments.
        attempt: Run, settings, global batch and micro-batch, and checkpoint that the workers start
            from.
    """

    def __init__(self, processes: Sequence[ChildProcess | RankProcess], attempt: Attempt) -> None:
        self._processes = processes
        self._coordinator = Coordinator(attempt.bad_rows)
        self._outcome: dict[str, Any] = {}  # what rank 0 returned
        self._errors: list[Exception] = []
        decoders = num_decode_processes(attempt.resolved.config, len(processes))
        start = resume_point(attempt.resolved, attempt.checkpoint)
        arguments = attempt.worker_context(decoders), start
        self._receivers = [
            threading.Thread(
                target=self._serve, args=(process, arguments), name="mmray-receiver", daemon=True
            )
            for process in processes
        ]
        for receiver in self._receivers:
            receiver.start()

    def _serve(self, process: ChildProcess | RankProcess, arguments: tuple[Any, ...]) -> None:
        """Send the arguments, and serve the calls of a worker until it ends."""
        try:
            # here: it waits for the worker's imports, and fails if it has died
            process.send(arguments)
            outcome = process.result(self._on_message)
        except Exception as error:  # noqa: BLE001 - raised in `wait`
            self._errors.append(error)
            return
        if process is self._processes[0]:
            self._outcome = outcome

    def _on_message(self, message: tuple[str, Any]) -> Any:
        """Call the method of the coordinator that a message names."""
        name, argument = message
        return getattr(self._coordinator, name)(argument)

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        running = self._receivers
        while running and not self._errors:
            running[0].join(POLL_INTERVAL_S)
            poll()
            running = [receiver for receiver in running if receiver.is_alive()]
        if self._errors:
            end_s = time.monotonic() + ERROR_WAIT_S
            for receiver in self._receivers:
                receiver.join(max(0.0, end_s - time.monotonic()))
            is_single = len(self._processes) == 1
            raise select_cause(self._errors, is_process_lost if is_single else is_lost)
        for process in self._processes:
            process.close()
        return self._outcome

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self._coordinator.drain(num_received)

    def request_stop(self) -> None:
        self._coordinator.request_stop()

    def request_stacks(self) -> None:
        self._coordinator.request_stacks()

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        self.close()

    def describe_data(self) -> str:
        states: list[str] = []
        with suppress(psutil.NoSuchProcess):
            states = [
                child.status()
                for worker in self._processes
                for child in psutil.Process(worker.process.pid).children()
            ]
        return f"processes of the worker{'s' * (len(self._processes) > 1)}: {format_counts(states)}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def num_decode_processes(config: Config, workers: int) -> int:
    """Return the number of processes that read and decode rows for all workers on this machine.

    It is the largest number of `data.workers`. If that is `auto`, it is one for each worker; with
    GPUs the cores of the machine less 2 for each worker, but at least one for each.
    """
    if config.data.worker_range is not None:
        return config.data.worker_range[1]
    if config.cluster.accelerator != "gpu":
        return workers
    return max(workers, cores() - workers * TRAINING_CORES)


def with_workers_of_torchrun(config: Config, log: Callable[[str, str], None]) -> Config:
    """Return the settings of a run with one worker in each process that torchrun started.

    Args:
        config: Settings of the run. What they request from Ray has no effect.
        log: Called with (line, label).

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


def follow_driver() -> None:
    """Run the worker of this rank, which is not 0, until the driver in rank 0's process has ended.

    A worker that was killed, as by the driver after a failure, is replaced.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM arrived before the worker was connected to the driver.
            Later the driver handles the signal: it lets the workers end with a checkpoint.
    """
    connected = threading.Event()
    signalled = threading.Event()

    def on_signal(*_: Any) -> None:
        if not connected.is_set():
            raise KeyboardInterrupt
        signalled.set()

    with signal_handlers(on_signal):
        while not signalled.is_set():
            connected.clear()
            child = ChildProcess("worker", serve_driver)
            try:
                child.result(lambda _: connected.set())
                child.close()
                return
            except ChildDied:
                continue
            finally:
                child.kill()  # otherwise Python waits at exit for a child that is not connected
