"""Waiting for resources that others hold: what a command logs, when it gives up, and when a run
gives back what it does not need.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup

from mmray.cluster.capacity import Demand, Resources, fits, format_resources
from mmray.cluster.placement import alive_nodes, data_demand, free_nodes
from mmray.cluster.ray_internals import running_jobs
from mmray.errors import Log, ResourceError

if TYPE_CHECKING:
    from mmray.config import Cluster

FIRST_LINE_S = 10.0
LINE_INTERVAL_S = 60.0
POLL_INTERVAL_S = 0.5
# A reservation that waits longer needs more than runs can give back, or another kind of node.
YIELD_AFTER_S = 5.0
IGNORE_AFTER_S = 120.0
MAX_LISTED_JOBS = 3


class ResourceWait:
    """Logs what a command waits for while others use the resources, and limits the wait.

    The caller calls `poll()` while it waits; it raises ResourceError at the limit.

    Args:
        demand: The resources that the command needs.
        timeout_s: Seconds from the construction of this object after which the command gives up.
        log: Called with (line, label), such as `waiting`.
        setting: Name of the setting with this limit, for messages.
    """

    def __init__(
        self,
        demand: Demand,
        timeout_s: float,
        log: Log,
        setting: str = "cluster.queue_timeout_s",
    ) -> None:
        self._demand = demand
        self._timeout_s = timeout_s
        self._limit = f"{timeout_s:g} s ({setting})"
        self._log = log
        self._start_s = time.monotonic()
        self._next_line_s = FIRST_LINE_S

    def poll(self) -> None:
        """Log what the command waits for, first after 10 s and then every 60 s, and end the wait at
        its limit.

        Raises:
            ResourceError: The wait has taken `timeout_s` or longer.
        """
        waited_s = time.monotonic() - self._start_s
        if waited_s >= self._next_line_s:
            self._next_line_s = waited_s + LINE_INTERVAL_S
            text = f"{waited_s:.0f} s for {self._demand}; {self._describe_use()}"
            self._log(f"{text}; gives up after {self._limit}", "waiting")
        if waited_s >= self._timeout_s:
            raise ResourceError(
                f"{self._demand}: not free within {self._limit}; {self._describe_use()}. Rerun the "
                "same command later, or raise the setting"
            )

    def _describe_use(self) -> str:
        """Return what is free on the nodes for workers (or data), and who uses the rest."""
        demand = self._demand
        selector = demand.label_selector
        names = sorted({"CPU", *demand.per_worker})
        nodes = [node for node in free_nodes() if node.matches_labels(selector)]
        totals = [node for node in alive_nodes() if node.matches_labels(selector)]
        free = _sum_resources([node.resources for node in nodes], names)
        total = _sum_resources([node.resources for node in totals], names)
        num_nodes = sum(any(node.resources.get(name) for name in names) for node in totals)
        count = f"{num_nodes} node{'s' * (num_nodes != 1)}"
        text = f"free: {format_resources(free)} of {format_resources(total)} on {count}"
        jobs = running_jobs()
        if jobs:
            more = ", ..." if len(jobs) > MAX_LISTED_JOBS else ""
            text += f"; other jobs: {', '.join(jobs[:MAX_LISTED_JOBS])}{more}"
        return text


def _sum_resources(resources: Collection[Resources], names: Collection[str]) -> Resources:
    return {name: sum(each.get(name, 0.0) for each in resources) for name in names}


class _DataJobs(NamedTuple):
    """What jobs of Ray Data of this process wait for."""

    cluster_config: Cluster
    log: Log


_data_jobs: _DataJobs | None = None


def set_data_jobs(cluster_config: Cluster, log: Log) -> None:
    """Set for this process where `wait_for_data_cpu` waits, and how long."""
    global _data_jobs
    _data_jobs = _DataJobs(cluster_config, log)


def wait_for_data_cpu() -> Demand:
    """Wait until a CPU of a data node is free, because Ray Data would wait silently and forever.

    The CPU is requested by a placement group, so an autoscaler adds a node, and runs give back CPUs
    that they can do without. Outside of a `ray_session` any CPU counts, and nothing is awaited.

    Returns:
        The resources of a task of Ray Data.

    Raises:
        ResourceError: No CPU was free within `cluster.queue_timeout_s`.
    """
    if _data_jobs is None:
        return Demand(1, {"CPU": 1.0}, purpose="data")
    demand = data_demand(_data_jobs.cluster_config)
    if fits(demand, free_nodes()):
        return demand
    wait = ResourceWait(demand, _data_jobs.cluster_config.queue_timeout_s, _data_jobs.log)
    group = reserve(demand)
    try:
        while not is_reserved(group):
            wait.poll()
    finally:
        ray.util.remove_placement_group(group)
    return demand


def pending_reservations() -> list[str]:
    """Return the IDs of the placement groups of the cluster that wait for resources."""
    table: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return [name for name, group in table.items() if group["state"] in ("PENDING", "RESCHEDULING")]


def reserve(demand: Demand) -> PlacementGroup:
    """Request the resources of all workers of a demand, which Ray reserves together or not at all.

    Remove the placement group in the end with `ray.util.remove_placement_group`.
    """
    selector = demand.label_selector
    return ray.util.placement_group(
        [dict(demand.per_worker)] * demand.workers,
        bundle_label_selector=[dict(selector)] * demand.workers if selector else None,
    )


def is_reserved(group: PlacementGroup) -> bool:
    """Return whether Ray has reserved the resources of a placement group."""
    return group.wait(POLL_INTERVAL_S)


class Contention:
    """Detects that others wait for resources, so that a run gives back what it does not need.

    `must_yield()` returns whether others wait. Call it every few seconds, because the time that
    they wait counts from the call that first saw them.
    """

    def __init__(self) -> None:
        self._first_seen_s: dict[str, float] = {}

    def must_yield(self) -> bool:
        """Return whether a placement group of the cluster has waited for resources for 5 s or
        longer.

        One that has waited for 120 s is ignored, because giving back resources did not help.
        """
        now_s = time.monotonic()
        pending = pending_reservations()
        self._first_seen_s = {name: self._first_seen_s.get(name, now_s) for name in pending}
        waits_s = [now_s - seen_s for seen_s in self._first_seen_s.values()]
        return any(YIELD_AFTER_S <= wait_s < IGNORE_AFTER_S for wait_s in waits_s)
