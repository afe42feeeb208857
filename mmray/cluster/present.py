"""Which nodes are really there now, with what is free on them: what a run that lost some can start on again.

Ray counts a node that vanished among the living for half a minute; a connection to its raylet tells at once. Nodes that
are being taken away (drained) are still there, but nothing new should start on them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray._private import state  # free resources by node, and draining nodes: nothing public tells them in Ray 2.60
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import Labels, Node, keeping_off

CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Present:
    """The nodes on which workers may start, free resources alone, and the ids of those that must be left out."""

    nodes: list[Node]
    left_out: tuple[str, ...]

    def avoiding(self, labels: Labels | None) -> Labels | None:
        """A label selector that also keeps off the nodes that are gone or going, besides those that it already does."""
        if not self.left_out:
            return labels or None
        return keeping_off(self.left_out, labels)


def present() -> Present:
    """What is there now."""
    free, going = state.available_resources_per_node(), draining()
    alive = [node for node in ray.nodes() if node["Alive"]]
    gone = {node["NodeID"] for node in alive if node["NodeID"] in going or not _answers(node)}
    nodes = [
        Node(dict(free.get(node["NodeID"], {})), dict(node.get("Labels") or {}))
        for node in alive
        if node["NodeID"] not in gone
    ]
    return Present(nodes, tuple(sorted(gone)))


def draining() -> dict[str, float]:
    """Nodes that are being taken away: {node id: time of day when, in s; 0 where no deadline was given}."""
    return {node: deadline_ms / 1000 for node, deadline_ms in state.state.get_draining_nodes().items()}


def end_processes(processes: Iterable[tuple[str, int]], timeout_s: float = 10.0) -> None:
    """SIGKILL to processes by (node id, pid): it ends those that are stopped, or hang in code of C, as well."""
    tasks = [
        _kill.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pid)
        for node, pid in processes
    ]
    ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s)  # a node that does not answer has lost its worker anyway


@ray.remote(max_retries=0)
def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended meanwhile


def _answers(node: dict[str, Any]) -> bool:
    """Whether the node's raylet takes a connection; tried twice, for one lost packet is no dead node."""
    for _ in range(2):
        try:
            socket.create_connection(
                (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_TIMEOUT_S
            ).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False
