"""What a run asks of Ray: training workers, their devices and process group, and data actors beside them."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from mmray.cluster import placement, shared_storage
from mmray.cluster.autoscaling import AutoscalerRequest
from mmray.cluster.capacity import Demand, Labels, Node, Pool, Resources, max_gpus, max_workers, missing_capacity
from mmray.cluster.connect import INPUT_TASK_CPUS, num_decode_actors
from mmray.config import Config
from mmray.errors import ResourceError
from mmray.machine import cores, free_memory
from mmray.storage.paths import AnyPath, RemotePath

FREE_LOOK_S = 4.0  # until what is taken counts as taken: workers that have ended a moment ago hold their places


def resource_demand(config: Config, with_data: bool = True) -> Demand:
    """What the run takes at once, on the cluster that is joined: the workers, and CPUs for its data."""
    here = placement.alive_nodes()
    asked = config.data.workers if isinstance(config.data.workers, int) else 1
    return Demand(
        config.cluster.max_workers,
        _per_worker(config, here, placement.autoscaling_pools()),
        asked + INPUT_TASK_CPUS if with_data else 0,
        placement.train_labels(config.cluster.train_label, here),
        placement.data_labels(config.cluster.data_label, here),
    )


def check_capacity(config: Config, with_data: bool = True) -> None:
    """Raise ResourceError where the cluster can never give what the run asks for, whatever it grows to."""
    if config.cluster.wait_for_nodes:
        return  # who knows into what: cluster.start_timeout_s ends the wait
    least = config.with_cluster(workers=config.cluster.min_workers)
    lacking = missing_capacity(
        resource_demand(least, with_data), placement.alive_nodes(), placement.autoscaling_pools()
    )
    if lacking is not None:
        raise ResourceError(lacking)


def check_gpus(config: Config) -> None:
    """Raise ResourceError where there are fewer GPUs than the workers want: they would stand idle without a word."""
    cluster, each = config.cluster, _gpus_each(config)
    there, workers = max_gpus(placement.alive_nodes(), placement.autoscaling_pools()), cluster.min_workers
    if cluster.accelerator != "auto" or cluster.wait_for_nodes or not 0 < there < each * workers:
        return
    if there < each:
        fewer = "--train.parallel single trains on it"
    else:
        fewer = f"--cluster.workers {there // each} trains on them, with the same global batch"
    asked = f"{workers} training worker{'s' * (workers > 1)} of {'a GPU' if each == 1 else f'{each} GPUs'} each"
    raise ResourceError(
        f"the run asks for {asked}, and the cluster has {there} GPU{'s' * (there > 1)}: {fewer}; --cluster.accelerator "
        "cpu leaves them aside"
    )


def num_free_workers(config: Config) -> int:
    """How many of the workers, without data beside them, have a place that is free; asked for a moment.

    Raises ResourceError where the fewest have none and the cluster does not grow; where it may, it is left to Ray.
    """
    demand, until_s = resource_demand(config, with_data=False), time.monotonic() + FREE_LOOK_S
    fewest = replace(demand, workers=config.cluster.min_workers)
    while (lacking := missing_capacity(fewest, placement.free_nodes())) is not None and time.monotonic() < until_s:
        time.sleep(0.5)
    if lacking is None:
        return max_workers(demand, placement.free_nodes()) or fewest.workers
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        return fewest.workers
    raise ResourceError(f"with what is free now: {lacking}; or wait until what runs there has ended")


def check_storage(config: Config) -> None:
    """Raise where runs would be lost with a job, or a training node does not see their folder."""
    shared_storage.check_persistent(config.run.storage, Path.cwd())
    demand, here = resource_demand(config, with_data=False), placement.alive_nodes()
    if len(here) > 1 or "://" in config.run.storage:
        theirs = [node for node in here if node.matches_labels(demand.worker_labels) and node.fits(demand.per_worker)]
        shared_storage.check_shared(config.run.storage, theirs)


def ray_storage_args(folder: AnyPath) -> dict[str, Any]:
    """Where Ray Train keeps the small files of its own, as arguments of its RunConfig."""
    if isinstance(folder, RemotePath):
        return {"storage_path": (folder / "ray").key, "storage_filesystem": folder.storage.filesystem[0]}
    return {"storage_path": str(folder / "ray")}


def num_fitting_workers(config: Config, free: list[Node]) -> int:
    """Training workers that have a place in `free` beside the data's, at most as many as asked for; 0: none."""
    return max_workers(resource_demand(config), free)


def num_additional_workers(config: Config, free: list[Node], running: int) -> int:
    """Workers that have a place in `free`, what is free beside a running group of `running` workers."""
    return max_workers(
        replace(resource_demand(config), workers=config.cluster.max_workers - running, data_cpus=0), free
    )


def request_nodes(config: Config, autoscaler: AutoscalerRequest, running: int) -> None:
    """Wish for nodes for as many workers as an elastic run can use beside `running`, where the cluster may grow."""
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        demand = resource_demand(config, with_data=False)
        autoscaler.ask(demand.per_worker, demand.worker_labels, config.cluster.max_workers - running)


def scaling_config(config: Config, labels: Labels | None = None) -> ScalingConfig:
    """The training workers, where GPUs are used with one each, or one for each branch."""
    demand = resource_demand(config)
    return ScalingConfig(
        num_workers=demand.workers,
        use_gpu="GPU" in demand.per_worker,
        resources_per_worker=demand.per_worker,
        label_selector=labels or demand.worker_labels or None,  # type: ignore[call-arg]  # of ray.train's, hidden behind the old
    )


def torch_config(config: Config) -> TorchConfig:
    """NCCL with GPUs and gloo without, as Ray Train chooses; with a timeout, which neither has by default."""
    return TorchConfig(timeout_s=math.ceil(config.cluster.collective_timeout_s))


def format_workers(config: Config) -> str:
    """How many workers train, and on what; GPUs of the cluster that they leave aside."""
    each, there = (
        resource_demand(config).per_worker.get("GPU", 0),
        max_gpus(placement.alive_nodes(), placement.autoscaling_pools()),
    )
    workers = str(config.cluster.workers).replace("-", " to ")
    if each:
        return f"{workers}, {'a GPU' if each == 1 else f'{each:g} GPUs'} each"
    idle = f"; the cluster's {there} GPU{'s' * (there > 1)} left idle" if there else ""
    return f"{workers}, on CPUs{idle}"


def failure_config() -> FailureConfig:
    """Ray tries nothing again by itself, and waits no longer than its start-up limit."""
    return FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)  # type: ignore[call-arg]


def set_start_timeout(config: Config) -> None:
    """How long Ray waits for the workers of the next group; by itself it would try for ever."""
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.cluster.start_timeout_s)


def start_timeout_error(error: BaseException) -> ResourceError | None:
    """What is told where this error says that the limit has passed; None for any other."""
    if not isinstance(getattr(error, "controller_failure", None), WorkerGroupStartupTimeoutError):
        return None
    waited_s = float(os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"])
    return ResourceError(
        f"the training workers did not start within {waited_s:g} s (cluster.start_timeout_s): their nodes are taken, "
        "or did not come up; `ray status` on the head says which, and the same command goes on from where it was"
    )


def is_single_node(config: Config) -> bool:
    """Whether one machine is the whole cluster, and stays so: a head whose pools are empty is none."""
    return len(placement.alive_nodes()) == 1 and not placement.autoscaling_pools() and not config.cluster.wait_for_nodes


def num_data_actors(config: Config) -> int:
    """Decoding actors of the stream: as configured, or what cores and memory leave on the nodes of the data."""
    if isinstance(config.data.workers, int):
        return config.data.workers
    here, demand = placement.alive_nodes(), resource_demand(config)
    if is_single_node(config):  # a cluster on this machine has more logical CPUs than real cores
        cpus = min(ray.cluster_resources().get("CPU", 1), cores())
        return num_decode_actors(cpus, _taken(demand), free_memory() / 2**30, config.data.block_mb)
    return num_cluster_data_actors(demand, here, placement.autoscaling_pools(), config.data.block_mb)


def num_cluster_data_actors(demand: Demand, here: list[Node], pools: list[Pool], block_mb: float) -> int:
    """Decoding actors that fit on the nodes of the data; where those have yet to start, on one of each CPU pool."""
    theirs = [node for node in here if node.matches_labels(demand.data_labels) and node.resources.get("CPU")]
    theirs = theirs or [
        Node(pool.resources)
        for pool in pools
        if not pool.resources.get("GPU") and Node({}, pool.labels).matches_labels(demand.data_labels)
    ]
    cpus = sum(node.resources.get("CPU", 0) for node in theirs)
    memory_gib = sum(node.resources.get("memory", math.inf) for node in theirs) / 2**30
    apart = demand.data_labels and (demand.worker_labels or "GPU" in demand.per_worker)
    return num_decode_actors(cpus - INPUT_TASK_CPUS, 0 if apart else _taken(demand), memory_gib, block_mb)


def _taken(demand: Demand) -> float:
    return demand.workers * demand.per_worker.get("CPU", 0)


def _per_worker(config: Config, here: list[Node], pools: list[Pool]) -> Resources:
    """What one worker holds; a GPU (one for each branch) where asked for, or where the cluster has or gets enough."""
    wanted, each = config.cluster.accelerator, _gpus_each(config)
    enough = max_gpus(here, pools) >= each * config.cluster.min_workers
    own = {"CPU": config.cluster.cpus_per_worker}
    if wanted == "gpu" or (wanted == "auto" and enough):
        own["GPU"] = float(each)
    return {**own, **config.cluster.resources_per_worker}


def _gpus_each(config: Config) -> int:
    return 2 if config.train.parallel == "branches" else 1
