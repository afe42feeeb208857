"""The worker of a run in a process of this machine, without Ray: it starts in seconds, and is
replaced when it is lost.

Under torchrun (`torchrun --nproc-per-node 2 -m mmray train`) the process of rank 0 is the driver of
its worker, and the process of each other rank is a worker itself (local_worker.py). They are no
processes of the driver, so a failure ends the run, and torchrun restarts all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from mmray.config import Config
from mmray.errors import Log, MmrayError, ResourceError, TrainingError, UsageError, first_line
from mmray.machine import cores, torchrun_world_size
from mmray.processes import ChildDied, ChildProcess
from mmray.training.backend import (
    Attempt,
    WorkerFailed,
    format_counts,
    is_lost,
    is_process_lost,
    resume_point,
    run_in_thread,
    select_cause,
)
from mmray.training.coordinator import Coordinator, Updates
from mmray.training.local_worker import measure_alone, run_worker
from mmray.training.monitor import Workers

if TYPE_CHECKING:
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, HeartbeatRecord
    from mmray.training.resolve import ResolvedRun

CONNECT_TIMEOUT_S = 60.0
# Of a worker with a GPU: one for the thread that launches kernels, one for the thread that moves
# rows and for those of the metrics.
TRAINING_CORES = 2
T = TypeVar("T")
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: of CUDA, of CUDA under WSL, of ROCm


class LocalBackend:
    """Starts the worker of a run in a new process of this machine, without Ray, and again after a
    failure. It implements the protocol `Backend`.

    The first process imports torch while the driver prepares the run.

    Args:
        world_size: Number of workers; under torchrun it has started those of ranks 1 and up.
    """

    errors: tuple[type[Exception], ...] = (WorkerFailed, MmrayError, OSError)

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._next: ChildProcess | None = ChildProcess("worker", run_worker)

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
        worker = self._next or ChildProcess("worker", run_worker)
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
            self._next.process.join(CONNECT_TIMEOUT_S)
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

    `cluster.accelerator` `gpu` requires them, and `auto` one for each of several workers if there
    are
    any.

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
    """The worker process of a run on this machine, and the thread that receives its messages.

    Args:
        process: A process that runs `run_worker` and waits for its arguments.
    """

    def __init__(self, process: ChildProcess, attempt: Attempt) -> None:
        self._process = process
        self._coordinator = Coordinator(attempt.bad_rows)
        resolved = attempt.resolved
        self._is_single = resolved.batch_shape.world_size == 1
        decoders = num_decode_processes(resolved.config, resolved.batch_shape.world_size)
        start = resume_point(resolved, attempt.checkpoint)
        self._arguments = attempt.worker_context(decoders), start

    def _serve(self) -> dict[str, Any]:
        """Send the arguments, and serve the calls of the worker until it ends."""
        try:
            # in a thread: it waits for the worker's imports, and fails if it has died
            self._process.send(self._arguments)
            outcome: dict[str, Any] = self._process.result(self._coordinator.call)
        except Exception as error:  # noqa: BLE001 - raised with its kind
            raise select_cause([error], is_process_lost if self._is_single else is_lost) from None
        self._process.close()
        return outcome

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        return run_in_thread(self._serve, poll)

    def drain(self, num_received: int) -> Updates:
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
            worker = psutil.Process(self._process.process.pid)
            states = [child.status() for child in worker.children()]
        return f"processes of the worker: {format_counts(states)}"

    def close(self) -> None:
        self._process.kill()


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
