"""Resources that a run requests from Ray: devices, decode actors, and the process group of the
workers.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mmray.cluster import ray_internals, run_resources
from mmray.cluster.capacity import NODE_GROUP, Node, Pool, num_workers_that_fit
from mmray.cluster.placement import ROLE_LABEL, AutoscalerRequest, SchedulableNodes
from mmray.cluster.run_resources import (
    check_capacity,
    check_driver_memory,
    num_free_workers,
    resource_demand,
)
from mmray.config import Cluster, Config, Data, Train
from mmray.config.recipes import RECIPES
from mmray.errors import ResourceError
from mmray.training.driver import describe_idle, describe_schedule
from mmray.training.workers import ray_backend, ray_trainer
from mmray.training.workers.ray_backend import MAX_DECODERS, RayBackend, decoder_limits
from mmray.training.workers.ray_trainer import torch_trainer

GIB = 2.0**30
LAPTOP = Node({"CPU": 12.0, "GPU": 2.0, "memory": 64 * GIB}, {"ray.io/node-id": "a"})
HEAD = Node({"CPU": 4.0, ray_internals.HEAD_RESOURCE: 1.0}, {"ray.io/node-id": "h"})
GPU_NODE = Node({"CPU": 8.0, "GPU": 4.0, "memory": 64 * GIB}, {"ray.io/node-id": "g"})
CPU_NODE = Node({"CPU": 16.0, "memory": 64 * GIB}, {"ray.io/node-id": "c"})
FULL_NODE = Node({"CPU": 4.0, "GPU": 4.0, "memory": 64 * GIB}, {"ray.io/node-id": "f"})
NO_CPUS = Node({"CPU": 0.0}, {ROLE_LABEL: "head", "ray.io/node-id": "n"})
OTHER_GPU_NODE = Node(GPU_NODE.resources, {"ray.io/node-id": "o"})
POOLS = [Pool("cpu", {"CPU": 16.0}, 8), Pool("gpu", {"CPU": 8.0, "GPU": 1.0}, 4)]


@pytest.fixture
def cluster(monkeypatch):
    """cluster(nodes, pools): a cluster of these nodes; the driver's machine has 8 cores and 20 GiB
    free.
    """

    def of(nodes, pools=()):
        monkeypatch.setattr(ray_backend.placement, "alive_nodes", lambda: nodes)
        monkeypatch.setattr(ray_backend.placement, "autoscaling_pools", lambda: list(pools))

    monkeypatch.setattr(ray_backend, "cores", lambda: 8)
    monkeypatch.setattr(ray_backend, "free_memory", lambda: 20 * GIB)
    of([LAPTOP])
    return of


@pytest.mark.parametrize(
    ("nodes", "pools", "section", "data", "cpus", "limits"),
    [  # cpus of a worker, with decoding; limits: reserved, least and most decode actors of each
        # one node: limited by its 8 cores, not by Ray's 12 CPUs, of which workers use 2
        ([LAPTOP], [], Cluster(workers=2), Data(), 2, (1, 1, 3)),
        # 2.5 GiB each, within half of the memory
        ([LAPTOP], [], Cluster(workers=2), Data(block_mb=512), 2, (1, 1, 2)),
        ([LAPTOP], [], Cluster(workers=2), Data(workers=11), 6, (5, 6, 6)),
        ([LAPTOP], [], Cluster(workers=2), Data(workers="2-16"), 2, (1, 1, 8)),
        # several nodes: as many as get a CPU
        ([HEAD, GPU_NODE, CPU_NODE], [], Cluster(workers=4), Data(), 2, (1, 1, MAX_DECODERS)),
        # a CPU each for decoding would leave CPUs for two workers only: they share those of workers
        ([HEAD, FULL_NODE], [], Cluster(workers=4), Data(), 1, (1, 1, MAX_DECODERS)),
        ([NO_CPUS], POOLS, Cluster(workers=4), Data(workers=8), 3, (2, 2, 2)),
        # nodes of an unknown size will be added
        ([NO_CPUS], [], Cluster(workers=4, wait_for_nodes=True), Data(), 1, (1, 1, MAX_DECODERS)),
    ],
)
def test_decode_actors_of_a_worker_are_reserved_with_it(
    cluster, nodes, pools, section, data, cpus, limits
):
    cluster(nodes, pools)
    config = Config(cluster=section, data=data)
    demand = resource_demand(config)
    assert demand.per_worker["CPU"] == cpus
    found = decoder_limits(config, demand)
    assert (found.reserved, found.minimum, found.maximum) == limits


def test_further_decode_actors_run_on_data_nodes_and_not_on_the_head(cluster):
    cluster([HEAD, GPU_NODE, CPU_NODE])
    config = Config(cluster=Cluster(workers=4))
    selector = decoder_limits(config, resource_demand(config)).label_selector
    nodes = [HEAD, GPU_NODE, CPU_NODE]
    assert [node.matches_labels(selector) for node in nodes] == [False, False, True]
    cluster([HEAD])
    selector = decoder_limits(config, resource_demand(config)).label_selector
    assert HEAD.matches_labels(selector)  # the only node


@pytest.mark.parametrize(
    ("nodes", "settings", "gpus"),
    [
        ([LAPTOP], RECIPES["sample"]().cluster.model_dump(), 1),
        ([CPU_NODE], RECIPES["sample"]().cluster.model_dump(), 0),
        ([LAPTOP], {"accelerator": "cpu"}, 0),
        ([CPU_NODE], {"accelerator": "gpu"}, 1),
    ],
)
def test_workers_have_gpus_if_the_cluster_has_any(cluster, nodes, settings, gpus):
    cluster(nodes)
    assert resource_demand(Config(cluster=Cluster(**settings))).per_worker.get("GPU", 0) == gpus


@pytest.mark.parametrize(
    ("nodes", "workers", "parallel", "message"),
    [
        (
            [HEAD, GPU_NODE],
            8,
            "ddp",
            r"8 training workers of 2 CPU and 1 GPU.*--cluster\.workers 4 would fit.*cpu",
        ),
        (
            [HEAD, GPU_NODE],
            "3-4",
            "branches",
            r"3 training workers of 2 CPU and 2 GPU.*--cluster\.workers 2 would",
        ),
    ],
)
def test_too_few_gpus_are_an_error(cluster, nodes, workers, parallel, message):
    """Otherwise they would be idle unnoticed."""
    cluster(nodes)

    def check(**settings):
        check_capacity(
            Config(cluster=Cluster(workers=workers, **settings), train=Train(parallel=parallel))
        )

    with pytest.raises(ResourceError, match=message):
        check()
    check(accelerator="cpu")
    check(wait_for_nodes=True)


def test_node_is_excluded_if_the_run_fits_on_others(cluster):
    """Workers of later attempts avoid it."""
    config = Config(cluster=Cluster(workers="1-8", accelerator="gpu"))
    cluster([HEAD, CPU_NODE, GPU_NODE, OTHER_GPU_NODE])
    backend = RayBackend()
    assert backend.exclude_node(config, "g")
    demand = resource_demand(config, excluded=backend._excluded)
    assert num_workers_that_fit(demand, [HEAD, CPU_NODE, GPU_NODE, OTHER_GPU_NODE]) == 4
    assert not backend.exclude_node(config, "o") and backend._excluded == {"g"}  # the last one
    assert not RayBackend().exclude_node(Config(cluster=Cluster(workers=8, accelerator="gpu")), "g")
    cluster([HEAD, CPU_NODE, GPU_NODE], [Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 2)])
    assert RayBackend().exclude_node(config, "g")  # the cluster grows
    in_pool = Node(GPU_NODE.resources, GPU_NODE.labels | {NODE_GROUP: "gpu"})
    cluster([HEAD, CPU_NODE, in_pool], [Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 1)])
    assert not RayBackend().exclude_node(config, "g")  # the node itself is the pool


def test_run_of_fixed_size_waits_for_nodes_that_do_not_answer(cluster, monkeypatch):
    """Otherwise one failure of the network excludes them for the whole attempt.

    Draining nodes do not come back.
    """
    monkeypatch.setattr(ray_backend, "POLL_INTERVAL_S", 0.0)
    cluster([HEAD, CPU_NODE, GPU_NODE, OTHER_GPU_NODE])
    answers = []

    def world_size(workers, *unavailable, draining=()):
        answers[:] = [SchedulableNodes([], names) for names in unavailable]
        monkeypatch.setattr(ray_backend.placement, "schedulable_nodes", lambda: answers.pop(0))
        monkeypatch.setattr(
            ray_backend.placement, "draining_nodes", lambda: dict.fromkeys(draining, 0.0)
        )
        return RayBackend().choose_world_size(
            Config(cluster=Cluster(workers=workers, accelerator="gpu"))
        )

    assert world_size(8, ("g", "o"), ("o",), ()) == 8 and answers == []
    assert world_size(8, ("g",), draining=("g",)) == 8
    assert world_size(4, ("g",)) == 4  # the other node suffices
    assert world_size(99, ("g",)) == 99  # they would not suffice
    monkeypatch.setattr(ray_backend, "NODE_LOSS_S", 0.0)
    assert world_size(8, ("g",)) == 8


def test_elastic_run_requests_only_the_workers_that_it_lacks(cluster, monkeypatch):
    requests = []
    monkeypatch.setattr(ray_backend, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(
        AutoscalerRequest, "request", lambda self, _, __, count: requests.append(count)
    )
    nodes = [HEAD, CPU_NODE, GPU_NODE]
    cluster(nodes, [Pool("gpu", {"CPU": 8.0, "GPU": 4.0}, 2)])
    monkeypatch.setattr(
        ray_backend.placement, "schedulable_nodes", lambda: SchedulableNodes(nodes, ())
    )
    for most, missing in ((4, 0), (8, 4)):
        assert (
            RayBackend().choose_world_size(
                Config(cluster=Cluster(workers=f"1-{most}", accelerator="gpu"))
            )
            == 4
        )
        assert requests == [most, missing]
        requests.clear()


def test_evaluation_takes_free_workers(cluster, monkeypatch):
    config, free = Config(cluster=Cluster(workers="2-4", accelerator="cpu")), [Node({"CPU": 3.0})]
    monkeypatch.setattr(ray_backend.placement, "free_nodes", lambda: free)
    monkeypatch.setattr(run_resources, "FREE_WAIT_S", 0.0)
    assert num_free_workers(config) == 3
    free[:] = [Node({"CPU": 1.0})]
    assert num_free_workers(config) == 2  # they wait until others have ended
    cluster([Node({"CPU": 1.0})])
    with pytest.raises(ResourceError, match=r"2 training workers.*the cluster has 1 CPU"):
        num_free_workers(config)


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("accelerator", "backend"), [("gpu", BOTH), ("auto", BOTH), ("cpu", "gloo")]
)
@pytest.mark.parametrize(("settings", "seconds"), [({}, 300), ({"hang_timeout_s": 400.3}, 601)])
@pytest.mark.parametrize("ips", [("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.2")])
def test_process_group_has_backend_timeout_and_interface(
    cluster, tmp_path, monkeypatch, accelerator, backend, settings, seconds, ips
):
    """The arguments of init_process_group in each worker; the loopback if there is one node."""
    config = Config(cluster=Cluster(workers=2, accelerator=accelerator, **settings))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    timeout_s = config.cluster.group_timeout_s
    trainer = torch_trainer(lambda: None, timeout_s, tmp_path, resource_demand(config), {})
    calls, groups, selected = [], [], []
    monkeypatch.setattr(ray_trainer, "get_node_ip_address", lambda: ips[1])
    monkeypatch.setattr("mmray.engine.collectives.set_network_interface", selected.append)
    monkeypatch.setattr(ray_trainer.ray, "get", lambda _: None)
    one = SimpleNamespace(
        get_local_rank=lambda: 0, get_local_world_size=lambda: 2, get_node_rank=lambda: 0
    )
    monkeypatch.setattr(ray_trainer.ray.train, "get_context", lambda: one)
    workers = SimpleNamespace(
        execute=lambda _: ips,
        execute_single=lambda *_: ("127.0.0.1", 1),
        execute_single_async=lambda _, call, **arguments: calls.append((call, arguments)),
    )
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, timeout: groups.append(
            {
                "backend": backend,
                "timeout": timeout,
                "on": selected[0],
                "rank": int(os.environ["RANK"]),
            }
        ),
    )
    trainer.backend_config.backend_cls().on_start(workers, trainer.backend_config)
    for call, arguments in calls:
        call(**arguments)
    assert [each["rank"] for each in groups] == [0, 1]
    assert all(
        each["backend"] == backend and each["timeout"] == timedelta(seconds=seconds)
        for each in groups
    )
    assert all(each["on"] == ("127.0.0.1" if len(set(ips)) == 1 else ips[1]) for each in groups)


@pytest.mark.parametrize(
    ("settings", "num_local", "said"),
    [
        (
            {"accelerator": "cpu", "cpus_per_worker": 1.0},
            2,
            "1 of 2 cores; --cluster.cpus-per-worker auto uses them",
        ),
        ({"accelerator": "cpu", "cpus_per_worker": 2.0}, 2, None),
        # 9 threads do not fit
        ({"accelerator": "cpu", "workers": 3, "cpus_per_worker": 2.0}, 8, None),
        ({"accelerator": "gpu", "workers": 2}, 8, "6 of 8 GPUs; --cluster.workers 8 uses them"),
        ({"accelerator": "gpu", "workers": 8}, 8, None),
        ({"accelerator": "cpu", "cpus_per_worker": 1.0}, None, None),
    ],
)
def test_idle_cores_and_gpus_are_named_with_their_flag(settings, num_local, said):
    assert describe_idle(Config(cluster=Cluster(**settings)), num_local) == said


def test_head_without_memory_for_another_run_is_refused():
    check_driver_memory(0.61, is_single_node=False)
    check_driver_memory(0.1, is_single_node=True)
    with pytest.raises(ResourceError, match=r"0.50 GiB of memory are free .* needs 0.6 GiB there"):
        check_driver_memory(0.5, is_single_node=False)


@pytest.mark.parametrize(("warmup_steps", "is_named"), [(99, False), (100, True), (500, True)])
def test_a_warm_up_that_takes_the_complete_run_is_named(warmup_steps, is_named):
    text = describe_schedule(100, 2.0, warmup_steps)
    assert text.startswith("100 steps, about 2.0 epochs")
    assert (f"the warm-up (optimizer.warmup_steps) takes {warmup_steps}" in text) == is_named
