"""The resources that a run requests from the cluster, and checks that the cluster can have them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from mmray.cluster import placement, shared_storage
from mmray.cluster.capacity import (
    NODE_GROUP,
    Demand,
    Node,
    exclude_nodes,
    max_cluster,
    missing_capacity,
    num_workers_that_fit,
)
from mmray.config import Cluster, Config
from mmray.errors import ResourceError
from mmray.storage.paths import check_kept

FREE_WAIT_S = 4.0
# Memory of a run on the node of its driver: the driver, Ray Train's controller and its
# synchronization, and the coordinator.
DRIVER_GIB = 0.6


def resource_demand(
    config: Config, with_data: bool = True, excluded: Collection[str] = ()
) -> Demand:
    """Return the resources that a run requests from Ray for its largest number of workers.

    With `cluster.accelerator` `auto`, workers have GPUs if the cluster has, or can add, any.

    Args:
        with_data: Include the CPUs of decode actors in those of each worker, if the cluster then
            still has CPUs for all workers. One reservation then has all that the run needs.
        excluded: IDs of nodes on which no worker may start.

    Returns:
        A Demand: `workers` (number), `per_worker` (such as {"CPU": 4, "GPU": 1}) and
        `label_selector`.
    """
    nodes = placement.alive_nodes()
    cluster = config.cluster
    pools = placement.autoscaling_pools()
    per_worker = {"CPU": cluster.num_cpus}
    resources = [each.resources for each in nodes] + [pool.resources for pool in pools]
    has_gpus = any(each.get("GPU") for each in resources)
    if cluster.accelerator == "gpu" or (cluster.accelerator == "auto" and has_gpus):
        per_worker["GPU"] = float(config.train.gpus_per_worker)
    selector = placement.train_label_selector(cluster.train_label, nodes)
    if excluded:
        selector = exclude_nodes(excluded, selector)
    demand = Demand(cluster.max_workers, per_worker | cluster.resources_per_worker, selector)
    if not with_data:
        return demand
    largest = max_cluster(nodes, pools, demand.workers)
    num_fitting = num_workers_that_fit(demand, largest)
    if not num_fitting:  # nodes of an unknown size will be added
        return demand
    for decode_cpus in range(min_decoders(config), 0, -1):
        cpus = demand.per_worker["CPU"] + decode_cpus
        with_decoders = replace(demand, per_worker=demand.per_worker | {"CPU": cpus})
        if num_workers_that_fit(with_decoders, largest) == num_fitting:
            return with_decoders
    return demand


def min_decoders(config: Config) -> int:
    """Return the smallest number of decode actors of a worker."""
    low, _ = config.data.worker_range or (1, 1)
    return math.ceil(low / config.cluster.max_workers)


def check_capacity(config: Config, with_data: bool = True, excluded: Collection[str] = ()) -> None:
    """Check that the cluster can provide the resources of a run, now or after it has grown.

    Args:
        config: Settings of the run. Without effect if `cluster.wait_for_nodes` is set.
        with_data: Include the CPUs of decode actors.
        excluded: IDs of nodes that the run cannot use.

    Raises:
        ResourceError: It can never provide the smallest number of workers.
    """
    if config.cluster.wait_for_nodes:
        return  # limits unknown: cluster.queue_timeout_s ends the wait
    demand = replace(resource_demand(config, with_data), workers=config.cluster.min_workers)
    alive = placement.alive_nodes()
    nodes = [node for node in alive if node.node_id not in excluded]
    taken = Counter(node.label(NODE_GROUP) for node in alive if node.node_id in excluded)
    pools = [
        replace(pool, max_nodes=pool.max_nodes - taken[pool.name])
        for pool in placement.autoscaling_pools()
    ]
    if missing := missing_capacity(demand, nodes, pools):
        raise ResourceError(missing)


def num_free_workers(config: Config) -> int:
    """Return how many workers without decode actors fit into the free resources, at least the
    minimum.
    """
    check_capacity(config, with_data=False)
    demand = resource_demand(config, with_data=False)
    minimum = replace(demand, workers=config.cluster.min_workers)
    free = placement.wait_for_free_nodes(minimum, FREE_WAIT_S)
    return max(num_workers_that_fit(demand, free), minimum.workers)


def check_driver_memory(free_gib: float, is_single_node: bool) -> None:
    """Check that this machine, usually the head, has memory for the processes of another run.

    Raises:
        ResourceError: It has less than the 0.6 GiB that the driver and Ray Train's controller need.
    """
    if free_gib < DRIVER_GIB and not is_single_node:
        raise ResourceError(
            f"{free_gib:.2f} GiB of memory are free on the node of the driver (the head, for a "
            f"submitted job), and a run needs {DRIVER_GIB:g} GiB there. Wait until another run has "
            "ended, or use a larger head"
        )


def check_storage(config: Config) -> None:
    """Check that the run's folder will be kept, and that all training nodes share it."""
    check_kept("run.storage", config.run.storage)
    if len(placement.alive_nodes()) > 1 or "://" in config.run.storage:
        shared_storage.check_shared(config.run.storage, training_nodes(config))


def training_nodes(config: Config) -> list[Node]:
    """Return the alive nodes that can have training workers of a run."""
    demand = resource_demand(config, with_data=False)
    return [
        node
        for node in placement.alive_nodes()
        if node.matches_labels(demand.label_selector) and node.fits(demand.per_worker)
    ]


def request_nodes(
    config: Config,
    autoscaler: placement.AutoscalerRequest,
    running: int,
    excluded: Collection[str] = (),
) -> None:
    """Request nodes from the autoscaler for the workers that an elastic run can use in addition to
    the `running` ones. Without effect if the cluster cannot grow.
    """
    if config.cluster.wait_for_nodes or placement.autoscaling_pools():
        demand = resource_demand(config, with_data=False, excluded=excluded)
        autoscaler.request(demand.per_worker, demand.label_selector, demand.workers - running)


def is_single_node(cluster_config: Cluster) -> bool:
    """Return whether the cluster is one machine and cannot grow."""
    return (
        len(placement.alive_nodes()) == 1
        and not placement.autoscaling_pools()
        and not cluster_config.wait_for_nodes
    )
