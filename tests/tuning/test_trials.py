"""From recipe and space to trials and their runs, and back to a recipe."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from mmray.cluster import placement
from mmray.cluster.capacity import Node
from mmray.config import Config, Train, recipes
from mmray.errors import ResourceError, UsageError
from mmray.tuning.ray_tune import train_to_rung
from mmray.tuning.rungs import rungs_up_to
from mmray.tuning.search import prepare_data
from mmray.tuning.trials import (
    DEFAULT_STEPS,
    EVAL_ROWS,
    SweepRequest,
    TrialData,
    build_plan,
    corner_trials,
    default_axes,
    warmup_warning,
)
from tests.spaces import parse_space
from tests.training import runs

SAMPLE = recipes.load("sample").with_cluster(workers=2)  # micro and global 128, 300 steps
FOLDER = Path("/sweeps/one")


def trials(*given, base=SAMPLE, goal="throughput"):
    return corner_trials(base, parse_space(given), goal)


def plan_of(*given, goal="loss", base=SAMPLE, num_rows=3000, **length):
    """The plan of a sweep with this length of a trial."""
    space = parse_space(given)
    request = SweepRequest(base, Train(**length), space, goal)
    plan = build_plan(request, corner_trials(base, space, goal), TrialData(num_rows=num_rows))
    return replace(plan, folder=FOLDER)


def test_recipe_is_the_trial_with_its_listed_value_or_with_its_rounded_drawn_value():
    rates = [1.0001e-3, 1e-3, 1.0004e-3]
    base = SAMPLE.replace(optimizer=SAMPLE.optimizer.replace(lr=1e-3))
    for axis, expected in (
        (",".join(map(str, rates)), [False, True, False]),
        ("loguniform(1e-4,1e-2)", [True, True, True]),
    ):
        plan = plan_of(f"optimizer.lr={axis}", base=base)
        assert [plan.is_recipe({"optimizer.lr": rate}) for rate in rates] == expected


def test_throughput_of_a_vision_language_model_is_searched_by_tokens():
    """Also of a recipe with `batch.micro`; values below the longest row are not tried."""
    base = recipes.load("sample-vlm")
    [(key, values)] = default_axes(base, "throughput").items()
    found = trials(f"{key}={values}", base=base)
    assert [each.infeasible for each in found] == [None] * 4
    assert [each.shape.micro_tokens for each in found] == [128, 256, 512, 1024]
    plan = plan_of(f"{key}={values}", base=base, goal="throughput")
    best = plan.best_recipe(plan.trial("t001", {"batch.tokens": 256})).batch
    assert (best.tokens, best.micro, best.global_) == (256, None, base.batch.global_)
    shorter, _ = trials("batch.tokens=64,256", base=base)
    assert "model.inputs.max_tokens" in shorter.infeasible
    with pytest.raises(UsageError, match="--goal throughput"):
        trials("batch.tokens=256", base=base, goal="loss")


@pytest.mark.parametrize(
    ("given", "shapes"),
    [  # (micro, accumulation, global)
        (["batch.micro=16,32,64"], [(16, 4, 128), (32, 2, 128), (64, 1, 128)]),
        (
            ["batch.micro=8,16", "batch.accumulation=1,2"],
            [(8, 1, 16), (8, 2, 32), (16, 1, 32), (16, 2, 64)],
        ),
    ],
)
def test_searched_accumulation_sets_the_global_batch_and_otherwise_follows_it(given, shapes):
    result = [trial.shape for trial in trials(*given)]
    assert [
        (shape.micro_batch_size, shape.accumulation, shape.global_batch_size) for shape in result
    ] == shapes


def test_impossible_batch_arithmetic_makes_only_its_trial_infeasible():
    one, other = trials("batch.micro=32,128")
    assert one.shape is not None and one.infeasible is None
    assert (
        other.shape is None
        and ("64 rows per worker (batch.global 128 on 2 workers)") in other.infeasible
    )
    contradicting = trials(
        "batch.accumulation=1,2", base=SAMPLE.replace(batch=SAMPLE.batch.replace(micro=32))
    )
    assert [t.infeasible is None for t in contradicting] == [False, True]
    with pytest.raises(UsageError, match="no combination is feasible"):
        trials("batch.micro=128,256")


def test_micro_batch_follows_a_searched_global_batch():
    small, large = trials(
        "batch.global=32,256", base=SAMPLE.replace(batch=SAMPLE.batch.replace(micro=64))
    )
    assert (small.shape.micro_batch_size, small.shape.accumulation) == (16, 1)
    assert (large.shape.micro_batch_size, large.shape.accumulation) == (64, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("batch.micr=8", "batch.micr: unknown setting; did you mean `micro`"),
        ("batch.micro=8,0", r"batch.micro: input should be greater than or equal to 1 \(got '0'\)"),
        ("train.precision=fp32,fp8", "train.precision"),
        ("data.train=one,two", "--space data.train: trials are compared on one set"),
    ],
)
def test_value_invalid_in_all_trials_is_a_usage_error(given, message):
    with pytest.raises(UsageError, match=message):
        trials(given, "optimizer.lr=1e-4,3e-4")


def test_global_batch_above_the_rows_of_the_set_makes_only_its_trial_infeasible(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("mmray.tuning.search.check_capacity", lambda config: None)
    base = runs.config(runs.make_data(tmp_path / "set"), tmp_path, "sweep")  # 50 rows
    both = trials("batch.global=32,64", base=base, goal="loss")
    feasible, data = prepare_data(both, "loss", runs.Silent())
    assert ([trial.settings for trial in feasible], data.num_rows) == (
        [{"batch.global": 32}],
        50,
    )
    assert data.held_out_rows == len(runs.HELD_OUT)
    assert data.sets["train"] == str(tmp_path / "set")
    with pytest.raises(UsageError, match="64 rows per step are more than the 50 rows"):
        prepare_data(both[1:], "loss", runs.Silent())


def test_all_trials_train_on_the_same_number_of_samples():
    axes = ("batch.micro=16,64", "batch.accumulation=1,2")  # global 32, 64, 128, 256
    lengths = [
        ({}, DEFAULT_STEPS * 256),
        ({"steps": 6}, 6 * 256),
        ({"samples": 1000}, 1000),
        ({"epochs": 2}, 24 * 256),  # 3,000 rows
    ]
    for length, samples in lengths:
        assert plan_of(*axes, goal="throughput", **length).rungs == (samples,)
    plan = plan_of(*axes, goal="throughput", steps=6)
    result = [
        plan.run_config(replace(trial, name=f"t{number}"), 6 * 256)
        for number, trial in enumerate(trials(*axes))
    ]
    assert {run.train.samples for run in result} == {6 * 256} and {
        run.train.steps for run in result
    } == {None}
    # 48, 24, 12, 6 steps: about ten log lines each
    assert [run.train.log_every for run in result] == [4, 2, 1, 1]
    assert (result[0].run.storage, result[0].run.name) == ("/sweeps/one/trials", "t0")
    assert result[0].evaluate.limit == EVAL_ROWS
    assert result[0].optimizer == SAMPLE.optimizer


def test_learning_trials_have_rungs_and_warmup_in_samples_and_a_constant_rate():
    """The recipe: 350 steps of 128 rows, 30 of them warm-up. A rung has at least two warm-ups."""
    plan = plan_of("batch.global=64,128,512")
    assert plan.rungs == (300 * 128 // 4, 300 * 128)
    assert plan.rungs[0] >= 2 * 30 * 128 > plan.rungs[0] // 4
    for rows, steps in ((64, 60), (128, 30), (512, 8)):
        trial = plan.trial("t001", {"batch.global": rows})
        config = plan.run_config(trial, plan.rungs[0])
        assert (config.optimizer.warmup_steps, config.optimizer.schedule) == (steps, "constant")
        # so that losses of different global batches are comparable
        assert config.evaluate.loss_batch == 128
        assert config.train.samples == plan.rungs[0]
        assert config.evaluate.every == max(1, math.ceil(plan.rungs[0] / rows) // 4)
        assert config.evaluate.limit == SAMPLE.evaluate.limit
    plan = plan_of("batch.global=64,128", "optimizer.warmup_steps=10,30")
    searched = plan.trial("t001", {"batch.global": 64, "optimizer.warmup_steps": 10})
    assert plan.run_config(searched, plan.rungs[0]).optimizer.warmup_steps == 20


@pytest.mark.parametrize(
    ("held_out", "limit", "every"),
    [(100, None, 18), (400, None, 22), (2000, None, 75), (2000, 500, 28)],
)
def test_evaluations_cost_at_most_a_twentieth_of_training(held_out, limit, every):
    """At least one and at most four of them to the first rung, which has 75 steps."""
    base = SAMPLE.replace(evaluate=SAMPLE.evaluate.replace(limit=limit))
    data = TrialData(held_out_rows=held_out)
    plan = replace(plan_of("batch.global=128", base=base), data=data)
    assert (
        plan.run_config(plan.trial("t001", {"batch.global": 128}), plan.rungs[0]).evaluate.every
        == every
    )


@pytest.mark.parametrize(
    ("samples", "min_samples", "rungs"),
    [
        (1600, 100, (100, 400, 1600)),
        (1600, 101, (400, 1600)),
        (1600, 1, (100, 400, 1600)),
        (1600, 401, (1600,)),
    ],
)
def test_each_rung_has_four_times_the_samples(samples, min_samples, rungs):
    assert rungs_up_to(samples, min_samples) == rungs


def test_lost_node_restarts_a_trial_once():
    plan = plan_of("batch.global=64")
    trial = plan.trial("t1", {"batch.global": 64})
    configs = [replace(plan, local=local).run_config(trial, 64) for local in (True, False)]
    assert [config.cluster.max_failures for config in configs] == [0, 1]


def test_trials_without_a_rung_after_the_warmup_are_reported():
    assert warmup_warning(plan_of("batch.global=64,128")) is None
    short = plan_of("batch.global=64,128", samples=3000)
    assert "trials end during warm-up (3,000 of 3,840 samples)" in warmup_warning(short)
    single = plan_of("batch.global=64,128", samples=20_000)
    assert single.rungs == (20_000,) and (
        "20,000 samples are too few for two rungs"
    ) in warmup_warning(single)


def test_default_space_is_the_learning_rate():
    assert default_axes(SAMPLE, "loss") == {"optimizer.lr": "loguniform(0.0002,0.02)"}


@pytest.mark.parametrize("key", ["batch.micro", "batch.accumulation"])
def test_division_of_the_global_batch_is_searched_for_throughput_only(key):
    trials(f"{key}=1", base=SAMPLE.replace(batch=SAMPLE.batch.replace(micro=None)))
    with pytest.raises(UsageError, match=f"--space {key}: --goal loss depends on the global batch"):
        trials(f"{key}=1", goal="loss")


@pytest.mark.parametrize(
    ("given", "goal", "message"),
    [
        ("evaluate.loss_batch=8,16", "loss", "trials are compared by one evaluation"),
        ("data.eval_captions=a,b", "recall", "trials are compared on one set"),
        ("optimizer.schedule=cosine,linear", "recall", "constant learning rate after the warm-up"),
        ("optimizer.final_lr_fraction=0,0.1", "loss", "constant learning rate after the warm-up"),
        ("objective.kind=contrastive,sigmoid", "loss", "losses of two objectives are not comp"),
    ],
)
def test_settings_that_trials_override_or_are_compared_by_are_not_searched(given, goal, message):
    with pytest.raises(UsageError, match=f"--space {given.partition('=')[0]}: .*{message}"):
        trials(given, goal=goal)


@pytest.mark.parametrize(
    "given",
    ["data.targets=all,last", "data.reasoning=trained,masked", "model.inputs.max_tokens=64,128"],
)
def test_settings_that_select_held_out_tokens_are_not_searched_for_loss(given):
    base = recipes.load("sample-vlm")
    with pytest.raises(UsageError, match=r"would be of different tokens, so not comparable"):
        trials(given, goal="loss", base=base)
    assert len(trials("model.inputs.max_tokens=16,32", goal="loss")) == 2  # of a dual encoder


@pytest.mark.parametrize("goal", ["recall", "throughput"])
def test_weights_that_define_the_inputs_of_a_run_are_not_searched(goal):
    base = recipes.load("clip")
    with pytest.raises(UsageError, match=r"--space model\.weights: weights define image size"):
        trials("model.weights=none,other", goal=goal, base=base)


def test_trial_of_elastic_recipe_has_fixed_workers():
    elastic = SAMPLE.with_cluster(workers="1-4")
    plan = plan_of("batch.micro=16", goal="throughput", base=elastic)
    trial = plan.trial("t001", {"batch.micro": 16})
    run = plan.run_config(trial, 1000)
    assert (run.cluster.min_workers, run.cluster.max_workers, trial.shape.world_size) == (4, 4, 4)
    assert plan.best_recipe(trial).cluster == elastic.cluster


def test_best_recipe_trains_on_as_many_samples_as_the_recipe():
    axes = ("batch.micro=16", "batch.accumulation=2", "optimizer.lr=1e-4")
    settings = {"batch.micro": 16, "batch.accumulation": 2, "optimizer.lr": 1e-4}
    plan = plan_of(*axes, goal="throughput", steps=6)
    best = plan.best_recipe(plan.trial("t001", settings))
    assert (best.batch.micro, best.batch.global_, best.batch.accumulation) == (16, 64, None)
    assert (best.train.steps, best.optimizer.lr, best.run.name) == (
        2 * SAMPLE.train.steps,
        1e-4,
        None,
    )  # as many samples
    assert best.optimizer.warmup_steps == 2 * SAMPLE.optimizer.warmup_steps
    assert (
        best.data == SAMPLE.data
        and best.evaluate == SAMPLE.evaluate
        and best.cluster == SAMPLE.cluster
    )
    assert best.optimizer.schedule == SAMPLE.optimizer.schedule
    assert Config.model_validate(best.model_dump(mode="json", by_alias=True)) == best
    learned = plan_of("batch.global=64,128")
    recipe = learned.best_recipe(learned.trial("t001", {"batch.global": 64}))
    # as it was searched
    assert (recipe.optimizer.schedule, recipe.optimizer.warmup_steps) == ("cooldown", 60)
    assert recipe.train.steps == 2 * SAMPLE.train.steps  # as many samples as the recipe
    assert recipe.evaluate.loss_batch == 128  # so that its loss is comparable with the recipe's


class Ended(NamedTuple):
    path: Path
    result: dict[str, str]


def test_trial_trains_to_a_rung(tmp_path, monkeypatch):
    trained, statuses = [], iter(["finished", "finished", "stopped"])

    def train(config, reporter, should_stop, local, check_storage):
        trained.append((config.train.samples, should_stop()))
        (tmp_path / "metrics.jsonl").write_text(
            f'{{"step": 1, "rows_stop": 1, "evaluate/loss": {len(trained)}}}\n'
        )
        return Ended(tmp_path, {"status": next(statuses)})

    monkeypatch.setattr("mmray.tuning.ray_tune.train", train)
    monkeypatch.setattr("mmray.tuning.ray_tune.check_capacity", lambda config: None)
    plan = replace(plan_of("batch.global=64,128"), folder=tmp_path, rungs=(100, 400, 1600))
    trial = plan.trial("t001", {"batch.global": 64})
    ends = [train_to_rung(trial, plan, rung, runs.Silent()) for rung in (1, 2, 0)]
    assert [(outcome.status, value) for outcome, value in ends] == [
        ("paused", 1),
        ("finished", 2),
        ("stopped", None),
    ]
    assert trained == [(400, False), (1600, False), (100, False)]
    (tmp_path / "stop").touch()
    assert train_to_rung(trial, plan, 0, runs.Silent())[0].status == "stopped"
    assert len(trained) == 3


def test_trial_with_too_few_gpus_is_infeasible_and_others_run(tmp_path, monkeypatch):
    for name in ("alive_nodes", "free_nodes"):
        monkeypatch.setattr(placement, name, lambda: [Node({"CPU": 16.0, "GPU": 2.0})])
    monkeypatch.setattr(placement, "autoscaling_pools", list)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})
    base = runs.config(runs.make_data(tmp_path / "set"), tmp_path, "sweep")
    corners = trials("cluster.workers=1,2,4,1-4", base=base)
    feasible, _ = prepare_data(corners, "throughput", runs.Silent())
    assert [trial.config.cluster.max_workers for trial in feasible] == [1, 2]
    plan = replace(plan_of("cluster.workers=1,2", goal="throughput", base=base), folder=tmp_path)
    outcome, _ = train_to_rung(corners[2], plan, 0, runs.Silent())
    assert (
        outcome.status == "infeasible"
        and "4 training workers of 2 CPU and 1 GPU each" in outcome.error
    )
    with pytest.raises(ResourceError, match=r"--cluster.workers 2 would fit"):
        prepare_data(corners[2:], "throughput", runs.Silent())
