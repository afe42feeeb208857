"""One worker in a child process of this machine, without Ray: it starts in seconds, and is replaced
if it dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mmray.config import Config
from mmray.errors import DeviceError, MmrayError, ResourceError
from mmray.machine import cores
from mmray.processes import ChildDied, ChildProcess
from mmray.training.backend import Attempt, Cause, format_counts, resume_point
from mmray.training.coordinator import Coordinator
from mmray.training.local_worker import run_worker

if TYPE_CHECKING:
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, HeartbeatRecord

POLL_INTERVAL_S = 0.1
# Of a worker with a GPU: one for the thread that launches kernels, one for the thread that moves
# rows and for those of the metrics.
TRAINING_CORES = 2
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: of CUDA, of CUDA under WSL, of ROCm


class WorkerFailed(Exception):
    """The worker process failed.

    Args:
        kind: `raised` (the worker raised `cause`, or exited by itself), `device` (a GPU failed), or
            `lost` (it was killed).
        cause: The error of the worker.
    """

    def __init__(self, kind: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.kind = kind
        self.cause = cause


class LocalBackend:
    """Starts the single worker of a run in a new process of this machine, again after a failure;
    the methods are described in `Backend`.

    The first process imports torch while the driver prepares the run.
    """

    errors: tuple[type[Exception], ...] = (WorkerFailed, MmrayError, OSError)

    def __init__(self) -> None:
        self._next: ChildProcess | None = _start_worker()

    def check(self, config: Config, reporter: RunReporter) -> None:
        check_gpus(config)

    def resolve(self, config: Config) -> Config:
        return resolve_on_this_machine(config)

    def num_local(self, device: str) -> int:
        return count_gpus() if device == "gpu" else cores()

    def choose_world_size(self, config: Config) -> int:
        return 1

    def start(self, attempt: Attempt) -> LocalWorkers:
        process = self._next or _start_worker()
        self._next = None
        return LocalWorkers(process, attempt)

    def exclude_node(self, config: Config, node: str) -> bool:
        return False  # this machine is the only one

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> Cause:
        return (error.kind, error.cause) if isinstance(error, WorkerFailed) else ("raised", error)

    def close(self) -> None:
        """End the process that was started in advance for the worker, if it was not used."""
        if self._next is not None:
            self._next.kill()


def _start_worker() -> ChildProcess:
    """Start a process that waits for its arguments after it has imported what it needs."""
    return ChildProcess("worker", run_worker)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use.

    It imports torch, which takes seconds, only if the machine has a GPU driver.
    """
    if not any(next(Path("/dev").glob(name), None) for name in GPU_DEVICES):
        return 0
    import torch

    return torch.cuda.device_count()


def check_gpus(config: Config) -> None:
    """Check that this machine has the GPUs of one worker.

    Args:
        config: Settings of the run; only `cluster.accelerator` `gpu` requires GPUs.

    Raises:
        ResourceError: torch can use fewer.
    """
    needed = config.train.gpus_per_worker
    found = count_gpus()
    if config.cluster.accelerator == "gpu" and found < needed:
        raise ResourceError(
            f"cluster.accelerator gpu: a worker needs {needed} GPU{'s' * (needed > 1)} and torch "
            f"sees {found} on "
            "this machine; set it to auto or cpu, or give --cluster.address"
        )


def resolve_on_this_machine(config: Config) -> Config:
    """Return the settings with values in place of `auto` for one worker on this machine.

    `cluster.accelerator` becomes `gpu` or `cpu`, and `cluster.cpus_per_worker` a number.

    Args:
        config: Settings of the run. `auto` and `gpu` use a GPU if torch can use one.
    """
    cluster = config.cluster
    device = "gpu" if cluster.accelerator != "cpu" and count_gpus() else "cpu"
    return config.with_cluster(
        accelerator=device, cpus_per_worker=cluster.resolve_cpus(cores() if device == "cpu" else 1)
    )


class LocalWorkers:
    """The single worker process of a run on this machine, and the thread that receives its
    messages.

    The methods are described in `monitor.Workers`.

    Args:
        process: A process that runs `run_worker` and waits for its arguments.
        attempt: Run, settings, batch shape and checkpoint that the worker starts from.
    """

    def __init__(self, process: ChildProcess, attempt: Attempt) -> None:
        self._process = process
        self._coordinator = Coordinator(attempt.bad_rows)
        self._outcome: dict[str, Any] | Exception | None = None
        decoders = num_decode_processes(attempt.resolved.config, attempt.config.cluster.accelerator)
        start = resume_point(
            attempt.resolved, attempt.checkpoint, world=1, batch_shape=attempt.batch_shape
        )
        arguments = attempt.worker_context(decoders), start, attempt.config
        self._receiver = threading.Thread(
            target=self._serve, args=(arguments,), name="mmray-receiver", daemon=True
        )
        self._receiver.start()

    def _serve(self, arguments: tuple[Any, ...]) -> None:
        """Send the arguments, and serve the calls of the worker until it ends."""
        try:
            # here: it waits for the worker's imports, and fails if it has died
            self._process.send(arguments)
            self._outcome = self._process.result(self._on_message)
        except Exception as error:  # noqa: BLE001 - raised in `wait`
            self._outcome = error

    def _on_message(self, message: tuple[str, Any]) -> Any:
        """Call the method of the coordinator that a message names."""
        name, argument = message
        return getattr(self._coordinator, name)(argument)

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        while self._receiver.is_alive():
            self._receiver.join(POLL_INTERVAL_S)
            poll()
        outcome = self._outcome
        if isinstance(outcome, ChildDied):
            raise worker_failed(outcome)
        if isinstance(outcome, DeviceError):
            raise WorkerFailed("device", outcome)
        if isinstance(outcome, MmrayError):
            raise outcome
        if isinstance(outcome, Exception):
            raise WorkerFailed("raised", outcome)
        self._process.close()
        return dict(outcome or {})

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

    def waits_for_resources(self, log: Callable[[str, str], None]) -> bool:
        return False

    def share_resources(self) -> None:
        """Do nothing, because this machine has no other reservations."""

    def num_more_workers(self) -> int:
        return 0

    def describe_data(self) -> str:
        states: list[str] = []
        with suppress(psutil.NoSuchProcess):
            states = [
                process.status() for process in psutil.Process(self._process.process.pid).children()
            ]
        return f"processes of the worker: {format_counts(states)}"

    def export_metrics(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None:
        self._process.kill()


def worker_failed(died: ChildDied) -> WorkerFailed:
    """Return the failure of a worker process that ended without a result.

    If it exited by itself, an import failed or user code called exit: it is not a lost process,
    which would be replaced several times.

    Args:
        died: The end of the process, with its exit code (negative: killed by a signal).

    Returns:
        An error with the kind of the failure: `raised` (it exited by itself) or `lost` (it was
        killed).
    """
    is_lost = died.exit_code is None or died.exit_code < 0
    return WorkerFailed("lost" if is_lost else "raised", RuntimeError(str(died)))


def num_decode_processes(config: Config, device: str) -> int:
    """Return the number of processes that read and decode rows for a worker on this machine.

    Args:
        config: Settings of the run. By default one; with a GPU the cores that training does not
            use.
        device: `cpu` or `gpu`.
    """
    if config.data.worker_range is not None:
        return config.data.worker_range[1]
    return max(1, cores() - TRAINING_CORES) if device == "gpu" else 1
