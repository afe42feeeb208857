"""Check whether a run fits a cluster and what is missing, because Ray would wait forever.

Pure functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

Resources = dict[str, float]
Labels = dict[str, str]
LabelSelector = dict[str, str]  # Ray's: {key: `value`, `!value`, `in(a,b)` or `!in(a,b)`}

NODE_ID = "ray.io/node-id"
NODE_GROUP = "ray.io/node-group"  # Ray's label with the name of the node's pool
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Args:
        resources: Amount by name, such as {"CPU": 16, "GPU": 1}; total or free, as the caller
            needs.
        labels: Ray's labels of the node, value by key; None: unknown until the node starts.
    """

    resources: Resources
    labels: Labels | None = field(default_factory=dict)

    def matches_labels(self, selector: LabelSelector) -> bool:
        """Return whether the node satisfies a label selector; True if its labels are unknown.

        Args:
            selector: Condition by label key, as in Ray: {"role": "gpu"}, {"role": "!gpu"}, {"zone":
                "in(a,b)"} or {"zone": "!in(a,b)"}. All conditions must hold.
        """
        if self.labels is None:
            return True
        for key, condition in selector.items():
            body = condition.removeprefix("!")
            values = body[3:-1].split(",") if body.startswith("in(") else [body]
            if (self.labels.get(key) in {each.strip() for each in values}) == condition.startswith(
                "!"
            ):
                return False
        return True

    def fits(self, bundle: Resources) -> bool:
        """Return whether the node has all of some resources.

        Args:
            bundle: Amount by name, such as {"CPU": 4, "GPU": 1}.
        """
        return all(
            self.resources.get(name, 0) + TOLERANCE >= amount for name, amount in bundle.items()
        )


@dataclass(frozen=True)
class Pool:
    """A node type of an autoscaling cluster.

    Args:
        name: Name of the pool, such as `gpu-workers`.
        resources: Resources of one of its nodes, amounts by name, such as {"CPU": 16, "GPU": 1}.
        max_nodes: Maximum number of its nodes, including existing ones.
        labels: Ray's labels of its nodes, value by key; None: unknown.
    """

    name: str
    resources: Resources
    max_nodes: int
    labels: Labels | None = None


@dataclass(frozen=True)
class Demand:
    """Resources that one run requests from Ray.

    Args:
        workers: Number of training workers.
        per_worker: Resources of each worker, such as {"CPU": 4, "GPU": 1}.
        data_cpus: Number of CPUs for processes that read and decode rows; each may be on another
            node.
        worker_label_selector: Ray's label selector of the nodes for workers, such as {"role":
            "gpu"} (`Node.matches_labels` has all forms); {}: any node.
        data_label_selector: The same of the nodes for data.
    """

    workers: int
    per_worker: Resources
    data_cpus: int
    worker_label_selector: LabelSelector = field(default_factory=dict)
    data_label_selector: LabelSelector = field(default_factory=dict)

    def with_cpus(self, more: float) -> Demand:
        """Return a copy of the demand (resources of a run), in which each worker has more CPUs.

        Returns:
            The copy: `per_worker["CPU"]` is larger by `more`, such as {"CPU": 5, "GPU": 1} instead
            of {"CPU": 4, "GPU": 1} for 1; a missing entry counts as 0. All else is equal.
        """
        cpus = self.per_worker.get("CPU", 0.0) + more
        return replace(self, per_worker=self.per_worker | {"CPU": cpus})

    def __str__(self) -> str:
        workers = (
            f"{self.workers} training worker{'s' * (self.workers != 1)} of "
            f"{format_resources(self.per_worker)} each"
        )
        if self.worker_label_selector:
            workers += f" on nodes{format_label_selector(self.worker_label_selector)}"
        data = f"{self.data_cpus} CPU{'s' * (self.data_cpus != 1)} for data"
        if self.data_label_selector:
            data += f" on nodes{format_label_selector(self.data_label_selector)}"
        return ", and ".join(
            part for part, count in ((workers, self.workers), (data, self.data_cpus)) if count
        )


def missing_capacity(
    demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool] = ()
) -> str | None:
    """Return what a cluster lacks for a run, as a message for the user.

    Args:
        demand: Resources of the workers and of the data.
        nodes: The alive nodes, with their total or free resources.
        pools: Node types that the autoscaler can add; empty for a cluster of fixed size.

    Returns:
        None if the demand fits the nodes, or the nodes with all pools at their maximum. Otherwise
        the missing resources, what the cluster has, and what to change.
    """
    largest = max_cluster(demand, nodes, pools)
    if fits(demand, nodes) or fits(demand, largest):
        return None
    names = {"CPU", "GPU", *demand.per_worker}
    totals = {name: sum(node.resources.get(name, 0) for node in largest) for name in names}
    nodes_text = f"{len(largest)} node{'s' * (len(largest) != 1)}"
    total = (
        f"the cluster {'can grow to' if pools else 'has'} {format_resources(totals)} on "
        f"{nodes_text}"
    )
    grow_fix = (
        "raise the maximum of a pool of the autoscaler"
        if pools
        else ("add nodes, or join a larger cluster")
    )
    cause, fix = _cause_and_fix(demand, largest)
    on_cpus = (
        ("; or train on CPUs (--cluster.accelerator cpu)") if demand.per_worker.get("GPU") else ""
    )
    return f"{demand}: {cause}; {total}. {fix or grow_fix}{on_cpus}"


def _cause_and_fix(demand: Demand, nodes: Sequence[Node]) -> tuple[str, str]:
    """The first cause why the demand does not fit, and a change with which it may (empty: only more
    nodes).
    """
    missing = [
        name for name in demand.per_worker if not any(node.resources.get(name) for node in nodes)
    ]
    if missing:
        known = sorted({name for node in nodes for name in node.resources if ":" not in name})
        return f"no node has any {' or '.join(missing)}", f"the nodes have {', '.join(known)}"
    for purpose, selector in (
        ("training", demand.worker_label_selector),
        ("data", demand.data_label_selector),
    ):
        is_needed = purpose == "training" or demand.data_cpus
        if is_needed and not any(node.matches_labels(selector) for node in nodes):
            fix = (
                "Label a node, or in a run allow any "
                f"(--cluster.{purpose.removesuffix('ing')}-label none)"
            )
            return f"no node for {purpose} is{format_label_selector(selector)}", fix
    if not any(
        node.fits(demand.per_worker) and node.matches_labels(demand.worker_label_selector)
        for node in nodes
    ):
        return "no single node can hold one worker", ""
    if not fits(replace(demand, workers=0), nodes):
        return "there are too few CPUs for data", (
            "fewer --data.workers need fewer CPUs"
        ) if demand.data_cpus > 2 else ""
    fitting = num_workers_that_fit(demand, nodes)
    return f"{fitting} workers fit together with the data", (
        f"--cluster.workers {fitting} would fit"
    ) if fitting else ""


def fits(demand: Demand, nodes: Sequence[Node]) -> bool:
    """Return whether the resources of one run fit into the free resources of a cluster."""
    return max_concurrent(demand, nodes, 1) == 1


def max_concurrent(demand: Demand, nodes: Sequence[Node], limit: int) -> int:
    """Return how many runs with the same demand fit at once.

    Args:
        demand: Resources of the workers and of the data of one run.
        nodes: Nodes with their free resources.
        limit: The largest number to return.
    """
    free = [Node(dict(node.resources), node.labels) for node in nodes]
    # Data last, because single CPUs fit the gaps left by workers.
    bundles = [(demand.per_worker, demand.worker_label_selector)] * demand.workers
    bundles += [({"CPU": 1.0}, demand.data_label_selector)] * demand.data_cpus
    return next(
        (count for count in range(limit) if not all(_allocate(free, *each) for each in bundles)),
        limit,
    )


def num_workers_that_fit(demand: Demand, nodes: Sequence[Node]) -> int:
    """Return how many of a run's workers fit into the free resources, together with its data CPUs.

    Args:
        demand: Resources of the workers and of the data; its number of workers is the largest
            result.
    """
    # if more fit, fewer fit: bisect for the first count that does not fit
    counts = range(1, demand.workers + 1)
    return bisect_left(
        counts, True, key=lambda count: not fits(replace(demand, workers=count), nodes)
    )


def max_cluster(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """Return the nodes of the largest cluster that the autoscaler can start for a run.

    Args:
        nodes: The alive nodes, with their total resources.
        pools: Node types of the autoscaler.

    Returns:
        The alive nodes that are in no pool, and as many nodes of each pool as it can have or the
        run can use, each a Node: `resources` (amount by name, such as {"CPU": 16}) and `labels`.
    """
    needed = demand.workers + demand.data_cpus  # each node hosts at least one worker or data CPU
    labels = {(node.labels or {}).get(NODE_GROUP): node.labels for node in nodes}  # by pool
    names = {pool.name for pool in pools}
    fixed = (node for node in nodes if (node.labels or {}).get(NODE_GROUP) not in names)
    full = (
        [Node(pool.resources, labels.get(pool.name, pool.labels))] * min(pool.max_nodes, needed)
        for pool in pools
    )
    return [*fixed, *chain.from_iterable(full)]


def exclude_nodes(node_ids: Iterable[str], selector: LabelSelector | None = None) -> LabelSelector:
    """Return a label selector that excludes some nodes.

    Args:
        selector: The label selector to extend; nodes that it excludes stay excluded. None: empty.
    """
    before = (selector or {}).get(NODE_ID, "").removeprefix("!in(").removesuffix(")")
    return {
        **(selector or {}),
        NODE_ID: f"!in({','.join(sorted({*node_ids, *filter(None, before.split(','))}))})",
    }


def format_resources(resources: Resources) -> str:
    """Format resources, such as {"CPU": 1, "GPU": 1}, for a message as `1 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


def format_label_selector(selector: LabelSelector) -> str:
    """Format a label selector, such as {"role": "gpu"}, for a message as ` labeled role=gpu`; "" if
    it is empty.
    """
    return f" labeled {', '.join(map('='.join, selector.items()))}" if selector else ""


def _allocate(free: list[Node], bundle: Resources, selector: LabelSelector) -> bool:
    """Allocate the bundle on the fitting node with the fewest GPUs, then CPUs; return False if none
    fits.
    """
    fitting = [node for node in free if node.matches_labels(selector) and node.fits(bundle)]
    if not fitting:
        return False
    node = min(
        fitting, key=lambda node: (node.resources.get("GPU", 0), node.resources.get("CPU", 0))
    )
    for name, amount in bundle.items():
        node.resources[name] = node.resources.get(name, 0) - amount
    return True
