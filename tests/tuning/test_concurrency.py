"""How many trials run at a time, on one machine and on clusters, and the resources of each."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mmray.cluster import placement
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool
from mmray.cluster.placement import ROLE_LABEL, parse_launcher_config
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster, Config
from mmray.tuning.concurrency import fit_trials, plan_concurrency

# 8 x 16 CPUs, 4 x 1 GPU
CLUSTER_YAML = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())
POOLS = parse_launcher_config(CLUSTER_YAML)
HEAD = Node({HEAD_RESOURCE: 1.0}, {ROLE_LABEL: "head"})
ON_ROLES = Demand(1, {"CPU": 1.0, "GPU": 1.0}, {ROLE_LABEL: "train"})
TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0})
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0})
ONE_WORKER = [Config(cluster=Cluster(workers=1))]


def nodes(count, group=None, role=None, **resources):
    return [Node(resources, {NODE_GROUP: group, ROLE_LABEL: role} if group else None)] * count


CPUS_16 = nodes(1, CPU=16.0)
GPUS_2 = [Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)]
THREE = nodes(3, "gpu", "train", CPU=8.0, GPU=1.0)


@pytest.mark.parametrize(
    ("free", "demand", "wanted", "pools", "planned"),
    [
        (CPUS_16, TWO_CPU_WORKERS, 1, (), 1),
        (CPUS_16, TWO_CPU_WORKERS, 9, (), 8),
        ([], TWO_CPU_WORKERS, 3, (), 1),  # waits for resources in use
        ([], GPU_WORKERS, 4, GPUS_2, 1),
        # empty pools count: four GPUs
        ([HEAD], ON_ROLES, 6, POOLS, 4),
        ([HEAD], ON_ROLES, 2, POOLS, 2),
        ([HEAD, *THREE], ON_ROLES, 6, POOLS, 4),
    ],
)
def test_concurrency_follows_free_and_future_nodes(free, demand, wanted, pools, planned):
    assert fit_trials(free, demand, wanted, pools) == planned


@pytest.fixture
def place_nodes(monkeypatch):
    """Set the nodes and pools of the cluster."""

    def place(nodes, pools=()):
        values = {"alive_nodes": nodes, "free_nodes": nodes, "autoscaling_pools": pools}
        for name, value in values.items():
            monkeypatch.setattr(placement, name, lambda value=value: list(value))
        monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0})

    return place


def test_head_with_empty_pools_is_not_a_single_machine(place_nodes):
    place_nodes([HEAD], POOLS)
    assert plan_concurrency(ONE_WORKER, None, 6) == 4
    assert plan_concurrency(ONE_WORKER, None, 2) == 2
    assert plan_concurrency(ONE_WORKER, None, 1) == 1  # the whole cluster
    place_nodes(CPUS_16)
    assert plan_concurrency(ONE_WORKER, None, 6) == 1


def test_trial_with_all_cores_of_a_machine_runs_alone(place_nodes, monkeypatch):
    """8 cores, of which Ray counts 10 CPUs."""
    monkeypatch.setattr(placement, "available_cores_if_local", lambda: 8)
    place_nodes(nodes(1, CPU=10.0))
    assert plan_concurrency(ONE_WORKER, 2, 6) == 1
    small = [Config(cluster=Cluster(workers=1, cpus_per_worker=2))]
    assert plan_concurrency(small, 3, 6) == 3
    assert plan_concurrency(small, 6, 6) == 3  # each has a CPU for its data


@pytest.mark.parametrize(("concurrency", "expected"), [(None, 1), (3, 3), (9, 6)])
def test_concurrency_is_as_given_if_nodes_will_be_added_without_a_known_limit(
    place_nodes, concurrency, expected
):
    growing = [Config(cluster=Cluster(workers=1, wait_for_nodes=True))]
    place_nodes([HEAD])
    assert plan_concurrency(growing, concurrency, 6) == expected
    place_nodes([HEAD], POOLS)
    assert plan_concurrency(growing, 6, 6) == 4


def test_drivers_of_trials_fit_the_memory_of_the_head(place_nodes):
    head = replace(HEAD, resources=HEAD.resources | {"memory": 2 * 2**30})
    place_nodes([head], POOLS)
    assert plan_concurrency(ONE_WORKER, None, 6) == 3
