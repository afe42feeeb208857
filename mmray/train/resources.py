"""Resources that a run requests from Ray: training workers, their devices and process group, and decode actors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from mmray.cluster import placement, ray_internals, shared_storage
from mmray.cluster.capacity import (
    NODE_ID,
    Demand,
    LabelSelector,
    Node,
    exclude_nodes,
    missing_capacity,
    num_workers_that_fit,
)
from mmray.cluster.connect import INPUT_TASK_CPUS
from mmray.config import Config
from mmray.errors import ResourceError
from mmray.machine import cores, free_memory
from mmray.storage.paths import AnyPath, RemotePath
from mmray.train.backend import num_gpus

FREE_WAIT_S = 4.0


def resource_demand(config: Config, with_data: bool = True, excluded: Collection[str] = ()) -> Demand:
    """Return the run's workers and data CPUs; accelerator `auto`: GPUs if the cluster has, or can add, any.

    `excluded` are IDs of nodes on which no worker may start.
    """
    nodes, cluster = placement.alive_nodes(), config.cluster
    per_worker = {"CPU": cluster.num_cpus}
    pools = [Node(pool.resources) for pool in placement.autoscaling_pools()]
    has_gpus = any(node.resources.get("GPU") for node in [*nodes, *pools])
    if cluster.accelerator == "gpu" or (cluster.accelerator == "auto" and has_gpus):
        per_worker["GPU"] = float(num_gpus(config))
    actors = config.data.workers if isinstance(config.data.workers, int) else 1
    train_label_selector = placement.train_label_selector(cluster.train_label, nodes)
    return Demand(
        cluster.max_workers,
        per_worker | cluster.resources_per_worker,
        actors + INPUT_TASK_CPUS if with_data else 0,
        exclude_nodes(excluded, train_label_selector) if excluded else train_label_selector,
        placement.data_label_selector(cluster.data_label, nodes),
    )


def check_capacity(config: Config, with_data: bool = True, excluded: Collection[str] = ()) -> None:
    """Raise ResourceError if the cluster can never provide what the run needs, even after growing.

    `excluded` are IDs of nodes that the run cannot use.
    """
    if config.cluster.wait_for_nodes:
        return  # limits unknown: cluster.start_timeout_s ends the wait
    demand = replace(resource_demand(config, with_data), workers=config.cluster.min_workers)
    nodes = [node for node in placement.alive_nodes() if (node.labels or {}).get(NODE_ID) not in excluded]
    if missing := missing_capacity(demand, nodes, placement.autoscaling_pools()):
        raise ResourceError(missing)


def num_free_workers(config: Config) -> int:
    """Return how many workers, without data, fit the free resources. Raises ResourceError."""
    demand = resource_demand(config, with_data=False)
    minimum = replace(demand, workers=config.cluster.min_workers)
    free = placement.wait_for_free_nodes(minimum, FREE_WAIT_S)
    can_grow = config.cluster.wait_for_nodes or placement.autoscaling_pools()
    if not can_grow and (missing := missing_capacity(minimum, free)):
        raise ResourceError(f"with the resources that are free now, {missing}; or wait until other jobs have ended")
    return max(num_workers_that_fit(demand, free), minimum.workers)


def check_storage(config: Config) -> None:
    """Raise if the run's folder would be deleted with a job, or is not shared by all training nodes."""
    shared_storage.check_persistent(config.run.storage, Path.cwd())
    demand, nodes = resource_demand(config, with_data=False), placement.alive_nodes()
    if len(nodes) > 1 or "://" in config.run.storage:
        selector = demand.worker_label_selector
        training_nodes = [node for node in nodes if node.matches_labels(selector) and node.fits(demand.per_worker)]
        shared_storage.check_shared(config.run.storage, training_nodes)


def request_nodes(
    config: Config, autoscaler: placement.AutoscalerRequest, running: int, excluded: Collection[str] = ()
) -> None:
    """Request nodes for the workers that an elastic run can use in addition to `running`, if the cluster can grow."""
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        demand = resource_demand(config, with_data=False, excluded=excluded)
        autoscaler.request(demand.per_worker, demand.worker_label_selector, demand.workers - running)


def torch_trainer(
    loop: Callable[..., Any],
    config: Config,
    folder: AnyPath,
    name: str | None = None,
    label_selector: LabelSelector | None = None,
    **trainer_options: Any,
) -> TorchTrainer:
    """Return Ray Train's trainer of `loop`, without retries; its small files are written to `folder`/ray."""
    os.environ[ray_internals.START_TIMEOUT_VARIABLE] = str(config.cluster.start_timeout_s)  # Ray would wait forever
    demand = resource_demand(config, with_data=False)
    storage: dict[str, Any] = {"storage_path": str(folder / "ray")}
    if isinstance(folder, RemotePath):
        storage = {"storage_path": (folder / "ray").fs_path, "storage_filesystem": folder.storage.filesystem[0]}
    no_retries: Any = {"max_failures": 0, "controller_failure_limit": 0, "max_preemption_failures": 0}
    selector: Any = {"label_selector": label_selector or demand.worker_label_selector or None}  # missing in Ray's stub
    return TorchTrainer(
        loop,
        # NCCL for GPUs and gloo otherwise (Ray's choice), with a timeout, which neither has by default.
        torch_config=TorchConfig(timeout_s=math.ceil(config.cluster.group_timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=demand.workers,
            use_gpu="GPU" in demand.per_worker,
            resources_per_worker=demand.per_worker,
            **selector,
        ),
        run_config=RunConfig(name=name, failure_config=FailureConfig(**no_retries), **storage),
        **trainer_options,
    )


def is_single_node(config: Config) -> bool:
    """Return True if the cluster is one machine and cannot grow."""
    return len(placement.alive_nodes()) == 1 and not placement.autoscaling_pools() and not config.cluster.wait_for_nodes


def num_decode_actors(config: Config) -> int:
    """Return the number of decode actors: as configured, or as many as cores and memory of the data nodes allow."""
    if isinstance(config.data.workers, int):
        return config.data.workers
    demand, pools = resource_demand(config), placement.autoscaling_pools()
    cpu_pools = [Node(pool.resources, pool.labels) for pool in pools if not pool.resources.get("GPU")]
    selector = demand.data_label_selector
    data_nodes, pool_nodes = (
        [node.resources for node in group if node.matches_labels(selector) and node.resources.get("CPU")]
        for group in (placement.alive_nodes(), cpu_pools)
    )
    node_resources = data_nodes or pool_nodes  # one node of each pool while no data node has started
    cpus = sum(resources["CPU"] for resources in node_resources) - INPUT_TASK_CPUS
    memory_gib = sum(resources.get("memory", math.inf) for resources in node_resources) / 2**30
    if is_single_node(config):  # Ray may count more CPUs than cores (connect.num_local_cpus): use at most the cores
        cpus, memory_gib = min(cpus + INPUT_TASK_CPUS, cores()), free_memory() / 2**30
    separate_nodes = selector and (demand.worker_label_selector or "GPU" in demand.per_worker)
    worker_cpus = 0 if separate_nodes else demand.workers * demand.per_worker.get("CPU", 0)
    # Each actor needs a CPU that no worker uses, and memory for itself and its blocks.
    actor_gib = 0.5 + 4 * config.data.block_mb / 1024
    return max(1, int(min(cpus - worker_cpus, memory_gib * 0.5 / actor_gib)))
