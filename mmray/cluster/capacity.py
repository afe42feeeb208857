"""Check whether a run fits a cluster and what is missing, because Ray would wait forever.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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

    @property
    def node_id(self) -> str:
        """Ray's ID of the node; "" if it has not started."""
        return self.label(NODE_ID) or ""

    def label(self, key: str) -> str | None:
        """Return the value of a label, if the node is known to have it."""
        return (self.labels or {}).get(key)

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
        """Return whether the node has all of some resources."""
        return all(
            self.resources.get(name, 0) + TOLERANCE >= amount for name, amount in bundle.items()
        )


@dataclass(frozen=True)
class Pool:
    """A node type of an autoscaling cluster.

    Args:
        resources: Resources of one of its nodes.
        max_nodes: Maximum number of its nodes, including existing ones.
        labels: Ray's labels of its nodes; None: unknown.
    """

    name: str
    resources: Resources
    max_nodes: int
    labels: Labels | None = None


@dataclass(frozen=True)
class Demand:
    """Resources that a command requests from Ray.

    Args:
        workers: Number of training workers, or of tasks that read data.
        per_worker: Resources of each, such as {"CPU": 4, "GPU": 1}; all of them are on one node.
        label_selector: Ray's label selector of the nodes, such as {"role": "gpu"}
            (`Node.matches_labels` has all forms); {}: any node.
        purpose: What the resources are for.
    """

    workers: int
    per_worker: Resources
    label_selector: LabelSelector = field(default_factory=dict)
    purpose: Literal["training", "data"] = "training"

    def __str__(self) -> str:
        plural = "s" * (self.workers != 1)
        what = f"{self.workers} CPU{plural} for data"
        if self.purpose == "training":
            resources = format_resources(self.per_worker)
            what = f"{self.workers} training worker{plural} of {resources} each"
        nodes = format_label_selector(self.label_selector)
        return f"{what} on nodes{nodes}" if nodes else what


def missing_capacity(
    demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool] = ()
) -> str | None:
    """Return what a cluster lacks for a demand, as a message for the user.

    Args:
        nodes: The alive nodes, with their total or free resources.
        pools: Node types that the autoscaler can add; empty for a cluster of fixed size.

    Returns:
        None if the demand fits the nodes, or the nodes with all pools at their maximum. Otherwise
        the missing resources, what the cluster has, and what to change.
    """
    largest = max_cluster(nodes, pools, demand.workers)
    if fits(demand, nodes) or fits(demand, largest):
        return None
    names = {"CPU", "GPU", *demand.per_worker}
    totals = {name: sum(node.resources.get(name, 0) for node in largest) for name in names}
    nodes_text = f"{len(largest)} node{'s' * (len(largest) != 1)}"
    total = (
        f"the cluster {'can grow to' if pools else 'has'} {format_resources(totals)} on "
        f"{nodes_text}"
    )
    wait_flag = "--wait-for-nodes" if demand.purpose == "data" else "--cluster.wait-for-nodes true"
    grow_fix, later = "Add nodes, or join a larger cluster", f"; if nodes will join: {wait_flag}"
    if pools:
        grow_fix, later = "Raise the maximum of a pool of the autoscaler", ""
    cause, fix = _cause_and_fix(demand, largest)
    on_cpus = (
        ("; or train on CPUs (--cluster.accelerator cpu)") if demand.per_worker.get("GPU") else ""
    )
    return f"{demand}: {cause}; {total}. {fix or grow_fix}{on_cpus}{later}"


def _cause_and_fix(demand: Demand, nodes: Sequence[Node]) -> tuple[str, str]:
    """The first cause why the demand does not fit, and a change with which it may (empty: only more
    nodes).
    """
    missing = [
        name for name in demand.per_worker if not any(node.resources.get(name) for node in nodes)
    ]
    if missing:
        known = {name for node in nodes for name in node.resources if ":" not in name}
        known -= {"memory", "object_store_memory"}
        fix = f"The nodes have {', '.join(sorted(known))}" if known else ""
        return f"no node has any {' or '.join(missing)}", fix
    allowed = [node for node in nodes if node.matches_labels(demand.label_selector)]
    if not allowed:
        flag = f"--cluster.{demand.purpose.removesuffix('ing')}-label none"
        cause = f"no node for {demand.purpose} is{format_label_selector(demand.label_selector)}"
        return cause, f"Label a node, or in a run allow any ({flag})"
    if not any(node.fits(demand.per_worker) for node in allowed):
        what = "one worker" if demand.purpose == "training" else "it"
        return f"no single node can hold {what}", ""
    fitting = num_workers_that_fit(demand, nodes)
    return f"{fitting} workers fit", f"--cluster.workers {fitting} would fit"


def fits(demand: Demand, nodes: Sequence[Node]) -> bool:
    """Return whether a demand fits into the free resources of a cluster."""
    return max_concurrent(demand, nodes, 1) == 1


def max_concurrent(demand: Demand, nodes: Sequence[Node], limit: int) -> int:
    """Return how many runs with the same demand fit at once.

    Args:
        nodes: Nodes with their free resources.
        limit: The largest number to return.
    """
    free = [Node(dict(node.resources), node.labels) for node in nodes]
    for count in range(limit):
        for _ in range(demand.workers):
            if not _allocate(free, demand):
                return count
    return limit


def num_workers_that_fit(demand: Demand, nodes: Sequence[Node]) -> int:
    """Return how many workers of a demand fit into the free resources, at most all."""
    return max_concurrent(replace(demand, workers=1), nodes, demand.workers)


def max_cluster(nodes: Sequence[Node], pools: Sequence[Pool], max_nodes: int) -> list[Node]:
    """Return the nodes of the largest cluster, with `max_nodes` of each pool of the autoscaler."""
    labels = {node.label(NODE_GROUP): node.labels for node in nodes}  # by pool
    names = {pool.name for pool in pools}
    largest = [node for node in nodes if node.label(NODE_GROUP) not in names]
    for pool in pools:
        node = Node(pool.resources, labels.get(pool.name, pool.labels))
        largest += [node] * min(pool.max_nodes, max_nodes)
    return largest


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


def _allocate(free: list[Node], demand: Demand) -> bool:
    """Allocate one worker on the fitting node with the fewest GPUs, then CPUs; return False if none
    fits.
    """
    fitting = [
        node
        for node in free
        if node.matches_labels(demand.label_selector) and node.fits(demand.per_worker)
    ]
    if not fitting:
        return False
    node = min(
        fitting, key=lambda node: (node.resources.get("GPU", 0), node.resources.get("CPU", 0))
    )
    for name, amount in demand.per_worker.items():
        node.resources[name] = node.resources.get(name, 0) - amount
    return True
