"""What is wrong with this machine or this cluster, and what mends it: each finding from something that was tried.

Small checks, each a function from what it looks at to findings; `examine` is the composer, and the only one that
touches Ray.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from mmray.cluster.connect import ray_session
from mmray.cluster.shared_storage import check_shared
from mmray.config import Cluster
from mmray.errors import ResourceError
from mmray.machine import cores, free_memory

GIB = 2**30
LEAST_MEMORY_GIB = 2.0
LEAST_DISK_GIB = 5.0
LEAST_SHM_SHARE = 0.25  # of memory; Ray wants 30 % of it for its object store and falls back to slow files below
LEAST_OPEN_FILES = 4096
PROBE_MB = 8


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` says what to do about it where it is not `ok`."""

    level: Literal["ok", "warn", "fail"]
    what: str
    seen: str
    fix: str = ""


def run_checks(address: str | None, storage: str) -> Iterator[Finding]:
    """Findings about this machine, and about the Ray cluster at `address` (RAY_ADDRESS; none: one started here)."""
    yield from _packages()
    torch = _torch()
    yield torch
    if torch.level == "ok":
        yield _gpus()
    yield check_memory(free_memory() / GIB)
    yield check_shm(_size_gib(Path("/dev/shm")), psutil.virtual_memory().total / GIB)
    yield check_open_files()
    if "://" not in storage:
        yield check_disk("disk of run.storage", Path(storage).expanduser())
    yield check_disk("disk of Ray's files", Path(tempfile.gettempdir()))
    yield check_storage(storage) if "://" in storage else check_writable(Path(storage).expanduser())
    yield check_auth(os.environ.get("RAY_AUTH_MODE"), Path.home() / ".ray" / "auth_token")
    yield from _ray(address or os.environ.get("RAY_ADDRESS"))


def _packages() -> Iterator[Finding]:
    """Whether each package is of the range that mmray was built with."""
    from importlib.metadata import requires

    for line in requires("mmray") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("fail", wanted.name, "not installed", f"pip install '{line}'")
            continue
        if not wanted.specifier.contains(have, prereleases=True):
            yield Finding("fail", wanted.name, f"{have}, needs {wanted.specifier}", f"pip install '{line}'")
    yield Finding("ok", "packages", f"mmray {version('mmray')}, Ray {version('ray')}, Python {sys.version.split()[0]}")


def _torch() -> Finding:
    """torch and torchvision must be of one build: a CPU-only torch with the registry's torchvision fails at import."""
    try:
        import torch
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Finding("fail", "torch", reason, "pip install --force-reinstall torch torchvision, both from one index")
    return Finding("ok", "torch", f"{torch.__version__} with torchvision {version('torchvision')}")


def _gpus() -> Finding:
    import torch

    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        listed = []
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return check_gpus(
        len([line for line in listed if line.startswith("GPU")]), names, os.environ.get("CUDA_VISIBLE_DEVICES")
    )


def check_gpus(listed: int, usable: list[str], visible: str | None = None) -> Finding:
    """Holds the GPUs that the driver lists against those that torch can use; `visible` is CUDA_VISIBLE_DEVICES."""
    if listed > len(usable):
        seen = f"the driver lists {listed}, torch can use {len(usable)}"
        if visible is not None:
            fix = f"CUDA_VISIBLE_DEVICES={visible} hides the others; unset it to use them all"
            return Finding("warn", "GPUs", seen, fix)
        return Finding("fail", "GPUs", seen, "update the driver, or install the torch build of its CUDA version")
    return Finding("ok", "GPUs", ", ".join(usable) or "none: mmray trains on the CPU here")


def check_memory(available_gib: float) -> Finding:
    seen = f"{available_gib:.1f} GiB free, {cores()} cores"
    if available_gib < LEAST_MEMORY_GIB:
        return Finding("warn", "memory", seen, "close other programs; fewer --cluster.workers and --data.workers")
    return Finding("ok", "memory", seen)


def check_shm(size_gib: float | None, memory_gib: float) -> Finding:
    """Ray's object store lies in /dev/shm; containers give it 64 MB unless told otherwise."""
    if size_gib is None:
        return Finding("ok", "shared memory", "this system has no /dev/shm; Ray uses files")
    seen = f"/dev/shm of {size_gib:.1f} GiB"
    if size_gib < LEAST_SHM_SHARE * memory_gib:
        fix = f"start the container with --shm-size={0.3 * memory_gib:.0f}g; until then Ray uses slow files in /tmp"
        return Finding("warn", "shared memory", seen, fix)
    return Finding("ok", "shared memory", seen)


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_OPEN_FILES:
        fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536} in the shell that starts mmray (or Ray)"
        return Finding("warn", "open files", f"at most {soft}", fix)
    return Finding("ok", "open files", f"at most {soft:,}")


def check_disk(what: str, place: Path) -> Finding:
    existing = next(path for path in [place.absolute(), *place.absolute().parents] if path.exists())
    usage = shutil.disk_usage(existing)
    seen = f"{usage.free / GIB:.0f} GiB free at {existing}"
    if usage.free / GIB < LEAST_DISK_GIB or usage.used > 0.95 * usage.total:  # above 95 % Ray refuses to spill
        return Finding("warn", what, seen, "make room, or choose another place (--run.storage; Ray: RAY_TMPDIR)")
    return Finding("ok", what, seen)


def check_writable(place: Path) -> Finding:
    """A file is written into the folder of runs, and taken away again."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".mmray-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        return Finding("fail", "run.storage", f"{place} cannot be written: {error}", "choose another --run.storage")
    return Finding("ok", "run.storage", f"{place} can be written")


def check_storage(address: str) -> Finding:
    """An object is put at the address of runs, read back, and deleted."""
    began_s = time.monotonic()
    try:
        check_shared(address, [])
    except ResourceError as error:
        return Finding("fail", "run.storage", str(error), "mend what it says, or choose another --storage")
    return Finding("ok", "run.storage", f"{address} takes and gives objects, in {time.monotonic() - began_s:.1f} s")


def check_auth(mode: str | None, file: Path) -> Finding:
    """RAY_AUTH_MODE must be one and the same for a head and all that talk to it."""
    what, there = "authentication", file.exists() or bool(os.environ.get("RAY_AUTH_TOKEN"))
    if mode == "token" and not there:
        return Finding("fail", what, f"RAY_AUTH_MODE=token, and no token at {file}", "ray get-auth-token --generate")
    if there and file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        return Finding("warn", what, f"others may read {file}", f"chmod 600 {file}")
    if mode is None and there:
        seen = f"RAY_AUTH_MODE is not set, and {file} exists"
        return Finding(
            "ok", what, f"{seen}: clusters here use it; set RAY_AUTH_MODE=token (or disabled) to join another"
        )
    return Finding("ok", what, f"RAY_AUTH_MODE={mode}" if mode else "RAY_AUTH_MODE is not set: a cluster here is open")


def _ray(address: str | None) -> Iterator[Finding]:
    """Joins (or starts) Ray, runs a task, moves a block through the object store."""
    began_s = time.monotonic()
    try:
        with ray_session(Cluster(address=address)):
            yield Finding("ok", "Ray", f"{address or 'started here'} in {time.monotonic() - began_s:.1f} s")
            yield from _cluster()
    except ResourceError as error:
        fix = "is RAY_AUTH_MODE the same here and at the head? `ray status` on the head says how it is"
        yield Finding("fail", "Ray", str(error).splitlines()[0], fix)


def _cluster() -> Iterator[Finding]:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    yield check_nodes([node for node in ray.nodes() if node["Alive"]], free)
    began_s = time.monotonic()
    try:
        probe = ray.remote(num_cpus=min(1, total.get("CPU", 0)))(_probe_task)
        size = ray.get(probe.remote(bytes(PROBE_MB << 20)), timeout=60)
    except ray.exceptions.GetTimeoutError:
        fix = "all CPUs are taken, or no node has one yet: `ray status` says by whom"
        yield Finding("fail", "a task", "did not run within 60 s", fix)
        return
    seen = f"ran with {size >> 20} MB from the object store in {time.monotonic() - began_s:.2f} s"
    yield Finding("ok", "a task", seen)


def check_nodes(alive: list[dict[str, Any]], free: dict[str, float]) -> Finding:
    """What the cluster holds, and whether data finds a CPU beside the training."""
    cpus = sum(node["Resources"].get("CPU", 0) for node in alive)
    gpu_count = sum(node["Resources"].get("GPU", 0) for node in alive)
    seen = (
        f"{len(alive)} node{'s' * (len(alive) > 1)}; free: {free.get('CPU', 0):g} of {cpus:g} CPUs, "
        f"{free.get('GPU', 0):g} of {gpu_count:g} GPUs"
    )
    if gpu_count and cpus <= gpu_count:
        return Finding("warn", "cluster", seen, "data needs CPUs beside those of the training workers: add CPU nodes")
    return Finding("ok", "cluster", seen)


def _probe_task(data: bytes) -> int:
    """A task of the probe's."""
    return len(data)


def _size_gib(path: Path) -> float | None:
    return shutil.disk_usage(path).total / GIB if path.exists() else None
