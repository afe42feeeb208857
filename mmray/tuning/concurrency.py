"""How many trials run at a time, and the resources of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from mmray.cluster.run_resources import DRIVER_GIB, is_single_node, min_decoders, resource_demand
from mmray.config import Config
from mmray.tuning.trials import TrialResources

# Ended trials release their CPUs with a delay.
FREE_WAIT_S = 10.0
MAX_CONCURRENT = 64


def apply_trial_resources(config: Config, resources: TrialResources) -> Config:
    """Return the config of a trial's run with its share of the cores if `cluster.cpus_per_worker`
    is `auto`.
    """
    if resources.cpus_per_worker is not None and config.cluster.cpus_per_worker == "auto":
        return config.with_cluster(cpus_per_worker=resources.cpus_per_worker)
    return config


def plan_resources(
    configs: Sequence[Config], concurrency: int | None, num_trials: int
) -> TrialResources:
    """Return how many trials run at a time, and the resources of each.

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
        return TrialResources(max_trials)
    cpus_per_worker = None
    if max_trials > 1 and placement.available_cores_if_local() and "GPU" not in demand.per_worker:
        # `auto` would give all cores of the machine to each trial.
        decode_cpus = max(map(min_decoders, configs))
        share = nodes[0].resources["CPU"] / max_trials / demand.workers
        cpus_per_worker = float(max(1, int(share) - decode_cpus))
        per_worker = demand.per_worker | {"CPU": cpus_per_worker + decode_cpus}
        demand = replace(demand, per_worker=per_worker)
    free = placement.wait_for_free_nodes(demand, FREE_WAIT_S if fits(demand, nodes) else 0.0)
    num_concurrent = fit_trials(free, demand, max_trials, pools)
    return TrialResources(num_concurrent, cpus_per_worker if num_concurrent > 1 else None)


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
    """Return how many trials fit at a time, at least 1: that one waits for other jobs.

    Args:
        pools: Node types that an autoscaler can add.
    """
    cluster = max_cluster(free, pools, demand.workers * max_trials)
    return max(1, max_concurrent(demand, cluster, max_trials))
