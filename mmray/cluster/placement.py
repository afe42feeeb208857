"""Nodes and pools of the cluster, and the placement of data and training workers (see
README.md).
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import ray.exceptions
import yaml
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import (
    Demand,
    LabelSelector,
    Node,
    Pool,
    Resources,
    exclude_nodes,
    fits,
    missing_capacity,
)
from mmray.cluster.ray_internals import (
    HEAD_RESOURCE,
    actors_of_job,
    autoscaler_groups,
    draining_nodes,
    free_resources,
    request_nodes,
)
from mmray.errors import ResourceError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Cluster

ROLE_LABEL = "mmray/role"
LAUNCHER_FILE = Path("~/ray_bootstrap_config.yaml")
UNLIMITED = 10_000  # maximum of a pool without a limit
# Requests to the autoscaler.
EXPIRES_S = 60.0
REFRESH_S = 15.0
REQUEST_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 1.0
FREE_INTERVAL_S = 0.25
MAX_PROBES = 32
KILL_TIMEOUT_S = 10.0
# Neither Ray (10002 to 19999) nor Linux (from 32768) assigns these ports to processes.
FREE_PORTS = range(20_000, 32_768)
START_TOLERANCE_S = 2.0  # process start times shift with system clock corrections


@dataclass(frozen=True)
class SchedulableNodes:
    """Nodes on which workers can start now.

    Args:
        nodes: Reachable nodes that are not draining, with their free resources.
        unavailable: IDs of the other alive nodes.
    """

    nodes: list[Node]
    unavailable: tuple[str, ...]

    def excluding_unavailable(self, selector: LabelSelector | None) -> LabelSelector | None:
        """Return a label selector (None: empty) that also excludes the unavailable nodes; None if
        it has no condition.
        """
        return exclude_nodes(self.unavailable, selector) if self.unavailable else selector or None


def alive_entries() -> list[dict[str, Any]]:
    """Return what Ray knows of each alive node, such as `NodeID`, `Resources` and `Labels`."""
    return [node for node in ray.nodes() if node["Alive"]]


def alive_nodes() -> list[Node]:
    """Return the alive nodes of the cluster with their total resources."""
    return [Node(dict(node["Resources"]), dict(node["Labels"])) for node in alive_entries()]


def node_names(node_ids: Collection[str]) -> dict[str, str]:
    """Return the hosts of nodes for messages, such as `gpu-7 at 10.0.0.3`, by ID; of a node that
    Ray does not know the first 8 characters of the ID.
    """
    names = {node_id: node_id[:8] for node_id in node_ids}
    for node in ray.nodes():
        if node["NodeID"] in names:
            address = node["NodeManagerAddress"]
            names[node["NodeID"]] = f"{node['NodeManagerHostname']} at {address}"
    return names


def node_name(node_id: str) -> str:
    """Return the name of a node as `node_names` does."""
    return node_names([node_id])[node_id]


def own_node_name() -> str:
    """Return the name of this process's node as `node_names` does, without a request to Ray: each
    rank asks for it when it starts.
    """
    return f"{socket.gethostname()} at {ray.util.get_node_ip_address()}"


def free_nodes() -> list[Node]:
    """Return the alive nodes of the cluster with their free resources."""
    free = free_resources()
    return [Node(free.get(node["NodeID"], {}), dict(node["Labels"])) for node in alive_entries()]


def wait_for_free_nodes(demand: Demand, timeout_s: float) -> list[Node]:
    """Return the nodes with their free resources once a demand fits, or after `timeout_s`: workers
    that have ended release theirs late.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        nodes = free_nodes()
        if fits(demand, nodes) or time.monotonic() >= end_s:
            return nodes
        time.sleep(FREE_INTERVAL_S)


def schedulable_nodes() -> SchedulableNodes:
    """Return the nodes on which workers can start now: those that accept connections and are not
    draining.
    """
    draining = draining_nodes()
    alive = alive_entries()
    with ThreadPoolExecutor(MAX_PROBES) as threads:  # a probe of a lost node takes seconds
        are_reachable = list(threads.map(_is_reachable, alive))
    unavailable = []
    for node, is_reachable in zip(alive, are_reachable, strict=True):
        if not is_reachable or node["NodeID"] in draining:
            unavailable.append(node["NodeID"])
    nodes = [node for node in free_nodes() if node.node_id not in unavailable]
    return SchedulableNodes(nodes, tuple(sorted(unavailable)))


def _is_reachable(node: dict[str, Any]) -> bool:
    """Return whether the raylet accepts a connection, because Ray reports a lost node as alive for
    half a minute.
    """
    for _ in range(2):  # a packet may be lost
        with suppress(OSError):
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
            return True
        time.sleep(0.1)
    return False


def autoscaling_pools() -> list[Pool]:
    """Return the node types that the autoscaler of the cluster can add.

    They are those of Ray's autoscaler, otherwise those of the launcher file of `ray up` on the head
    node. Empty if the cluster cannot grow or its limits are unknown.
    """
    groups = autoscaler_groups()
    if groups is None:
        # `ray up` writes it on the head node, where submitted jobs run.
        file = LAUNCHER_FILE.expanduser()
        return parse_launcher_config(yaml.safe_load(file.read_text())) if file.exists() else []
    return [
        Pool(name, resources, UNLIMITED if limit < 0 else limit)
        for name, resources, limit in groups
        if limit
    ]


def parse_launcher_config(launcher: dict[str, Any]) -> list[Pool]:
    """Return the node types for workers in a cluster launcher file of Ray, such as cluster.yaml."""
    limit = int(launcher.get("max_workers", 0))
    pools = []
    for name, node_type in (launcher.get("available_node_types") or {}).items():
        max_nodes = min(limit, int(node_type.get("max_workers", limit)))
        if name != launcher.get("head_node_type") and max_nodes > 0:
            resources = {
                key: float(amount) for key, amount in node_type.get("resources", {}).items()
            }
            labels = {
                str(key): str(value) for key, value in (node_type.get("labels") or {}).items()
            }
            pools.append(Pool(name, resources, max_nodes, labels))
    return pools


@dataclass
class AutoscalerRequest:
    """Request of an elastic run to the autoscaler for more nodes.

    It expires after 60 s unless it is repeated, so the nodes of a driver that died are released.

    Args:
        name: Name of the request; requests of different names add up.
    """

    name: str
    _count: int = 0
    _sent_s: float = field(default=float("-inf"))

    def request(self, per_worker: Resources, selector: LabelSelector, count: int) -> None:
        """Request nodes for the workers that an elastic run is missing.

        Call it repeatedly: an unchanged request is sent again after 15 s. If the autoscaler fails
        or does not answer within 5 s, the next call sends the request again.

        Args:
            per_worker: Resources of a worker, such as {"CPU": 4, "GPU": 1}.
            selector: Label selector of the nodes for workers; {}: any node.
            count: Number of workers that are missing; 0 cancels the request.
        """
        if (not count and not self._count) or (
            count == self._count and time.monotonic() - self._sent_s < REFRESH_S
        ):
            return
        self._count = count
        self._sent_s = time.monotonic()
        try:
            request_nodes(
                self.name, [dict(per_worker)] * count, selector, EXPIRES_S, REQUEST_TIMEOUT_S
            )
        except (ray.exceptions.RayError, TimeoutError):
            # resend at the next call (a cancel is not: the request expires)
            self._sent_s = float("-inf")

    def cancel(self) -> None:
        """Cancel the request for more nodes, if there is one."""
        self.request({}, {}, 0)


def available_cores_if_local() -> int | None:
    """Return the cores of this machine if the cluster is one node with more CPUs in Ray than cores.

    mmray starts Ray so on a small machine, because workers and data share cores.

    Returns:
        The number of cores; None for any other cluster.
    """
    nodes = alive_nodes()
    available_cores = cores()
    return (
        available_cores
        if len(nodes) == 1 and nodes[0].resources.get("CPU", 0) > available_cores
        else None
    )


def data_label_selector(setting: str, nodes: list[Node]) -> LabelSelector:
    """Return the label selector of the nodes that read and decode data.

    With `auto` these are nodes labeled mmray/role=data, if any node has a role. Otherwise nodes
    without GPUs, if the cluster has nodes with GPUs and others besides the head; else any node.

    Args:
        setting: `cluster.data_label`: `auto`, `none` (any node), or `name=value`.
        nodes: The alive nodes, with resources and labels.
    """
    if setting != "auto" or _has_roles(nodes):
        return _role_label_selector(setting, "data")
    gpu_nodes = [node for node in nodes if node.resources.get("GPU")]
    cpu_nodes = [
        n
        for n in nodes
        if n not in gpu_nodes and n.resources.get("CPU") and HEAD_RESOURCE not in n.resources
    ]
    return exclude_nodes(node.node_id for node in gpu_nodes) if gpu_nodes and cpu_nodes else {}


def decode_label_selector(setting: str, nodes: list[Node]) -> LabelSelector:
    """Return the label selector of the nodes for further decode actors: the nodes for data, but not
    the head node (whatever the setting is), unless it is the only node.
    """
    selector = data_label_selector(setting, nodes)
    heads = [node for node in nodes if HEAD_RESOURCE in node.resources]
    if len(heads) == len(nodes):
        return selector
    return exclude_nodes((node.node_id for node in heads), selector)


def train_label_selector(setting: str, nodes: list[Node]) -> LabelSelector:
    """Return the label selector of the nodes for training workers; `auto` selects mmray/role=train
    if a node has a role, otherwise any node.
    """
    return _role_label_selector(setting, "train") if setting != "auto" or _has_roles(nodes) else {}


def _role_label_selector(setting: str, role: str) -> LabelSelector:
    """Return the label selector of a setting: `auto` (those of `role`), `none` or `key=value`."""
    key, _, value = {"auto": f"{ROLE_LABEL}={role}", "none": ""}.get(setting, setting).partition(
        "="
    )
    return {key: value} if key else {}


def _has_roles(nodes: list[Node]) -> bool:
    return any(node.label(ROLE_LABEL) for node in nodes)


def data_demand(cluster_config: Cluster) -> Demand:
    """Return the smallest resources of a job of Ray Data: one CPU on a node for data."""
    selector = data_label_selector(cluster_config.data_label, alive_nodes())
    return Demand(1, {"CPU": 1.0}, selector, "data")


def check_data_capacity(cluster_config: Cluster) -> None:
    """Raise ResourceError if no node for data can exist: Ray would wait forever for one."""
    demand = data_demand(cluster_config)
    missing = missing_capacity(demand, alive_nodes(), autoscaling_pools())
    if missing is not None and not cluster_config.wait_for_nodes:
        raise ResourceError(missing)


def run_on_node(node: str, function: Callable[..., Any], *args: object) -> Any:
    """Start a Ray task on a node, without reserving CPUs and without retries.

    Args:
        function: Called with `args` in a worker process of Ray on the node; it must be picklable.
    """
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    return (
        ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=affinity)
        .remote(*args)
    )


def free_address() -> tuple[str, int]:
    """Return the IP address by which Ray knows this node, and a free port.

    Raises:
        OSError: No port is free.
    """
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Another connection of this node may get a port that Linux assigns before this one is used.
    candidates = random.SystemRandom().sample(FREE_PORTS, 100)
    with socket.socket(family) as free:
        for port in candidates:
            with suppress(OSError):
                free.bind(("", port))
                return address, port
    raise OSError(f"none of 100 ports between {FREE_PORTS[0]} and {FREE_PORTS[-1]} is free")


def actor_states(class_name: str, timeout_s: float = 5.0) -> list[str]:
    """Return the state of each of this job's actors of a class, for a message.

    Args:
        class_name: Part of the class name of the actors.
        timeout_s: Seconds to wait for the answers of the nodes.

    Returns:
        For a living actor the state of its process with the node, such as `sleeping on node
        gpu-7 at 10.0.0.3`; for others Ray's state, such as `pending creation`.
    """
    actors = actors_of_job(class_name)
    tasks = {
        run_on_node(node, process_state, pid): node
        for state, node, pid in actors
        if state == "ALIVE"
    }
    done, pending = (
        ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s) if tasks else ([], [])
    )
    names = node_names(set(tasks.values()))
    states = [f"{ray.get(task)} on node {names[tasks[task]]}" for task in done]
    states += [f"on node {names[tasks[task]]}, which does not answer" for task in pending]
    return states + [state.lower().replace("_", " ") for state, _, _ in actors if state != "ALIVE"]


def process_state(pid: int) -> str:
    """Return the state of a process of this machine, such as `sleeping`, or `ended`."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return "ended"


def kill_processes(processes: Iterable[tuple[str, int, float]]) -> None:
    """Send SIGKILL to processes (node ID, process ID, start in seconds since the epoch)."""
    tasks = [run_on_node(node, kill_process, pid, started_s) for node, pid, started_s in processes]
    ray.wait(tasks, num_returns=len(tasks), timeout=KILL_TIMEOUT_S)


def kill_process(pid: int, started_s: float) -> bool:
    """Send SIGKILL to a process of this node, unless its process ID was reused.

    Args:
        started_s: Its start time in seconds since the epoch; a process with another one is not
            killed.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if abs(process.create_time() - started_s) <= START_TOLERANCE_S:
            process.kill()  # raises NoSuchProcess if the PID was reused in between
            return True
    return False
