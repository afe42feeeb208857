"""Evaluation of checkpoints beside training, on one Ray."""

from __future__ import annotations

import pytest

import mmray
from mmray.engine.checkpoint import files
from mmray.errors import UsageError
from mmray.training.driver import train
from mmray.training.validate import unsupported_reasons
from tests.training.runs import Silent, config, lines, make_data, marks

STEPS = [2, 4, 6]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("beside") / "set")


def settings(data, folder, where, every=0):
    wanted = config(data, folder, where, steps=6, checkpoint_every=2, keep_checkpoints=9)
    evaluate = wanted.evaluate.replace(where=where, every=every)
    return wanted.replace(evaluate=evaluate).with_cluster(workers=1, cpus_per_worker=1)


def evaluated(path):
    """Metrics of the evaluations by step."""
    return {
        line["step"]: {name: each for name, each in line.items() if name.startswith("evaluate/")}
        for line in mmray.Run(path).history
        if any(name.startswith("evaluate/") for name in line)
    }


def test_metrics_and_best_equal_those_of_evaluation_in_training(local_ray, data, tmp_path):
    inside = train(settings(data, tmp_path, "training", every=2), Silent())
    reporter = Silent()
    beside = train(settings(data, tmp_path, "beside"), reporter)
    assert marks(beside.path) == marks(inside.path)
    losses = [[line["train/loss"] for line in lines(each.path)] for each in (inside, beside)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert not any("evaluate/loss" in line for line in lines(beside.path))
    expected = evaluated(inside.path)
    found = evaluated(beside.path)
    assert list(found) == list(expected) == STEPS
    for step in STEPS:
        assert found[step] == pytest.approx(expected[step], rel=1e-5), step
    best = beside.result["best"]
    assert best["step"] == inside.result["best"]["step"]
    assert best["score"] == pytest.approx(inside.result["best"]["score"])
    assert beside.result["scores"] == pytest.approx(inside.result["scores"], rel=1e-5)
    assert beside.result["metrics"]["rows"] == inside.result["metrics"]["rows"]
    record = mmray.Run(beside.path)
    assert record.metrics["recall_at_1/mean"] == beside.result["scores"]["recall_at_1/mean"]
    assert "held out 2" in (beside.path / "report.html").read_text()
    notes = [text for label, text in reporter.notes if label == "evaluate"]
    assert len(notes) == len(STEPS) and all("recall@1" in text for text in notes)
    # The best one is kept, although it has no metrics of its own.
    files.prune(beside.path / "checkpoints", 1, f"evaluate/{best['metric']}")
    kept = files.complete_steps(beside.path / "checkpoints")
    assert kept == sorted({best["step"], 6})


def test_settings_without_a_meaning_are_refused(data, tmp_path):
    wanted = settings(data, tmp_path, "beside", every=2)
    assert any("set --train.checkpoint-every" in each for each in unsupported_reasons(wanted))
    with pytest.raises(UsageError, match=r"evaluate\.where beside needs a Ray cluster"):
        train(settings(data, tmp_path, "beside"), Silent(), local=True)
    assert not (tmp_path / "beside").exists()
