"""A complete run on Ray with two workers: its files, and the same command again."""

import json

import pytest

from mmray.training.driver import train
from tests.training.runs import STEPS, Silent, config, lines, make_data, marks


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def unkilled(local_ray, data, tmp_path_factory):
    """An undisturbed run."""
    reporter, wanted = Silent(), config(data, tmp_path_factory.mktemp("runs"), "calm")
    trackers = ("tests.training.trackers:Keeping", "tests.training.trackers:Failing")
    return train(wanted.replace(run=wanted.run.replace(trackers=trackers)), reporter), reporter


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
    on_driver = ["importing", "starting Ray", "checking the data", "starting 2 workers"]
    on_worker = [
        "importing the engine",
        "building the model",
        "dry run",
        "waiting for the first batch",
        "first step",
    ]
    assert [each["stage"] for each in result["starts"][0]] == [*on_driver, *on_worker, "training"]
    assert result["all_processes_peak_gib"] > max(
        line["memory/peak_gib"] for line in lines(outcome.path)
    )
    # of the tracker
    metrics = [json.loads(line) for line in (outcome.path / "kept.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics if "step" in each] == listener.steps and metrics[
        -1
    ] == {"finish": True}
    assert any(
        label == "tracker" and "503 from https://***@" in text for label, text in listener.notes
    )
    assert ("batch", "micro 4 x accumulation 2 x workers 2 = 16 rows per step") in listener.notes


def test_same_command_reports_finished_run(unkilled, local_ray, data):
    outcome, _ = unkilled
    again = train(config(data, outcome.path.parent, "calm"), Silent())
    assert again.already_done and again.result["steps"] == STEPS
