"""From recipe and space to trials and back to a recipe; the number of concurrent trials."""

from pathlib import Path

import pytest
import yaml

from mmray.cluster import placement as cluster
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool
from mmray.cluster.placement import ROLE_LABEL, parse_launcher_config
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster, Config, recipes
from mmray.config.search_space import Space, parse_space
from mmray.errors import ResourceError, UsageError
from mmray.tune.search import Sweep, mark_infeasible, plan_concurrency, resolve_trials
from mmray.tune.trials import (
    DEFAULT_STEPS,
    Trial,
    build_trials,
    clear_length_and_derived_batch,
    restore_length,
    samples_per_trial,
    to_recipe,
    trial_concurrency,
    trial_config,
)
from tests.train import runs

SAMPLE = recipes.load("sample").with_cluster(workers=2)  # micro 64, global 128, 300 steps
FOLDER = Path("/sweeps/one")
CLUSTER_YAML = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())  # 8 x 16 CPUs, 4 x 1 GPU
POOLS = parse_launcher_config(CLUSTER_YAML)
HEAD = Node({HEAD_RESOURCE: 1.0}, {ROLE_LABEL: "head"})
ON_ROLES = Demand(1, {"CPU": 1.0, "GPU": 1.0}, 2, {ROLE_LABEL: "train"}, {ROLE_LABEL: "data"})
TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0}, data_cpus=2)
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0}, data_cpus=3)


def trials(*given, base=SAMPLE):
    return build_trials(base, parse_space(given, None))


@pytest.mark.parametrize(
    ("given", "shapes"),
    [  # (micro, accumulation, global)
        (["batch.micro=16,32,64"], [(16, 4, 128), (32, 2, 128), (64, 1, 128)]),
        (["batch.micro=8,16", "batch.accumulation=1,2"], [(8, 1, 16), (8, 2, 32), (16, 1, 32), (16, 2, 64)]),
    ],
)
def test_searched_accumulation_sets_the_global_batch_and_otherwise_follows_it(given, shapes):
    base = clear_length_and_derived_batch(SAMPLE, [each.partition("=")[0] for each in given])
    result = [trial.shape for trial in trials(*given, base=base)]
    assert [(shape.micro, shape.accumulation, shape.global_rows) for shape in result] == shapes


def test_impossible_batch_arithmetic_makes_only_its_trial_infeasible():
    one, other = trials("batch.micro=32,128")
    assert one.shape is not None and one.infeasible is None
    assert other.shape is None and "64 rows per worker (batch.global 128 on 2 workers)" in other.infeasible
    contradicting = trials("batch.accumulation=1,2", base=SAMPLE.replace(batch=SAMPLE.batch.replace(micro=32)))
    assert [t.infeasible is None for t in contradicting] == [False, True]
    with pytest.raises(UsageError, match="no combination is feasible"):
        trials("batch.micro=128,256")


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


def test_global_batch_above_the_rows_of_the_set_makes_only_its_trial_infeasible(tmp_path):
    base = runs.config(runs.make_data(tmp_path / "set"), tmp_path, "sweep")  # 50 rows
    sweep, both = Sweep(base, base, Space({})), trials("batch.global=32,64", base=base)
    checked, feasible, num_rows = resolve_trials(both, sweep, runs.Silent())
    assert (list(feasible), num_rows, checked[0]) == (["t001"], 50, both[0])
    assert "64 rows per step are more than the 50 rows" in checked[1].infeasible
    with pytest.raises(UsageError, match="64 rows per step are more than the 50 rows"):
        resolve_trials(both[1:], sweep, runs.Silent())


def test_all_trials_train_on_the_same_number_of_samples():
    base = clear_length_and_derived_batch(SAMPLE, ["batch.micro", "batch.accumulation"])
    result = trials("batch.micro=16,64", "batch.accumulation=1,2", base=base)  # global 32, 64, 128, 256
    lengths = [({}, DEFAULT_STEPS * 256), ({"steps": 6}, 6 * 256), ({"samples": 1000}, 1000), ({"epochs": 2}, 6000)]
    for length, samples in lengths:
        assert samples_per_trial(base.replace(train=base.train.replace(**length)), result, 3000) == samples
    runs = [trial_config(trial, 6 * 256, 10_000, FOLDER, "throughput") for trial in result]
    assert {run.train.samples for run in runs} == {6 * 256} and {run.train.steps for run in runs} == {None}
    assert [run.train.log_every for run in runs] == [4, 2, 1, 1]  # 48, 24, 12, 6 steps: about ten log lines each
    assert (runs[0].run.storage, runs[0].run.name) == ("/sweeps/one/trials", "t001")
    assert runs[0].cluster.max_failures == 0 and runs[0].evaluate.limit == 512
    assert trial_config(result[0], 100, 1000, FOLDER, "recall").evaluate.limit is None


def test_trial_of_elastic_recipe_has_fixed_workers():
    elastic = SAMPLE.with_cluster(workers="1-4")
    trial = trials("batch.micro=16", base=elastic)[0]
    run = trial_config(trial, 1000, 10_000, FOLDER, "throughput")
    assert (run.cluster.min_workers, run.cluster.max_workers, trial.shape.workers) == (4, 4, 4)
    assert to_recipe(trial).cluster == elastic.cluster


def test_best_recipe_keeps_the_original_length():
    typed = clear_length_and_derived_batch(SAMPLE, ["batch.accumulation"])
    base = restore_length(typed.replace(train=typed.train.replace(steps=6)), SAMPLE)
    assert base.train == SAMPLE.train
    trial = trials("batch.micro=16", "batch.accumulation=2", "optimizer.lr=1e-4", base=base)[0]
    best = to_recipe(trial)
    assert (best.batch.micro, best.batch.global_, best.batch.accumulation) == (16, 64, None)
    assert (best.train.steps, best.optimizer.lr, best.run.name) == (SAMPLE.train.steps, 1e-4, None)
    assert best.data == SAMPLE.data and best.evaluate == SAMPLE.evaluate and best.cluster == SAMPLE.cluster
    assert Config.model_validate(best.model_dump(mode="json", by_alias=True)) == best


def nodes(count, group=None, role=None, **resources):
    return [Node(resources, {NODE_GROUP: group, ROLE_LABEL: role} if group else None)] * count


CPUS_8, CPUS_16 = nodes(1, CPU=8.0), nodes(1, CPU=16.0)
GPUS_2 = [Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)]
THREE = nodes(3, "gpu", "train", CPU=8.0, GPU=1.0)


@pytest.mark.parametrize(
    ("free", "whole", "demand", "wanted", "pools", "planned"),
    [  # planned: concurrent trials, data CPUs of each
        (CPUS_16, [], TWO_CPU_WORKERS, 1, (), (1, 13)),  # decode actors share the CPUs left by workers
        (CPUS_16, [], TWO_CPU_WORKERS, 2, (), (2, 5)),
        (nodes(1, CPU=4.0), [], TWO_CPU_WORKERS, 1, (), (1, 1)),
        ([], CPUS_8, TWO_CPU_WORKERS, 3, (), (1, 5)),  # waits for resources in use
        ([], [], GPU_WORKERS, 4, (), (1, 1)),  # waits for a cluster that can grow
        ([], [], GPU_WORKERS, 4, GPUS_2, (1, 13)),
        ([HEAD], [HEAD], ON_ROLES, 6, POOLS, (4, 31)),  # empty pools count: one GPU and a fourth of 128 CPUs
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
        for name, value in (("alive_nodes", nodes), ("free_nodes", nodes), ("autoscaling_pools", pools)):
            monkeypatch.setattr(cluster, name, lambda value=value: list(value))
        monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})

    return place


def test_head_with_empty_pools_is_not_a_single_machine(place_nodes):
    runs = {f"t{number:03}": Config(cluster=Cluster(workers=1)) for number in range(1, 7)}
    place_nodes([HEAD], POOLS)
    at_once, sized = plan_concurrency(runs, None)
    assert at_once == 4
    assert {config.data.workers for config in sized.values()} == {15}  # one CPU for the controller
    place_nodes(CPUS_16)
    assert (plan_concurrency(runs, None)[0], plan_concurrency(runs, 3)[0]) == (1, 3)


def test_trial_with_too_few_gpus_is_infeasible_and_others_run(place_nodes):
    place_nodes([Node({"CPU": 16.0, "GPU": 2.0})])
    sizes = {"t001": 1, "t002": 2, "t003": 4, "t004": "1-4"}
    trials = [Trial(name, {}, Config(cluster=Cluster(workers=size))) for name, size in sizes.items()]
    checked = mark_infeasible(trials)
    assert [trial.infeasible is None for trial in checked] == [True, True, False, False]
    assert "4 training workers of 1 CPU and 1 GPU each" in checked[2].infeasible
    with pytest.raises(ResourceError, match=r"--cluster.workers 2 would fit"):
        mark_infeasible(trials[2:])
