"""mmray doctor: each check on given values, and all checks on this machine."""

import json
import socket
import sys
from pathlib import Path

import pytest
import ray

from mmray.cluster import doctor, node_checks
from tests.test_cli import typed  # noqa: F401 - a fixture


def test_import_error_of_torch_is_a_finding_and_other_checks_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_check_ray", lambda _: iter(()))
    found = list(doctor.run_checks(None, "runs"))
    assert [each.level for each in found if each.name == "torch"] == ["error"]
    assert "memory" in [each.name for each in found] and "GPUs" not in [each.name for each in found]


GPU_NODE = {"Resources": {"CPU": 2.0, "GPU": 2.0}}
CPU_NODE = {"Resources": {"CPU": 8.0}}
SLURM = """
ProctrackType           = proctrack/{}
SlurmctldHost[0]        = head
SlurmctldParameters     = {}
"""


@pytest.mark.parametrize(
    ("finding", "level", "text"),
    [
        (
            doctor.check_nodes([CPU_NODE], {}, 2),
            "ok",
            "the 8 CPUs of Ray share the 2 of this machine",
        ),
        (doctor.check_memory(64.0), "ok", "64.0 GiB"),
        (doctor.check_memory(1.0), "warning", "1.0 GiB"),
        (doctor.check_shm(0.0625, 24.0), "warning", "--shm-size=7g"),
        (doctor.check_shm(24.0, 24.0), "ok", "24.0 GiB"),
        (doctor.check_gpus(2, ["H200", "H200"]), "ok", "H200, H200"),
        (doctor.check_gpus(0, []), "ok", "none"),
        (doctor.check_gpus(2, ["H200"]), "error", "lists 2 GPUs, torch can use 1"),
        (doctor.check_gpus(8, ["H200"], visible="0"), "warning", "CUDA_VISIBLE_DEVICES=0"),
        (doctor.check_interfaces({"10.0.0.1": "eth0"}), "ok", "10.0.0.1 on eth0"),
        (
            doctor.check_interfaces({"10.0.0.1": "eth0", "1.2.3.4": None}),
            "warning",
            "start Ray on 1.2.3.4 with",
        ),
        (doctor.check_nodes([GPU_NODE], {"GPU": 2.0}), "warning", "add CPU nodes"),
        (
            doctor.check_nodes([GPU_NODE, CPU_NODE], {"CPU": 9.0, "GPU": 2.0}),
            "ok",
            "2 nodes; free resources: 9 of 10 CPU, 2 of 2 GPU",
        ),
        (doctor.check_preemption(SLURM.format("cgroup", "(null)")), "ok", "proctrack/cgroup"),
        (
            doctor.check_preemption(SLURM.format("pgid", "(null)")),
            "warning",
            "without a checkpoint",
        ),
        (
            doctor.check_preemption(SLURM.format("pgid", "preempt_send_user_signal")),
            "ok",
            "SlurmctldParameters = preempt_send_user_signal",
        ),
        (doctor.check_disk("disk", Path("/not/yet")), None, "free at /"),
    ],
)
def test_findings(finding, level, text):
    assert level in (None, finding.level) and text in finding.observed + finding.fix


def test_auth_token(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    file = tmp_path / "auth_token"
    assert doctor.check_auth("disabled", file).level == "ok"
    assert doctor.check_auth("token", file).level == "error"
    file.write_text("secret")
    file.chmod(0o644)
    found = doctor.check_auth("token", file)
    assert found.level == "warning" and "chmod 600" in found.fix and "secret" not in str(found)
    file.chmod(0o600)
    assert doctor.check_auth("token", file).level == "ok"


def test_unwritable_storage_is_an_error(tmp_path):
    assert doctor.check_storage(str(tmp_path / "new"), []).level == "ok"
    (tmp_path / "file").write_text("")
    found = doctor.check_storage(str(tmp_path / "file"), [])
    assert found.level == "error" and "not writable" in found.observed
    assert list((tmp_path / "new").iterdir()) == []


def test_doctor_on_this_machine(local_ray, typed, tmp_path):  # noqa: F811
    code, out, _ = typed(
        "doctor", "--storage", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json")
    )
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert code == (4 if any(finding["level"] == "error" for finding in findings) else 0)
    task = next(finding for finding in findings if finding["name"] == "test task")
    assert task["level"] == "ok" and "8 MB" in task["observed"] and "test task" in out


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_cluster_checks_measure_each_node_and_the_links(nodes, tmp_path, monkeypatch):
    """Two nodes and the head: figures of each, and of what is between them."""
    nodes.reset([(1, 0)])
    monkeypatch.setattr(node_checks, "COLLECTIVE_MB", 8)
    monkeypatch.setattr(node_checks, "TRANSFER_MB", 8)
    found = list(node_checks.check_cluster(nodes.address, str(tmp_path)))
    levels = {each.name: each.level for each in found}
    assert levels["versions"] == levels["run.storage"] == "ok"
    host = f"node {socket.gethostname()} at {ray.util.get_node_ip_address()}"
    names = [each.name for each in found if each.name.startswith("node ")]
    wanted = 2 * ["connections", "shared memory", "disk", "clock"]
    assert sorted(names) == sorted(f"{host}: {name}" for name in wanted)
    here = host.removeprefix("node ")
    assert [each.name for each in found].count(f"transfer {here} to {here}") == 2
    (collective,) = [each for each in found if each.name.startswith("all-reduce of 2 nodes")]
    assert "MB/s" in collective.observed


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (node_checks.check_keepalive({}), "warning"),
        (node_checks.check_keepalive({"RAY_grpc_keepalive_timeout_ms": "120000"}), "ok"),
        (node_checks.check_clock(0.01), "ok"),
        (node_checks.check_clock(-1.0), "warning"),
        (node_checks.check_clock(7.0), "error"),
    ],
)
def test_measurements_of_a_node_are_rated(finding, level):
    assert finding.level == level and bool(finding.fix) == (level != "ok")


def test_versions_must_be_equal(monkeypatch):
    monkeypatch.setattr(node_checks, "node_name", {"a" * 56: "cpu-1", "b" * 56: "cpu-2"}.get)
    finding = node_checks.compare_versions({"a" * 56: "v1", "b" * 56: "v2"})
    assert finding.level == "error"
    assert "v1 on node cpu-1; v2 on node cpu-2" in finding.observed
