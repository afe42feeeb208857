"""`mmray runs`: state, steps and scores of runs and sweeps."""

import json
import os
import time
from pathlib import Path

import pytest

from mmray import cli
from mmray.console.reporter import ConsoleReporter
from mmray.errors import UsageError
from mmray.report.listing import list_runs
from mmray.storage.lease import FOLDER, STALE_AFTER_S, Lease, is_live
from mmray.storage.paths import to_path
from tests.report.factories import line, make_run, make_sweep, trial

FINAL = {"recall_at_1/mean": 0.375, "recall_at_1/image_to_text": 0.375}
BEST = {"step": 10, "metric": "recall_at_1/mean", "score": 0.5}


def evaluated(step, recall):
    scores = {"recall_at_1/mean": recall, "recall_at_1/image_to_text": recall, "loss": 2.0}
    return line(step, **{f"evaluate/{name}": value for name, value in scores.items()})


def fill(folder):
    """A finished, a failed, a killed, a running and a stopped run, a sweep, and files that are none
    of them.
    """
    last = {"train/loss": 0.25, "step": 20}
    result = {
        "status": "finished",
        "steps": 20,
        "metrics": last,
        "scores": FINAL,
        "best": BEST,
    }
    make_run(folder / "finished", result=result)
    make_run(folder / "stopped", result=result | {"status": "stopped", "scores": {}})
    lines = [evaluated(5, 0.625), evaluated(10, 0.125), line(15)]
    make_run(folder / "failed", lines, {"status": "failed", "error": "disk full"})
    make_run(
        folder / "killed", [line(3, **{"evaluate/loss": 1.5}), line(4, **{"evaluate/loss": 1.75})]
    )
    make_run(folder / "running", lines[:1], {"status": "unfinished", "steps": 99})
    make_sweep(
        folder / "sweep",
        [trial("t001", 8, 1, 500.0), trial("t002", 16, 1, 900.0)],
        status="running",
    )
    (folder / "notes").mkdir()
    (folder / "notes.txt").write_text("not a run")


def test_rows_have_state_steps_and_scores(tmp_path):
    fill(tmp_path)
    with Lease(tmp_path / "running"):
        rows = {row["name"]: row for row in list_runs(tmp_path)}
    got = {
        name: [row[key] for key in ("state", "steps", "loss", "scores", "best")]
        for name, row in rows.items()
        if row["kind"] == "run"
    }
    of_10, of_5 = (
        {"recall_at_1/mean": recall, "loss": 2.0, "recall_at_1/image_to_text": recall}
        for recall in (0.125, 0.625)
    )
    assert got == {
        "finished": ["finished", 20, 0.25, FINAL, BEST],
        "stopped": ["stopped", 20, 0.25, {}, BEST],
        "failed": ["failed", 15, 4 / 15, of_10, None],
        "killed": ["unfinished", 4, 1.0, {"loss": 1.75}, None],
        "running": ["running", 5, 0.8, of_5, None],
    }
    sweep = rows["sweep"]
    best = {"trial": "t002", "metric": "samples/s", "score": 900.0}
    assert [sweep[key] for key in ("kind", "state", "trials", "best")] == [
        *("sweep", "unfinished", 2, best)
    ]


def test_last_active_run_is_first_in_table_and_json(tmp_path, capfd):
    fill(tmp_path)
    now_s = time.time()
    for age_s, name in enumerate(("killed", "finished", "sweep", "stopped", "failed", "running")):
        for file in (tmp_path / name).iterdir():
            os.utime(file, (now_s - 3600 * age_s - 10,) * 2)
    assert cli.run(["runs", str(tmp_path), "--json", "-"], ConsoleReporter()) == 0
    rows = json.loads(capfd.readouterr().out)["runs"]
    assert [row["name"] for row in rows] == [
        "killed",
        "finished",
        "sweep",
        "stopped",
        "failed",
        "running",
    ]
    assert (
        cli.run(["runs", str(tmp_path), "--json", str(tmp_path / "runs.json")], ConsoleReporter())
        == 0
    )
    assert [row["state"] for row in json.loads((tmp_path / "runs.json").read_text())["runs"]].count(
        "unfinished"
    ) == 3
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "state", "steps", "loss", "score", "best", "active"]
    words = [" ".join(each.split()) for each in lines]
    assert words[3] == (
        "finished finished 20 0.250 recall@1 image to text 37.5% recall_at_1/mean 0.500 (step 10) "
        "1h 00m ago"
    )
    assert words[4] == "sweep unfinished 2 trials - - samples/s 900.000 (t002) 2h 00m ago"


def test_missing_folder_is_a_usage_error_and_empty_folder_is_not(tmp_path, capfd):
    with pytest.raises(
        UsageError, match=r"cannot list .*nowhere: No such file or directory; give a folder of runs"
    ):
        list_runs(tmp_path / "nowhere")
    assert cli.run(["runs", str(tmp_path)], ConsoleReporter()) == 0
    assert "no runs" in capfd.readouterr().out


def test_folder_without_access_is_left_out(tmp_path, monkeypatch):
    make_run(tmp_path / "mine", [line(3)])
    make_run(tmp_path / "locked", [line(3)])
    stat = Path.stat

    def refuse(path, **options):
        if path.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)  # permissions do not bind root
    assert [row["name"] for row in list_runs(tmp_path)] == ["mine"]


def test_runs_on_an_object_store_are_listed(s3):
    for name, status in (("one", "finished"), ("two", "unfinished")):
        folder = to_path(f"{s3.address}/{name}")
        (folder / "config.yaml").write_text("recipe: sample\n")
        (folder / "result.json").write_text(json.dumps({"status": status, "steps": 7}))
        (folder / "metrics.jsonl").write_text(json.dumps(line(8)) + "\n")
    with Lease(to_path(f"{s3.address}/two")):
        rows = {row["name"]: (row["state"], row["steps"]) for row in list_runs(to_path(s3.address))}
    assert rows == {"one": ("finished", 7), "two": ("running", 8)}


@pytest.mark.parametrize("ahead_s", [0, 300, -300])
def test_lease_of_another_machine_is_live_until_its_heartbeats_are_old(
    tmp_path, monkeypatch, ahead_s
):
    """Also on a machine whose clock differs from that of the storage."""
    storage_s = time.time()
    monkeypatch.setattr(time, "time", lambda: storage_s + ahead_s)
    assert not is_live(tmp_path)
    (tmp_path / FOLDER).mkdir()
    claim = tmp_path / FOLDER / "3"
    claim.write_text(
        json.dumps({"host": "elsewhere", "pid": 1, "machine": "another", "process": "1"})
    )
    assert is_live(tmp_path)
    os.utime(claim, (storage_s - STALE_AFTER_S - 1,) * 2)
    assert not is_live(tmp_path)
    with Lease(tmp_path / "own"):
        assert is_live(tmp_path / "own")
    assert not is_live(tmp_path / "own")
