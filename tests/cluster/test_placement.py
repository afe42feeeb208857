"""Placement of data and training on nodes, and the CPUs a local cluster needs."""

from pathlib import Path

import pytest
import yaml

from mmray.cluster.capacity import NODE_ID, Node
from mmray.cluster.connect import num_local_cpus
from mmray.cluster.placement import ROLE_LABEL, LiveNodes, data_labels, parse_launcher_config, train_labels
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster
from mmray.errors import UsageError

LAPTOP = [Node({"CPU": 8.0, "GPU": 1.0, HEAD_RESOURCE: 1.0}, {NODE_ID: "a"})]
HEAD = Node({"CPU": 4.0, HEAD_RESOURCE: 1.0}, {NODE_ID: "h"})
GPU_NODE = Node({"CPU": 8.0, "GPU": 4.0}, {NODE_ID: "g"})
CPU_NODE = Node({"CPU": 16.0}, {NODE_ID: "c"})
WITH_ROLES = [Node({"CPU": 0.0}, {ROLE_LABEL: "head"})]


@pytest.mark.parametrize(
    ("nodes", "data", "train"),
    [
        (LAPTOP, {}, {}),
        ([HEAD, GPU_NODE], {}, {}),  # the head's few CPUs would starve the GPUs
        ([HEAD, CPU_NODE], {}, {}),
        ([HEAD, GPU_NODE, CPU_NODE], {NODE_ID: "!in(g)"}, {}),
        (WITH_ROLES, {ROLE_LABEL: "data"}, {ROLE_LABEL: "train"}),
    ],
)
def test_labels_follow_roles_and_data_avoids_gpu_nodes_if_others_have_cpus(nodes, data, train):
    assert (data_labels("auto", nodes), train_labels("auto", nodes)) == (data, train)
    for labels in (data_labels, train_labels):
        assert labels("none", nodes) == {} and labels("pool=big", nodes) == {"pool": "big"}


def test_unavailable_nodes_are_excluded_in_addition():
    nodes = LiveNodes([], ("c2", "a"))
    assert nodes.excluding_unavailable({NODE_ID: "!in(g)", "pool": "big"}) == {NODE_ID: "!in(a,c2,g)", "pool": "big"}
    assert nodes.excluding_unavailable(None) == {NODE_ID: "!in(a,c2)"}
    assert LiveNodes([], ()).excluding_unavailable({NODE_ID: "!in(g)"}) == {NODE_ID: "!in(g)"}


def test_label_without_value_is_refused():
    with pytest.raises(UsageError, match=r"cluster.data_label"):
        Cluster(data_label="cpu-nodes")


@pytest.mark.parametrize(("actors", "cpus"), [(1, 4), (3, 6), (64, 67)])
def test_local_cluster_has_a_cpu_for_each_actor(actors, cpus):
    assert num_local_cpus(Cluster(workers=2), actors, physical=2) == cpus


def test_launcher_file_gives_the_pools():
    """tests/test_cluster_yaml.py checks which runs they accept."""
    file = Path(__file__).parents[2] / "cluster.yaml"
    pools = {pool.name: pool for pool in parse_launcher_config(yaml.safe_load(file.read_text()))}
    assert pools.keys() == {"cpu", "gpu"}
    assert pools["gpu"].resources == {"CPU": 8, "GPU": 1} and pools["gpu"].max_nodes == 4
    assert pools["gpu"].labels == {ROLE_LABEL: "train"} and pools["cpu"].labels == {ROLE_LABEL: "data"}
