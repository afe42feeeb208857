"""Checks of `mmray doctor`: problems of this machine or cluster, and their fixes."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from mmray.cluster.capacity import Node
from mmray.cluster.connect import ray_session
from mmray.cluster.shared_storage import check_shared
from mmray.config import Cluster
from mmray.errors import Finding, ResourceError, UsageError
from mmray.machine import cores, free_memory, network_interface
from mmray.version import VERSION

GIB = 2**30
MIN_MEMORY_GIB = 2.0
MIN_DISK_GIB = 5.0
# Share of the memory. Ray's object store takes 30 %, or slow files in /tmp if /dev/shm is smaller.
MIN_SHM_SHARE = 0.25
MIN_OPEN_FILES = 4096
PROBE_MB = 8


def warn_if(problem: bool, name: str, observed: str, fix: str) -> Finding:
    """Return a warning with its fix if there is a problem, otherwise `ok`."""
    return Finding("warning", name, observed, fix) if problem else Finding("ok", name, observed)


def run_checks(address: str | None, storage: str) -> Iterator[Finding]:
    """Run all checks of `mmray doctor`: this machine, the storage of runs, and the Ray cluster.

    Args:
        address: Address of the Ray cluster; None: RAY_ADDRESS, otherwise Ray is started here.
        storage: Folder or URI for runs.

    Yields:
        A Finding for each check as soon as it is known: `level` (`ok`, `warning` or `error`),
        `name`, `observed` (text) and `fix`.
    """
    yield _check_packages()
    yield from _check_torch()
    yield check_memory(free_memory() / GIB)
    yield from measure_shm()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = (
        f"run `ulimit -n {min(hard, 65536) if hard > 0 else 65536}` in the shell that starts "
        "mmray (or Ray)"
    )
    yield warn_if(0 < soft < MIN_OPEN_FILES, "open files", f"limit {soft:,}", fix)
    if "://" not in storage:
        yield check_disk("disk of run.storage", Path(storage).expanduser())
    yield check_disk("disk of Ray temp dir", Path(tempfile.gettempdir()))
    yield check_storage(storage, [])
    yield check_auth(os.environ.get("RAY_AUTH_MODE"), Path.home() / ".ray" / "auth_token")
    yield from _check_slurm()
    yield from _check_ray(address or os.environ.get("RAY_ADDRESS"))


def _check_packages() -> Finding:
    versions = f"mmray {VERSION}, Ray {version('ray')}, Python {sys.version.split()[0]}"
    return Finding("ok", "packages", versions)


def _check_torch() -> Iterator[Finding]:
    """Check that torch and torchvision are builds of one index (mixed builds fail at import), and
    torch's GPUs.
    """
    try:
        import torch
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        fix = "pip install --force-reinstall torch torchvision (both from one index)"
        yield Finding("error", "torch", str(error).splitlines()[0], fix)
        return
    yield Finding("ok", "torch", f"{torch.__version__} with torchvision {version('torchvision')}")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        listed = []
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    num_listed = sum(line.startswith("GPU") for line in listed)
    yield check_gpus(num_listed, names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_gpus(listed: int, usable: list[str], visible: str | None = None) -> Finding:
    """Compare the GPUs that the driver lists with the GPUs that torch can use.

    Args:
        listed: Number of GPUs that nvidia-smi lists.
        usable: Names of the GPUs that torch can use, such as `NVIDIA H100 80GB HBM3`.
        visible: Value of CUDA_VISIBLE_DEVICES; None: not set.
    """
    if listed <= len(usable):
        return Finding("ok", "GPUs", ", ".join(usable) or "none; training uses the CPU")
    observed = f"the driver lists {listed} GPUs, torch can use {len(usable)}"
    if visible is None:
        fix = "update the driver, or install the torch build for its CUDA version"
        return Finding("error", "GPUs", observed, fix)
    fix = f"CUDA_VISIBLE_DEVICES={visible} hides the others; unset it to use all of them"
    return Finding("warning", "GPUs", observed, fix)


def check_memory(available_gib: float) -> Finding:
    """Check the free memory of this machine."""
    fix = "close other programs, or use fewer --cluster.workers and --data.workers"
    return warn_if(available_gib < MIN_MEMORY_GIB, "memory", f"{available_gib:.1f} GiB free", fix)


def measure_shm() -> list[Finding]:
    """Check the size of /dev/shm of this machine; empty if it has none."""
    folder = Path("/dev/shm")
    if not folder.exists():
        return []
    memory_gib = psutil.virtual_memory().total / GIB
    return [check_shm(shutil.disk_usage(folder).total / GIB, memory_gib)]


def check_shm(size_gib: float, memory_gib: float) -> Finding:
    """Check the size of /dev/shm, which holds Ray's object store; containers limit it to 64 MB by
    default.
    """
    fix = (
        f"start the container with --shm-size={0.3 * memory_gib:.0f}g; otherwise Ray uses slow "
        "files in /tmp"
    )
    small = size_gib < MIN_SHM_SHARE * memory_gib
    return warn_if(small, "shared memory", f"/dev/shm has {size_gib:.1f} GiB", fix)


def check_disk(what: str, folder: Path) -> Finding:
    """Check the free space of a disk; Ray stops spilling objects above 95 %."""
    existing = next(
        path for path in [folder.absolute(), *folder.absolute().parents] if path.exists()
    )
    usage = shutil.disk_usage(existing)
    full = usage.free / GIB < MIN_DISK_GIB or usage.used > 0.95 * usage.total
    fix = "free disk space, or choose another folder (--run.storage; for Ray: RAY_TMPDIR)"
    return warn_if(full, what, f"{usage.free / GIB:.0f} GiB free at {existing}", fix)


def check_storage(address: str, nodes: list[Node]) -> Finding:
    """Check that this machine and some nodes can write, read and delete files in `address`.

    Returns:
        A Finding: `ok` with the time it took, or an `error`, which is not raised.
    """
    start_s = time.monotonic()
    try:
        check_shared(address, nodes)
    except ResourceError as error:
        fix = "fix the error above, or choose another --storage"
        return Finding("error", "run.storage", str(error), fix)
    on_nodes = f" on {len(nodes)} nodes" if nodes else ""
    took_s = time.monotonic() - start_s
    observed = f"{address}: files written and read{on_nodes} in {took_s:.1f} s"
    return Finding("ok", "run.storage", observed)


def check_auth(mode: str | None, file: Path) -> Finding:
    """Check Ray's token authentication, which must be set equally on the head and on every client.

    Args:
        mode: Value of RAY_AUTH_MODE; None: not set.
        file: File of the token, ~/.ray/auth_token.
    """
    name = "authentication"
    has_token = file.exists() or bool(os.environ.get("RAY_AUTH_TOKEN"))
    if mode == "token" and not has_token:
        observed = f"RAY_AUTH_MODE=token, but there is no token at {file}"
        return Finding("error", name, observed, "ray get-auth-token --generate")
    if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        return Finding("warning", name, f"other users can read {file}", f"chmod 600 {file}")
    unset = (
        "RAY_AUTH_MODE is not set: a local cluster gets a token; to join another cluster, set "
        "it as there"
    )
    return Finding("ok", name, f"RAY_AUTH_MODE={mode}" if mode else unset)


def _check_slurm() -> Iterator[Finding]:
    """Check the settings of Slurm, if this machine belongs to one."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "config"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        yield check_preemption(shown.stdout)


def check_preemption(config: str) -> Finding:
    """Check that Slurm signals only the script of a preempted job, so that Ray outlives the
    checkpoint.

    Args:
        config: What `scontrol show config` prints.
    """
    names = ("ProctrackType", "SlurmctldParameters")
    lines = [" ".join(line.split()) for line in config.splitlines() if line.startswith(names)]
    observed = ", ".join(lines)
    fix = (
        "set ProctrackType=proctrack/cgroup, or at least SlurmctldParameters="
        "preempt_send_user_signal: otherwise a preempted job ends without a checkpoint"
    )
    is_safe = "proctrack/cgroup" in observed or "preempt_send_user_signal" in observed
    return warn_if(not is_safe, "Slurm", observed, fix)


def _check_ray(address: str | None) -> Iterator[Finding]:
    """Connect to (or start) Ray, run a task, transfer data through the object store."""
    start_s = time.monotonic()
    try:
        with ray_session(Cluster(address=address)):
            how = f"connected to {address}" if address else "started"
            yield Finding("ok", "Ray", f"{how} in {time.monotonic() - start_s:.1f} s")
            import ray

            from mmray.cluster.placement import alive_entries

            total = ray.cluster_resources()
            free = ray.available_resources()
            alive = alive_entries()
            yield check_nodes(alive, free, None if address else cores())
            try:
                yield check_interfaces(_interfaces(alive))
            except ray.exceptions.RayError as error:  # a node was lost, or did not answer in time
                observed = f"{type(error).__name__}: {error}"
                yield Finding("warning", "network", observed, "see `ray status`, and repeat")
            start_s = time.monotonic()
            try:
                probe: Any = ray.remote(num_cpus=min(1, total.get("CPU", 0)))(
                    lambda data: len(data)
                )
                size = ray.get(probe.remote(bytes(PROBE_MB << 20)), timeout=60)
            except ray.exceptions.GetTimeoutError:
                fix = "all CPUs are in use, or no node has one yet: see `ray status`"
                yield Finding("error", "test task", "did not run within 60 s", fix)
                return
            observed = (
                f"ran with {size >> 20} MB from the object store in "
                f"{time.monotonic() - start_s:.2f} s"
            )
            yield Finding("ok", "test task", observed)
    except (ResourceError, UsageError) as error:
        fix = (
            "check the address, that RAY_AUTH_MODE is the same here and on the head, and run "
            "`ray status` on the head"
        )
        yield Finding("error", "Ray", str(error).splitlines()[0], fix)


def _interfaces(alive: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return the network interface of each node's IP address, as the node itself sees it."""
    import ray

    from mmray.cluster.placement import run_on_node

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    tasks = [run_on_node(node, network_interface, ip) for node, ip in addresses.items()]
    return dict(zip(addresses.values(), ray.get(tasks, timeout=60), strict=True))


def check_interfaces(interfaces: dict[str, str | None]) -> Finding:
    """Check that each node has a network interface with the IP address by which Ray knows it.

    Workers set this interface for gloo and NCCL.

    Args:
        interfaces: Name of the interface by IP address of the node; None: no interface has it.
    """
    missing = [ip for ip, name in interfaces.items() if name is None]
    observed = ", ".join(f"{ip} on {name or 'no interface'}" for ip, name in interfaces.items())
    fix = (
        f"start Ray on {', '.join(missing)} with --node-ip-address, an address of the node's "
        "network interface, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there"
    )
    return warn_if(bool(missing), "network", observed, fix)


def check_nodes(
    alive: list[dict[str, Any]], free: dict[str, float], local_cpus: int | None = None
) -> Finding:
    """Report the resources of the cluster, and warn if training workers leave no CPU for data.

    Args:
        free: Free resources of the cluster by name, such as {"CPU": 12, "GPU": 1}.
        local_cpus: Cores of this machine if mmray started Ray here; None: another cluster. Ray then
            counts more CPUs, because workers and data share the cores.
    """
    cpus, gpus = (sum(node["Resources"].get(name, 0) for node in alive) for name in ("CPU", "GPU"))
    resources = f"{free.get('CPU', 0):g} of {cpus:g} CPU, {free.get('GPU', 0):g} of {gpus:g} GPU"
    observed = f"{len(alive)} node{'s' * (len(alive) > 1)}; free resources: {resources}"
    if local_cpus is not None and local_cpus < cpus:
        observed += f"; the {cpus:g} CPUs of Ray share the {local_cpus} of this machine"
    fix = "data needs CPUs in addition to one per training worker: add CPU nodes"
    return warn_if(0 < gpus >= cpus, "cluster", observed, fix)
