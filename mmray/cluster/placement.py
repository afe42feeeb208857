"""The cluster as Ray describes it, in the words of capacity.py, and on which of its nodes data and training belong.

A cluster whose nodes carry the label `mmray/role` (cluster.yaml gives it to each pool) is laid out by it: data on
`data`, training on `train`. The head carries it too, so that the layout is known while both pools are empty.
Without it, data keeps off the nodes with GPUs where others have CPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data
import ray.exceptions
import yaml
from ray._private import state  # free resources by node, and draining nodes: nothing public tells them in Ray 2.60
from ray._private.state import state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import NODE_ID, Demand, Labels, Node, Pool, exclude_nodes, missing_capacity
from mmray.errors import ResourceError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Cluster


ROLE = "mmray/role"
HEAD_MARK = "node:__internal_head__"
LAUNCHER_FILE = Path("~/ray_bootstrap_config.yaml")
UNLIMITED = 10_000  # nodes of a pool that has no end


def alive_nodes() -> list[Node]:
    """The nodes that are alive, with all that they have."""
    return [Node(dict(node["Resources"]), dict(node["Labels"])) for node in ray.nodes() if node["Alive"]]


def physical_cores_if_local() -> int | None:
    """Cores of this machine where it is the whole cluster and Ray counts more CPUs than it has (join.py); else None."""
    here, there = alive_nodes(), cores()
    return there if len(here) == 1 and here[0].resources.get("CPU", 0) > there else None


def free_nodes() -> list[Node]:
    """The nodes that are alive, with what is free on them."""
    free = ray_state.available_resources_per_node()
    alive = {node["NodeID"]: dict(node["Labels"]) for node in ray.nodes() if node["Alive"]}
    return [Node(dict(free.get(node_id, {})), labels) for node_id, labels in alive.items()]


def autoscaling_pools() -> list[Pool]:
    """What an autoscaling cluster may add; nothing where the cluster does not grow, or does not say how.

    Some services tell Ray their pools; a cluster that `ray up` made has the launcher's file on its head, where
    submitted jobs run.
    """
    config = ray_state.get_cluster_config()
    if config is None:
        file = LAUNCHER_FILE.expanduser()
        return parse_launcher_config(yaml.safe_load(file.read_text())) if file.exists() else []
    groups = [(group, UNLIMITED if group.max_count < 0 else group.max_count) for group in config.node_group_configs]
    return [
        Pool(group.name, {name: float(amount) for name, amount in group.resources.items()}, most)
        for group, most in groups
        if most
    ]


def parse_launcher_config(launcher: dict[str, Any]) -> list[Pool]:
    """The pools of a launcher's file (cluster.yaml as `ray up` has settled it)."""
    at_most = int(launcher.get("max_workers", 0))
    kinds = {
        name: kind
        for name, kind in (launcher.get("available_node_types") or {}).items()
        if name != launcher.get("head_node_type")
    }
    most = {name: min(at_most, int(kind.get("max_workers", at_most))) for name, kind in kinds.items()}
    return [
        Pool(
            name,
            {key: float(amount) for key, amount in kind.get("resources", {}).items()},
            most[name],
            parse_labels(kind),
        )
        for name, kind in kinds.items()
        if most[name] > 0
    ]


def parse_labels(kind: dict[str, Any]) -> Labels:
    return {str(key): str(value) for key, value in (kind.get("labels") or {}).items()}


def data_labels(wanted: str, here: list[Node]) -> Labels:
    """Labels of the nodes on which data is read and decoded."""
    if wanted != "auto":
        return parse_label(wanted)
    if _has_roles(here):
        return {ROLE: "data"}
    with_gpus = [node for node in here if node.resources.get("GPU")]
    others = [n for n in here if n not in with_gpus and n.resources.get("CPU") and HEAD_MARK not in n.resources]
    if not with_gpus or not others:
        return {}
    return exclude_nodes((node.labels or {})[NODE_ID] for node in with_gpus)


def train_labels(wanted: str, here: list[Node]) -> Labels:
    """Labels of the nodes on which training workers run; GPUs by themselves need none."""
    if wanted != "auto":
        return parse_label(wanted)
    return {ROLE: "train"} if _has_roles(here) else {}


def parse_label(wanted: str) -> Labels:
    """`none` or `key=value`."""
    if wanted == "none":
        return {}
    key, _, value = wanted.partition("=")
    return {key: value}


def set_data_placement(section: Cluster) -> None:
    """Every Ray Data job that this process starts from here on keeps to the nodes of the data."""
    labels = data_labels(section.data_label, alive_nodes())
    ray.data.DataContext.get_current().execution_options.label_selector = labels or None


def check_data_capacity(section: Cluster) -> None:
    """Raise ResourceError where no node for the data has a CPU, or can get one: Ray would wait for it for ever."""
    here = alive_nodes()
    lacking = missing_capacity(Demand(0, {}, 1, {}, data_labels(section.data_label, here)), here, autoscaling_pools())
    if lacking is not None and not section.wait_for_nodes:
        raise ResourceError(
            f"{lacking}, or say that nodes are yet to come (--wait-for-nodes, or --cluster.wait-for-nodes for training)"
        )


def _has_roles(here: list[Node]) -> bool:
    return any((node.labels or {}).get(ROLE) for node in here)


# Which nodes are really there now, with what is free on them: what a run that lost some can start on again.
#
# Ray counts a node that vanished among the living for half a minute; a connection to its raylet tells at once. Nodes
# that
# are being taken away (drained) are still there, but nothing new should start on them.
CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class LiveNodes:
    """The nodes on which workers may start, free resources alone, and the ids of those that must be left out."""

    nodes: list[Node]
    unavailable: tuple[str, ...]

    def excluding_unavailable(self, labels: Labels | None) -> Labels | None:
        """A label selector that also keeps off the nodes that are gone or going, besides those that it already does."""
        if not self.unavailable:
            return labels or None
        return exclude_nodes(self.unavailable, labels)


def live_nodes() -> LiveNodes:
    """What is there now."""
    free, going = state.available_resources_per_node(), draining_nodes()
    alive = [node for node in ray.nodes() if node["Alive"]]
    gone = {node["NodeID"] for node in alive if node["NodeID"] in going or not _is_reachable(node)}
    nodes = [
        Node(dict(free.get(node["NodeID"], {})), dict(node.get("Labels") or {}))
        for node in alive
        if node["NodeID"] not in gone
    ]
    return LiveNodes(nodes, tuple(sorted(gone)))


def draining_nodes() -> dict[str, float]:
    """Nodes that are being taken away: {node id: time of day when, in s; 0 where no deadline was given}."""
    return {node: deadline_ms / 1000 for node, deadline_ms in state.state.get_draining_nodes().items()}


def kill_processes(processes: Iterable[tuple[str, int]], timeout_s: float = 10.0) -> None:
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


def _is_reachable(node: dict[str, Any]) -> bool:
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
