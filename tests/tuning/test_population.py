"""Population based training: who continues, how settings change, and how the run of a child is
made.
"""

import pytest

from mmray.config import from_yaml, recipes, to_yaml
from mmray.config.search_space import Range, Space
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.checkpoint import files
from mmray.errors import TrainingError, UsageError
from mmray.training.driver import train
from mmray.tuning.population import check_sweep, copy_run, next_generation
from mmray.tuning.trials import even_rungs
from tests.training import runs

SPACE = Space(
    {"optimizer.lr": Range(1e-4, 1e-2, log=True), "optimizer.weight_decay": (0.0, 0.1, 0.2)}, 8
)


def row(number, *values, lr=1e-3):
    rungs = [{"samples": 100 * n, "value": value} for n, value in enumerate(values, 1)]
    return {
        "trial": f"t{number}",
        "rungs": rungs,
        "settings": {"optimizer.lr": lr, "optimizer.weight_decay": 0.1},
    }


def test_copies_of_the_best_quarter_replace_the_worst():
    rows = [row(number, float(number)) for number in range(1, 9)]
    survivors, children = next_generation(rows, 0, 8, SPACE, maximize=False)
    assert survivors == [f"t{number}" for number in range(1, 7)]
    assert len(children) == 2 and {child.parent for child in children} <= {"t1", "t2"}
    best = next_generation(rows, 0, 8, SPACE, maximize=True)[0]
    assert best == [f"t{number}" for number in range(8, 2, -1)]
    # as in a repeated command
    assert next_generation(rows, 0, 8, SPACE, maximize=False) == (survivors, children)


def test_diverged_trials_are_replaced():
    rows = [row(1, 1.0), row(2, 2.0), row(3), row(4)]  # 3 and 4 have no finite value
    survivors, children = next_generation(rows, 0, 4, SPACE, maximize=False)
    assert survivors == ["t1"] and [child.parent for child in children] == ["t1"] * 3
    assert next_generation([row(1), row(2)], 0, 2, SPACE, maximize=False) == ([], [])
    assert next_generation([row(1, 1.0)], 0, 1, SPACE, maximize=False) == (["t1"], [])
    assert next_generation(rows, 1, 4, SPACE, maximize=False) == ([], [])  # of another rung


def test_settings_change_within_the_space():
    rows = [row(1, 1.0, lr=9e-3), row(2, 2.0), *(row(number) for number in range(3, 201))]
    children = next_generation(rows, 0, 200, SPACE, maximize=False)[1]
    rates = {child.settings["optimizer.lr"] for child in children}
    # by a factor, cut at the end
    assert {7.2e-3, 1e-2} <= rates and all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert len(rates) > 20  # drawn again
    assert {child.settings["optimizer.weight_decay"] for child in children} == {0.0, 0.1, 0.2}


def test_only_settings_of_the_optimizer_change_during_a_run():
    check_sweep(SPACE, "loss", "random")
    with pytest.raises(
        UsageError, match=r"batch\.global, optimizer\.kind cannot change during a run"
    ):
        check_sweep(
            Space({"batch.global": (64, 128), "optimizer.kind": ("adamw", "lion")}),
            "loss",
            "random",
        )
    for goal, searcher in (("memory", "random"), ("loss", "optuna")):
        with pytest.raises(UsageError, match="--scheduler pbt needs"):
            check_sweep(SPACE, goal, searcher)


def test_run_of_a_child_has_the_newest_valid_checkpoint_and_its_own_settings(tmp_path):
    parent, child = tmp_path / "t001", tmp_path / "t002"
    for step in (4, 8):
        (parent / "checkpoints" / f"step-{step}").mkdir(parents=True)
    with pytest.raises(
        TrainingError, match="t001/checkpoints has no valid checkpoint to continue from"
    ):
        copy_run(parent, child, {})
    names = (files.STATE, files.META, *files.shard_names(1))
    for step in (4, 8, 12):
        checkpoint = parent / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(exist_ok=True)
        for name in names:
            (checkpoint / name).write_text(f'{{"step": {step}}}')
        files.write_checksums(checkpoint, names, {})
    (checkpoint / files.META).write_text("damaged")
    for name in ("metrics.jsonl", "tokenizer.json", "data.json", "environment.json"):
        (parent / name).write_text(name)
    recipe = recipes.load("sample")
    (parent / "config.yaml").write_text(to_yaml(recipe))
    (parent / "result.json").write_text("{}")
    child.mkdir()
    (child / "metrics.jsonl").write_text("the rest of a killed copy")
    copy_run(parent, child, {"optimizer.lr": 0.5})
    config = from_yaml((child / "config.yaml").read_text(), "config.yaml")
    assert config == recipe.replace(optimizer=recipe.optimizer.replace(lr=0.5))
    assert [each.name for each in (child / "checkpoints").iterdir()] == ["step-8"]
    assert files.verify(child / "checkpoints" / "step-8") is None and checkpoint.exists()
    assert not (child / QUARANTINE).exists()
    assert (child / "metrics.jsonl").read_text() == "metrics.jsonl" and not (
        child / "result.json"
    ).exists()
    (child / "metrics.jsonl").write_text("trained since")
    copy_run(parent, child, {"optimizer.lr": 0.5})
    assert (child / "metrics.jsonl").read_text() == "trained since"
    (parent / QUARANTINE).write_text("{}")
    copy_run(parent, tmp_path / "t003", {})
    assert (tmp_path / "t003" / QUARANTINE).read_text() == "{}"


def test_child_trains_on_from_the_last_step_of_its_parent(tmp_path):
    made = runs.config(
        runs.make_data(tmp_path / "set"), tmp_path, "t001", steps=4, checkpoint_every=0
    )
    made = made.with_cluster(workers=1).replace(
        optimizer=made.optimizer.replace(schedule="constant")
    )
    parent = train(made, runs.Silent(), local=True).path
    child = tmp_path / "t002"
    copy_run(parent, child, {"optimizer.lr": 5e-4, "optimizer.weight_decay": 0.3})
    optimizer = made.optimizer.replace(lr=5e-4, weight_decay=0.3)
    longer = made.replace(
        optimizer=optimizer, train=made.train.replace(steps=6), run=made.run.replace(name="t002")
    )
    outcome = train(longer, runs.Silent(), local=True)
    assert outcome.path == child and outcome.result["status"] == "finished"
    assert runs.marks(child) == list(runs.expected_marks(6))
    # after the warm-up
    assert [line["train/lr"] for line in runs.lines(child)][2:] == [1e-3, 1e-3, 5e-4, 5e-4]


def test_rungs_of_a_population_have_equal_distances():
    assert even_rungs(1600, 300, 8) == (320, 640, 960, 1280, 1600)
    assert even_rungs(1600, 1, 4) == (400, 800, 1200, 1600) and even_rungs(100, 101, 8) == (100,)
