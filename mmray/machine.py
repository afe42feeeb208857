"""CPU cores and memory available to this process, within the limits of its container, pod or batch job.

Reads cgroup v2 limits of the process's cgroup and its parents, and cgroup v1 limits at the root
(https://docs.kernel.org/admin-guide/cgroup-v2.html, `cpu.max`, `memory.max`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """Return the number of CPU cores available to this process: its affinity, limited by CPU quotas."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([bound, *_quotas()])))


def free_memory() -> int:
    """Return the free memory in bytes: the machine's, limited by cgroups."""
    return int(max(0, min([psutil.virtual_memory().available, *_left()])))


def _quotas() -> Iterator[float]:
    for folder in _levels():
        most, each = (_words(folder / "cpu.max") or ["max", "1"])[:2]
        if most != "max":
            yield int(most) / int(each)
    quota, period = _number(CGROUPS / "cpu/cpu.cfs_quota_us"), _number(CGROUPS / "cpu/cpu.cfs_period_us")
    if quota > 0 and period < math.inf:
        yield quota / period


def _left() -> Iterator[float]:
    """Yield the free memory under each limit; inactive page cache counts as free."""
    for folder in _levels():
        yield _number(folder / "memory.max") - _used(folder, "memory.current", "inactive_file")
    folder = CGROUPS / "memory"
    yield _number(folder / "memory.limit_in_bytes") - _used(folder, "memory.usage_in_bytes", "total_inactive_file")


def _used(folder: Path, file: str, idle: str) -> float:
    words = _words(folder / "memory.stat")
    counts = dict(zip(words[::2], words[1::2], strict=False))
    taken = _number(folder / file)
    return 0 if math.isinf(taken) else taken - int(counts.get(idle, 0))


def _levels() -> list[Path]:
    """Return the folders of this process's cgroup v2 and its parents; only the root in most containers."""
    own = next((line[3:] for line in _words(OWN_CGROUP) if line.startswith("0::")), "/")
    path = CGROUPS / own.lstrip("/")
    return [CGROUPS, *(folder for folder in [path, *path.parents] if CGROUPS in folder.parents)]


def _number(file: Path) -> float:
    """Read a number; infinity if there is no file or no limit."""
    words = _words(file)
    return float(words[0]) if words and words[0] != "max" else math.inf


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
