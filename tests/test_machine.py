"""Available cores and memory within the limits of a container, a pod or a batch job."""

from types import SimpleNamespace

import pytest

from mmray import machine

GIB = 2**30


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of 64 cores with 240 GiB available; write(file, text) creates a cgroup file."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=240 * GIB))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")

    def write(file, text):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    return write


def test_without_limits_the_machine_is_reported(host):
    host("cgroup/cpu.max", "max 100000\n")
    host("cgroup/memory.max", "max\n")
    host("cgroup/memory.current", f"{9 * GIB}\n")
    assert (machine.cores(), machine.free_memory()) == (64, 240 * GIB)


def test_container_limits_are_reported(host):
    """Inactive page cache counts as free, because the kernel reclaims it."""
    host("cgroup/cpu.max", "350000 100000\n")
    host("cgroup/memory.max", f"{16 * GIB}\n")
    host("cgroup/memory.current", f"{9 * GIB}\n")
    host("cgroup/memory.stat", f"anon {4 * GIB}\ninactive_file {5 * GIB}\nactive_file 0\n")
    assert (machine.cores(), machine.free_memory()) == (4, 12 * GIB)


def test_limits_of_parent_cgroups_apply(host):
    host("own", "0::/slurm/job_7/step_0\n")
    host("cgroup/slurm/job_7/cpu.max", "800000 100000\n")
    host("cgroup/slurm/job_7/memory.max", f"{32 * GIB}\n")
    host("cgroup/slurm/job_7/memory.current", f"{2 * GIB}\n")
    host("cgroup/slurm/job_7/step_0/memory.max", "max\n")
    assert (machine.cores(), machine.free_memory()) == (8, 30 * GIB)


def test_cgroup_v1_limits_are_reported(host):
    host("cgroup/cpu/cpu.cfs_quota_us", "200000\n")
    host("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    host("cgroup/memory/memory.limit_in_bytes", f"{8 * GIB}\n")
    host("cgroup/memory/memory.usage_in_bytes", f"{6 * GIB}\n")
    host("cgroup/memory/memory.stat", f"total_inactive_file {1 * GIB}\n")
    assert (machine.cores(), machine.free_memory()) == (2, 3 * GIB)
    host("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert machine.cores() == 64


def test_cpu_affinity_limits_cores(host, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert machine.cores() == 3
