"""How many trials run at a time, and the resources of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmray.cluster import placement
from mmray.cluster.capacity import (
    Demand,
    LabelSelector,
    Node,
    Pool,
    fits,
    max_cluster,
    max_concurrent,
)
from mmray.cluster.connect import INPUT_TASK_CPUS
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.cluster.run_resources import DRIVER_GIB, is_single_node, min_decoders, resource_demand
from mmray.config import Config
from mmray.tuning.trials import TrialResources

# Decode actors of ended trials release their CPUs with a delay.
FREE_WAIT_S = 10.0
MAX_CONCURRENT = 64
MAX_DATA_NODES = 1000  # nodes that are counted of a pool without a limit


def apply_trial_resources(config: Config, resources: TrialResources) -> Config:
    """Return the config of a trial's run with its share of the resources in place of `auto`.

    Args:
        config: The config of a trial's run. `cluster.cpus_per_worker` and `data.workers` are
            replaced if they are `auto`.
        resources: `cpus_per_worker` and `decode_actors` of a trial when several run at once. A
            value of None replaces nothing.
    """
    if resources.cpus_per_worker is not None and config.cluster.cpus_per_worker == "auto":
        config = config.with_cluster(cpus_per_worker=resources.cpus_per_worker)
    if resources.decode_actors is not None and config.data.workers == "auto":
        workers = config.cluster.max_workers
        most = max(workers, resources.decode_actors)
        config = config.replace(data=config.data.replace(workers=f"{workers}-{most}"))
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

    Returns:
        A TrialResources: `num_concurrent` (trials at a time), and for each `decode_actors` and
        `cpus_per_worker`; None: as a run alone has.
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
    data_selector = placement.data_label_selector(configs[0].cluster.data_label, nodes)
    num_concurrent, decode_actors = fit_trials(
        free, nodes, demand, data_selector, max_trials, pools
    )
    if num_concurrent == 1:
        return TrialResources()
    return TrialResources(num_concurrent, decode_actors, cpus_per_worker)


def _max_drivers(nodes: Sequence[Node]) -> int:
    """Return how many driver processes of trials fit the memory of the head node."""
    heads = [node for node in nodes if HEAD_RESOURCE in node.resources]
    memory_bytes = max((node.resources.get("memory", 0.0) for node in heads), default=0.0)
    if not memory_bytes:
        return MAX_CONCURRENT
    return min(MAX_CONCURRENT, max(1, int(memory_bytes / 2**30 / DRIVER_GIB)))


def fit_trials(
    free: Sequence[Node],
    nodes: Sequence[Node],
    demand: Demand,
    data_selector: LabelSelector,
    max_trials: int,
    pools: Sequence[Pool] = (),
) -> tuple[int, int]:
    """Return how many trials fit at a time, and the largest number of decode actors of each.

    Args:
        nodes: The same nodes with all of their resources, for a trial that must wait for other
            jobs.
        data_selector: Label selector of the nodes for decode actors.
        max_trials: Upper limit of the number of trials.
        pools: Node types that an autoscaler can add.

    Returns:
        Number of trials and number of decode actors, both at least 1.
    """
    # Decode actors may be on all nodes of a pool.
    cluster = max_cluster(free, pools, demand.workers * max_trials + MAX_DATA_NODES)
    num_concurrent = max_concurrent(demand, cluster, max_trials)
    if num_concurrent == 0:
        num_concurrent = 1
        cluster = max_cluster(nodes, pools, demand.workers + MAX_DATA_NODES)
    data_nodes = [node for node in cluster if node.matches_labels(data_selector)]
    cpus = sum(node.resources.get("CPU", 0.0) for node in data_nodes)
    worker_cpus = 0.0
    if not data_selector:
        worker_cpus = demand.workers * demand.per_worker.get("CPU", 0.0)
    return num_concurrent, max(1, int(cpus / num_concurrent - worker_cpus) - INPUT_TASK_CPUS)
