"""How many trials a cluster holds side by side; pure.

A trial that gets its training workers but no CPU for its data waits for ever, in silence; so room for all of it is
counted first. The trial's own driver takes no CPU: it sits on the head beside the command's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, concurrent, feasible, grown
from mmray.cluster.connect import FEED_CPUS
from mmray.errors import ResourceError


def largest(demands: Sequence[Demand]) -> Demand:
    """A demand that holds each of these."""
    names = {name for demand in demands for name in demand.per_worker}
    return replace(
        demands[0],
        workers=max(demand.workers for demand in demands),
        per_worker={name: max(demand.per_worker.get(name, 0) for demand in demands) for name in names},
        data_cpus=max(demand.data_cpus for demand in demands),
    )


def room_for(
    free: Sequence[Node],
    whole: Sequence[Node],
    demand: Demand,
    wanted: int,
    pools: Sequence[Pool] = (),
    waits: bool = False,
) -> tuple[int, int]:
    """(trials at a time, CPUs that each then has for data actors), up to `wanted` trials.

    `free` is what is free on the nodes, `whole` all that they have; nodes that the pools have yet to add count as free.
    Where one trial has room once others let go of theirs, one is tried: it waits as a run does. Raises ResourceError.
    """
    together = replace(demand, workers=demand.workers * wanted, data_cpus=demand.data_cpus * wanted)
    reach = [*free, *to_come(together, whole, pools)]
    at_once = concurrent(demand, reach, wanted)
    if at_once == 0:
        lacking = None if waits else feasible(demand, whole, pools)
        if lacking is not None:
            raise ResourceError(f"not one trial has room: {lacking}")
        at_once, reach = 1, grown(demand, whole, pools)
    cpus = sum(node.resources.get("CPU", 0) for node in reach if node.bears(demand.data_labels)) / at_once
    taken = 0 if demand.data_labels else demand.workers * demand.per_worker.get("CPU", 0)
    return at_once, max(1, int(cpus - taken) - FEED_CPUS)


def to_come(demand: Demand, here: Sequence[Node], pools: Sequence[Pool]) -> list[Node]:
    """The nodes that the pools may add to those that are here, as far as the demand could use them."""
    group_of = [(node.labels or {}).get(NODE_GROUP) for node in here]
    theirs = [node for node, group in zip(here, group_of, strict=True) if group in {pool.name for pool in pools}]
    left = [replace(pool, most=pool.most - group_of.count(pool.name)) for pool in pools]
    return grown(demand, theirs, left)
