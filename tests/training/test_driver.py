"""A complete run on Ray, the same command again, and a run whose checkpoints are evaluated beside
training; tests/cluster has runs of several workers.
"""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mmray
from mmray.engine.checkpoint import files
from mmray.errors import MmrayError, UsageError
from mmray.training.driver import StartTimeline, _train, train
from mmray.training.evaluate_beside import EVENTS_DIR
from mmray.training.validate import unsupported_reasons
from tests.training.runs import STEPS, Silent, config, lines, make_data, marks
from tests.training.scripted import ScriptedBackend, fail_with, finish

EVALUATED = [3, 6, 9, 12]  # all checkpoints


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("set"))


def one_worker(data, folder, name="calm", every=3, **evaluate):
    trackers = ("tests.training.trackers:Keeping", "tests.training.trackers:Failing")
    wanted = config(data, folder, name, keep_checkpoints=9)
    wanted = wanted.with_cluster(workers=1, cpus_per_worker=1)
    return wanted.replace(
        run=wanted.run.replace(trackers=trackers),
        evaluate=wanted.evaluate.replace(every=every, **evaluate),
    )


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


def evaluated(path):
    """Metrics of the evaluations by step."""
    return {
        line["step"]: {name: each for name, each in line.items() if name.startswith("evaluate/")}
        for line in mmray.Run(path).history
        if any(name.startswith("evaluate/") for name in line)
    }


def test_metrics_and_best_beside_training_equal_those_in_training(unkilled, data, tmp_path):
    inside, _ = unkilled
    reporter = Silent()
    beside = train(one_worker(data, tmp_path, every=0, where="beside"), reporter)
    assert marks(beside.path) == marks(inside.path)
    losses = [[line["train/loss"] for line in lines(each.path)] for each in (inside, beside)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert not any("evaluate/loss" in line for line in lines(beside.path))
    expected = evaluated(inside.path)
    found = evaluated(beside.path)
    assert list(found) == list(expected) == EVALUATED
    for step in EVALUATED:
        assert found[step] == pytest.approx(expected[step], rel=1e-5), step
    best = beside.result["best"]
    assert best["step"] == inside.result["best"]["step"]
    assert best["score"] == pytest.approx(inside.result["best"]["score"])
    assert beside.result["scores"] == pytest.approx(inside.result["scores"], rel=1e-5)
    assert beside.result["metrics"]["rows"] == inside.result["metrics"]["rows"]
    record = mmray.Run(beside.path)
    assert record.metrics["recall_at_1/mean"] == beside.result["scores"]["recall_at_1/mean"]
    shown = f"held out {found[EVALUATED[0]]['evaluate/loss']:.4g} at the start"
    assert shown in (beside.path / "report.html").read_text()
    notes = [text for label, text in reporter.notes if label == "evaluate"]
    assert len(notes) == len(EVALUATED) and all("recall@1" in text for text in notes)
    events = EventAccumulator(str(beside.path / EVENTS_DIR)).Reload()
    in_events = {each.step: each.value for each in events.Scalars("evaluate/recall_at_1/mean")}
    recalls = {step: each["evaluate/recall_at_1/mean"] for step, each in found.items()}
    assert in_events == pytest.approx(recalls)
    # The best one is kept, although it has no metrics of its own.
    files.prune(beside.path / "checkpoints", 1, f"evaluate/{best['metric']}")
    kept = files.complete_steps(beside.path / "checkpoints")
    assert kept == sorted({best["step"], STEPS})


def test_settings_of_evaluation_beside_training_without_a_meaning_are_refused(data, tmp_path):
    wanted = one_worker(data, tmp_path, "beside", every=2, where="beside")
    assert any("set --train.checkpoint-every" in each for each in unsupported_reasons(wanted))
    with pytest.raises(UsageError, match=r"evaluate\.where beside needs a Ray cluster"):
        train(one_worker(data, tmp_path, "beside", every=0, where="beside"), Silent(), local=True)
    assert not (tmp_path / "beside").exists()


def test_start_that_failed_before_a_step_is_repeated_with_other_settings(data, tmp_path):
    wanted = config(data, tmp_path, "mine").with_cluster(max_failures=0)

    def start(settings, act):
        reporter = Silent()
        timeline = StartTimeline(reporter, 0.0)
        return _train(settings, timeline, ScriptedBackend([act]), lambda: False), reporter.notes

    with pytest.raises(MmrayError, match="set a lower rate"):
        start(wanted, fail_with(UsageError("set a lower rate")))
    corrected = wanted.replace(optimizer=wanted.optimizer.replace(lr=1e-4))
    outcome, notes = start(corrected, finish)
    assert (outcome.path, outcome.result["status"]) == (tmp_path / "mine", "finished")
    assert "lr: 0.0001" in (outcome.path / "config.yaml").read_text()
    assert ["its first stored step" in text for label, text in notes if label == "restarted"] == [
        True
    ]
