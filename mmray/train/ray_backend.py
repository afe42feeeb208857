"""Workers on a Ray cluster: each attempt is a new `TorchTrainer` with a fixed number of workers."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import ray.exceptions
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster import placement
from mmray.cluster.capacity import num_workers_that_fit
from mmray.cluster.ray_internals import START_TIMEOUT_VARIABLE, is_train_error, version_warning
from mmray.config import Config
from mmray.data.stream.stream import StreamDataConfig
from mmray.engine.batch import halve
from mmray.errors import DeviceError, MmrayError, OutOfMemoryError, ResourceError, StorageError, TrainingError
from mmray.machine import cores
from mmray.train.backend import Attempt, Cause, format_counts
from mmray.train.coordinator import Coordinator
from mmray.train.resolve import ResolvedRun
from mmray.train.resources import (
    check_capacity,
    check_storage,
    num_decode_actors,
    request_nodes,
    resource_demand,
    torch_trainer,
)
from mmray.train.worker import train_loop_per_worker

if TYPE_CHECKING:
    from mmray.train.monitor import AttemptMonitor, HeartbeatRecord, RunReporter

JOIN_INTERVAL_S = 0.25
POLL_INTERVAL_S = 0.5  # of the free resources, while workers of the last attempt release theirs
STABLE_POLLS, MAX_POLLS = 4, 20
# Errors of collectives that broke or timed out: gloo's, NCCL's, and those of the store through which ranks connect.
COLLECTIVE_ERRORS = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|Connection timed out|No route to host|NCCL|Socket Timeout"
    "|(recv|send) operation to complete|wait timeout after"
)
T = TypeVar("T")


class RayBackend:
    """Starts workers with Ray Train."""

    errors: tuple[type[Exception], ...] = (
        ray.train.TrainingFailedError,
        MmrayError,
        ray.exceptions.RayError,
        RuntimeError,
        OSError,
    )

    def __init__(self) -> None:
        self.autoscaler = placement.AutoscalerRequest(f"mmray-{os.urandom(4).hex()}")
        self._nodes: placement.SchedulableNodes | None = None  # at the last choice of the number of workers
        self._excluded: frozenset[str] = frozenset()  # IDs of nodes on which a device failed

    def check(self, config: Config, reporter: RunReporter) -> None:
        if warning := version_warning():
            reporter.log(warning, "warning")
        check_capacity(config)
        check_storage(config)

    def resolve(self, config: Config) -> Config:
        cluster = config.cluster
        device = "gpu" if "GPU" in resource_demand(config).per_worker else "cpu"
        share = cores() // cluster.max_workers if device == "cpu" and placement.available_cores_if_local() else 1
        cpus = float(max(1, share)) if cluster.cpus_per_worker == "auto" else cluster.cpus_per_worker
        return config.with_cluster(accelerator=device, cpus_per_worker=cpus)

    def num_local(self, device: str) -> int | None:
        if (available := placement.available_cores_if_local()) is None:
            return None
        return int(placement.alive_nodes()[0].resources.get("GPU", 0)) if device == "gpu" else available

    def choose_world_size(self, config: Config) -> int:
        self._nodes = placement.schedulable_nodes()
        if not config.cluster.elastic:
            return config.cluster.max_workers  # if they do not fit, Ray waits and an autoscaler adds nodes
        request_nodes(config, self.autoscaler, 0, self._excluded)
        counts: list[int] = []
        for _ in range(MAX_POLLS):
            counts.append(num_workers_that_fit(resource_demand(config, excluded=self._excluded), self._nodes.nodes))
            stable = len(counts) >= STABLE_POLLS and len(set(counts[-STABLE_POLLS:])) == 1
            if counts[-1] == config.cluster.max_workers or (stable and counts[-1]):
                break
            time.sleep(POLL_INTERVAL_S)
            self._nodes = placement.schedulable_nodes()
        return max(counts[-1], config.cluster.min_workers)

    def start(self, attempt: Attempt) -> RayWorkers:
        assert self._nodes is not None, "choose_world_size comes before"
        return RayWorkers(attempt, self._nodes, self._excluded, self.autoscaler)

    def exclude_node(self, config: Config, node: str) -> bool:
        try:
            check_capacity(config, excluded={*self._excluded, node})
        except ResourceError:
            return False
        self._excluded |= {node}
        return True

    def find_cause(self, error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> Cause:
        if is_train_error(error, "PreemptionError"):  # of Ray Train's preemption watcher, which is off by default
            return "preempted", TrainingError("a node was preempted")
        if (timeout_error := start_timeout_error(error)) is not None:
            # An elastic run retries with fewer workers: resources were taken, or a node was lost.
            return "lost" if monitor.world > monitor.config.cluster.min_workers else "raised", timeout_error
        if not isinstance(error, ray.train.WorkerGroupError):
            return "lost", TrainingError(f"Ray Train failed: {error}")
        failures = [getattr(each, "health_check_failure", each) for each in error.worker_failures.values()]
        raised = [each for each in failures if not _is_worker_lost(each)]
        oom_killed = next((each for each in failures if isinstance(each, ray.exceptions.OutOfMemoryError)), None)
        if oom_killed is not None and not raised:
            return "lost", _host_oom_error(oom_killed, monitor, resolved)
        # Errors of mmray first, and of these a bad device or a lack of memory: other ranks' errors only follow from it.
        mmray_errors = [each for each in raised if isinstance(each, MmrayError)]
        mmray_errors.sort(key=lambda each: not isinstance(each, (DeviceError, OutOfMemoryError)))
        cause = next(iter([*mmray_errors, *raised, *failures]), error)
        if isinstance(cause, StorageError) and monitor.stop_reason in ("resize", "preempted"):
            return "lost", cause  # only the checkpoint before the resize failed; `lost` restarts from the previous one
        if raised:
            return "device" if isinstance(cause, DeviceError) else "raised", cause
        return "preempted" if monitor.preempted else "lost", cause


class RayWorkers:
    """The worker group, stream and coordinator actor of an attempt."""

    def __init__(
        self,
        attempt: Attempt,
        nodes: placement.SchedulableNodes,
        excluded: frozenset[str],
        autoscaler: placement.AutoscalerRequest,
    ) -> None:
        self.config, self._excluded, self.autoscaler = attempt.resolved.config, excluded, autoscaler
        self.world = attempt.config.cluster.max_workers
        driver_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Coordinator).options(num_cpus=0, scheduling_strategy=driver_node)
        self.coordinator: Any = actor.remote(attempt.bad_rows)
        demand, start = resource_demand(attempt.config, excluded=excluded), attempt.resume_point()
        # Counted for the largest group, so that CPUs for the workers of a later, larger group stay free.
        actors = num_decode_actors(self.config.with_cluster(accelerator=attempt.config.cluster.accelerator))
        context = attempt.worker_context(actors)
        selector = nodes.excluding_unavailable(demand.data_label_selector)
        stream = StreamDataConfig(start, context.reader, actors, self.config.data.block_mb, selector, self.coordinator)
        self.trainer = torch_trainer(
            train_loop_per_worker,
            attempt.config,
            attempt.folder,
            name=f"attempt-{attempt.fencing_token}",
            label_selector=nodes.excluding_unavailable(demand.worker_label_selector),
            train_loop_config={"context": context, "resume_point": start, "coordinator": self.coordinator},
            datasets=stream.datasets(),
            dataset_config=stream,
        )

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        result: Any = run_in_thread(self.trainer.fit, poll)
        return dict(result.return_value)

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        try:
            messages, heartbeats = ray.get(self.coordinator.drain.remote(num_received), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return [], []  # the next call returns them; if Ray is shutting down, the attempt itself raises
        return messages, heartbeats

    def request_stop(self) -> None:
        self.coordinator.request_stop.remote()

    def request_stacks(self) -> None:
        self.coordinator.request_stacks.remote()

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        placement.kill_processes((record.node, record.pid, record.started_s) for record in heartbeats)

    def draining_nodes(self) -> dict[str, float]:
        return placement.draining_nodes()

    def num_more_workers(self) -> int:
        request_nodes(self.config, self.autoscaler, self.world, self._excluded)
        demand = resource_demand(self.config, with_data=False, excluded=self._excluded)
        remaining = replace(demand, workers=demand.workers - self.world)
        return num_workers_that_fit(remaining, placement.schedulable_nodes().nodes)

    def describe_data(self) -> str:
        return f"decode actors: {format_counts(placement.actor_states('DecodeActor'))}"

    def close(self) -> None:
        self.autoscaler.cancel()
        ray.kill(self.coordinator)


def run_in_thread(call: Callable[[], T], poll: Callable[[], None]) -> T:
    """Return or raise what `call` does in a daemon thread; polls meanwhile and once after its end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.set_exception(error)

    thread = threading.Thread(target=run, name="mmray-trainer", daemon=True)
    thread.start()
    running = True
    while running:
        thread.join(JOIN_INTERVAL_S)
        running = thread.is_alive()  # before the poll, so that the last poll comes after the end
        poll()  # an exception leaves at once; the daemon thread then ends with the process
    return done.result()


def _is_worker_lost(error: BaseException) -> bool:
    """Return whether a worker was lost; peers of a dead or slow rank only report a broken collective."""
    if isinstance(error, MmrayError):
        return False  # it may quote NCCL running out of memory
    lost = isinstance(error, ray.exceptions.RayError) or is_train_error(error, "WorkerHealthCheckTimeoutError")
    return lost or COLLECTIVE_ERRORS.search(str(error)) is not None


def _host_oom_error(error: BaseException, monitor: AttemptMonitor, resolved: ResolvedRun) -> OutOfMemoryError:
    """Ray's memory monitor killed a worker: its node, not a device, was out of memory."""
    rows_per_rank = -(-resolved.shape.global_rows // monitor.world)
    micro = min(rows for rows in (monitor.progress.micro, resolved.micro, resolved.shape.micro, rows_per_rank) if rows)
    smaller = halve(micro)
    what = f"a node ran out of memory with micro-batches of {micro} rows ({str(error).splitlines()[0]})"
    fix = f"Retrying with micro-batches of {smaller}" if smaller else "Check what else uses memory on that node"
    return OutOfMemoryError(f"{what}. {fix}", retry_micro=smaller)


def start_timeout_error(error: BaseException) -> ResourceError | None:
    """Return the error to raise if Ray Train's error is the start timeout; None for any other."""
    if not is_train_error(getattr(error, "controller_failure", None), "WorkerGroupStartupTimeoutError"):
        return None
    waited_s = float(os.environ[START_TIMEOUT_VARIABLE])
    return ResourceError(
        f"the training workers did not start within {waited_s:g} s (cluster.start_timeout_s): their nodes are in use "
        "or did not start. Check `ray status` on the head, and rerun the same command to resume"
    )
