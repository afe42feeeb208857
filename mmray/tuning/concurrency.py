"""How many trials run at a time."""

from __future__ import annotations

from collections.abc import Sequence

from mmray.cluster import placement
from mmray.cluster.capacity import (
    Demand,
    Node,
    Pool,
    fits,
    max_cluster,
    max_concurrent,
)
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.cluster.run_resources import DRIVER_GIB, is_single_node, resource_demand
from mmray.config import Config

# Ended trials release their CPUs with a delay.
FREE_WAIT_S = 10.0
MAX_CONCURRENT = 64


def plan_concurrency(configs: Sequence[Config], concurrency: int | None, num_trials: int) -> int:
    """Return how many trials run at a time.

    If trials run one after another, each has the whole cluster. Requires an initialized Ray.

    Args:
        configs: Configs of trials at the corners of the search space; each must get enough
            resources.
        concurrency: Requested number of trials at a time; None: one on a single machine, otherwise
            as many as fit.
        num_trials: Number of trials that will run, an upper limit.
    """
    demand = max(
        (resource_demand(config) for config in configs),
        key=lambda each: each.workers * sum(each.per_worker.values()),
    )
    nodes = placement.alive_nodes()
    pools = placement.autoscaling_pools()
    if concurrency is not None:
        max_trials = min(num_trials, concurrency)
    elif all(is_single_node(config.cluster) for config in configs):
        max_trials = 1
    else:
        max_trials = min(num_trials, _max_drivers(nodes))
    if concurrency and not pools and all(config.cluster.wait_for_nodes for config in configs):
        # The user states that nodes will be added, and for how many trials.
        return max_trials
    if (
        placement.available_cores_if_local()
        and "GPU" not in demand.per_worker
        and any(config.cluster.cpus_per_worker == "auto" for config in configs)
    ):
        return 1  # `auto` gives all cores of the machine to a trial
    free = placement.wait_for_free_nodes(demand, FREE_WAIT_S if fits(demand, nodes) else 0.0)
    return fit_trials(free, demand, max_trials, pools)


def _max_drivers(nodes: Sequence[Node]) -> int:
    """Return how many driver processes of trials fit the memory of the head node."""
    heads = [node for node in nodes if HEAD_RESOURCE in node.resources]
    memory_bytes = max((node.resources.get("memory", 0.0) for node in heads), default=0.0)
    if not memory_bytes:
        return MAX_CONCURRENT
    return min(MAX_CONCURRENT, max(1, int(memory_bytes / 2**30 / DRIVER_GIB)))


def fit_trials(
    free: Sequence[Node], demand: Demand, max_trials: int, pools: Sequence[Pool] = ()
) -> int:
    """Return how many trials fit at a time, with nodes that an autoscaler can add; at least 1."""
    cluster = max_cluster(free, pools, demand.workers * max_trials)
    return max(1, max_concurrent(demand, cluster, max_trials))
