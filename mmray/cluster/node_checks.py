"""`mmray doctor --cluster`: measure the nodes of a Ray cluster before a run, and what is between
them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import ray.exceptions

from mmray.cluster.connect import ray_session
from mmray.cluster.doctor import check_disk, check_storage, measure_shm, warn_if
from mmray.cluster.placement import alive_nodes, free_address, node_name, run_on_node
from mmray.cluster.ray_internals import KEEPALIVE_MS, KEEPALIVE_VARIABLE
from mmray.config import Cluster
from mmray.errors import Finding, Level
from mmray.machine import set_network_interface
from mmray.version import VERSION

TIMEOUT_S = 120.0
TRANSFER_MB = COLLECTIVE_MB = 64
ROUNDS = 3
RAY_KEEPALIVE_MS = 20_000  # Ray's default
# Below the first value a figure is poor, below the second it is bad.
MB_PER_S = (300.0, 50.0)
CLOCK_S = (-0.5, -5.0)  # differences, negated
LINK_FIX = "check the network of the nodes: both sides of this link, its MTU, and its firewall"


def check_cluster(address: str | None, storage: str) -> Iterator[Finding]:
    """Measure each node of a cluster, and the links between them.

    Args:
        address: Address of the Ray cluster; None: RAY_ADDRESS, otherwise Ray is started here.
        storage: Folder or URI for runs, `run.storage`.

    Yields:
        A Finding for each check, as soon as it is known.

    Raises:
        ResourceError: The cluster cannot be reached.
    """
    with ray_session(Cluster(address=address)):
        nodes = alive_nodes()
        tasks = {}
        for node in nodes:
            num_gpus = int(node.resources.get("GPU", 0))
            tasks[node.node_id] = run_on_node(node.node_id, check_node, num_gpus)
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=TIMEOUT_S)
        versions = {}
        for node_id, task in tasks.items():
            name = f"node {node_name(node_id)}"
            try:
                versions[node_id], findings = ray.get(task, timeout=0)
                findings.append(check_clock(_clock_difference(node_id)))
            except ray.exceptions.RayError as error:
                is_late = isinstance(error, ray.exceptions.GetTimeoutError)
                observed = f"no answer within {TIMEOUT_S:.0f} s" if is_late else _last_line(error)
                fix = "check the log of its raylet; mmray and its packages must be installed there"
                yield Finding("error", name, observed, fix)
                continue
            for finding in findings:
                yield replace(finding, name=f"{name}: {finding.name}")
        yield compare_versions(versions)
        yield check_storage(storage, nodes)
        yield from _check_links(list(versions))


def _last_line(error: Exception) -> str:
    """Return the message of an error of a task, which Ray puts after the traceback."""
    return str(error).strip().splitlines()[-1]


def check_node(gpus_of_ray: int) -> tuple[str, list[Finding]]:
    """Return the versions of packages on this node, and the findings about it."""
    findings = measure_shm()
    if gpus_of_ray:
        findings.append(_check_gpus(gpus_of_ray))
    with suppress(psutil.Error):  # of another user
        findings.append(check_keepalive(psutil.Process(os.getppid()).environ()))
    findings.append(check_disk("disk", Path(tempfile.gettempdir())))
    packages = ", ".join(f"{name} {version(name)}" for name in ("ray", "torch", "pyarrow"))
    return f"mmray {VERSION}, Python {sys.version.split()[0]}, {packages}", findings


def check_keepalive(raylet_environment: Mapping[str, str]) -> Finding:
    """Check that connections of Ray survive a link that fails for some seconds.

    Args:
        raylet_environment: Environment variables with which Ray was started on the node.
    """
    value_ms = int(raylet_environment.get(KEEPALIVE_VARIABLE, RAY_KEEPALIVE_MS))
    fix = (
        f"start Ray on all nodes with {KEEPALIVE_VARIABLE}={KEEPALIVE_MS}, or a link that fails "
        "for 20 s can end a run minutes later"
    )
    observed = f"Ray keeps connections that do not answer for {value_ms / 1000:g} s"
    return warn_if(value_ms < KEEPALIVE_MS, "connections", observed, fix)


def _check_gpus(gpus_of_ray: int) -> Finding:
    try:
        import torch

        usable = torch.cuda.device_count()
    except (ImportError, OSError):  # a missing or damaged torch can use none
        usable = 0
    fix = "update the driver, or use the image for its CUDA version"
    level: Level = "error" if usable < gpus_of_ray else "ok"
    return _finding(level, "GPUs", f"torch can use {usable}, Ray counts {gpus_of_ray}", fix)


def check_clock(ahead_s: float) -> Finding:
    """Check by how many seconds the clock of a node is ahead of the driver's."""
    fix = "synchronize the clocks (chrony): times in logs and leases of runs use them"
    observed = f"differs from the driver's by {abs(ahead_s):.2f} s"
    return _finding(_level(-abs(ahead_s), CLOCK_S), "clock", observed, fix)


def _clock_difference(node_id: str) -> float:
    """Return by how many seconds the clock of a node is ahead, from the quickest of three tasks."""
    answers = []
    for _ in range(ROUNDS):
        sent_s = time.time()
        there_s = ray.get(run_on_node(node_id, _clock), timeout=TIMEOUT_S)
        took_s = time.time() - sent_s
        answers.append((took_s, there_s - sent_s - took_s / 2))
    return float(min(answers)[1])


def _clock() -> float:
    return time.time()  # Ray takes no built-in functions as tasks


def compare_versions(versions: Mapping[str, str]) -> Finding:
    """Check that all nodes have the same versions, given as text by the ID of the node."""
    nodes = {text: node_id for node_id, text in versions.items()}
    if len(nodes) <= 1:
        return Finding("ok", "versions", f"{next(iter(nodes), 'none')} on {len(versions)} nodes")
    listed = "; ".join(f"{text} on node {node_name(node_id)}" for text, node_id in nodes.items())
    fix = "use one image, or one requirements.lock, for all nodes (jobs/deploy/Dockerfile)"
    return Finding("error", "versions", listed, fix)


def _level(value: float, limits: tuple[float, float]) -> Level:
    """Return `warning` for a value below the first limit, `error` below the second."""
    if value >= limits[0]:
        return "ok"
    return "warning" if value >= limits[1] else "error"


def _finding(level: Level, name: str, observed: str, fix: str) -> Finding:
    return Finding(level, name, observed, "" if level == "ok" else fix)


def _rate(name: str, value: float, unit: str, limits: tuple[float, float], fix: str) -> Finding:
    return _finding(_level(value, limits), name, f"{value:,.0f} {unit}", fix)


def _check_links(node_ids: list[str]) -> Iterator[Finding]:
    """Measure object transfers from each node to the next, and a collective of all nodes."""
    if len(node_ids) < 2:
        yield Finding("ok", "network", "one node: nothing is sent between nodes")
        return
    for sender, receiver in pairwise([*node_ids, node_ids[0]]):
        name = f"transfer {node_name(sender)} to {node_name(receiver)}"
        yield _check_link(name, "MB/s", _measure_transfer, sender, receiver)
    name = f"all-reduce of {len(node_ids)} nodes (gloo)"
    yield _check_link(name, f"MB/s for {COLLECTIVE_MB} MB", _measure_collective, node_ids)


def _check_link(name: str, unit: str, measure: Callable[..., float], *args: object) -> Finding:
    try:
        return _rate(name, measure(*args), unit, MB_PER_S, LINK_FIX)
    except ray.exceptions.RayError as error:
        return Finding("error", name, f"failed: {_last_line(error)}", LINK_FIX)


def _measure_transfer(sender: str, receiver: str) -> float:
    """Return the MB/s at which an object of one node arrives on another."""
    data = run_on_node(sender, np.ones, TRANSFER_MB << 20, np.uint8)
    ray.wait([data], timeout=TIMEOUT_S, fetch_local=False)
    # In a list, so that Ray does not fetch it before the task.
    return float(ray.get(run_on_node(receiver, _receive, [data]), timeout=TIMEOUT_S))


def _receive(reference: list[Any]) -> float:
    start_s = time.monotonic()
    size = ray.get(reference[0]).nbytes
    return float(size / 1e6 / (time.monotonic() - start_s))


def _measure_collective(node_ids: list[str]) -> float:
    """Return the MB/s of an all-reduce with one process on each node."""
    master = ray.get(run_on_node(node_ids[0], free_address), timeout=TIMEOUT_S)
    tasks = [
        run_on_node(node_id, _all_reduce, master, rank, len(node_ids))
        for rank, node_id in enumerate(node_ids)
    ]
    return min(ray.get(tasks, timeout=TIMEOUT_S))


def _all_reduce(master: tuple[str, int], rank: int, world_size: int) -> float:
    """Return the MB/s of all-reduces of float32 values (their bytes by the median time)."""
    import torch
    import torch.distributed as dist

    set_network_interface(ray.util.get_node_ip_address())
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master[0]}:{master[1]}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    try:
        values = torch.ones(COLLECTIVE_MB << 18)
        times_s = []
        for _ in range(ROUNDS):
            start_s = time.monotonic()
            dist.all_reduce(values)
            times_s.append(time.monotonic() - start_s)
        return float(values.nbytes / 1e6 / statistics.median(times_s))
    finally:
        dist.destroy_process_group()
