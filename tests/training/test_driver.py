"""Complete runs on Ray with two workers: their files, and the end of a run with bad rows."""

import json

import pytest

import mmray
from mmray.cli import main
from mmray.errors import DataError
from mmray.training.driver import train
from tests.made import make_set, row
from tests.training.runs import HELD_OUT, STEPS, Silent, config, lines, make_data, marks


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


def test_too_many_bad_rows_end_the_run_and_are_named(tmp_path, without_ray):
    rows = [row(number, b"broken" if number % 2 == 0 else None) for number in range(50)]
    make_set(tmp_path / "set", rows)
    wanted = config(tmp_path / "set", tmp_path, "bad").with_cluster(workers=1, cpus_per_worker=1)
    with pytest.raises(DataError, match=r"17 rows could not be read.*row-\d+, made:\d+"):
        train(wanted, Silent())
    named = [
        json.loads(line)
        for line in (tmp_path / "bad" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert all(entry["row"] % 2 == 0 and entry["stage"] == "train" for entry in named)
    assert all(entry["reason"] == "format" and entry["detail"] for entry in named)


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


def test_evaluate_command_gives_same_metrics_as_training(unkilled, tmp_path, capfd, without_ray):
    """tests/cluster/test_object_store.py evaluates on Ray."""
    outcome, _ = unkilled
    make_set(tmp_path / "set", HELD_OUT)
    run_command(
        "evaluate", outcome.path, "--data", tmp_path / "set", "--json", tmp_path / "scores.json"
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["metrics"]
    final = outcome.result["metrics"]
    assert scores == pytest.approx({name: final[name] for name in scores}, rel=1e-6)
    text = capfd.readouterr().out
    assert "median rank" in text and f"loss │ {final['loss']:.3f}" in text and "rows │ 20" in text


def test_exported_run_loads(unkilled, tmp_path, capfd):
    run_command("export", unkilled[0].path, tmp_path / "out")
    assert "mmray.load(" in capfd.readouterr().out
    assert mmray.load(tmp_path / "out").embed_texts(["a red one"]).shape == (1, 16)
