"""Whether a run fits a cluster, and the message if it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmray.cluster import capacity
from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, max_concurrent, missing_capacity

GPU_NODE = Node({"CPU": 8.0, "GPU": 4.0}, {"mmray/role": "train"})
CPU_NODE = Node({"CPU": 16.0}, {"mmray/role": "data"})
HEAD = Node({}, {"mmray/role": "head"})
GPU_POOL = Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 2)
OF_POOL = Node({"CPU": 8.0, "GPU": 4.0}, {NODE_GROUP: "gpu"})
NOT_TRAIN = {"mmray/role": "!train"}


def gpu_run(workers, labels=None):
    return Demand(workers, {"CPU": 1.0, "GPU": 1.0}, labels or {})


def data_task(labels=None):
    return Demand(1, {"CPU": 1.0}, labels or {}, "data")


@pytest.mark.parametrize(
    ("demand", "nodes", "pools"),
    [
        (gpu_run(8), [HEAD, GPU_NODE, GPU_NODE, CPU_NODE], []),
        (gpu_run(8), [HEAD], [GPU_POOL, Pool("cpu", {"CPU": 16.0}, 4)]),
        (gpu_run(8), [HEAD, OF_POOL, OF_POOL], [GPU_POOL]),
        (data_task(NOT_TRAIN), [GPU_NODE, CPU_NODE], []),
    ],
)
def test_fitting_run_has_no_message(demand, nodes, pools):
    assert missing_capacity(demand, nodes, pools) is None


@pytest.mark.parametrize(
    ("demand", "nodes", "pools", "part"),
    [
        (gpu_run(99), [HEAD, GPU_NODE, CPU_NODE], [], "24 CPU and 4 GPU on 3 nodes"),
        (gpu_run(99), [HEAD, GPU_NODE, CPU_NODE], [], "--cluster.workers 4 would fit"),
        # misspelled
        (
            Demand(1, {"slots": 1.0}),
            [Node({"CPU": 4.0, "slot": 2.0})],
            [],
            "no node has any slots",
        ),
        (
            Demand(1, {"CPU": 12.0}),
            [Node({"CPU": 8.0})] * 2,
            [],
            "no single node can hold one worker",
        ),
        (
            Demand(4, {"CPU": 2.0}),
            [Node({"CPU": 4.0})],
            [],
            "4 training workers of 2 CPU each: 2 workers fit; ",
        ),
        (gpu_run(2), [Node({"CPU": 8.0})], [], "--cluster.accelerator cpu"),
        (
            gpu_run(1, {"role": "gup"}),
            [GPU_NODE, CPU_NODE],
            [],
            "--cluster.train-label none",
        ),
        (gpu_run(9), [HEAD], [GPU_POOL, Pool("cpu", {"CPU": 16.0}, 4)], "can grow to"),
        # existing nodes count once
        (gpu_run(9), [HEAD, OF_POOL, OF_POOL], [GPU_POOL], "can grow to"),
        (
            data_task(NOT_TRAIN),
            [GPU_NODE],
            [],
            "1 CPU for data on nodes labeled mmray/role=!train: no node for data is",
        ),
        # only the head: the others have not joined yet
        (
            gpu_run(2),
            [Node({"memory": 8e9})],
            [],
            "on 1 node. Add nodes, or join a larger cluster; or train on CPUs "
            "(--cluster.accelerator cpu); if nodes will join: --cluster.wait-for-nodes true",
        ),
        (data_task(), [HEAD], [], "if nodes will join: --wait-for-nodes"),
    ],
)
def test_message_names_what_is_missing_and_what_would_fit(demand, nodes, pools, part):
    assert part in (missing_capacity(demand, nodes, pools) or "")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_fitting_runs_are_within_the_totals(sizes, workers, limit):
    nodes = [Node({"CPU": float(cpus), "GPU": float(gpus)}) for cpus, gpus in sizes]
    demand = gpu_run(workers)
    count = max_concurrent(demand, nodes, limit)
    assert count <= limit
    assert count * workers <= sum(gpus for _, gpus in sizes)
    assert count * workers <= sum(cpus for cpus, _ in sizes)
    assert (missing_capacity(demand, nodes) is None) == (count > 0)
    if count:
        assert capacity.num_workers_that_fit(demand, nodes) == workers
