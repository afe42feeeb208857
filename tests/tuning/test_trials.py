"""From recipe and space to trials and back to a recipe; the number of concurrent trials."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from mmray.cluster import placement as cluster
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool
from mmray.cluster.placement import ROLE_LABEL, parse_launcher_config
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster, Config, recipes
from mmray.config.search_space import Range, Space, parse_space
from mmray.engine.optimizer import lr_at
from mmray.errors import ResourceError, UsageError
from mmray.tuning.ray_tune import sized, train_rungs
from mmray.tuning.search import check_corners, plan_share
from mmray.tuning.sweep import Sweep
from mmray.tuning.trials import (
    DEFAULT_STEPS,
    EVAL_ROWS,
    FeasibleSpace,
    Share,
    build_plan,
    build_trial,
    clear_length_and_derived_batch,
    corner_trials,
    default_axes,
    larger_than_out_of_memory,
    parse_values,
    restore_length,
    rungs_of,
    starting_points,
    trial_concurrency,
    warmup_warning,
)
from tests.training import runs

SAMPLE = recipes.load("sample").with_cluster(workers=2)  # micro and global 128, 300 steps
FOLDER = Path("/sweeps/one")
# 8 x 16 CPUs, 4 x 1 GPU
CLUSTER_YAML = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())
POOLS = parse_launcher_config(CLUSTER_YAML)
HEAD = Node({HEAD_RESOURCE: 1.0}, {ROLE_LABEL: "head"})
ON_ROLES = Demand(1, {"CPU": 1.0, "GPU": 1.0}, 2, {ROLE_LABEL: "train"}, {ROLE_LABEL: "data"})
TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0}, data_cpus=2)
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0}, data_cpus=3)


def trials(*given, base=SAMPLE):
    return corner_trials(base, parse_space(given, None))


def plan_of(*given, goal="loss", base=SAMPLE, num_rows=3000, settings=None):
    """The plan of a sweep; `settings` has the length of a trial."""
    space = parse_space(given, None)
    corners = corner_trials(base, space)
    length = clear_length_and_derived_batch(base, []) if settings is None else settings
    return build_plan(
        length,
        base,
        space,
        goal,
        FeasibleSpace(corners, num_rows=num_rows),
        folder=FOLDER,
        recipe_rows=128,
    )


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
    base = clear_length_and_derived_batch(SAMPLE, [each.partition("=")[0] for each in given])
    result = [trial.shape for trial in trials(*given, base=base)]
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
    both = trials("batch.global=32,64", base=base)
    feasible = check_corners(both, "loss", runs.Silent())
    assert ([trial.settings for trial in feasible.corners], feasible.num_rows) == (
        [{"batch.global": 32}],
        50,
    )
    assert feasible.held_out_rows == len(runs.HELD_OUT)
    assert [each["train"] for each in feasible.data_sets.values()] == [str(tmp_path / "set")]
    with pytest.raises(UsageError, match="64 rows per step are more than the 50 rows"):
        check_corners(both[1:], "loss", runs.Silent())


def test_all_trials_train_on_the_same_number_of_samples():
    base = clear_length_and_derived_batch(SAMPLE, ["batch.micro", "batch.accumulation"])
    axes = ("batch.micro=16,64", "batch.accumulation=1,2")  # global 32, 64, 128, 256
    lengths = [
        ({}, DEFAULT_STEPS * 256),
        ({"steps": 6}, 6 * 256),
        ({"samples": 1000}, 1000),
        ({"epochs": 2}, 6000),
    ]
    for length, samples in lengths:
        settings = base.replace(train=base.train.replace(**length))
        assert plan_of(*axes, goal="memory", base=base, settings=settings).rungs == (samples,)
    plan = plan_of(
        *axes, goal="memory", base=base, settings=base.replace(train=base.train.replace(steps=6))
    )
    result = [
        plan.config(replace(trial, name=f"t{number}"), 6 * 256)
        for number, trial in enumerate(trials(*axes, base=base))
    ]
    assert {run.train.samples for run in result} == {6 * 256} and {
        run.train.steps for run in result
    } == {None}
    # 48, 24, 12, 6 steps: about ten log lines each
    assert [run.train.log_every for run in result] == [4, 2, 1, 1]
    assert (result[0].run.storage, result[0].run.name) == ("/sweeps/one/trials", "t0")
    assert result[0].evaluate.limit == EVAL_ROWS
    assert result[0].optimizer == base.optimizer


def test_learning_trials_have_rungs_and_warmup_in_samples_and_a_constant_rate():
    """The recipe: 350 steps of 128 rows, 30 of them warm-up. A rung has at least two warm-ups."""
    plan = plan_of("batch.global=64,128,512")
    assert (
        plan.rungs == (300 * 128 // 4, 300 * 128)
        and plan.rungs[0] >= 2 * 30 * 128 > plan.rungs[0] // 4
    )
    for rows, steps in ((64, 60), (128, 30), (512, 8)):
        trial = plan.trial("t001", {"batch.global": rows})
        config = plan.config(trial, plan.rungs[0])
        assert (config.optimizer.warmup_steps, config.optimizer.schedule) == (steps, "constant")
        # so that losses of different global batches are comparable
        assert config.evaluate.loss_batch == 128
        assert config.train.samples == plan.rungs[0]
        assert config.evaluate.every == max(1, math.ceil(plan.rungs[0] / rows) // 4)
        assert config.evaluate.limit == SAMPLE.evaluate.limit
    searched = plan.trial("t001", {"batch.global": 64, "optimizer.warmup_steps": 10})
    assert plan.config(searched, plan.rungs[0]).optimizer.warmup_steps == 20


@pytest.mark.parametrize(
    ("held_out", "limit", "every"),
    [(100, None, 18), (400, None, 22), (2000, None, 75), (2000, 500, 28)],
)
def test_evaluations_cost_at_most_a_twentieth_of_training(held_out, limit, every):
    """At least one and at most four of them to the first rung, which has 75 steps."""
    base = SAMPLE.replace(evaluate=SAMPLE.evaluate.replace(limit=limit))
    plan = replace(plan_of("batch.global=128", base=base), held_out_rows=held_out)
    assert (
        plan.config(plan.trial("t001", {"batch.global": 128}), plan.rungs[0]).evaluate.every
        == every
    )


def test_rate_decays_only_after_the_last_rung():
    plan = plan_of("batch.global=64,128")
    trial = plan.trial("t001", {"batch.global": 128})
    full = plan.config(trial, plan.rungs[-1])
    cooled = plan.config(trial, plan.cooldown_samples(trial), cooldown=True)
    steps, total = (-(-config.train.samples // 128) for config in (full, cooled))
    rates = [
        [lr_at(step, config.optimizer, last) for step in range(steps)]
        for config, last in ((full, steps), (cooled, total))
    ]
    assert rates[0] == pytest.approx(rates[1])
    assert lr_at(steps + 2, cooled.optimizer, total) < full.optimizer.lr and total < 1.26 * steps


@pytest.mark.parametrize(
    ("samples", "shortest", "rungs"),
    [
        (1600, 100, (100, 400, 1600)),
        (1600, 101, (400, 1600)),
        (1600, 1, (100, 400, 1600)),
        (1600, 401, (1600,)),
    ],
)
def test_each_rung_has_four_times_the_samples(samples, shortest, rungs):
    assert rungs_of(samples, shortest) == rungs


def test_rate_does_not_decay_in_the_warmup():
    # 300 steps
    trials_of = {
        warmup: plan_of(f"optimizer.warmup_steps={warmup}") for warmup in (20, 299, 300, 2000)
    }
    can = {
        warmup: plan.can_cool_down(plan.trial("t1", {"optimizer.warmup_steps": warmup}))
        for warmup, plan in trials_of.items()
    }
    assert can == {20: True, 299: True, 300: False, 2000: False}
    plan = plan_of("batch.global=64,128", goal="memory")
    assert not plan.can_cool_down(plan.trial("t1", {"batch.global": 64}))


def test_lost_node_restarts_a_trial_once():
    plan = plan_of("batch.global=64")
    trial = plan.trial("t1", {"batch.global": 64})
    assert [
        replace(plan, local=local).config(trial, 64).cluster.max_failures for local in (True, False)
    ] == [0, 1]


def test_trials_without_a_rung_after_the_warmup_are_reported():
    assert warmup_warning(plan_of("batch.global=64,128")) is None
    long = clear_length_and_derived_batch(SAMPLE, [])
    short = plan_of(
        "batch.global=64,128", settings=long.replace(train=long.train.replace(samples=3000))
    )
    assert "trials end during warm-up (3,000 of 3,840 samples)" in warmup_warning(short)
    single = plan_of(
        "batch.global=64,128", settings=long.replace(train=long.train.replace(samples=20_000))
    )
    assert single.rungs == (20_000,) and (
        "20,000 samples are too few for two rungs"
    ) in warmup_warning(single)


def test_starting_points_scale_the_rate_with_the_global_batch():
    space = parse_space(["optimizer.lr=loguniform(1e-5,1e-1)", "batch.global=32,128,512"], 24)
    points = starting_points(SAMPLE, parse_values(SAMPLE, space))
    assert points[0] == {"optimizer.lr": 2e-3, "batch.global": 128}
    rates = {(point["batch.global"], point["optimizer.lr"]) for point in points[1:]}
    assert rates == {(512, 4e-3), (32, 1e-3), (512, 8e-3), (32, 5e-4)}
    # a grid has them all
    assert starting_points(SAMPLE, parse_space(["batch.global=32,128"])) == []
    narrow = parse_space(["optimizer.lr=loguniform(5e-3,1e-1)"], 24)
    assert starting_points(SAMPLE, narrow) == []  # the recipe's own rate is outside
    few = parse_space(["optimizer.lr=loguniform(1e-5,1e-1)", "batch.global=32,128,512"], 4)
    assert len(starting_points(SAMPLE, parse_values(SAMPLE, few))) == 2


def test_default_space_is_the_learning_rate_of_goals_that_depend_on_it():
    assert default_axes(SAMPLE, "loss") == {"optimizer.lr": "loguniform(0.0002,0.02)"}
    assert default_axes(SAMPLE, "memory") == {}


def test_trial_as_large_as_one_that_ran_out_of_memory_does_not_start():
    def oom(micro, **settings):
        return {
            "trial": "t001",
            "status": "out_of_memory",
            "micro": micro,
            "workers": 2,
            "settings": settings,
            "rungs": [],
        }

    base = SAMPLE.replace(batch=SAMPLE.batch.replace(micro=32))
    trial = build_trial(base, "t002", {"optimizer.lr": 1e-3})
    assert ("t001 ran out of memory with micro-batches of 32") in larger_than_out_of_memory(
        trial, [oom(32)]
    )
    assert larger_than_out_of_memory(trial, [oom(16, **{"optimizer.lr": 1.0, "batch.micro": 16})])
    assert larger_than_out_of_memory(trial, [oom(64)]) is None
    assert larger_than_out_of_memory(trial, [oom(32, **{"train.precision": "fp32"})]) is None
    assert larger_than_out_of_memory(trial, [oom(32, **{"optimizer.kind": "lion"})]) is None
    assert larger_than_out_of_memory(trial, [oom(32) | {"status": "failed"}]) is None
    # it had trained with them
    assert larger_than_out_of_memory(trial, [oom(32) | {"rungs": [{}]}]) is None


def test_trial_of_elastic_recipe_has_fixed_workers():
    elastic = SAMPLE.with_cluster(workers="1-4")
    plan = plan_of("batch.micro=16", goal="memory", base=elastic)
    trial = plan.trial("t001", {"batch.micro": 16})
    run = plan.config(trial, 1000)
    assert (run.cluster.min_workers, run.cluster.max_workers, trial.shape.world_size) == (4, 4, 4)
    assert plan.recipe(trial).cluster == elastic.cluster


def test_best_recipe_trains_on_as_many_samples_as_the_recipe():
    typed = clear_length_and_derived_batch(SAMPLE, ["batch.accumulation"])
    base = restore_length(typed.replace(train=typed.train.replace(steps=6)), SAMPLE)
    assert base.train == SAMPLE.train
    axes = ("batch.micro=16", "batch.accumulation=2", "optimizer.lr=1e-4")
    settings = {"batch.micro": 16, "batch.accumulation": 2, "optimizer.lr": 1e-4}
    plan = plan_of(*axes, goal="memory", base=base)
    best = plan.recipe(plan.trial("t001", settings))
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
    recipe = learned.recipe(learned.trial("t001", {"batch.global": 64}))
    # as it was searched
    assert (recipe.optimizer.schedule, recipe.optimizer.warmup_steps) == ("cooldown", 60)
    assert recipe.train.steps == 2 * SAMPLE.train.steps  # as many samples as the recipe


class Ended(NamedTuple):
    path: Path
    result: dict[str, str]


def test_trial_trains_from_rung_to_rung_and_skips_those_that_are_done(tmp_path, monkeypatch):
    trained, reported, statuses = [], [], iter(["finished", "finished", "stopped"])

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
    assert train_rungs(trial, plan, 1, 3, runs.Silent(), reported.append).status == "finished"
    assert reported == [{"samples": 400, "value": 1}, {"samples": 1600, "value": 2}]
    assert train_rungs(trial, plan, 0, 1, runs.Silent(), reported.append).status == "stopped"
    assert train_rungs(trial, plan, 1, 1, runs.Silent(), reported.append).status == "paused"
    assert trained == [(400, False), (1600, False), (100, False)] and len(reported) == 2
    (tmp_path / "stop").touch()
    assert (
        train_rungs(trial, plan, 0, 3, runs.Silent(), reported.append).status == "stopped"
        and len(trained) == 3
    )


def nodes(count, group=None, role=None, **resources):
    return [Node(resources, {NODE_GROUP: group, ROLE_LABEL: role} if group else None)] * count


CPUS_8, CPUS_16 = nodes(1, CPU=8.0), nodes(1, CPU=16.0)
GPUS_2 = [Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)]
THREE = nodes(3, "gpu", "train", CPU=8.0, GPU=1.0)


@pytest.mark.parametrize(
    ("free", "whole", "demand", "wanted", "pools", "planned"),
    [  # planned: concurrent trials, data CPUs of each
        # decode actors share the CPUs left by workers
        (CPUS_16, [], TWO_CPU_WORKERS, 1, (), (1, 13)),
        (CPUS_16, [], TWO_CPU_WORKERS, 2, (), (2, 5)),
        (nodes(1, CPU=4.0), [], TWO_CPU_WORKERS, 1, (), (1, 1)),
        ([], CPUS_8, TWO_CPU_WORKERS, 3, (), (1, 5)),  # waits for resources in use
        ([], [], GPU_WORKERS, 4, (), (1, 1)),  # waits for a cluster that can grow
        ([], [], GPU_WORKERS, 4, GPUS_2, (1, 13)),
        # empty pools count: one GPU and a fourth of 128 CPUs
        ([HEAD], [HEAD], ON_ROLES, 6, POOLS, (4, 31)),
        ([HEAD], [HEAD], ON_ROLES, 2, POOLS, (2, 47)),
        ([HEAD, *THREE], [HEAD, *THREE], ON_ROLES, 6, POOLS, (4, 31)),
    ],
)
def test_concurrency_follows_free_and_future_nodes(free, whole, demand, wanted, pools, planned):
    assert trial_concurrency(free, whole, demand, wanted, pools) == planned


@pytest.fixture
def place_nodes(monkeypatch):
    """Set the nodes and pools of the cluster."""

    def place(nodes, pools=()):
        for name, value in (
            ("alive_nodes", nodes),
            ("free_nodes", nodes),
            ("autoscaling_pools", pools),
        ):
            monkeypatch.setattr(cluster, name, lambda value=value: list(value))
        monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})

    return place


def test_head_with_empty_pools_is_not_a_single_machine(place_nodes):
    configs = [Config(cluster=Cluster(workers=1))]
    sweep = Sweep(SAMPLE, SAMPLE, Space({"optimizer.lr": Range(1e-4, 1e-2, log=True)}, 6), "loss")
    place_nodes([HEAD], POOLS)
    assert plan_share(configs, sweep, 6) == Share(4, 31)
    assert plan_share(configs, sweep, 2) == Share(2, 47)  # as many as are promoted
    assert plan_share(configs, sweep, 1) == Share()  # has all, as a run
    place_nodes(CPUS_16)
    assert [
        plan_share(configs, replace(sweep, concurrency=limit), 6).num_trials for limit in (None, 3)
    ] == [1, 3]


def test_concurrent_trials_on_one_machine_share_its_cores(place_nodes, monkeypatch):
    """8 cores, of which Ray counts 10 CPUs: each trial has 2 for its data."""
    monkeypatch.setattr(cluster, "available_cores_if_local", lambda: 8)
    sweep = Sweep(
        SAMPLE,
        SAMPLE,
        Space({"optimizer.lr": Range(1e-4, 1e-2, log=True)}, 6),
        "loss",
        concurrency=2,
    )
    place_nodes(nodes(1, CPU=10.0))
    alone = Config(cluster=Cluster(workers=1))
    share = plan_share([alone], sweep, 6)
    assert share == Share(2, 1, 3.0)
    assert (sized(alone, share).cluster.cpus_per_worker, sized(alone, share).data.workers) == (
        3.0,
        1,
    )
    assert sized(alone, Share()) == alone


def test_concurrency_is_as_given_if_nodes_will_be_added_without_a_known_limit(place_nodes):
    growing = [Config(cluster=Cluster(workers=1, wait_for_nodes=True))]
    sweep = Sweep(SAMPLE, SAMPLE, Space({"optimizer.lr": Range(1e-4, 1e-2, log=True)}, 6), "loss")
    place_nodes([HEAD])
    assert [
        plan_share(growing, replace(sweep, concurrency=limit), 6).num_trials
        for limit in (None, 3, 9)
    ] == [1, 3, 6]
    place_nodes([HEAD], POOLS)
    assert plan_share(growing, replace(sweep, concurrency=6), 6).num_trials == 4


def test_drivers_of_trials_fit_the_memory_of_the_head(place_nodes):
    sweep = Sweep(SAMPLE, SAMPLE, Space({"optimizer.lr": Range(1e-4, 1e-2, log=True)}, 6), "loss")
    place_nodes([replace(HEAD, resources=HEAD.resources | {"memory": 2.5 * 2**30})], POOLS)
    assert plan_share([Config(cluster=Cluster(workers=1))], sweep, 6).num_trials == 2


def test_trial_with_too_few_gpus_is_infeasible_and_others_run(place_nodes, tmp_path):
    place_nodes([Node({"CPU": 16.0, "GPU": 2.0})])
    base = runs.config(runs.make_data(tmp_path / "set"), tmp_path, "sweep")
    corners = trials("cluster.workers=1,2,4,1-4", base=base)
    feasible = check_corners(corners, "memory", runs.Silent())
    assert [trial.config.cluster.max_workers for trial in feasible.corners] == [1, 2]
    plan = replace(plan_of("cluster.workers=1,2", goal="memory", base=base), folder=tmp_path)
    outcome = train_rungs(corners[2], plan, 0, 1, runs.Silent(), lambda result: None)
    assert (
        outcome.status == "infeasible"
        and ("4 training workers of 1 CPU and 1 GPU each") in outcome.error
    )
    with pytest.raises(ResourceError, match=r"--cluster.workers 2 would fit"):
        check_corners(corners[2:], "memory", runs.Silent())
