"""Available cores and memory within the limits of a container, a pod or a batch job."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mmray import machine

GIB = 2**30


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of 64 cores with 240 GiB available; write(file, text) creates a cgroup file."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(
        machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=240 * GIB)
    )
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
UNLIMITED = {
    "cgroup/cpu.max": "max 100000",
    "cgroup/memory.max": "max",
    "cgroup/memory.current": 9 * GIB,
}


@pytest.mark.parametrize(
    ("files", "cores", "gib"), [(UNLIMITED, 64, 240), (CONTAINER, 4, 12), (PARENTS, 8, 30)]
)
def test_cgroup_limits_are_reported(host, files, cores, gib):
    for file, content in files.items():
        host(file, f"{content}\n")
    assert (machine.cores(), machine.free_memory()) == (cores, gib * GIB)


def test_cpu_affinity_limits_cores(host, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert machine.cores() == 3


def test_process_age_includes_the_start_of_python():
    code = "from mmray.machine import process_age_s; print(process_age_s())"
    start_s = time.monotonic()
    age_s = float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    assert 0.01 < age_s < time.monotonic() - start_s + 0.02  # the kernel counts in 1/100 s


def test_gloo_and_nccl_get_the_interface_of_an_ip_unless_the_user_chose_one(monkeypatch):
    interfaces = {"lo": "127.0.0.1", "eth0": "172.17.0.2", "eth1": "10.0.0.7"}
    addresses = {
        name: [SimpleNamespace(address=each) for each in ("aa:bb", ip)]
        for name, ip in interfaces.items()
    }
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    machine.set_network_interface("1.2.3.4")  # of no interface, such as a public address
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    machine.set_network_interface("10.0.0.7")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")
    assert machine.network_interface(machine.LOOPBACK) == "lo"
