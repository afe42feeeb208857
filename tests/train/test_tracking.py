"""Trackers get what is logged, from the driver alone; none of them, whatever it does, holds a run up or ends it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mmray.config import Config, Data, Run
from mmray.errors import UsageError
from mmray.train import trackers as tracking
from mmray.train.run_dir import redact, redact_text
from tests.train.runs import Silent

STEPS = 5


def config_of(*trackers: str, **settings) -> Config:
    names = tuple(name if name in tracking.BUILT_IN else f"tests.train.trackers:{name}" for name in trackers)
    return Config(run=Run(trackers=names, project="tests"), **settings)


def metrics_of(step: int) -> dict:
    return {"step": step, "train/loss": 1 / step, "rows_sha": "f00", "throughput/samples_per_s": math.inf}


def told(
    config: Config,
    folder: Path,
    steps: range = range(1, STEPS + 1),
    status: str = "finished",
    at_end: Callable[[], None] = lambda: None,
) -> Silent:
    """A run of these steps, as the driver sees it; `at_end` is called before the trackers are told of it."""
    listener = Silent()
    folder.mkdir(exist_ok=True)
    with tracking.track_run(config, folder, listener) as tracked:
        for step in steps:
            tracked.step(metrics_of(step), STEPS)
        at_end()
        tracked.run_status = status
    assert listener.steps == list(steps)
    return listener


def kept(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


def test_a_stopped_job_still_tells_how_the_run_ended(tmp_path: Path) -> None:
    """Ray signals all processes of a job that is stopped, and the run ends by a checkpoint."""

    def stopped() -> None:
        trackers = [child for child in psutil.Process().children() if "mmray.train.tracker_process" in child.cmdline()]
        assert len(trackers) == 1
        while not kept(tmp_path):  # it has begun
            time.sleep(0.05)
        trackers[0].terminate()

    (tmp_path / "kept.jsonl").touch()
    told(config_of("Keeping"), tmp_path, range(1, 3), "stopped", at_end=stopped)
    assert [line["finish"] for line in kept(tmp_path) if "finish" in line] == [True]


def test_a_tracker_hears_the_run_and_its_continuation(tmp_path: Path) -> None:
    told(config_of("Keeping"), tmp_path, range(1, 4), "failed")
    told(config_of("Keeping"), tmp_path, range(2, STEPS + 1))  # from the checkpoint of step 1
    lines = kept(tmp_path)
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5]
    assert lines[1]["metrics"] == {"train/loss": 1.0}  # numbers alone
    assert [line["start"] for line in lines if "start" in line] == [None, "first"]
    assert [line["finish"] for line in lines if "finish" in line] == [False, True]
    about = lines[0]["about"]
    assert (about["name"], about["project"], about["config"]["batch"]["global"]) == (tmp_path.name, "tests", None)


@pytest.mark.parametrize(
    ("bad", "complaints"),
    [
        ("Failing", ["did not take step 1: ConnectionError: 503", "could not end: TimeoutError", "take 5 lines"]),
        ("Unreachable", ["could not begin, and gets nothing of this run: ConnectionError: no route"]),
        ("Dying", ["ended with exit code 7"]),
        ("Hanging", ["did not end within 1 s and was stopped"]),
    ],
)
def test_a_bad_tracker_stops_nothing(
    bad: str, complaints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "ENDING_S", 1.0 if bad == "Hanging" else 10.0)
    began_s = time.monotonic()
    last = f'{{"step": {STEPS},'

    def all_kept() -> None:
        """The good one is through, so that the rest of the time is the other's."""
        while not (file := tmp_path / "kept.jsonl").exists() or last not in file.read_text():
            assert time.monotonic() - began_s < 50
            time.sleep(0.02)

    listener = told(config_of(bad, "Keeping"), tmp_path, at_end=all_kept)
    assert time.monotonic() - began_s < 60
    notes = [text for label, text in listener.notes if label == "tracker"]
    for complaint in complaints:
        assert any(complaint in note for note in notes), notes
    assert not any("secret-word" in note or "library" in note for note in notes)
    assert len([line for line in kept(tmp_path) if "step" in line]) == STEPS


def test_the_run_never_waits_for_a_tracker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "ENDING_S", 0.5)
    monkeypatch.setattr(tracking, "WAITING", 50)
    long = {"step": 1} | {f"metric/{number}": 0.5 for number in range(2000)}
    with tracking.track_run(config_of("Hanging"), tmp_path, Silent()) as tracked:
        began_s = time.monotonic()
        for step in range(1, 400):
            tracked.step(long | {"step": step}, 400)
        assert time.monotonic() - began_s < 10
        listener = tracked.reporter
    assert any("lines were lost" in text for _, text in listener.notes)  # type: ignore[attr-defined]


@pytest.mark.cluster  # for the seconds that its import takes, three times
def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    data = Data(train="s3://me:pass@host/hush-hush/set")
    for steps in (range(1, 3), range(2, STEPS + 1)):
        assert told(config_of("mlflow", data=data), tmp_path / "run", steps).notes == []
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(step, 1 / step) for step in range(1, STEPS + 1)]
    assert run.data.params["data.train"] == "s3://***@host/***/set"
    assert run.data.params["optimizer.lr"] == "0.0005"
    assert not any(b"hush-hush" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    assert told(config_of("wandb", data=Data(train="s3://me:hush-hush@host/set")), tmp_path).notes == []
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"train/loss" in written and b"s3://***@host/set" in written
    assert not any(b"hush-hush" in found.read_bytes() for found in tmp_path.rglob("*") if found.is_file())


def test_what_is_not_there_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    tracking.check_trackers(config_of("Keeping"))
    with pytest.raises(UsageError, match=r"run.trackers: there is no `tensorflow`; take one of mlflow, wandb"):
        tracking.check_trackers(Config(run=Run(trackers=("tensorflow",))))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install \"mmray\[mlflow\]\""):
        tracking.check_trackers(config_of("mlflow"))


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "abcdefgh")
    settings = {"api_key": "x", "max_tokens": 5, "tokenizer": "trained", "list": ["https://a:b@c/d", "abcdefgh"]}
    assert redact(settings) == {
        "api_key": "***", "max_tokens": 5, "tokenizer": "trained", "list": ["https://***@c/d", "***"],
    }  # fmt: skip
    assert redact_text("plain words stay") == "plain words stay"
