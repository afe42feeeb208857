"""`mmray doctor --cluster`: measure the nodes of a Ray cluster before a run, and what is between
them.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import ray.exceptions

from mmray.bench.synthetic_images import photos_per_s
from mmray.cluster.capacity import NODE_ID, Node
from mmray.cluster.connect import ray_session
from mmray.cluster.doctor import check_disk, check_shm
from mmray.cluster.placement import alive_nodes, run_on_node
from mmray.cluster.shared_storage import check_shared
from mmray.config import Cluster
from mmray.data.images.decode import decode
from mmray.errors import Finding, Level, ResourceError
from mmray.machine import cores, set_network_interface
from mmray.version import VERSION

GIB = 2**30
TIMEOUT_S = 120.0
DECODE_S = 1.0
TRANSFER_MB = COLLECTIVE_MB = 64
ROUNDS = 3
BUSY_FRACTION = 0.5  # share of the cores before the measurements
# Below the first value a figure is poor, below the second it is bad.
DECODES_PER_S = (200.0, 80.0)
MB_PER_S = (300.0, 50.0)
CLOCK_S = (-0.5, -5.0)  # differences, negated


class NodeReport(NamedTuple):
    """Measurements of a node.

    Attributes:
        versions: Versions of mmray, Python, Ray, torch and pyarrow, as text.
        gpus_of_ray: Number of GPUs that Ray counts on the node.
        gpus_of_torch: Number of GPUs that torch can use.
        shm_gib: Size of /dev/shm in GiB.
        memory_gib: Memory in GiB.
        disk: Result of the check of the disk of the temporary folder.
        busy_cores: Cores that other processes used before the measurements.
        num_cores: Cores that this process may use.
        clock_s: Seconds by which its clock is ahead of the driver's.
        decodes_per_s: JPEGs of 500 x 375 pixels that a core decodes per second.
    """

    versions: str
    gpus_of_ray: int
    gpus_of_torch: int
    shm_gib: float
    memory_gib: float
    disk: Finding
    busy_cores: float
    num_cores: int
    clock_s: float
    decodes_per_s: float


def check_cluster(address: str | None, storage: str) -> Iterator[Finding]:
    """Measure each node of a cluster, and the links between them.

    Args:
        address: Address of the Ray cluster; None: RAY_ADDRESS, otherwise Ray is started here.
        storage: Folder or URI for runs, `run.storage`.

    Yields:
        A Finding for each check, as soon as it is known: `level` (`ok`, `warning` or `error`),
        `name`, `observed` (text) and `fix`.

    Raises:
        ResourceError: The cluster cannot be reached.
    """
    with ray_session(Cluster(address=address)):
        nodes = alive_nodes()
        ids = [str((node.labels or {})[NODE_ID]) for node in nodes]
        reports, failures = _reports(nodes, ids)
        fix = "check the log of its raylet; mmray and its packages must be installed there"
        for node_id, reason in failures.items():
            yield Finding("error", f"node {node_id[:8]}", reason, fix)
        yield compare_versions(reports)
        for node_id, report in reports.items():
            yield from rate_node(node_id, report)
        yield _storage(storage, nodes)
        yield from _links(list(reports))


def _reports(nodes: list[Node], ids: list[str]) -> tuple[dict[str, NodeReport], dict[str, str]]:
    """Return the report of each node by its ID, and why other nodes have none."""
    tasks = {
        node_id: run_on_node(node_id, measure_node, int(node.resources.get("GPU", 0)))
        for node, node_id in zip(nodes, ids, strict=True)
    }
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=TIMEOUT_S)
    reports = {}
    failures = {}
    for node_id, task in tasks.items():
        try:
            report = ray.get(task, timeout=0)
            reports[node_id] = report._replace(clock_s=_clock_difference(node_id))
        except ray.exceptions.GetTimeoutError:
            failures[node_id] = f"no answer within {TIMEOUT_S:.0f} s"
        except ray.exceptions.RayError as error:
            failures[node_id] = _last_line(error)
    return reports, failures


def _last_line(error: Exception) -> str:
    """Return the message of an error of a task, which Ray puts after the traceback."""
    return str(error).strip().splitlines()[-1]


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


def measure_node(gpus_of_ray: int) -> NodeReport:
    """Measure this node (Ray task), except for its clock.

    Args:
        gpus_of_ray: GPUs that Ray counts here; torch is imported only if there are any.

    Returns:
        A NodeReport: `versions` (text), `gpus_of_ray`, `gpus_of_torch`, `shm_gib`, `memory_gib`,
        `disk` (a Finding), `busy_cores`, `num_cores`, `decodes_per_s`, and `clock_s`, which is 0
        until the driver has compared the clocks.
    """
    busy = psutil.cpu_percent(interval=0.5) / 100 * (psutil.cpu_count() or 1)
    gpus_of_torch = 0
    if gpus_of_ray:
        with suppress(ImportError, OSError):  # a missing or damaged torch can use none
            import torch

            gpus_of_torch = torch.cuda.device_count()
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    packages = ", ".join(f"{name} {version(name)}" for name in ("ray", "torch", "pyarrow"))
    return NodeReport(
        versions=f"mmray {VERSION}, Python {sys.version.split()[0]}, {packages}",
        gpus_of_ray=gpus_of_ray,
        gpus_of_torch=gpus_of_torch,
        shm_gib=shm / GIB,
        memory_gib=psutil.virtual_memory().total / GIB,
        disk=check_disk("disk", Path(tempfile.gettempdir())),
        busy_cores=busy,
        num_cores=cores(),
        clock_s=0.0,
        decodes_per_s=photos_per_s(decode, DECODE_S),
    )


def compare_versions(reports: dict[str, NodeReport]) -> Finding:
    """Check that all nodes have the same versions.

    Args:
        reports: The report of each node by its ID; its `versions` (text) is read.

    Returns:
        A Finding with `level`, `name`, `observed` (text) and `fix`: the level `ok`, or `error` with
        the differing versions.
    """
    nodes = {report.versions: node_id for node_id, report in reports.items()}
    if len(nodes) <= 1:
        return Finding("ok", "versions", f"{next(iter(nodes), 'none')} on {len(reports)} nodes")
    listed = "; ".join(f"{text} on node {node_id[:8]}" for text, node_id in nodes.items())
    fix = "use one image, or one requirements.lock, for all nodes (jobs/deploy/Dockerfile)"
    return Finding("error", "versions", listed, fix)


def rate_node(node_id: str, report: NodeReport) -> Iterator[Finding]:
    """Compare the measurements of a node with what training needs.

    Args:
        node_id: ID of the node.
        report: The NodeReport of `measure_node` on it.

    Yields:
        A Finding for each measurement: `level` (`ok`, `warning` or `error`), `name`, `observed`
        (text) and `fix` ("" if it is ok).
    """
    node = f"node {node_id[:8]}"
    is_busy = report.busy_cores > BUSY_FRACTION * report.num_cores
    busy = f"{report.busy_cores:.1f} of {report.num_cores} cores were busy before the measurements"
    fix = "repeat when the node is idle: the rates below are too low"
    yield _finding("warning" if is_busy else "ok", f"{node} load", busy, fix)
    if report.gpus_of_ray:
        gpus = f"torch can use {report.gpus_of_torch}, Ray counts {report.gpus_of_ray}"
        fix = "update the driver, or use the image for its CUDA version"
        lacks_gpus = report.gpus_of_torch < report.gpus_of_ray
        yield _finding("error" if lacks_gpus else "ok", f"{node} GPUs", gpus, fix)
    for finding in (check_shm(report.shm_gib, report.memory_gib), report.disk):
        yield replace(finding, name=f"{node} {finding.name}")
    fix = "synchronize the clocks (chrony): times in logs and leases of runs use them"
    observed = f"differs from the driver's by {abs(report.clock_s):.2f} s"
    yield _finding(_level(-abs(report.clock_s), CLOCK_S), f"{node} clock", observed, fix)
    fix = "use faster cores for data nodes" + (", when the node is idle" if is_busy else "")
    yield _rate(f"{node} decoding", report.decodes_per_s, "JPEGs/s a core", DECODES_PER_S, fix)


def _level(value: float, limits: tuple[float, float]) -> Level:
    """Return `warning` for a value below the first limit, `error` below the second."""
    if value >= limits[0]:
        return "ok"
    return "warning" if value >= limits[1] else "error"


def _finding(level: Level, name: str, observed: str, fix: str) -> Finding:
    return Finding(level, name, observed, "" if level == "ok" else fix)


def _rate(name: str, value: float, unit: str, limits: tuple[float, float], fix: str) -> Finding:
    return _finding(_level(value, limits), name, f"{value:,.0f} {unit}", fix)


def _storage(storage: str, nodes: list[Node]) -> Finding:
    start_s = time.monotonic()
    try:
        check_shared(storage, nodes)
    except ResourceError as error:
        fix = "mount the same folder on all nodes, or use an object store"
        return Finding("error", "run.storage", str(error), fix)
    took_s = time.monotonic() - start_s
    observed = f"{storage}: written and read from {len(nodes)} nodes in {took_s:.1f} s"
    return Finding("ok", "run.storage", observed)


def _links(node_ids: list[str]) -> Iterator[Finding]:
    """Measure object transfers from each node to the next, and a collective of all nodes."""
    if len(node_ids) < 2:
        yield Finding("ok", "network", "one node: nothing is sent between nodes")
        return
    fix = "check the network of the nodes: both sides of this link, its MTU, and its firewall"
    for sender, receiver in pairwise([*node_ids, node_ids[0]]):
        name = f"{sender[:8]} to {receiver[:8]}"
        try:
            data = run_on_node(sender, np.ones, TRANSFER_MB << 20, np.uint8)
            ray.wait([data], timeout=TIMEOUT_S, fetch_local=False)
            mb_per_s = ray.get(run_on_node(receiver, receive, [data]), timeout=TIMEOUT_S)
        except ray.exceptions.RayError as error:
            yield Finding("error", f"transfer {name}", f"failed: {_last_line(error)}", fix)
            continue
        yield _rate(f"transfer {name}", mb_per_s, "MB/s", MB_PER_S, fix)
    try:
        mb_per_s = _measure_collective(node_ids)
    except ray.exceptions.RayError as error:
        yield Finding("error", "all-reduce", f"failed: {_last_line(error)}", fix)
        return
    name = f"all-reduce of {len(node_ids)} nodes (gloo)"
    yield _rate(name, mb_per_s, f"MB/s for {COLLECTIVE_MB} MB", MB_PER_S, fix)


def receive(reference: list[Any]) -> float:
    """Return the MB/s at which an object of another node arrives here (Ray task).

    Args:
        reference: A list with the ObjectRef of the object alone, so that Ray does not fetch it
            before the task.
    """
    start_s = time.monotonic()
    size = ray.get(reference[0]).nbytes
    return float(size / 1e6 / (time.monotonic() - start_s))


def _measure_collective(node_ids: list[str]) -> float:
    """Return the MB/s of an all-reduce with one process on each node."""
    master = ray.get(run_on_node(node_ids[0], _free_address), timeout=TIMEOUT_S)
    tasks = [
        run_on_node(node_id, all_reduce, master, rank, len(node_ids))
        for rank, node_id in enumerate(node_ids)
    ]
    return min(ray.get(tasks, timeout=TIMEOUT_S))


def _free_address() -> str:
    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{address}:{free.getsockname()[1]}"


def all_reduce(master: str, rank: int, world_size: int) -> float:
    """Return the MB/s of all-reduces of float32 values (their bytes by the median time) with gloo
    in a group of all nodes (Ray task; all nodes call it together).

    Args:
        master: `host:port` on the node of rank 0.
        rank: Rank of this node.
        world_size: Number of nodes.
    """
    import torch
    import torch.distributed as dist

    set_network_interface(ray.util.get_node_ip_address())
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}",
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
