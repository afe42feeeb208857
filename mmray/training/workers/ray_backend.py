"""Workers on a Ray cluster; each attempt is a new `DataParallelTrainer` of ray_trainer.py."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import ray.exceptions
import ray.train
from ray.util.placement_group import PlacementGroup

from mmray.cluster import placement
from mmray.cluster.capacity import Demand, fits, num_workers_that_fit
from mmray.cluster.ray_internals import version_warning
from mmray.cluster.run_resources import (
    check_capacity,
    check_driver_memory,
    check_storage,
    is_single_node,
    min_decoders,
    request_nodes,
    resource_demand,
    training_nodes,
)
from mmray.cluster.shared_storage import check_inputs
from mmray.cluster.waiting import Contention, ResourceWait, is_reserved, reserve
from mmray.config import Config
from mmray.data.stream.pool_size import DecoderLimits
from mmray.engine.batch import out_of_memory_error
from mmray.errors import Log, MmrayError, ResourceError, TrainingError, first_line
from mmray.machine import cores, free_memory
from mmray.storage.paths import AnyPath
from mmray.training.monitor import Workers
from mmray.training.workers.backend import (
    Attempt,
    WorkerFailed,
    format_counts,
    is_lost,
    resume_point,
    run_in_thread,
    select_cause,
)
from mmray.training.workers.coordinator import Request, Updates
from mmray.training.workers.inputs import local_inputs
from mmray.training.workers.rank import measure_in_rank
from mmray.training.workers.ray_trainer import (
    get_device,
    start_coordinator,
    torch_trainer,
    train_loop_per_worker,
)

if TYPE_CHECKING:
    from mmray.training import RunReporter
    from mmray.training.monitor import AttemptMonitor, HeartbeatRecord
    from mmray.training.resolve import ResolvedRun
# Free resources are polled this often while workers of the last attempt release theirs.
POLL_INTERVAL_S = 0.5
STABLE_POLLS = 4
MAX_POLLS = 20
# Memory of a decode actor.
ACTOR_GIB = 0.5
BLOCKS_PER_ACTOR = 4
MAX_DECODERS = 1024  # decode actors of a worker
T = TypeVar("T")
NODE_LOSS_S = 40.0  # Ray reports a node that does not answer as lost after about half a minute


class RayBackend:
    """Starts the workers of a run with Ray Train, and again after a failure. It implements the
    protocol `Backend`.

    Args:
        check_storage: Check before the run that all nodes can use `run.storage`, and the memory of
            the driver's node. A sweep has done so for its trials.
    """

    errors: tuple[type[Exception], ...] = (
        ray.train.TrainingFailedError,
        WorkerFailed,
        MmrayError,
        ray.exceptions.RayError,
        RuntimeError,
        OSError,
    )

    def __init__(self, check_storage: bool = True) -> None:
        self._check_storage = check_storage
        self.autoscaler = new_request()
        # The nodes when the number of workers was last chosen.
        self._nodes: placement.SchedulableNodes | None = None
        self._excluded: frozenset[str] = frozenset()  # IDs of nodes on which a device failed

    def check(self, config: Config, reporter: RunReporter) -> None:
        if warning := version_warning():
            reporter.log(warning, "warning")
        check_capacity(config)
        if self._check_storage:
            check_driver_memory(free_memory() / 2**30, is_single_node(config.cluster))
            check_storage(config)

    def resolve(self, config: Config) -> Config:
        cluster = config.cluster
        device = "gpu" if "GPU" in resource_demand(config).per_worker else "cpu"
        num_cores = cores() if device == "cpu" and placement.available_cores_if_local() else 1
        return config.with_cluster(
            accelerator=device, cpus_per_worker=cluster.resolve_cpus(num_cores)
        )

    def check_inputs(self, resolved: ResolvedRun) -> None:
        nodes = placement.alive_nodes()
        if len(nodes) == 1:
            return  # the node of this process, which has opened the files
        limits = decoder_limits(resolved.config, resource_demand(resolved.config))
        data_nodes = [
            node
            for node in nodes
            if node.matches_labels(limits.label_selector) and node.fits({"CPU": 1.0})
        ]
        if limits.maximum == limits.reserved:
            data_nodes = []  # all decode actors are on the nodes of their ranks
        check_inputs(local_inputs(resolved), training_nodes(resolved.config), data_nodes)

    def num_local(self, device: str) -> int | None:
        if (available := placement.available_cores_if_local()) is None:
            return None
        return (
            int(placement.alive_nodes()[0].resources.get("GPU", 0))
            if device == "gpu"
            else available
        )

    def choose_world_size(self, config: Config) -> int:
        self._nodes = placement.schedulable_nodes()
        if not config.cluster.elastic:
            self._wait_for_network(config)
            # if they do not fit, Ray waits and an autoscaler adds nodes
            return config.cluster.max_workers
        request_nodes(config, self.autoscaler, 0, self._excluded)
        counts: list[int] = []
        for _ in range(MAX_POLLS):
            counts.append(
                num_workers_that_fit(
                    resource_demand(config, excluded=self._excluded), self._nodes.nodes
                )
            )
            stable = len(counts) >= STABLE_POLLS and len(set(counts[-STABLE_POLLS:])) == 1
            if counts[-1] == config.cluster.max_workers or (stable and counts[-1]):
                break
            time.sleep(POLL_INTERVAL_S)
            self._nodes = placement.schedulable_nodes()
        world = max(counts[-1], config.cluster.min_workers)
        # Those of the workers are requested by their placement group.
        request_nodes(config, self.autoscaler, world, self._excluded)
        return world

    def _wait_for_network(self, config: Config) -> None:
        """Wait for nodes that do not answer, unless the others suffice, until Ray would notice that
        they are lost.
        """
        assert self._nodes is not None, "schedulable_nodes comes before"
        demand = resource_demand(config, excluded=self._excluded)
        end_s = time.monotonic() + NODE_LOSS_S
        while time.monotonic() < end_s:
            alive = placement.alive_nodes()
            unavailable = set(self._nodes.unavailable)
            answering = [node for node in alive if node.node_id not in unavailable]
            is_draining = (
                unavailable <= placement.draining_nodes().keys()
            )  # also if none is unavailable
            if is_draining or fits(demand, answering) or not fits(demand, alive):
                return
            time.sleep(POLL_INTERVAL_S)
            self._nodes = placement.schedulable_nodes()

    def start(self, attempt: Attempt) -> RayWorkers:
        assert self._nodes is not None, "choose_world_size comes before"
        config = attempt.resolved.config
        # As for the largest group: a smaller one needs no more CPUs for each worker.
        demand = replace(
            resource_demand(config, excluded=self._excluded),
            workers=attempt.resolved.batch_shape.world_size,
        )
        limits = decoder_limits(config, demand)
        answering = self._nodes.excluding_unavailable
        arguments = {
            "context": attempt.worker_context(),
            "resume_point": resume_point(attempt.resolved, attempt.checkpoint),
            "decoders": replace(limits, label_selector=answering(limits.label_selector) or {}),
        }
        return RayWorkers(
            train_loop_per_worker,
            arguments,
            config,
            demand,
            replace(demand, label_selector=answering(demand.label_selector) or {}),
            attempt.folder,
            name=f"{name_in_views(attempt.folder)}-attempt-{attempt.fencing_token}",
            bad_rows=attempt.bad_rows,
            excluded=self._excluded,
            autoscaler=self.autoscaler,
        )

    def exclude_node(self, config: Config, node: str) -> bool:
        try:
            check_capacity(config, excluded={*self._excluded, node})
        except (ResourceError, ray.exceptions.RayError):
            return False
        self._excluded |= {node}
        return True

    def find_cause(self, error: BaseException, monitor: AttemptMonitor) -> WorkerFailed:
        if isinstance(error, WorkerFailed):  # raised by `RayWorkers.waits_for_resources`
            return error
        failed = cause_in_group(error)
        if isinstance(failed.cause, ray.exceptions.OutOfMemoryError):
            # Ray's memory monitor killed a worker: its node, not a device, ran out of memory.
            error = out_of_memory_error(
                "a node ran out of memory",
                first_line(failed.cause),
                monitor.batch_shape,
                "check what else uses memory on that node",
            )
            return WorkerFailed("lost", error)
        if failed.kind != "lost":
            return failed
        ranks = lost_ranks(error)
        names = [each.process for each in monitor.heartbeats if each.rank in ranks]
        cause = failed.cause
        if names:
            cause = TrainingError(f"{'; '.join(names)}: {first_line(cause)}")
        return WorkerFailed("preempted" if monitor.preempted else "lost", cause)


def new_request() -> placement.AutoscalerRequest:
    """Return a request for nodes with a name of its own."""
    return placement.AutoscalerRequest(f"mmray-{os.urandom(4).hex()}")


@dataclass
class RayWorkers(Workers):
    """A worker group of Ray Train, and the actor that passes messages to the driver, which start
    when all resources are reserved: a command that waits has no process but its driver.

    Args:
        loop: The `train_loop_per_worker`. It gets `arguments`, and as `coordinator` the actor.
        demand: The resources of the workers, as messages name them.
        folder: Ray Train writes its small files to the subfolder `ray`.
        placed_demand: The resources that are requested, not on nodes that do not answer.
        name: Name of Ray's run; None: a random one.
        bad_rows: Numbers of the rows that earlier attempts could not read.
        excluded: IDs of nodes on which a device failed.
        autoscaler: The request for nodes.
    """

    loop: Callable[[dict[str, Any]], Any]
    arguments: dict[str, Any]
    config: Config
    demand: Demand
    placed_demand: Demand
    folder: AnyPath
    name: str | None = None
    bad_rows: set[int] = field(default_factory=set)
    excluded: frozenset[str] = frozenset()
    autoscaler: placement.AutoscalerRequest = field(default_factory=new_request)
    _coordinator: Any = None
    _stop_requested: bool = False  # before the coordinator was started
    _wait: ResourceWait | None = None
    _contention: Contention = field(default_factory=Contention)
    _group: PlacementGroup | None = None

    def wait(self, poll: Callable[[], None]) -> Any:
        self._group = reserve(self.placed_demand)
        while not is_reserved(self._group):
            poll()
        self._coordinator = start_coordinator(self.bad_rows)
        if self._stop_requested:
            self.request("stop")
        trainer = torch_trainer(
            self.loop,
            self.config.cluster.group_timeout_s,
            self.folder,
            self.placed_demand,
            self.arguments | {"coordinator": self._coordinator},
            self.name,
        )
        return run_in_thread(partial(trainer.fit_in, self._group), poll)

    def drain(self, num_received: int) -> Updates:
        if self._coordinator is None:
            return [], []
        try:
            messages, heartbeats = ray.get(self._coordinator.drain.remote(num_received), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            # the next call returns them; if Ray is shutting down, the attempt itself raises
            return [], []
        return messages, heartbeats

    def request(self, name: Request) -> None:
        if self._coordinator is None:
            self._stop_requested |= name == "stop"
        else:
            self._coordinator.request.remote(name)

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        placement.kill_processes(
            (record.node, record.pid, record.started_s) for record in heartbeats
        )

    def draining_nodes(self) -> dict[str, float]:
        return placement.draining_nodes()

    def waits_for_resources(self, log: Log) -> bool:
        if self._coordinator is not None:
            return False
        cluster = self.config.cluster
        # A group of more than the least number does not wait for what others took meanwhile: the
        # run then starts with fewer.
        is_larger = self.demand.workers > cluster.min_workers
        if self._wait is None:
            name = "cluster.start_timeout_s" if is_larger else "cluster.queue_timeout_s"
            limit_s = cluster.start_timeout_s if is_larger else cluster.queue_timeout_s
            self._wait = ResourceWait(self.demand, limit_s, log, name)
        try:
            self._wait.poll()
        except ResourceError as error:
            if is_larger:
                raise WorkerFailed("lost", error) from error
            raise
        return True

    def share_resources(self) -> None:
        if self._coordinator is not None:
            self._coordinator.request.remote("yield", self._contention.must_yield())

    def num_more_workers(self) -> int:
        world = self.demand.workers
        request_nodes(self.config, self.autoscaler, world, self.excluded)
        demand = resource_demand(self.config, excluded=self.excluded)
        remaining = replace(demand, workers=demand.workers - world)
        return num_workers_that_fit(remaining, placement.schedulable_nodes().nodes)

    def describe_data(self) -> str:
        return f"decode actors: {format_counts(placement.actor_states('DecodeActor'))}"

    def close(self) -> None:
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self.autoscaler.cancel()
        if self._coordinator is not None:
            ray.kill(self._coordinator)


def run_group(
    measure: Callable[..., T],
    config: Config,
    folder: AnyPath,
    log: Log,
    on_message: Callable[[dict[str, Any]], None],
) -> T:
    """Wait for the resources of a group of workers, log what it waits for, and call a function in
    all of them.

    Args:
        measure: Called on each worker with the config, its Group, and a function that passes a
            message, a dict, to `on_message`; it can be pickled.
        folder: Ray Train writes its small files to the subfolder `ray`.

    Returns:
        What `measure` returned on rank 0.

    Raises:
        ResourceError: The workers did not get their resources in time.
        TrainingError: A worker was lost, or `measure` raised an error that is not mmray's.
    """
    demand = resource_demand(config, with_data=False)
    arguments = {"measure": measure, "config": config}
    workers = RayWorkers(_measure_in_worker, arguments, config, demand, demand, folder)
    num_received = 0

    def poll() -> None:
        nonlocal num_received
        if workers.waits_for_resources(log):
            return
        messages, _ = workers.drain(num_received)
        num_received += len(messages)
        for message in messages:
            on_message(message)

    try:
        with closing(workers):
            result: T = workers.wait(poll)
            return result
    except ray.train.TrainingFailedError as error:
        cause = cause_in_group(error).cause
        if isinstance(cause, MmrayError):
            raise cause from error
        raise TrainingError(f"a worker failed: {type(cause).__name__}: {cause}") from error


def _measure_in_worker(arguments: dict[str, Any]) -> Any:
    report = arguments["coordinator"].push.remote
    config = arguments["config"]
    return measure_in_rank(arguments["measure"], config, get_device(config), report)


def name_in_views(folder: AnyPath) -> str:
    """Return the name of a run in Ray's dashboard: of its folder, and of a trial of a
    sweep (SWEEP/trials/t001) `SWEEP-t001`.
    """
    if folder.parent.name == "trials":
        return f"{folder.parent.parent.name}-{folder.name}"
    return folder.name


def root_cause(error: BaseException) -> BaseException:
    """Return the error that made a worker fail.

    Returns:
        The error that a task raised (maybe in a task of a task), with a note that has its
        traceback, or the failure of a health check; otherwise `error` itself.
    """
    if not isinstance(error, ray.exceptions.RayTaskError):
        return _failure_of(error)
    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    cause.add_note(str(error))  # the traceback of the task
    return cause


def _failure_of(error: BaseException) -> BaseException:
    """Return the failure of a health check, whose class is not part of Ray's public API."""
    failure: BaseException = getattr(error, "health_check_failure", error)
    return failure


def is_worker_lost(error: BaseException) -> bool:
    """Return whether an error means that a worker was lost, not that its code failed."""
    if type(error) is ray.exceptions.RayError:  # a task's error that cannot be pickled
        return False
    # Its class is not part of Ray's public API.
    is_hung = type(error).__name__ == "WorkerHealthCheckTimeoutError"
    return is_hung or isinstance(error, ray.exceptions.RayError) or is_lost(error)


def lost_ranks(error: BaseException) -> set[int]:
    """Return the ranks of a group whose process or node was lost, without those that then lost the
    connection to it.
    """
    ranks = set()
    if isinstance(error, ray.train.WorkerGroupError):
        for rank, failure in error.worker_failures.items():
            cause = _failure_of(failure)
            is_raised = isinstance(cause, ray.exceptions.RayTaskError)
            if isinstance(cause, ray.exceptions.RayActorError) and not is_raised:
                ranks.add(rank)
    return ranks


def cause_in_group(error: BaseException) -> WorkerFailed:
    """Return why a worker group of Ray Train failed."""
    if not isinstance(error, ray.train.WorkerGroupError):
        reason = error
        if isinstance(error, ray.train.ControllerError):
            reason = error.controller_failure
        return WorkerFailed("lost", TrainingError(f"Ray Train failed: {reason}"))
    return select_cause(map(root_cause, error.worker_failures.values()), is_worker_lost)


def decoder_limits(config: Config, demand: Demand) -> DecoderLimits:
    """Return how many decode actors each worker has, and on which nodes.

    A range `data.workers` is divided by the number of workers, rounded up. With `auto`, the maximum
    on a single machine follows from its cores and memory; on a cluster it is 1024, because each
    further actor requests a CPU and memory from Ray.
    """
    minimum = min_decoders(config)
    reserved = demand.per_worker["CPU"] - resource_demand(config, False).per_worker["CPU"]
    selector = placement.decode_label_selector(config.cluster.data_label, placement.alive_nodes())
    if config.data.worker_range is not None:
        maximum = math.ceil(config.data.worker_range[1] / config.cluster.max_workers)
    elif is_single_node(config.cluster):
        training_cpus = demand.workers * config.cluster.num_cpus
        actor_gib = ACTOR_GIB + BLOCKS_PER_ACTOR * config.data.block_mb / 1024
        total = min(cores() - training_cpus, free_memory() / 2**30 / 2 / actor_gib)
        maximum = int(total / demand.workers)
    else:
        maximum = MAX_DECODERS
    return DecoderLimits(max(1, int(reserved)), minimum, max(minimum, maximum), selector)
