"""CPU cores and memory available to this process, within the limits of its container, pod or batch
job; its network; its rank under torchrun.

Reads `cpu.max` and `memory.max` of the process's cgroup and its parents
(https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
HAS_MEMFD = hasattr(os, "memfd_create")  # whether a file can be in memory
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    It is the smallest of the process's CPU affinity and the CPU quotas of its cgroups, rounded up.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, math.ceil(min([affinity, *_cpu_quotas()])))


def free_memory() -> int:
    """Return the free memory of the host in bytes, limited by the memory limits of the cgroups."""
    return int(max(0, min([psutil.virtual_memory().available, *_free_bytes()])))


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory on a CPU, so that each step reuses it.

    Otherwise each step maps and clears the pages of large tensors again: 14 % more CPU time of a
    ResNet-18 step. Returns False if the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Of <malloc.h>.
    m_mmap_threshold = -3
    m_trim_threshold = -1
    return mallopt is not None and all(
        mallopt(option, 2**31 - 1) for option in (m_mmap_threshold, m_trim_threshold)
    )


def torchrun_world_size() -> int:
    """Return the number of processes that torchrun started with this one; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def torchrun_rank() -> int:
    """Return the rank of this process among those that torchrun started; 0 without torchrun."""
    return int(os.environ["RANK"]) if torchrun_world_size() > 1 else 0


def process_age_s() -> float:
    """Return the seconds since this process started."""
    start_s = psutil.Process().create_time()
    # on Linux, psutil adds the time of the boot in whole seconds
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (start_s - psutil.boot_time())
    return time.time() - start_s


def network_interface(ip: str) -> str | None:
    """Return the network interface of this machine with an IP address, such as `eth0`, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if ip in {each.address for each in addresses}), None
    )


def set_network_interface(ip: str) -> None:
    """Make gloo and NCCL use the network interface of an IP address, unless the user has set one.

    By default gloo takes the one of the host name, maybe the loopback, and NCCL the first.
    """
    if (name := network_interface(ip)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: not a prefix


def _cpu_quotas() -> Iterator[float]:
    for folder in _cgroup_dirs():
        quota, period = (_read_words(folder / "cpu.max") or ["max", "1"])[:2]
        if quota != "max":
            yield int(quota) / int(period)


def _free_bytes() -> Iterator[float]:
    """Yield the free memory under each limit; inactive page cache counts as free."""
    for folder in _cgroup_dirs():
        words = _read_words(folder / "memory.stat")
        idle = int(dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", 0))
        limit = _read_number(folder / "memory.max")
        used_bytes = _read_number(folder / "memory.current")
        yield limit if math.isinf(used_bytes) else limit - used_bytes + idle


def _cgroup_dirs() -> list[Path]:
    """Return the folders of this process's cgroup v2 and its parents; only the root in most
    containers.
    """
    own_cgroup = next((line[3:] for line in _read_words(OWN_CGROUP) if line.startswith("0::")), "/")
    path = CGROUPS / own_cgroup.lstrip("/")
    return [CGROUPS, *(folder for folder in [path, *path.parents] if CGROUPS in folder.parents)]


def _read_number(file: Path) -> float:
    """Read a number; infinity if there is no file or no limit."""
    words = _read_words(file)
    return float(words[0]) if words and words[0] != "max" else math.inf


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
