"""A complete run on Ray, and the same command again; tests/cluster has runs of several workers."""

import json

import pytest

from mmray.training.driver import train
from tests.training.runs import STEPS, Silent, config, make_data, marks


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("set"))


def one_worker(data, folder):
    trackers = ("tests.training.trackers:Keeping", "tests.training.trackers:Failing")
    wanted = config(data, folder, "calm").with_cluster(workers=1, cpus_per_worker=1)
    return wanted.replace(run=wanted.run.replace(trackers=trackers))


@pytest.fixture(scope="module")
def unkilled(local_ray, data, tmp_path_factory):
    """An undisturbed run."""
    reporter = Silent()
    return train(one_worker(data, tmp_path_factory.mktemp("runs")), reporter), reporter


def test_run_writes_its_files_and_metrics(unkilled):
    outcome, listener = unkilled
    result = outcome.result
    assert (result["status"], result["steps"], result["restarts"], result["wasted_steps"]) == (
        "finished",
        STEPS,
        0,
        0,
    )
    assert result["rows_consumed"] == 192
    # of 50 rows
    assert [mark[:2] for mark in marks(outcome.path)][:5] == [
        (1, 0),
        (2, 16),
        (3, 32),
        (4, 48),
        (5, 64),
    ]
    assert json.loads((outcome.path / "result.json").read_text()) == result
    assert {"recall_at_1/image_to_text", "median_rank/image_to_text"} <= result["metrics"].keys()
    assert (outcome.path / "checkpoints" / f"step-{STEPS}").is_dir()
    assert list(outcome.path.glob("events.*"))
    examples = json.loads((outcome.path / "examples.json").read_text())
    assert (examples["step"], examples["rows"]) == (STEPS, 20) and examples["images"]
    assert ("report", str(outcome.path / "report.html")) in listener.notes and (
        outcome.path / "report.html"
    ).exists()
    assert listener.steps == list(range(1, STEPS + 1))
    on_driver = ["importing", "connecting to Ray", "checking the data", "starting 1 worker"]
    on_worker = [
        "importing the engine",
        "building the model",
        "dry run",
        "waiting for the first batch",
        "first step",
    ]
    assert [each["stage"] for each in result["starts"][0]] == [*on_driver, *on_worker, "training"]
    # of the tracker
    metrics = [json.loads(line) for line in (outcome.path / "kept.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics if "step" in each] == listener.steps and metrics[
        -1
    ] == {"finish": True}
    assert any(
        label == "tracker" and "503 from https://***@" in text for label, text in listener.notes
    )
    assert ("batch", "micro 4 x accumulation 4 x workers 1 = 16 rows per step") in listener.notes


def test_same_command_reports_finished_run(unkilled, local_ray, data):
    outcome, _ = unkilled
    again = train(one_worker(data, outcome.path.parent), Silent())
    assert again.already_done and again.result["steps"] == STEPS
