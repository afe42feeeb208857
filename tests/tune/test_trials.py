"""From recipe and space to trials and back to a recipe; the number of concurrent trials."""

from pathlib import Path

import pytest
import yaml

from mmray.cluster import placement as cluster
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, max_concurrent
from mmray.cluster.placement import ROLE, parse_launcher_config
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster, Config, recipes
from mmray.config.search_space import parse_space
from mmray.errors import ResourceError, UsageError
from mmray.tune.search import filter_feasible, plan_concurrency
from mmray.tune.trials import (
    STEPS,
    Trial,
    max_demand,
    reset_searched,
    restore_length,
    samples_per_trial,
    to_recipe,
    trial_concurrency,
    trial_config,
    trials_of,
    warmup_warning,
)

SAMPLE = recipes.load("sample")  # micro 64, global 128, 2 workers, 500 steps
FOLDER = Path("/sweeps/one")
CLUSTER_YAML = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())  # 8 x 16 CPUs, 4 x 1 GPU
POOLS = parse_launcher_config(CLUSTER_YAML)
HEAD = Node({HEAD_RESOURCE: 1.0}, {ROLE: "head"})
ON_ROLES = Demand(1, {"CPU": 1.0, "GPU": 1.0}, 2, {ROLE: "train"}, {ROLE: "data"})
TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0}, data_cpus=2)
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0}, data_cpus=3)


def trials(*given, base=SAMPLE, samples=None):
    return trials_of(base, parse_space(given, samples))


def set_batch(config, **batch):
    return config.model_copy(update={"batch": config.batch.model_copy(update=batch)})


def set_train(config, **train):
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


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
    assert other.shape is None and "64 rows per worker (batch.global 128 on 2 workers)" in other.infeasible
    contradicting = trials("batch.accumulation=1,2", base=set_batch(SAMPLE, micro=32))
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


def test_all_trials_train_on_the_same_number_of_samples():
    base = reset_searched(SAMPLE, ["batch.micro", "batch.accumulation"])
    result = trials("batch.micro=16,64", "batch.accumulation=1,2", base=base)  # global 32, 64, 128, 256
    assert samples_per_trial(base, result, 3000) == STEPS * 256
    assert samples_per_trial(set_train(base, steps=6), result, 3000) == 6 * 256
    assert samples_per_trial(set_train(base, samples=1000), result, 3000) == 1000
    assert samples_per_trial(set_train(base, epochs=2), result, 3000) == 6000
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


def test_loss_within_warm_up_is_warned_about():
    runs = [trial_config(trial, 30 * 128, 10_000, FOLDER, "loss") for trial in trials("batch.micro=32,64")]
    assert "t001 ends during warm-up (30 of 30 steps)" in warmup_warning(runs, 10_000, "loss")
    assert warmup_warning(runs, 10_000, "throughput") is None
    longer = [trial_config(trial, 31 * 128, 10_000, FOLDER, "loss") for trial in trials("batch.micro=64")]
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


def nodes(*resources):
    return [Node(each) for each in resources]


@pytest.mark.parametrize(("cpus", "fit"), [(3.0, 0), (4.0, 1), (8.0, 2), (80.0, 9)])  # 3: none is left for data
def test_trials_fit_only_with_cpus_for_data(cpus, fit):
    assert max_concurrent(TWO_CPU_WORKERS, nodes({"CPU": cpus}), 9) == fit


def test_data_does_not_use_gpu_nodes():
    free = nodes({"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}, {"CPU": 6.0})
    assert max_concurrent(GPU_WORKERS, free, 9) == 2
    assert free[2].resources == {"CPU": 6.0}  # the free resources are not changed


def test_each_trial_reserves_the_largest_demand():
    assert max_demand([TWO_CPU_WORKERS, GPU_WORKERS]) == Demand(2, {"CPU": 1.0, "GPU": 1.0}, 3)


@pytest.mark.parametrize(("cpus", "wanted", "fits"), [(16.0, 1, (1, 13)), (16.0, 2, (2, 5)), (4.0, 1, (1, 1))])
def test_data_actors_share_cpus_left_by_workers(cpus, wanted, fits):
    assert trial_concurrency(nodes({"CPU": cpus}), [], TWO_CPU_WORKERS, wanted) == fits


def test_infeasible_trial_reports_missing_resources():
    with pytest.raises(ResourceError, match=r"no trial fits: 2 training workers of 1 CPU and 1 GPU each"):
        trial_concurrency([], nodes({"CPU": 6.0, "GPU": 1.0}), GPU_WORKERS, 1)


def test_sweep_waits_for_busy_resources_and_for_a_cluster_that_can_grow():
    assert trial_concurrency([], nodes({"CPU": 8.0}), TWO_CPU_WORKERS, 3)[0] == 1
    assert trial_concurrency([], [], GPU_WORKERS, 4, waits=True)[0] == 1
    assert trial_concurrency([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)])[0] == 1
    with pytest.raises(ResourceError):
        trial_concurrency([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 1)])


def test_empty_pools_count_at_their_maximum():
    assert trial_concurrency([HEAD], [HEAD], ON_ROLES, 6, POOLS) == (4, 31)  # one GPU each, and a fourth of 128 CPUs
    assert trial_concurrency([HEAD], [HEAD], ON_ROLES, 2, POOLS)[0] == 2


def pool_node(pool, role, taken=False, **resources):
    return Node({} if taken else resources, {NODE_GROUP: pool, ROLE: role})


def test_busy_nodes_are_not_counted_as_future_nodes():
    def here(taken):
        return [HEAD, *(pool_node("gpu", "train", taken, CPU=8.0, GPU=1.0) for _ in range(3))]

    assert trial_concurrency(here(taken=True), here(taken=False), ON_ROLES, 6, POOLS)[0] == 1  # the fourth trial
    assert trial_concurrency(here(taken=False), here(taken=False), ON_ROLES, 6, POOLS)[0] == 4


def test_waiting_trial_counts_data_actors_on_busy_nodes():
    here = [HEAD, *(pool_node("gpu", "train", CPU=8.0, GPU=1.0) for _ in range(4))]
    here += [pool_node("cpu", "data", CPU=16.0) for _ in range(8)]
    assert trial_concurrency([HEAD], here, ON_ROLES, 6, POOLS) == (
        1,
        3 * 16 - 1,
    )  # as many nodes as one trial could need


@pytest.fixture
def runs(monkeypatch):
    """Six trials on the cluster of cluster.yaml before a node of its pools has started."""
    monkeypatch.setattr(cluster, "alive_nodes", lambda: [HEAD])
    monkeypatch.setattr(cluster, "free_nodes", lambda: [HEAD])
    monkeypatch.setattr(cluster, "autoscaling_pools", lambda: POOLS)
    return {f"t{number:03}": Config(cluster=Cluster(workers=1)) for number in range(1, 7)}


def test_head_with_empty_pools_is_not_a_single_machine(runs):
    at_once, sized = plan_concurrency(runs, None)
    assert at_once == 4
    assert {config.data.workers for config in sized.values()} == {15}  # one CPU for the controller


def test_single_machine_runs_trials_sequentially(runs, monkeypatch):
    monkeypatch.setattr(cluster, "autoscaling_pools", list)
    monkeypatch.setattr(cluster, "alive_nodes", lambda: [Node({"CPU": 16.0})])
    monkeypatch.setattr(cluster, "free_nodes", lambda: [Node({"CPU": 16.0})])
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})
    assert plan_concurrency(runs, None)[0] == 1
    assert plan_concurrency(runs, 3)[0] == 3


def test_trial_with_too_few_gpus_is_infeasible_and_others_run(monkeypatch):
    monkeypatch.setattr(cluster, "autoscaling_pools", list)
    monkeypatch.setattr(cluster, "alive_nodes", lambda: [Node({"CPU": 16.0, "GPU": 2.0})])
    sizes = {"t001": 1, "t002": 2, "t003": 4, "t004": "1-4"}
    trials = [Trial(name, {}, Config(cluster=Cluster(workers=size)), None) for name, size in sizes.items()]
    checked = filter_feasible(trials)
    assert [trial.infeasible is None for trial in checked] == [True, True, False, False]
    assert "4 training workers of 1 CPU and 1 GPU each" in checked[2].infeasible
    with pytest.raises(ResourceError, match=r"--cluster.workers 2 would fit"):
        filter_feasible(trials[2:])
