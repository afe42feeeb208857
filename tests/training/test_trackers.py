"""Trackers receive logged metrics; a slow or failing tracker never delays or fails a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from mmray.config import Config, Data, Run
from mmray.errors import UsageError
from mmray.training import trackers
from mmray.training.run_dir import redact, redact_text
from tests.polling import wait_until
from tests.training.runs import Silent

STEPS = 5


def config_of(*names: str, **settings) -> Config:
    names = tuple(
        name if name in trackers.BUILT_IN else f"tests.training.trackers:{name}" for name in names
    )
    return Config(run=Run(trackers=names), **settings)


def metrics_of(step: int) -> dict:
    return {
        "step": step,
        "train/loss": 1 / step,
        "rows_sha": "f00",
        "throughput/samples_per_s": math.inf,
    }


def run_with_trackers(
    config: Config,
    folder: Path,
    steps: range = range(1, STEPS + 1),
    status: str = "finished",
    at_end: Callable[[], None] = lambda: None,
) -> Silent:
    """Report these steps as the driver does; `at_end` is called before the trackers finish."""
    reporter = Silent()
    folder.mkdir(exist_ok=True)
    with trackers.TrackingReporter(config, folder, reporter) as tracked:
        for step in steps:
            tracked.step(metrics_of(step), STEPS)
        at_end()
        tracked.run_status = status
    assert reporter.steps == list(steps)
    return reporter


def kept(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


def test_tracker_receives_run_and_its_resume_without_duplicate_steps(tmp_path: Path) -> None:
    run_with_trackers(config_of("Keeping"), tmp_path, range(1, 4), "failed")
    # from the checkpoint of step 1
    run_with_trackers(config_of("Keeping"), tmp_path, range(2, STEPS + 1))
    lines = kept(tmp_path)
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5]
    assert lines[1]["metrics"] == {"train/loss": 1.0}  # only numbers
    assert [line["start"] for line in lines if "start" in line] == [None, "first"]
    assert [line["finish"] for line in lines if "finish" in line] == [False, True]
    about = lines[0]["about"]
    assert (about["name"], about["config"]["batch"]["global"]) == (tmp_path.name, None)


@pytest.mark.parametrize(
    ("bad", "warnings"),
    [
        (
            "Failing",
            [
                "did not accept step 1: ConnectionError: 503",
                "could not finish",
            ],
        ),
        (
            "Unreachable",
            ["could not start, so nothing of this run is sent: ConnectionError: no route"],
        ),
        ("Exiting", ["did not accept step 1: SystemExit: 7"]),
        ("Hanging", ["did not finish within 1 s"]),
    ],
)
def test_failing_tracker_warns_and_run_continues(
    bad: str, warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAIT_S", 1.0 if bad == "Hanging" else 10.0)
    last = f'{{"step": {STEPS},'

    def all_kept() -> None:
        """Wait until the working tracker has received all steps."""
        file = tmp_path / "kept.jsonl"
        wait_until(lambda: file.exists() and last in file.read_text())

    reporter = run_with_trackers(config_of(bad, "Keeping"), tmp_path, at_end=all_kept)
    notes = [text for label, text in reporter.notes if label == "tracker"]
    for warning in warnings:
        assert any(warning in note for note in notes), notes
    assert not any("secret-word" in note for note in notes)
    assert len([line for line in kept(tmp_path) if "step" in line]) == STEPS


@pytest.mark.cluster  # its import takes seconds
def test_mlflow_logs_to_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    data = Data(train="s3://me:pass@host/hush-hush/set")
    for steps in (range(1, 3), range(2, STEPS + 1)):
        assert (
            run_with_trackers(config_of("mlflow", data=data), tmp_path / "run", steps).notes == []
        )
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [
        (step, 1 / step) for step in range(1, STEPS + 1)
    ]
    assert run.data.params["data.train"] == "s3://***@host/***/set"
    assert run.data.params["optimizer.lr"] == "0.0005"
    assert not any(
        b"hush-hush" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()
    )


def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    assert (
        run_with_trackers(
            config_of("wandb", data=Data(train="s3://me:hush-hush@host/set")), tmp_path
        ).notes
        == []
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # the service of wandb writes the file after `finish` has returned
    wait_until(lambda: b"train/loss" in file.read_bytes(), 120)
    assert b"s3://***@host/set" in file.read_bytes()
    assert not any(
        b"hush-hush" in found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()
    )


def test_wandb_offline_writes_to_no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write to a local folder `s3:`, which is deleted with a submitted job."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UsageError, match="wandb cannot write to an object store; log in"):
        trackers.WandbTracker().start(
            {"name": "run", "folder": "s3://bucket/runs/run", "config": {}}, None
        )


def test_missing_tracker_is_an_error_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers.check_trackers(config_of("Keeping"))
    with pytest.raises(UsageError, match=r"run.trackers: .*`tensorflow`.*mlflow, wandb"):
        trackers.check_trackers(Config(run=Run(trackers=("tensorflow",))))
    with pytest.raises(UsageError, match="names a tracker twice"):
        trackers.check_trackers(config_of("Keeping", "Keeping"))
    monkeypatch.setattr("mmray.plugins.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install \"mmray\[mlflow\]\""):
        trackers.check_trackers(config_of("mlflow"))


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "abcdefgh")
    settings = {"api_key": "x", "max_tokens": 5, "tokenizer": "trained"}
    urls, redacted = {"list": ["https://a:b@c/d", "abcdefgh"]}, {"list": ["https://***@c/d", "***"]}
    assert redact(settings | urls) == settings | redacted | {"api_key": "***"}
    assert redact_text("plain words stay") == "plain words stay"
