"""Check whether a run fits a cluster, how many runs fit at once, and what is missing. Pure functions.

A Demand (resource bundles of training workers, and single CPUs for data) is compared with the existing nodes and the
pools of the autoscaler. The check is needed because Ray waits forever for a worker that can never be placed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

Resources = dict[str, float]
Labels = dict[str, str]

NODE_ID = "ray.io/node-id"
NODE_GROUP = "ray.io/node-group"  # Ray's label with the name of the node's pool
TOLERANCE = 1e-6
REPORTED_RESOURCES = ("CPU", "GPU")


@dataclass(frozen=True)
class Node:
    """Resources (total or free) and labels of a node; labels None: unknown until the node starts."""

    resources: Resources
    labels: Labels | None = field(default_factory=dict)

    def matches_labels(self, wanted: Labels) -> bool:
        """Return whether the node satisfies this label selector."""
        if self.labels is None:
            return True
        return all(_matches(self.labels.get(key), value) for key, value in wanted.items())

    def fits(self, bundle: Resources) -> bool:
        """Return whether the node has all of these resources."""
        return all(self.resources.get(name, 0) + TOLERANCE >= amount for name, amount in bundle.items())


@dataclass(frozen=True)
class Pool:
    """A node type of an autoscaling cluster, with at most `most` nodes including existing ones."""

    name: str
    resources: Resources
    most: int
    labels: Labels | None = None


@dataclass(frozen=True)
class Demand:
    """Resources of one run."""

    workers: int
    per_worker: Resources
    data_cpus: int
    worker_labels: Labels = field(default_factory=dict)
    data_labels: Labels = field(default_factory=dict)

    def __str__(self) -> str:
        each = f"{format_resources(self.per_worker)} each{format_labels(self.worker_labels)}"
        workers = f"{self.workers} training workers of {each}"
        data = f"{self.data_cpus} CPUs for data{format_labels(self.data_labels)}"
        return ", and ".join(part for part, count in ((workers, self.workers), (data, self.data_cpus)) if count)


def missing_capacity(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool] = ()) -> str | None:
    """Return None if the demand fits the nodes and pools; otherwise a message with what is missing and what fits."""
    if max_concurrent(demand, nodes, 1):
        return None
    largest = max_cluster(demand, nodes, pools)
    return None if max_concurrent(demand, largest, 1) else _explain(demand, largest, pools)


def max_concurrent(demand: Demand, nodes: Sequence[Node], limit: int) -> int:
    """Return how many such runs fit at once on these free resources, up to `limit`."""
    free = [Node(dict(node.resources), node.labels) for node in nodes]
    return next((count for count in range(limit) if not _allocate_run(free, demand)), limit)


def max_workers(demand: Demand, nodes: Sequence[Node]) -> int:
    """Return how many workers of the demand fit together with its data CPUs."""
    counts = range(1, demand.workers + 1)
    return bisect_left(counts, True, key=lambda count: not max_concurrent(replace(demand, workers=count), nodes, 1))


def max_cluster(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """Return the existing nodes and those that autoscaling can add for this demand."""
    useful = demand.workers + demand.data_cpus  # each node hosts at least one worker or data CPU
    known = {(node.labels or {}).get(NODE_GROUP): node.labels for node in nodes}
    added = ([Node(pool.resources, known.get(pool.name, pool.labels))] * min(pool.most, useful) for pool in pools)
    return [*outside_pools(nodes, pools), *chain.from_iterable(added)]


def outside_pools(nodes: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """Return the nodes that belong to no pool."""
    names = {pool.name for pool in pools}
    return [node for node in nodes if (node.labels or {}).get(NODE_GROUP) not in names]


def max_gpus(nodes: Sequence[Node], pools: Sequence[Pool]) -> int:
    """Return the number of GPUs including those that autoscaling can add."""
    fixed = sum(node.resources.get("GPU", 0) for node in outside_pools(nodes, pools))
    return int(fixed + sum(pool.resources.get("GPU", 0) * pool.most for pool in pools))


def exclude_nodes(node_ids: Iterable[str], labels: Labels | None = None) -> Labels:
    """Return `labels` extended to exclude these nodes."""
    before = (labels or {}).get(NODE_ID, "").removeprefix("!in(").removesuffix(")")
    return {**(labels or {}), NODE_ID: f"!in({','.join(sorted({*node_ids, *filter(None, before.split(','))}))})"}


def format_resources(resources: Resources) -> str:
    """Format as `1 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


def format_labels(labels: Labels) -> str:
    """Format as ` on nodes labelled role=gpu`; empty without labels."""
    return f" on nodes labelled {_join(labels)}" if labels else ""


def _join(labels: Labels) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _explain(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool]) -> str:
    """Format what is missing, the first cause, and a change that would fit."""
    totals = {
        name: sum(node.resources.get(name, 0) for node in nodes) for name in {*REPORTED_RESOURCES, *demand.per_worker}
    }
    total = f"the cluster {'can grow to' if pools else 'has'} {format_resources(totals)} on {len(nodes)} nodes"
    return f"{demand}: {_cause(demand, nodes)}; {total}. {'; '.join(_suggestions(demand, nodes, pools))}"


def _cause(demand: Demand, nodes: Sequence[Node]) -> str:
    absent = [name for name in demand.per_worker if not any(node.resources.get(name) for node in nodes)]
    if absent:
        return f"no node has any {' or '.join(absent)}"
    for purpose, labels in (("training", demand.worker_labels), ("data", demand.data_labels)):
        if not any(node.matches_labels(labels) for node in nodes):
            return f"no node for {purpose} is labelled {_join(labels)}"
    if not any(node.fits(demand.per_worker) and node.matches_labels(demand.worker_labels) for node in nodes):
        return "no single node can hold one worker"
    if not max_concurrent(replace(demand, workers=0), nodes, 1):
        return "there are too few CPUs for data"
    return f"{max_workers(demand, nodes)} workers fit together with the data"


def _suggestions(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool]) -> list[str]:
    def would_fit(**changes: Any) -> bool:
        return bool(max_concurrent(replace(demand, **changes), nodes, 1))

    def without(name: str) -> Resources:
        return {other: amount for other, amount in demand.per_worker.items() if other != name}

    changes = []
    if fitting := max_workers(demand, nodes):
        changes.append(f"--cluster.workers {fitting} would fit")
    if demand.per_worker.get("GPU") and would_fit(per_worker=without("GPU")):
        changes.append("it would fit on CPUs (--cluster.accelerator cpu)")
    if (demand.worker_labels or demand.data_labels) and would_fit(worker_labels={}, data_labels={}):
        changes.append("it would fit without labels (--cluster.train-label none --cluster.data-label none)")
    for name in demand.per_worker.keys() - set(REPORTED_RESOURCES):
        if would_fit(per_worker=without(name)):
            known = sorted({key for node in nodes for key in node.resources if ":" not in key})
            changes.append(f"it would fit without {name} (the nodes have {', '.join(known)})")
    if demand.data_cpus > 2:
        changes.append("fewer --data.workers need fewer CPUs")
    fallback = "raise max_workers of a pool in cluster.yaml" if pools else "add nodes, or join a larger cluster"
    return changes or [fallback]


def _allocate_run(free: list[Node], demand: Demand) -> bool:
    """Allocate one run; data last, because single CPUs fit the gaps left by workers."""
    workers = all(_allocate(free, demand.per_worker, demand.worker_labels) for _ in range(demand.workers))
    return workers and all(_allocate(free, {"CPU": 1.0}, demand.data_labels) for _ in range(demand.data_cpus))


def _allocate(free: list[Node], bundle: Resources, labels: Labels) -> bool:
    """Allocate the bundle on the fitting node with the fewest GPUs, then CPUs; return False if none fits."""
    fitting = [node for node in free if node.matches_labels(labels) and node.fits(bundle)]
    if not fitting:
        return False
    node = min(fitting, key=lambda node: (node.resources.get("GPU", 0), node.resources.get("CPU", 0)))
    for name, amount in bundle.items():
        node.resources[name] = node.resources.get(name, 0) - amount
    return True


def _matches(value: str | None, wanted: str) -> bool:
    """Match the label selectors that mmray uses: `value`, `!value`, `in(a,b)`, `!in(a,b)`."""
    negated = wanted.startswith("!")
    body = wanted.removeprefix("!")
    values = body[3:-1].split(",") if body.startswith("in(") else [body]
    return (value in {each.strip() for each in values}) != negated
