"""The doctor: each finding from what it was shown, and the whole on a real machine."""

import json
import sys

import pytest

from mmray.cluster import doctor
from tests.test_cli import typed  # noqa: F401 - a fixture


def test_gpus_that_torch_cannot_use_are_a_failure():
    assert doctor.gpus(2, ["H200", "H200"]) == doctor.Finding("ok", "GPUs", "H200, H200")
    assert doctor.gpus(0, []).level == "ok"
    found = doctor.gpus(2, ["H200"])
    assert found.level == "fail" and "lists 2, torch can use 1" in found.seen and "driver" in found.fix
    hidden = doctor.gpus(8, ["H200"], visible="0")
    assert hidden.level == "warn" and "CUDA_VISIBLE_DEVICES=0" in hidden.fix


def test_a_torch_that_cannot_be_imported_is_a_finding_and_the_rest_is_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_ray", lambda _: iter(()))
    found = list(doctor.examine(None, "runs"))
    assert [each.level for each in found if each.what == "torch"] == ["fail"]
    assert "memory" in [each.what for each in found] and "GPUs" not in [each.what for each in found]


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (doctor.memory(64.0), "ok", "64.0 GiB"),
        (doctor.memory(1.0), "warn", "1.0 GiB"),
        (doctor.shm(0.0625, 24.0), "warn", "--shm-size=7g"),
        (doctor.shm(24.0, 24.0), "ok", "24.0 GiB"),
        (doctor.shm(None, 24.0), "ok", "no /dev/shm"),
    ],
)
def test_memory(found, level, said):
    assert found.level == level and said in found.seen + found.fix


def test_nodes_need_cpus_for_data():
    gpu_node = {"Resources": {"CPU": 2.0, "GPU": 2.0}}
    assert doctor.nodes([gpu_node], {"GPU": 2.0}).level == "warn"
    found = doctor.nodes([gpu_node, {"Resources": {"CPU": 8.0}}], {"CPU": 9.0, "GPU": 2.0})
    assert found.level == "ok" and found.seen == "2 nodes; free: 9 of 10 CPUs, 2 of 2 GPUs"


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    file = tmp_path / "auth_token"
    assert doctor.token("disabled", file).level == "ok"
    assert doctor.token("token", file).level == "fail"
    file.write_text("secret")
    file.chmod(0o644)
    found = doctor.token("token", file)
    assert found.level == "warn" and "chmod 600" in found.fix and "secret" not in str(found)
    file.chmod(0o600)
    assert doctor.token("token", file).level == "ok"


def test_a_place_that_cannot_be_written(tmp_path):
    assert doctor.writable(tmp_path / "new").level == "ok"
    (tmp_path / "file").write_text("")
    found = doctor.writable(tmp_path / "file")
    assert found.level == "fail" and "cannot be written" in found.seen
    assert list((tmp_path / "new").iterdir()) == []


def test_disk(tmp_path):
    found = doctor.disk("disk", tmp_path / "not" / "yet")
    assert str(tmp_path) in found.seen


def test_the_whole_on_this_machine(local_ray, typed, tmp_path):  # noqa: F811
    code, out, _ = typed("doctor", "--storage", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json"))
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert code == (4 if any(finding["level"] == "fail" for finding in findings) else 0)
    task = next(finding for finding in findings if finding["what"] == "a task")
    assert task["level"] == "ok" and "8 MB" in task["seen"] and "a task" in out
