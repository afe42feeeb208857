"""The doctor: each finding from what it was shown, and the whole on a real machine."""

import json
import sys

import pytest

from mmray.cluster import doctor
from tests.test_cli import typed  # noqa: F401 - a fixture


def test_gpus_that_torch_cannot_use_are_a_failure():
    assert doctor.check_gpus(2, ["H200", "H200"]) == doctor.Finding("ok", "GPUs", "H200, H200")
    assert doctor.check_gpus(0, []).level == "ok"
    found = doctor.check_gpus(2, ["H200"])
    assert found.level == "fail" and "lists 2, torch can use 1" in found.seen and "driver" in found.fix
    hidden = doctor.check_gpus(8, ["H200"], visible="0")
    assert hidden.level == "warn" and "CUDA_VISIBLE_DEVICES=0" in hidden.fix


def test_a_torch_that_cannot_be_imported_is_a_finding_and_the_rest_is_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_ray", lambda _: iter(()))
    found = list(doctor.run_checks(None, "runs"))
    assert [each.level for each in found if each.what == "torch"] == ["fail"]
    assert "memory" in [each.what for each in found] and "GPUs" not in [each.what for each in found]


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (doctor.check_memory(64.0), "ok", "64.0 GiB"),
        (doctor.check_memory(1.0), "warn", "1.0 GiB"),
        (doctor.check_shm(0.0625, 24.0), "warn", "--shm-size=7g"),
        (doctor.check_shm(24.0, 24.0), "ok", "24.0 GiB"),
        (doctor.check_shm(None, 24.0), "ok", "no /dev/shm"),
    ],
)
def test_memory(found, level, said):
    assert found.level == level and said in found.seen + found.fix


def test_nodes_need_cpus_for_data():
    gpu_node = {"Resources": {"CPU": 2.0, "GPU": 2.0}}
    assert doctor.check_nodes([gpu_node], {"GPU": 2.0}).level == "warn"
    found = doctor.check_nodes([gpu_node, {"Resources": {"CPU": 8.0}}], {"CPU": 9.0, "GPU": 2.0})
    assert found.level == "ok" and found.seen == "2 nodes; free: 9 of 10 CPUs, 2 of 2 GPUs"


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    file = tmp_path / "auth_token"
    assert doctor.check_auth("disabled", file).level == "ok"
    assert doctor.check_auth("token", file).level == "fail"
    file.write_text("secret")
    file.chmod(0o644)
    found = doctor.check_auth("token", file)
    assert found.level == "warn" and "chmod 600" in found.fix and "secret" not in str(found)
    file.chmod(0o600)
    assert doctor.check_auth("token", file).level == "ok"


def test_a_place_that_cannot_be_written(tmp_path):
    assert doctor.check_writable(tmp_path / "new").level == "ok"
    (tmp_path / "file").write_text("")
    found = doctor.check_writable(tmp_path / "file")
    assert found.level == "fail" and "cannot be written" in found.seen
    assert list((tmp_path / "new").iterdir()) == []


def test_disk(tmp_path):
    found = doctor.check_disk("disk", tmp_path / "not" / "yet")
    assert str(tmp_path) in found.seen


def test_the_whole_on_this_machine(local_ray, typed, tmp_path):  # noqa: F811
    code, out, _ = typed("doctor", "--storage", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json"))
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert code == (4 if any(finding["level"] == "fail" for finding in findings) else 0)
    task = next(finding for finding in findings if finding["what"] == "a task")
    assert task["level"] == "ok" and "8 MB" in task["seen"] and "a task" in out
