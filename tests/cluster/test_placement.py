"""Placement of data and training on nodes, and the CPUs a local cluster needs."""

import pytest

from mmray.cluster.capacity import NODE_ID, Node
from mmray.cluster.connect import num_local_cpus
from mmray.cluster.placement import (
    ROLE_LABEL,
    SchedulableNodes,
    data_label_selector,
    train_label_selector,
)
from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Cluster

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
    assert (data_label_selector("auto", nodes), train_label_selector("auto", nodes)) == (
        data,
        train,
    )
    for labels in (data_label_selector, train_label_selector):
        assert labels("none", nodes) == {} and labels("pool=big", nodes) == {"pool": "big"}


def test_unavailable_nodes_are_excluded_in_addition():
    nodes = SchedulableNodes([], ("c2", "a"))
    assert nodes.excluding_unavailable({NODE_ID: "!in(g)", "pool": "big"}) == {
        NODE_ID: "!in(a,c2,g)",
        "pool": "big",
    }
    assert nodes.excluding_unavailable(None) == {NODE_ID: "!in(a,c2)"}
    assert SchedulableNodes([], ()).excluding_unavailable({NODE_ID: "!in(g)"}) == {
        NODE_ID: "!in(g)"
    }


@pytest.mark.parametrize(("actors", "cpus"), [(1, 5), (3, 7), (64, 67)])
def test_local_cluster_has_a_cpu_for_each_actor(actors, cpus):
    assert num_local_cpus(Cluster(workers=2), actors, available_cores=2) == cpus
