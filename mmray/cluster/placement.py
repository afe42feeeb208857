"""The nodes of the cluster, what it can grow to, and on which nodes data workers and training workers run.

On a cluster whose nodes have the label `mmray/role` (cluster.yaml sets it on each pool), data runs on `data` nodes and
training on `train` nodes. The head has the label too, so the placement is known while both pools are empty. Without
roles, data avoids GPU nodes if other nodes have CPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import ray.data
import ray.exceptions
import yaml
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import NODE_ID, Demand, Labels, Node, Pool, Resources, exclude_nodes, missing_capacity
from mmray.cluster.ray_internals import HEAD_RESOURCE, autoscaler_groups, draining_nodes, free_resources, request_nodes
from mmray.errors import ResourceError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Cluster

ROLE = "mmray/role"
LAUNCHER_FILE = Path("~/ray_bootstrap_config.yaml")
UNLIMITED = 10_000  # nodes of a pool without a maximum
EXPIRES_S, REFRESH_S, REQUEST_TIMEOUT_S = 60.0, 15.0, 5.0  # of requests to the autoscaler
CONNECT_TIMEOUT_S = 1.0
START_TOLERANCE_S = 2.0  # the start time of a process shifts with corrections of the system clock


@dataclass(frozen=True)
class LiveNodes:
    """Nodes on which workers may start, with their free resources, and the ids of unreachable or draining nodes."""

    nodes: list[Node]
    unavailable: tuple[str, ...]

    def excluding_unavailable(self, labels: Labels | None) -> Labels | None:
        """A label selector that also excludes the unavailable nodes."""
        return exclude_nodes(self.unavailable, labels) if self.unavailable else labels or None


def alive_nodes() -> list[Node]:
    """The alive nodes with their total resources."""
    return [Node(dict(node["Resources"]), dict(node["Labels"])) for node in _alive()]


def free_nodes() -> list[Node]:
    """The alive nodes with their free resources."""
    free = free_resources()
    return [Node(free.get(node["NodeID"], {}), dict(node["Labels"])) for node in _alive()]


def live_nodes() -> LiveNodes:
    """The nodes that answer and are not draining, with their free resources.

    Ray lists a node that vanished as alive for half a minute; a connection to its raylet fails at once.
    """
    free, draining, alive = free_resources(), draining_nodes(), _alive()
    unavailable = {node["NodeID"] for node in alive if node["NodeID"] in draining or not _is_reachable(node)}
    nodes = [
        Node(free.get(node["NodeID"], {}), dict(node.get("Labels") or {}))
        for node in alive
        if node["NodeID"] not in unavailable
    ]
    return LiveNodes(nodes, tuple(sorted(unavailable)))


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _is_reachable(node: dict[str, Any]) -> bool:
    """Whether the node's raylet accepts a connection; tried twice, because one packet may be lost."""
    for _ in range(2):
        with suppress(OSError):
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
            return True
        time.sleep(0.1)
    return False


def autoscaling_pools() -> list[Pool]:
    """The pools of an autoscaling cluster; empty if it cannot grow or its limits are unknown.

    KubeRay and managed services report their pools to Ray. On a cluster made by `ray up`, the head node (on which
    submitted jobs run) has the launcher's file.
    """
    groups = autoscaler_groups()
    if groups is None:
        file = LAUNCHER_FILE.expanduser()
        return parse_launcher_config(yaml.safe_load(file.read_text())) if file.exists() else []
    limits = [(name, resources, UNLIMITED if most < 0 else most) for name, resources, most in groups]
    return [Pool(name, resources, most) for name, resources, most in limits if most]


def parse_launcher_config(launcher: dict[str, Any]) -> list[Pool]:
    """The worker pools of a cluster launcher file such as cluster.yaml."""
    limit = int(launcher.get("max_workers", 0))
    pools = []
    for name, kind in (launcher.get("available_node_types") or {}).items():
        most = min(limit, int(kind.get("max_workers", limit)))
        if name != launcher.get("head_node_type") and most > 0:
            resources = {key: float(amount) for key, amount in kind.get("resources", {}).items()}
            labels = {str(key): str(value) for key, value in (kind.get("labels") or {}).items()}
            pools.append(Pool(name, resources, most, labels))
    return pools


@dataclass
class AutoscalerRequest:
    """A request for nodes, under the name of one run. It expires unless repeated, so a dead driver keeps no node.

    A group of fixed size needs none: its placement group is a request. For further workers no task is pending.
    """

    name: str
    _count: int = 0
    _sent_s: float = field(default=float("-inf"))

    def request(self, per_worker: Resources, labels: Labels, count: int) -> None:
        """Request capacity for `count` more workers on nodes with these labels; 0 cancels. Repeated every 15 s."""
        if (not count and not self._count) or (count == self._count and time.monotonic() - self._sent_s < REFRESH_S):
            return
        self._count, self._sent_s = count, time.monotonic()
        try:
            request_nodes(self.name, [dict(per_worker)] * count, labels, EXPIRES_S, REQUEST_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            self._sent_s = float("-inf")  # sent again at the next call

    def cancel(self) -> None:
        self.request({}, {}, 0)


def physical_cores_if_local() -> int | None:
    """Cores of this machine if it is the whole cluster and Ray counts more CPUs (see connect.py); otherwise None."""
    nodes, here = alive_nodes(), cores()
    return here if len(nodes) == 1 and nodes[0].resources.get("CPU", 0) > here else None


def data_labels(setting: str, nodes: list[Node]) -> Labels:
    """Labels of the nodes that read and decode data."""
    if setting != "auto":
        return parse_label(setting)
    if _has_roles(nodes):
        return {ROLE: "data"}
    gpu_nodes = [node for node in nodes if node.resources.get("GPU")]
    others = [n for n in nodes if n not in gpu_nodes and n.resources.get("CPU") and HEAD_RESOURCE not in n.resources]
    return exclude_nodes((node.labels or {})[NODE_ID] for node in gpu_nodes) if gpu_nodes and others else {}


def train_labels(setting: str, nodes: list[Node]) -> Labels:
    """Labels of the nodes for training workers; GPU workers need none without roles."""
    if setting != "auto":
        return parse_label(setting)
    return {ROLE: "train"} if _has_roles(nodes) else {}


def parse_label(setting: str) -> Labels:
    """Parse `none` or `key=value`."""
    if setting == "none":
        return {}
    key, _, value = setting.partition("=")
    return {key: value}


def _has_roles(nodes: list[Node]) -> bool:
    return any((node.labels or {}).get(ROLE) for node in nodes)


def set_data_placement(section: Cluster) -> None:
    """Restrict every Ray Data job of this process to the data nodes."""
    labels = data_labels(section.data_label, alive_nodes())
    ray.data.DataContext.get_current().execution_options.label_selector = labels or None


def check_data_capacity(section: Cluster) -> None:
    """Raise ResourceError if no data node has, or can get, a CPU: Ray would wait forever."""
    nodes = alive_nodes()
    demand = Demand(0, {}, 1, {}, data_labels(section.data_label, nodes))
    missing = missing_capacity(demand, nodes, autoscaling_pools())
    if missing is not None and not section.wait_for_nodes:
        raise ResourceError(
            f"{missing}, or declare that nodes will be added (--wait-for-nodes; for training --cluster.wait-for-nodes)"
        )


def kill_processes(processes: Iterable[tuple[str, int, float]], timeout_s: float = 10.0) -> None:
    """SIGKILL processes given as (node id, pid, start time in seconds since the epoch).

    It also ends processes that are stopped, or hang in native code. A node that does not answer is skipped.
    """
    tasks = [
        _kill.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            pid, started_s
        )
        for node, pid, started_s in processes
    ]
    ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s)


@ray.remote(max_retries=0)
def _kill(pid: int, started_s: float) -> None:
    kill_process(pid, started_s)


def kill_process(pid: int, started_s: float) -> bool:
    """SIGKILL the process if it started at that time: its pid may belong to another process by now."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if abs(psutil.Process(pid).create_time() - started_s) <= START_TOLERANCE_S:
            os.kill(pid, signal.SIGKILL)
            return True
    return False
