"""From recipe and space to trials: typed and validated, equal in samples, and back to a recipe."""

from pathlib import Path

import pytest

from mmray.config import Config, recipes
from mmray.config.search_space import parse_space
from mmray.errors import UsageError
from mmray.tune.trials import (
    STEPS,
    reset_searched,
    restore_length,
    samples_per_trial,
    to_recipe,
    trial_config,
    trials_of,
    warmup_warning,
)

SAMPLE = recipes.load("sample")  # micro 64, global 128, 2 workers, 500 steps


def trials(*given, base=SAMPLE, samples=None):
    return trials_of(base, parse_space(given, samples))


def set_batch(config, **batch):
    return config.model_copy(update={"batch": config.batch.model_copy(update=batch)})


def set_train(config, **train):
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def test_values_get_the_types_of_their_settings():
    found = trials("optimizer.lr=1e-4,3e-4", "train.precision=fp32,bf16", "data.shuffle=false", "data.workers=auto,2")
    assert found[0].settings == {
        "optimizer.lr": 1e-4,
        "train.precision": "fp32",
        "data.shuffle": False,
        "data.workers": "auto",
    }
    assert found[-1].config.optimizer.lr == 3e-4 and found[-1].config.data.workers == 2
    assert [trial.name for trial in found] == [f"t{number:03}" for number in range(1, 9)]


def test_searched_accumulation_sets_the_global_batch():
    base = reset_searched(SAMPLE, ["batch.micro", "batch.accumulation"])
    shapes = [t.shape for t in trials("batch.micro=8,16", "batch.accumulation=1,2", base=base)]
    assert [(s.micro, s.accumulation, s.global_rows) for s in shapes] == [
        (8, 1, 16),
        (8, 2, 32),
        (16, 1, 32),
        (16, 2, 64),
    ]


def test_global_batch_sets_the_accumulation():
    shapes = [trial.shape for trial in trials("batch.micro=16,32,64")]
    assert [(s.micro, s.accumulation, s.global_rows) for s in shapes] == [(16, 4, 128), (32, 2, 128), (64, 1, 128)]
    assert reset_searched(SAMPLE, ["batch.micro"]).batch.global_ == 128


def test_impossible_batch_arithmetic_makes_only_its_trial_infeasible():
    one, other = trials("batch.micro=32,128")
    assert one.shape is not None and one.infeasible is None
    assert other.shape is None and "a worker's share of 128 rows over 2 workers is 64" in other.infeasible
    contradicting = trials("batch.accumulation=1,2", base=set_batch(SAMPLE, micro=32))
    assert [t.infeasible is None for t in contradicting] == [False, True]
    with pytest.raises(UsageError, match="no combination is feasible"):
        trials("batch.micro=128,256")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("batch.micr=8", "batch.micr: unknown setting; did you mean `micro`"),
        ("btach.micro=8", "did you mean `batch`"),
        ("batch.micro=8,0", r"batch.micro: input should be greater than or equal to 1 \(got '0'\)"),
        ("train.precision=fp32,fp8", "train.precision"),
        ("model.image=resnet50", "it is a group of settings; name one of them, as model.image.name"),
        ("batch.micro.rows=8", "`micro` is one setting, not a group"),
    ],
)
def test_value_invalid_in_all_trials_is_a_usage_error(given, said):
    with pytest.raises(UsageError, match=said):
        trials(given, "optimizer.lr=1e-4,3e-4")


def test_all_trials_train_on_the_same_number_of_samples():
    base = reset_searched(SAMPLE, ["batch.micro", "batch.accumulation"])
    found = trials("batch.micro=16,64", "batch.accumulation=1,2", base=base)  # global 32, 64, 128, 256
    assert samples_per_trial(base, found, 3000) == STEPS * 256
    assert samples_per_trial(set_train(base, steps=6), found, 3000) == 6 * 256
    assert samples_per_trial(set_train(base, samples=1000), found, 3000) == 1000
    assert samples_per_trial(set_train(base, epochs=2), found, 3000) == 6000
    runs = [trial_config(trial, 6 * 256, 10_000, Path("/sweeps/one"), "throughput") for trial in found]
    assert {run.train.samples for run in runs} == {6 * 256} and {run.train.steps for run in runs} == {None}
    assert [run.train.log_every for run in runs] == [4, 2, 1, 1]  # 48, 24, 12, 6 steps: about ten log lines each
    assert (runs[0].run.storage, runs[0].run.name) == ("/sweeps/one/trials", "t001")
    assert runs[0].cluster.max_failures == 0 and runs[0].evaluate.limit == 512
    assert trial_config(found[0], 100, 1000, Path("/sweeps/one"), "recall").evaluate.limit is None


def test_trial_of_elastic_recipe_has_fixed_workers():
    elastic = SAMPLE.with_cluster(workers="1-4")
    trial = trials("batch.micro=16", base=elastic)[0]
    run = trial_config(trial, 1000, 10_000, Path("/sweeps/one"), "throughput")
    assert (run.cluster.min_workers, run.cluster.max_workers, trial.shape.workers) == (4, 4, 4)
    assert to_recipe(trial).cluster == elastic.cluster


def test_loss_within_warm_up_is_warned_about():
    runs = [trial_config(trial, 30 * 128, 10_000, Path("/sweeps/one"), "loss") for trial in trials("batch.micro=32,64")]
    assert "t001 ends during warm-up (30 of 30 steps)" in warmup_warning(runs, 10_000, "loss")
    assert warmup_warning(runs, 10_000, "throughput") is None
    longer = [trial_config(trial, 31 * 128, 10_000, Path("/sweeps/one"), "loss") for trial in trials("batch.micro=64")]
    assert warmup_warning(longer, 10_000, "loss") is None


def test_best_recipe_keeps_the_original_length():
    typed = set_train(reset_searched(SAMPLE, ["batch.accumulation"]), steps=6)
    base = restore_length(typed, SAMPLE)
    assert base.train == SAMPLE.train
    trial = trials("batch.micro=16", "batch.accumulation=2", "optimizer.lr=1e-4", base=base)[0]
    best = to_recipe(trial)
    assert (best.batch.micro, best.batch.global_, best.batch.accumulation) == (16, 64, None)
    assert (best.train.steps, best.optimizer.lr, best.run.name) == (SAMPLE.train.steps, 1e-4, None)
    assert best.data == SAMPLE.data and best.evaluate == SAMPLE.evaluate and best.cluster == SAMPLE.cluster
    assert Config.model_validate(best.model_dump(mode="json", by_alias=True)) == best
