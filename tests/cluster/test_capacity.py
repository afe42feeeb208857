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


def gpu_run(workers, data_cpus=2, **labels):
    return Demand(workers, {"CPU": 1.0, "GPU": 1.0}, data_cpus, **labels)


@pytest.mark.parametrize(
    ("demand", "nodes", "pools"),
    [
        (gpu_run(8), [HEAD, GPU_NODE, GPU_NODE, CPU_NODE], []),
        (gpu_run(8), [HEAD], [GPU_POOL, Pool("cpu", {"CPU": 16.0}, 4)]),
        (gpu_run(8), [HEAD, OF_POOL, OF_POOL], [GPU_POOL]),
        (gpu_run(1, 3, data_label_selector=NOT_TRAIN), [GPU_NODE, CPU_NODE], []),
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
            Demand(1, {"slots": 1.0}, 2),
            [Node({"CPU": 4.0, "slot": 2.0})],
            [],
            "no node has any slots",
        ),
        (
            Demand(1, {"CPU": 12.0}, 0),
            [Node({"CPU": 8.0})] * 2,
            [],
            "no single node can hold one worker",
        ),
        (
            Demand(4, {"CPU": 1.0}, 2),
            [Node({"CPU": 4.0})],
            [],
            "2 workers fit together with the data",
        ),
        (gpu_run(2), [Node({"CPU": 8.0})], [], "--cluster.accelerator cpu"),
        (
            gpu_run(1, worker_label_selector={"role": "gup"}),
            [GPU_NODE, CPU_NODE],
            [],
            "--cluster.train-label none",
        ),
        (gpu_run(9), [HEAD], [GPU_POOL, Pool("cpu", {"CPU": 16.0}, 4)], "can grow to"),
        # existing nodes count once
        (gpu_run(9), [HEAD, OF_POOL, OF_POOL], [GPU_POOL], "can grow to"),
        (
            gpu_run(1, 3, data_label_selector=NOT_TRAIN),
            [GPU_NODE, Node({"CPU": 2.0})],
            [],
            "fewer --data.workers",
        ),
    ],
)
def test_message_names_what_is_missing_and_what_would_fit(demand, nodes, pools, part):
    assert part in (missing_capacity(demand, nodes, pools) or "")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_fitting_runs_are_within_the_totals(sizes, workers, data_cpus, limit):
    nodes = [Node({"CPU": float(cpus), "GPU": float(gpus)}) for cpus, gpus in sizes]
    demand = gpu_run(workers, data_cpus)
    count = max_concurrent(demand, nodes, limit)
    assert count <= limit
    assert count * workers <= sum(gpus for _, gpus in sizes)
    assert count * (workers + data_cpus) <= sum(cpus for cpus, _ in sizes)
    assert (missing_capacity(demand, nodes) is None) == (count > 0)
    if count:
        assert capacity.num_workers_that_fit(demand, nodes) == workers
