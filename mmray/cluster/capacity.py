"""Whether a run fits into a cluster, how many fit side by side, and what is missing where none does. Pure.

What is asked for is a Demand: training workers, each whole on one node, and single CPUs for the data. It is held
against the nodes that are there and against the pools from which an autoscaling cluster adds nodes. Ray itself waits
for ever where a worker, or the last CPU for the data, can never be had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

Resources = dict[str, float]
Labels = dict[str, str]

NODE_ID = "ray.io/node-id"
NODE_GROUP = "ray.io/node-group"  # the label by which Ray says from which pool a node came
SLACK = 1e-6
REPORTED_RESOURCES = ("CPU", "GPU")


@dataclass(frozen=True)
class Node:
    """A node: what it has (or has free), and its labels; None where they are not known before it starts."""

    resources: Resources
    labels: Labels | None = field(default_factory=dict)

    def matches_labels(self, wanted: Labels) -> bool:
        """Whether the node satisfies these labels; `!value` excludes."""
        if self.labels is None:
            return True
        return all(_matches(self.labels.get(key), value) for key, value in wanted.items())

    def fits(self, unit: Resources) -> bool:
        """Whether the node has all of it by itself."""
        return all(self.resources.get(name, 0) + SLACK >= amount for name, amount in unit.items())


@dataclass(frozen=True)
class Pool:
    """Nodes of one kind that an autoscaling cluster may have: at most `most` of them, those already there included."""

    name: str
    resources: Resources
    most: int
    labels: Labels | None = None


@dataclass(frozen=True)
class Demand:
    """What one run takes at once."""

    workers: int
    per_worker: Resources
    data_cpus: int
    worker_labels: Labels = field(default_factory=dict)
    data_labels: Labels = field(default_factory=dict)

    def __str__(self) -> str:
        each = f"{format_resources(self.per_worker)} each{format_labels(self.worker_labels)}"
        workers = f"{self.workers} training workers of {each}"
        data = f"{self.data_cpus} CPUs for the data{format_labels(self.data_labels)}"
        return ", and ".join(part for part, asked in ((workers, self.workers), (data, self.data_cpus)) if asked)


def missing_capacity(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool] = ()) -> str | None:
    """None where the demand fits the nodes, or what the pools can grow to; else what is missing and what would fit.

    A demand of no workers is one of data alone.
    """
    if max_concurrent(demand, nodes, 1):
        return None
    reach = max_cluster(demand, nodes, pools)
    if max_concurrent(demand, reach, 1):
        return None
    return _explain(demand, reach, pools)


def max_concurrent(demand: Demand, nodes: Sequence[Node], at_most: int) -> int:
    """How many such runs the nodes hold side by side, up to `at_most`; give nodes with what is free on them."""
    free = [Node(dict(node.resources), node.labels) for node in nodes]
    for count in range(at_most):
        if not _take_run(free, demand):
            return count
    return at_most


def max_cluster(demand: Demand, nodes: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """The largest cluster that this one can become, as far as the demand could use it."""
    fixed = outside_pools(nodes, pools)
    useful = demand.workers + demand.data_cpus  # a node takes at least one worker or one CPU of them, or nothing
    known = {(node.labels or {}).get(NODE_GROUP): node.labels for node in nodes}
    added = ([Node(pool.resources, known.get(pool.name, pool.labels))] * min(pool.most, useful) for pool in pools)
    return [*fixed, *chain.from_iterable(added)]


def outside_pools(nodes: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """The nodes that belong to none of the pools."""
    names = {pool.name for pool in pools}
    return [node for node in nodes if (node.labels or {}).get(NODE_GROUP) not in names]


def max_gpus(nodes: Sequence[Node], pools: Sequence[Pool]) -> int:
    """GPUs that the cluster has, or can come to have."""
    fixed = sum(node.resources.get("GPU", 0) for node in outside_pools(nodes, pools))
    return int(fixed + sum(pool.resources.get("GPU", 0) * pool.most for pool in pools))


def exclude_nodes(node_ids: Iterable[str], labels: Labels | None = None) -> Labels:
    """A label selector that keeps off these nodes, besides all that `labels` asks for."""
    before = (labels or {}).get(NODE_ID, "").removeprefix("!in(").removesuffix(")")
    return {**(labels or {}), NODE_ID: f"!in({','.join(sorted({*node_ids, *filter(None, before.split(','))}))})"}


def max_workers(demand: Demand, nodes: Sequence[Node]) -> int:
    """Workers of the demand's kind that fit beside its data, at most as many as it asks for."""
    counts = range(1, demand.workers + 1)
    return bisect_left(counts, True, key=lambda count: not max_concurrent(replace(demand, workers=count), nodes, 1))


def format_resources(resources: Resources) -> str:
    """`1 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


def format_labels(labels: Labels) -> str:
    """` on nodes labelled role=gpu`, or nothing."""
    return f" on nodes labelled {', '.join(f'{key}={value}' for key, value in labels.items())}" if labels else ""


def _explain(demand: Demand, reach: Sequence[Node], pools: Sequence[Pool]) -> str:
    """What is missing, the nearest cause first, and which change would fit."""
    can = "can grow to" if pools else "has"
    totals = {
        name: sum(node.resources.get(name, 0) for node in reach) for name in {*REPORTED_RESOURCES, *demand.per_worker}
    }
    have = f"the cluster {can} {format_resources(totals)} on {len(reach)} nodes"
    return f"{demand}: {_cause(demand, reach)}; {have}. {_suggestions(demand, reach, pools)}"


def _cause(demand: Demand, reach: Sequence[Node]) -> str:
    absent = [name for name in demand.per_worker if not any(node.resources.get(name) for node in reach)]
    if absent:
        return f"no node has any {' or '.join(absent)}"
    for whose, labels in (("training", demand.worker_labels), ("data", demand.data_labels)):
        if not any(node.matches_labels(labels) for node in reach):
            return f"no node for {whose} is labelled {', '.join(f'{key}={value}' for key, value in labels.items())}"
    if not any(node.fits(demand.per_worker) and node.matches_labels(demand.worker_labels) for node in reach):
        return "no single node can hold one worker"
    if not _take_data([Node(dict(node.resources), node.labels) for node in reach], demand):
        return "there are too few CPUs for the data"
    return f"{max_workers(demand, reach)} workers fit beside the data"


def _suggestions(demand: Demand, reach: Sequence[Node], pools: Sequence[Pool]) -> str:
    changes = []
    fitting = max_workers(demand, reach)
    if fitting:
        changes.append(f"--cluster.workers {fitting} would fit")
    if demand.per_worker.get("GPU"):
        bare = {name: amount for name, amount in demand.per_worker.items() if name != "GPU"}
        if max_concurrent(replace(demand, per_worker=bare), reach, 1):
            changes.append("on CPUs it would fit (--cluster.accelerator cpu)")
    elsewhere = replace(demand, worker_labels={}, data_labels={})
    if (demand.worker_labels or demand.data_labels) and max_concurrent(elsewhere, reach, 1):
        changes.append("without the labels it would fit (--cluster.train-label none --cluster.data-label none)")
    for name in demand.per_worker.keys() - set(REPORTED_RESOURCES):
        rest = {other: amount for other, amount in demand.per_worker.items() if other != name}
        if max_concurrent(replace(demand, per_worker=rest), reach, 1):
            known = sorted({key for node in reach for key in node.resources if ":" not in key})
            changes.append(f"without {name} it would fit (the nodes have {', '.join(known)})")
    if demand.data_cpus > 2:
        changes.append("fewer --data.workers need fewer CPUs")
    if not changes:
        changes.append(
            "raise max_workers of a pool in cluster.yaml" if pools else "add nodes, or join a larger cluster"
        )
    return "; ".join(changes)


def _take_run(free: list[Node], demand: Demand) -> bool:
    """Take what one run needs; the data last, for CPUs fit into the gaps that whole workers leave."""
    workers = all(_allocate(free, demand.per_worker, demand.worker_labels) for _ in range(demand.workers))
    return workers and _take_data(free, demand)


def _take_data(free: list[Node], demand: Demand) -> bool:
    return all(_allocate(free, {"CPU": 1.0}, demand.data_labels) for _ in range(demand.data_cpus))


def _allocate(free: list[Node], unit: Resources, labels: Labels) -> bool:
    """Take `unit` from the node where it leaves the fewest GPUs, then the fewest CPUs; False where none has it."""
    fitting = [node for node in free if node.matches_labels(labels) and node.fits(unit)]
    if not fitting:
        return False
    node = min(fitting, key=lambda node: (node.resources.get("GPU", 0), node.resources.get("CPU", 0)))
    for name, amount in unit.items():
        node.resources[name] = node.resources.get(name, 0) - amount
    return True


def _matches(have: str | None, wanted: str) -> bool:
    """Ray's label selectors, as far as mmray writes them: `value`, `!value`, `in(a,b)`, `!in(a,b)`."""
    negated = wanted.startswith("!")
    body = wanted.removeprefix("!")
    values = body[3:-1].split(",") if body.startswith("in(") else [body]
    return (have in {value.strip() for value in values}) != negated
