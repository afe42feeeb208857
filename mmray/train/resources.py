"""Resources that a run requests from Ray: training workers, their devices and process group, and data actors."""

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

from mmray.cluster import placement, ray_internals, shared_storage
from mmray.cluster.capacity import Demand, Labels, Node, Pool, Resources, max_gpus, max_workers, missing_capacity
from mmray.cluster.connect import INPUT_TASK_CPUS, num_decode_actors
from mmray.cluster.placement import AutoscalerRequest
from mmray.config import Config
from mmray.errors import ResourceError
from mmray.machine import cores, free_memory
from mmray.storage.paths import AnyPath, RemotePath

FREE_WAIT_S = 4.0  # workers that ended a moment ago still hold their resources


def resource_demand(config: Config, with_data: bool = True) -> Demand:
    """Return the concurrent demand of the run on the connected cluster: workers, and CPUs for its data."""
    nodes = placement.alive_nodes()
    actors = config.data.workers if isinstance(config.data.workers, int) else 1
    return Demand(
        config.cluster.max_workers,
        _per_worker(config, nodes, placement.autoscaling_pools()),
        actors + INPUT_TASK_CPUS if with_data else 0,
        placement.train_labels(config.cluster.train_label, nodes),
        placement.data_labels(config.cluster.data_label, nodes),
    )


def _per_worker(config: Config, nodes: list[Node], pools: list[Pool]) -> Resources:
    """Resources of one worker; with `auto` a GPU (one per branch) if the cluster has, or can get, enough of them."""
    accelerator, gpus = config.cluster.accelerator, _gpus_per_worker(config)
    enough = max_gpus(nodes, pools) >= gpus * config.cluster.min_workers
    bundle = {"CPU": config.cluster.cpus_per_worker}
    if accelerator == "gpu" or (accelerator == "auto" and enough):
        bundle["GPU"] = float(gpus)
    return {**bundle, **config.cluster.resources_per_worker}


def _gpus_per_worker(config: Config) -> int:
    return 2 if config.train.parallel == "branches" else 1


def check_capacity(config: Config, with_data: bool = True) -> None:
    """Raise ResourceError if the cluster can never provide what the run needs, even after growing."""
    if config.cluster.wait_for_nodes:
        return  # limits unknown: cluster.start_timeout_s ends the wait
    least = config.with_cluster(workers=config.cluster.min_workers)
    missing = missing_capacity(
        resource_demand(least, with_data), placement.alive_nodes(), placement.autoscaling_pools()
    )
    if missing is not None:
        raise ResourceError(missing)


def check_gpus(config: Config) -> None:
    """Raise ResourceError if the cluster has GPUs, but fewer than the workers need: they would be idle unnoticed."""
    cluster, each = config.cluster, _gpus_per_worker(config)
    available, workers = max_gpus(placement.alive_nodes(), placement.autoscaling_pools()), cluster.min_workers
    if cluster.accelerator != "auto" or cluster.wait_for_nodes or not 0 < available < each * workers:
        return
    if available < each:
        fix = "--train.parallel single trains on it"
    else:
        fix = f"--cluster.workers {available // each} trains on them, with the same global batch"
    raise ResourceError(
        f"the run needs {workers} training worker{'s' * (workers > 1)} with {_count_gpus(each)} each, and the cluster "
        f"has {available} GPU{'s' * (available > 1)}: {fix}; --cluster.accelerator cpu trains on CPUs"
    )


def _count_gpus(count: float) -> str:
    return "a GPU" if count == 1 else f"{count:g} GPUs"


def num_free_workers(config: Config) -> int:
    """Return the number of workers, without data, that fit the free resources.

    Raises ResourceError if not even the minimum fits within FREE_WAIT_S, unless the cluster can grow.
    """
    demand, until_s = resource_demand(config, with_data=False), time.monotonic() + FREE_WAIT_S
    minimum = replace(demand, workers=config.cluster.min_workers)
    while (missing := missing_capacity(minimum, placement.free_nodes())) is not None and time.monotonic() < until_s:
        time.sleep(0.5)
    if missing is None:
        return max_workers(demand, placement.free_nodes()) or minimum.workers
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        return minimum.workers
    raise ResourceError(f"with the resources that are free now, {missing}; or wait until other jobs have ended")


def check_storage(config: Config) -> None:
    """Raise if the run's folder would be deleted with a job, or is not shared by all training nodes."""
    shared_storage.check_persistent(config.run.storage, Path.cwd())
    demand, nodes = resource_demand(config, with_data=False), placement.alive_nodes()
    if len(nodes) > 1 or "://" in config.run.storage:
        train_nodes = [
            node for node in nodes if node.matches_labels(demand.worker_labels) and node.fits(demand.per_worker)
        ]
        shared_storage.check_shared(config.run.storage, train_nodes)


def ray_storage_args(folder: AnyPath) -> dict[str, Any]:
    """Arguments of RunConfig for the small files that Ray Train writes."""
    if isinstance(folder, RemotePath):
        return {"storage_path": (folder / "ray").key, "storage_filesystem": folder.storage.filesystem[0]}
    return {"storage_path": str(folder / "ray")}


def num_fitting_workers(config: Config, free: list[Node]) -> int:
    """Training workers that fit `free` together with their data, up to the maximum."""
    return max_workers(resource_demand(config), free)


def num_additional_workers(config: Config, free: list[Node], running: int) -> int:
    """Workers that fit `free` in addition to a running group."""
    return max_workers(
        replace(resource_demand(config), workers=config.cluster.max_workers - running, data_cpus=0), free
    )


def request_nodes(config: Config, autoscaler: AutoscalerRequest, running: int) -> None:
    """Request nodes for the workers that an elastic run can use in addition to `running`, if the cluster can grow."""
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        demand = resource_demand(config, with_data=False)
        autoscaler.request(demand.per_worker, demand.worker_labels, config.cluster.max_workers - running)


def scaling_config(config: Config, labels: Labels | None = None) -> ScalingConfig:
    """Ray Train's request for the training workers."""
    demand = resource_demand(config)
    return ScalingConfig(
        num_workers=demand.workers,
        use_gpu="GPU" in demand.per_worker,
        resources_per_worker=demand.per_worker,
        label_selector=labels or demand.worker_labels or None,  # type: ignore[call-arg]  # missing in ray.train's stub
    )


def torch_config(config: Config) -> TorchConfig:
    """NCCL for GPUs and gloo otherwise (Ray's choice), with a timeout, which neither has by default."""
    return TorchConfig(timeout_s=math.ceil(config.cluster.collective_timeout_s))


def failure_config() -> FailureConfig:
    """No retries by Ray: the supervisor restarts."""
    return FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)  # type: ignore[call-arg]


def format_workers(config: Config) -> str:
    """Number and devices of the workers, and GPUs of the cluster that they leave idle."""
    each = resource_demand(config).per_worker.get("GPU", 0)
    workers = str(config.cluster.workers).replace("-", " to ")
    if each:
        return f"{workers}, {_count_gpus(each)} each"
    gpus = max_gpus(placement.alive_nodes(), placement.autoscaling_pools())
    idle = f"; the cluster's {gpus} GPU{'s' * (gpus > 1)} left idle" if gpus else ""
    return f"{workers}, on CPUs{idle}"


def set_start_timeout(config: Config) -> None:
    """Limit how long Ray waits for the workers of the next group; it would wait forever by default."""
    os.environ[ray_internals.START_TIMEOUT_VARIABLE] = str(config.cluster.start_timeout_s)


def start_timeout_error(error: BaseException) -> ResourceError | None:
    """The error to raise if Ray Train's error is the start timeout; None for any other."""
    if not ray_internals.is_start_timeout(error):
        return None
    waited_s = float(os.environ[ray_internals.START_TIMEOUT_VARIABLE])
    return ResourceError(
        f"the training workers did not start within {waited_s:g} s (cluster.start_timeout_s): their nodes are in use "
        "or did not start. Check `ray status` on the head, and rerun the same command to resume"
    )


def is_single_node(config: Config) -> bool:
    """Return True if the cluster is one machine and cannot grow."""
    return len(placement.alive_nodes()) == 1 and not placement.autoscaling_pools() and not config.cluster.wait_for_nodes


def num_data_actors(config: Config) -> int:
    """Decode actors of the stream: as configured, or what cores and memory allow on the data nodes."""
    if isinstance(config.data.workers, int):
        return config.data.workers
    nodes, demand = placement.alive_nodes(), resource_demand(config)
    if is_single_node(config):  # a local cluster has more logical CPUs than cores
        cpus = min(ray.cluster_resources().get("CPU", 1), cores())
        return num_decode_actors(cpus, _worker_cpus(demand), free_memory() / 2**30, config.data.block_mb)
    return num_cluster_data_actors(demand, nodes, placement.autoscaling_pools(), config.data.block_mb)


def num_cluster_data_actors(demand: Demand, nodes: list[Node], pools: list[Pool], block_mb: float) -> int:
    """Decode actors that fit the data nodes; if none has started yet, those that fit one node of each CPU pool."""
    data_nodes = [node for node in nodes if node.matches_labels(demand.data_labels) and node.resources.get("CPU")]
    data_nodes = data_nodes or [
        Node(pool.resources)
        for pool in pools
        if not pool.resources.get("GPU") and Node({}, pool.labels).matches_labels(demand.data_labels)
    ]
    cpus = sum(node.resources.get("CPU", 0) for node in data_nodes)
    memory_gib = sum(node.resources.get("memory", math.inf) for node in data_nodes) / 2**30
    separate = demand.data_labels and (demand.worker_labels or "GPU" in demand.per_worker)
    return num_decode_actors(cpus - INPUT_TASK_CPUS, 0 if separate else _worker_cpus(demand), memory_gib, block_mb)


def _worker_cpus(demand: Demand) -> float:
    return demand.workers * demand.per_worker.get("CPU", 0)
