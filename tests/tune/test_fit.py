"""How many trials fit, and what is said when none does."""

import pytest

from mmray.cluster.capacity import Demand, Node, Pool, concurrent
from mmray.errors import ResourceError
from mmray.tune.fit import largest, room_for

TWO_CPU_WORKERS = Demand(2, {"CPU": 1.0}, data_cpus=2)
GPU_WORKERS = Demand(2, {"CPU": 1.0, "GPU": 1.0}, data_cpus=3)


def nodes(*resources):
    return [Node(each) for each in resources]


def test_trials_fit_only_with_room_for_their_data():
    assert concurrent(TWO_CPU_WORKERS, nodes({"CPU": 4.0}), 9) == 1
    assert concurrent(TWO_CPU_WORKERS, nodes({"CPU": 3.0}), 9) == 0  # the workers would hold all, and the data wait
    assert concurrent(TWO_CPU_WORKERS, nodes({"CPU": 8.0}), 9) == 2
    assert concurrent(TWO_CPU_WORKERS, nodes({"CPU": 80.0}), 9) == 9


def test_data_leaves_the_gpu_nodes_to_the_workers():
    free = nodes({"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}, {"CPU": 6.0})
    assert concurrent(GPU_WORKERS, free, 9) == 2
    assert free[2].resources == {"CPU": 6.0}  # what is free is only looked at


def test_the_largest_demand_holds_each():
    assert largest([TWO_CPU_WORKERS, GPU_WORKERS]) == Demand(2, {"CPU": 1.0, "GPU": 1.0}, 3)


def test_data_actors_are_a_share_of_what_the_workers_leave():
    assert room_for(nodes({"CPU": 16.0}), [], TWO_CPU_WORKERS, 1) == (1, 13)
    assert room_for(nodes({"CPU": 16.0}), [], TWO_CPU_WORKERS, 2) == (2, 5)
    assert room_for(nodes({"CPU": 4.0}), [], TWO_CPU_WORKERS, 1) == (1, 1)


def test_where_none_fits_it_is_said_what_is_missing():
    with pytest.raises(ResourceError, match=r"not one trial has room: 2 training workers of 1 CPU and 1 GPU each"):
        room_for([], nodes({"CPU": 6.0, "GPU": 1.0}), GPU_WORKERS, 1)


def test_a_cluster_that_can_grow_is_waited_for():
    assert room_for([], [], GPU_WORKERS, 4, waits=True)[0] == 1
    assert room_for([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 2)])[0] == 1
    with pytest.raises(ResourceError):
        room_for([], [], GPU_WORKERS, 4, pools=[Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 1)])


def test_room_that_others_hold_now_is_waited_for():
    assert room_for([], nodes({"CPU": 8.0}), TWO_CPU_WORKERS, 3)[0] == 1
