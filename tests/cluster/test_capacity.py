"""Whether a run fits a cluster, and the message if it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmray.cluster.capacity import NODE_GROUP, Demand, Node, Pool, max_concurrent, max_workers, missing_capacity

GPU_NODE = Node({"CPU": 8.0, "GPU": 4.0}, {"mmray/role": "train"})
CPU_NODE = Node({"CPU": 16.0}, {"mmray/role": "data"})
HEAD = Node({}, {"mmray/role": "head"})


def gpu_run(workers, data_cpus=2, **labels):
    return Demand(workers, {"CPU": 1.0, "GPU": 1.0}, data_cpus, **labels)


def test_fitting_run_has_no_message():
    assert missing_capacity(gpu_run(8), [HEAD, GPU_NODE, GPU_NODE, CPU_NODE]) is None


def test_too_many_gpus_suggests_number_that_fits():
    said = missing_capacity(gpu_run(99), [HEAD, GPU_NODE, CPU_NODE])
    assert said is not None
    assert said.startswith("99 training workers of 1 CPU and 1 GPU each, and 2 CPUs for data: 4 workers fit")
    assert "24 CPU and 4 GPU on 3 nodes" in said and "--cluster.workers 4 would fit" in said


def test_misspelt_resource_lists_existing_ones():
    said = missing_capacity(Demand(1, {"CPU": 1.0, "gpu_slots": 1.0}, 2), [Node({"CPU": 4.0, "gpu_slot": 2.0})])
    assert said is not None and "no node has any gpu_slots" in said and "the nodes have CPU, gpu_slot" in said


def test_worker_is_not_split_over_nodes():
    said = missing_capacity(Demand(1, {"CPU": 12.0}, 0), [Node({"CPU": 8.0}), Node({"CPU": 8.0})])
    assert said is not None and "no single node can hold one worker" in said


def test_workers_leave_cpus_for_data():
    said = missing_capacity(Demand(4, {"CPU": 1.0}, 2), [Node({"CPU": 4.0})])
    assert (
        said is not None and "2 workers fit together with the data" in said and "--cluster.workers 2 would fit" in said
    )


def test_missing_gpus_suggest_cpu():
    said = missing_capacity(gpu_run(2), [Node({"CPU": 8.0})])
    assert said is not None and "no node has any GPU" in said and "--cluster.accelerator cpu" in said


def test_missing_label_is_named():
    said = missing_capacity(gpu_run(1, worker_labels={"role": "gup"}), [GPU_NODE, CPU_NODE])
    assert said is not None and "no node for training is labelled role=gup" in said
    assert "--cluster.train-label none" in said


@pytest.mark.parametrize(("workers", "fits"), [(8, True), (9, False)])
def test_pools_count_with_their_maximum(workers, fits):
    pools = [Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 2), Pool("cpu", {"CPU": 16.0}, 4)]
    assert (missing_capacity(gpu_run(workers), [HEAD], pools) is None) is fits


def test_existing_nodes_of_a_pool_count_once():
    pools = [Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 2)]
    there = Node({"CPU": 8.0, "GPU": 4.0}, {NODE_GROUP: "gpu"})
    assert missing_capacity(gpu_run(8), [HEAD, there, there], pools) is None
    assert "can grow to" in (missing_capacity(gpu_run(9), [HEAD, there, there], pools) or "")


def test_data_cpus_respect_labels():
    demand = gpu_run(1, data_cpus=3, data_labels={"mmray/role": "!train"})
    assert missing_capacity(demand, [GPU_NODE, CPU_NODE]) is None
    assert "too few CPUs for data" in (missing_capacity(demand, [GPU_NODE, Node({"CPU": 2.0})]) or "")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_fitting_runs_are_within_the_totals(nodes, workers, data_cpus, at_most):
    here = [Node({"CPU": float(cpus), "GPU": float(gpus)}) for cpus, gpus in nodes]
    demand = gpu_run(workers, data_cpus)
    count = max_concurrent(demand, here, at_most)
    assert count <= at_most
    assert count * workers <= sum(gpus for _, gpus in nodes)
    assert count * (workers + data_cpus) <= sum(cpus for cpus, _ in nodes)
    assert (missing_capacity(demand, here) is None) == (count > 0)
    if count:
        assert max_workers(demand, here) == workers
