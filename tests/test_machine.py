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


CONTAINER = {  # inactive page cache counts as free, because the kernel reclaims it
    "cgroup/cpu.max": "350000 100000",
    "cgroup/memory.max": 16 * GIB,
    "cgroup/memory.current": 9 * GIB,
    "cgroup/memory.stat": f"anon {4 * GIB}\ninactive_file {5 * GIB}\nactive_file 0",
}
PARENTS = {
    "own": "0::/slurm/job_7/step_0",
    "cgroup/slurm/job_7/cpu.max": "800000 100000",
    "cgroup/slurm/job_7/memory.max": 32 * GIB,
    "cgroup/slurm/job_7/memory.current": 2 * GIB,
    "cgroup/slurm/job_7/step_0/memory.max": "max",
}
UNLIMITED = {"cgroup/cpu.max": "max 100000", "cgroup/memory.max": "max", "cgroup/memory.current": 9 * GIB}


@pytest.mark.parametrize(("files", "cores", "gib"), [(UNLIMITED, 64, 240), (CONTAINER, 4, 12), (PARENTS, 8, 30)])
def test_cgroup_limits_are_reported(host, files, cores, gib):
    for file, content in files.items():
        host(file, f"{content}\n")
    assert (machine.cores(), machine.free_memory()) == (cores, gib * GIB)


def test_cpu_affinity_limits_cores(host, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert machine.cores() == 3
