"""Placement of data and training on nodes, the number of decode actors, and the CPUs a local cluster needs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from mmray.cluster.capacity import NODE_GROUP, NODE_ID, Demand, Node, Pool, max_gpus, missing_capacity
from mmray.cluster.connect import num_local_cpus
from mmray.cluster.placement import ROLE, LiveNodes, data_labels, parse_launcher_config, train_labels
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.cluster.shared_storage import check_persistent
from mmray.config import Cluster
from mmray.config.recipes import RECIPES
from mmray.errors import ResourceError, UsageError
from mmray.train import resources
from mmray.train.resources import num_cluster_data_actors

LAPTOP = [Node({"CPU": 8.0, "GPU": 1.0, HEAD_RESOURCE: 1.0}, {"ray.io/node-id": "a"})]
HEAD = Node({"CPU": 4.0, HEAD_RESOURCE: 1.0}, {"ray.io/node-id": "h"})
GPU_NODE = Node({"CPU": 8.0, "GPU": 4.0, "memory": 64 * 2.0**30}, {"ray.io/node-id": "g"})
CPU_NODE = Node({"CPU": 16.0, "memory": 64 * 2.0**30}, {"ray.io/node-id": "c"})


def per_worker(here, parallel="ddp", **cluster):
    config = SimpleNamespace(cluster=Cluster(**cluster), train=SimpleNamespace(parallel=parallel))
    return resources._per_worker(config, here, [])


@pytest.mark.parametrize(
    ("here", "given", "said"),
    [
        (
            LAPTOP,
            {"parallel": "branches"},
            r"1 training worker with 2 GPUs each, .* has 1 GPU: --train\.parallel single",
        ),
        (
            [HEAD, GPU_NODE],
            {"workers": 8},
            r"8 training workers with a GPU each, .* has 4 GPUs: --cluster\.workers 4 tr",
        ),
        (
            [GPU_NODE],
            {"workers": "3-4", "parallel": "branches"},
            r"3 .* with 2 GPUs .* 4 GPUs: --cluster\.workers 2 trains",
        ),
    ],
)
def test_too_few_gpus_are_an_error(monkeypatch, here, given, said):
    def check(**further):
        config = {"parallel": "ddp"} | given | further
        train = SimpleNamespace(parallel=config.pop("parallel"))
        resources.check_gpus(SimpleNamespace(cluster=Cluster(**config), train=train))

    monkeypatch.setattr(resources.placement, "alive_nodes", lambda: here)
    monkeypatch.setattr(resources.placement, "autoscaling_pools", list)
    with pytest.raises(ResourceError, match=said):
        check()
    for further in ({"accelerator": "cpu"}, {"accelerator": "gpu"}, {"wait_for_nodes": True}):
        check(**further)  # an explicit setting is kept; growing pools are waited for
    assert "GPU" not in per_worker(here, **given)
    assert per_worker(here, accelerator="gpu", **given)["GPU"] == (2 if "parallel" in given else 1)


def test_gpus_of_fixed_nodes_and_pools_add_up():
    pool = Pool("gpus", {"CPU": 8.0, "GPU": 1.0}, 3)
    of_the_pool = Node({"CPU": 8.0, "GPU": 1.0}, {NODE_GROUP: "gpus"})
    assert max_gpus([*LAPTOP, of_the_pool], [pool]) == 4
    assert max_gpus([GPU_NODE], []) == 4


def test_sample_recipe_fits_one_gpu_or_two_cpus():
    cluster = RECIPES["sample"]().cluster
    assert per_worker(LAPTOP, workers=cluster.workers) == {"CPU": 1.0, "GPU": 1.0}
    assert per_worker([CPU_NODE], workers=cluster.workers) == {"CPU": 1.0}
    assert cluster.max_workers == 2


@pytest.mark.parametrize(
    ("here", "data"),
    [
        (LAPTOP, {}),
        ([HEAD, GPU_NODE], {}),  # the head's few CPUs would starve the GPUs
        ([HEAD, CPU_NODE], {}),
        ([HEAD, GPU_NODE, CPU_NODE], {"ray.io/node-id": "!in(g)"}),
        ([Node({"CPU": 0.0}, {ROLE: "head"})], {ROLE: "data"}),
    ],
)
def test_data_avoids_gpu_nodes_if_others_have_cpus(here, data):
    assert data_labels("auto", here) == data
    assert data_labels("none", here) == {}
    assert data_labels("pool=big", here) == {"pool": "big"}


def test_unavailable_nodes_are_excluded_in_addition():
    going = LiveNodes([], ("c2", "a"))
    assert going.excluding_unavailable({NODE_ID: "!in(g)", "pool": "big"}) == {NODE_ID: "!in(a,c2,g)", "pool": "big"}
    assert going.excluding_unavailable(None) == {NODE_ID: "!in(a,c2)"}
    assert LiveNodes([], ()).excluding_unavailable({NODE_ID: "!in(g)"}) == {NODE_ID: "!in(g)"}


def test_training_labels_follow_roles():
    assert train_labels("auto", [HEAD, GPU_NODE, CPU_NODE]) == {}
    assert train_labels("auto", [Node({}, {ROLE: "head"})]) == {ROLE: "train"}
    assert train_labels("pool=big", LAPTOP) == {"pool": "big"}


def test_label_without_value_is_refused():
    with pytest.raises(UsageError, match=r"cluster.data_label"):
        Cluster(data_label="cpu-nodes")


def test_decode_actors_fill_data_nodes():
    here = [HEAD, GPU_NODE, CPU_NODE]
    gpus = Demand(4, {"CPU": 1.0, "GPU": 1.0}, 2, {}, data_labels("auto", here))
    assert num_cluster_data_actors(gpus, here, [], 24.0) == 19  # 16 and the head's 4, and one for the feed
    cpus = Demand(4, {"CPU": 2.0}, 2)
    assert num_cluster_data_actors(cpus, [CPU_NODE], [], 24.0) == 7


def test_decode_actors_of_a_pool_without_nodes():
    head = Node({"CPU": 0.0}, {ROLE: "head"})
    pools = [Pool("cpu", {"CPU": 16.0}, 8), Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 4)]
    demand = Demand(4, {"CPU": 1.0, "GPU": 1.0}, 2, {ROLE: "train"}, {ROLE: "data"})
    assert num_cluster_data_actors(demand, [head], pools, 24.0) == 15


@pytest.mark.parametrize(("actors", "cpus"), [(1, 4), (3, 6), (64, 67)])
def test_local_cluster_has_a_cpu_for_each_actor(actors, cpus):
    assert num_local_cpus(Cluster(workers=2), actors, physical=2) == cpus


def test_relative_storage_of_a_job_is_refused():
    job = Path("/session/runtime_resources/working_dir_files/_ray_pkg_1")
    with pytest.raises(UsageError, match=r"run.storage runs is relative"):
        check_persistent("runs", job)
    check_persistent("/shared/runs", job)
    check_persistent("runs", Path("/project"))


def test_launcher_file_gives_the_pools():
    file = Path(__file__).parents[2] / "cluster.yaml"
    found = {pool.name: pool for pool in parse_launcher_config(yaml.safe_load(file.read_text()))}
    assert found.keys() == {"cpu", "gpu"}
    assert found["gpu"].resources == {"CPU": 8, "GPU": 1} and found["gpu"].most == 4
    assert found["gpu"].labels == {"mmray/role": "train"} and found["cpu"].labels == {"mmray/role": "data"}
    head = [Node({}, {"mmray/role": "head"})]
    demand = Demand(4, {"CPU": 1, "GPU": 1}, 2, {"mmray/role": "train"}, {"mmray/role": "data"})
    assert missing_capacity(demand, head, list(found.values())) is None
    assert "4 workers fit" in (missing_capacity(replace(demand, workers=5), head, list(found.values())) or "")
    assert missing_capacity(demand, head, [found["gpu"]]) is not None  # no pool may run data tasks
