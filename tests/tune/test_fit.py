"""Number of concurrent trials, and the error if none fits."""

from pathlib import Path

import pytest
import yaml

from mmray.cluster import placement as cluster
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, max_concurrent
from mmray.cluster.placement import ROLE, parse_launcher_config
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster, Config
from mmray.errors import ResourceError
from mmray.tune.search import _concurrency, filter_feasible
from mmray.tune.trials import Trial, max_demand, trial_concurrency

CLUSTER_YAML = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())  # 8 x 16 CPUs, 4 x 1 GPU
POOLS = parse_launcher_config(CLUSTER_YAML)
HEAD = Node({HEAD_RESOURCE: 1.0}, {ROLE: "head"})
ON_ROLES = Demand(1, {"CPU": 1.0, "GPU": 1.0}, 2, {ROLE: "train"}, {ROLE: "data"})
TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0}, data_cpus=2)
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0}, data_cpus=3)


def nodes(*resources):
    return [Node(each) for each in resources]


def test_trials_fit_only_with_cpus_for_data():
    assert max_concurrent(TWO_CPU_WORKERS, nodes({"CPU": 4.0}), 9) == 1
    assert max_concurrent(TWO_CPU_WORKERS, nodes({"CPU": 3.0}), 9) == 0  # no CPUs left for data
    assert max_concurrent(TWO_CPU_WORKERS, nodes({"CPU": 8.0}), 9) == 2
    assert max_concurrent(TWO_CPU_WORKERS, nodes({"CPU": 80.0}), 9) == 9


def test_data_does_not_use_gpu_nodes():
    free = nodes({"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}, {"CPU": 6.0})
    assert max_concurrent(GPU_WORKERS, free, 9) == 2
    assert free[2].resources == {"CPU": 6.0}  # the free resources are not changed


def test_each_trial_reserves_the_largest_demand():
    assert max_demand([TWO_CPU_WORKERS, GPU_WORKERS]) == Demand(2, {"CPU": 1.0, "GPU": 1.0}, 3)


def test_data_actors_share_cpus_left_by_workers():
    assert trial_concurrency(nodes({"CPU": 16.0}), [], TWO_CPU_WORKERS, 1) == (1, 13)
    assert trial_concurrency(nodes({"CPU": 16.0}), [], TWO_CPU_WORKERS, 2) == (2, 5)
    assert trial_concurrency(nodes({"CPU": 4.0}), [], TWO_CPU_WORKERS, 1) == (1, 1)


def test_infeasible_trial_reports_missing_resources():
    with pytest.raises(ResourceError, match=r"no trial fits: 2 training workers of 1 CPU and 1 GPU each"):
        trial_concurrency([], nodes({"CPU": 6.0, "GPU": 1.0}), GPU_WORKERS, 1)


def test_sweep_waits_for_cluster_that_can_grow():
    assert trial_concurrency([], [], GPU_WORKERS, 4, waits=True)[0] == 1
    assert trial_concurrency([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)])[0] == 1
    with pytest.raises(ResourceError):
        trial_concurrency([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 1)])


def test_sweep_waits_for_resources_in_use():
    assert trial_concurrency([], nodes({"CPU": 8.0}), TWO_CPU_WORKERS, 3)[0] == 1


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
    at_once, sized = _concurrency(runs, None)
    assert at_once == 4
    assert {config.data.workers for config in sized.values()} == {15}  # one CPU for the controller


def test_single_machine_runs_trials_sequentially(runs, monkeypatch):
    monkeypatch.setattr(cluster, "autoscaling_pools", list)
    monkeypatch.setattr(cluster, "alive_nodes", lambda: [Node({"CPU": 16.0})])
    monkeypatch.setattr(cluster, "free_nodes", lambda: [Node({"CPU": 16.0})])
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})
    assert _concurrency(runs, None)[0] == 1
    assert _concurrency(runs, 3)[0] == 3


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
