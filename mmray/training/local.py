"""One worker in a child process of this machine, without Ray: it starts in seconds, and is replaced
if it dies.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mmray.config import Config
from mmray.errors import DeviceError, MmrayError, ResourceError
from mmray.machine import cores
from mmray.processes import SPAWN, describe_signal, starting_children
from mmray.training.backend import Attempt, Cause, format_counts, num_gpus, resume_point
from mmray.training.coordinator import Coordinator
from mmray.training.local_worker import run_worker

if TYPE_CHECKING:
    from mmray.training.monitor import AttemptMonitor
    from mmray.training.reporter import RunReporter
    from mmray.training.worker_group import HeartbeatRecord

POLL_INTERVAL_S = 0.1
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: of CUDA, of CUDA under WSL, of ROCm
EXIT_TIMEOUT_S = 10.0  # after the result; then the process is killed


class WorkerFailed(Exception):
    """The worker raised `cause` (kind `raised` or `device`), exited (`raised`), or was killed
    (`lost`).
    """

    def __init__(self, kind: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.kind, self.cause = kind, cause


class LocalBackend:
    """Starts the worker of each attempt in a new process; the first imports torch while the driver
    prepares the run.
    """

    errors: tuple[type[Exception], ...] = (WorkerFailed, MmrayError, OSError)

    def __init__(self) -> None:
        self._next: _Process | None = _Process()

    def check(self, config: Config, reporter: RunReporter) -> None:
        check_gpus(config)

    def resolve(self, config: Config) -> Config:
        return resolve_on_this_machine(config)

    def num_local(self, device: str) -> int:
        return count_gpus() if device == "gpu" else cores()

    def choose_world_size(self, config: Config) -> int:
        return 1

    def start(self, attempt: Attempt) -> LocalWorkers:
        process, self._next = self._next or _Process(), None
        return LocalWorkers(process, attempt)

    def exclude_node(self, config: Config, node: str) -> bool:
        return False  # this machine is the only one

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> Cause:
        return (error.kind, error.cause) if isinstance(error, WorkerFailed) else ("raised", error)

    def close(self) -> None:
        """End the process that no attempt has used."""
        if self._next is not None:
            self._next.kill()


class _Process:
    """A worker process; it waits for its arguments after it has imported what it needs."""

    def __init__(self) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=run_worker, args=(theirs,), name="mmray-worker")
        with starting_children():
            self.process.start()
        theirs.close()  # so that the end of the process is read as EOF

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def count_gpus() -> int:
    """Return the number of GPUs that torch can use; imports torch, which takes seconds, only if
    there is a driver.
    """
    if not any(next(Path("/dev").glob(name), None) for name in GPU_DEVICES):
        return 0
    import torch

    return torch.cuda.device_count()


def check_gpus(config: Config) -> None:
    """Raise ResourceError if this machine has not the GPUs of a worker."""
    needed, found = num_gpus(config), count_gpus()
    if config.cluster.accelerator == "gpu" and found < needed:
        raise ResourceError(
            f"cluster.accelerator gpu: a worker needs {needed} GPU{'s' * (needed > 1)} and torch "
            f"sees {found} on "
            "this machine; set it to auto or cpu, or give --cluster.address"
        )


def resolve_on_this_machine(config: Config) -> Config:
    """Return the config with the device of one worker on this machine and its CPUs."""
    cluster = config.cluster
    device = "gpu" if cluster.accelerator != "cpu" and count_gpus() else "cpu"
    return config.with_cluster(
        accelerator=device, cpus_per_worker=cluster.resolve_cpus(cores() if device == "cpu" else 1)
    )


class LocalWorkers:
    """The worker process of an attempt, and the thread that receives its messages."""

    def __init__(self, process: _Process, attempt: Attempt) -> None:
        self._process, self._coordinator = process, Coordinator(attempt.bad_rows)
        self._result: tuple[str, Any] | None = None
        decoders = num_decode_processes(attempt.resolved.config, attempt.config.cluster.accelerator)
        start = resume_point(attempt.resolved, attempt.checkpoint, world=1)
        arguments = pickle.dumps((attempt.worker_context(decoders), start, attempt.config))
        self._receiver = threading.Thread(
            target=self._serve, args=(arguments,), name="mmray-receiver", daemon=True
        )
        self._receiver.start()

    def _serve(self, arguments: bytes) -> None:
        """Send the arguments, and serve the calls of the worker until it sends its result, or
        ends.
        """
        connection = self._process.connection
        try:
            # here: it waits for the worker's imports, and fails if it has died
            connection.send_bytes(arguments)
            while self._result is None:
                name, argument = connection.recv()
                if name in ("returned", "raised"):
                    self._result = name, argument
                elif (reply := getattr(self._coordinator, name)(argument)) is not None:
                    connection.send(reply)
        except (EOFError, OSError):
            return

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        while self._receiver.is_alive():
            self._receiver.join(POLL_INTERVAL_S)
            poll()
        self._process.process.join(EXIT_TIMEOUT_S)
        if self._result is None:
            code = self._process.process.exitcode  # None: alive after EXIT_TIMEOUT_S
            # An import failed, or user code called exit: not a lost process, which is replaced
            # several times.
            kind = "lost" if code is None or code < 0 else "raised"
            raise WorkerFailed(kind, RuntimeError(describe_exit(code)))
        kind, value = self._result
        if kind == "raised":
            error = pickle.loads(value)
            if isinstance(error, DeviceError):
                raise WorkerFailed("device", error)
            raise error if isinstance(error, MmrayError) else WorkerFailed("raised", error)
        return dict(value)

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self._coordinator.drain(num_received)

    def request_stop(self) -> None:
        self._coordinator.request_stop()

    def request_stacks(self) -> None:
        self._coordinator.request_stacks()

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        self._process.kill()

    def draining_nodes(self) -> dict[str, float]:
        return {}

    def num_more_workers(self) -> int:
        return 0

    def describe_data(self) -> str:
        states: list[str] = []
        with suppress(psutil.NoSuchProcess):
            states = [
                process.status() for process in psutil.Process(self._process.process.pid).children()
            ]
        return f"processes of the worker: {format_counts(states)}"

    def close(self) -> None:
        self._process.kill()


def describe_exit(code: int | None) -> str:
    """Return how a worker process ended; code None: it closed its connection and did not end."""
    if code is None:
        return "the worker process closed its connection"
    if code >= 0:
        return f"the worker process exited with code {code}"
    return f"the worker process was ended by {describe_signal(-code)}"


def num_decode_processes(config: Config, device: str) -> int:
    """Return the number of data processes: as configured; by default the cores that training
    leaves, at least one.
    """
    if isinstance(config.data.workers, int):
        return config.data.workers
    return max(1, cores() - 1) if device == "gpu" else 1
