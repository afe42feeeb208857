"""Resources that a run requests from Ray: decode actors within cores and memory, and the process group of workers."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ray.train.torch import config as ray_torch

from mmray.cluster.capacity import Node
from mmray.cluster.connect import num_decode_actors
from mmray.config import Cluster, Config, Data
from mmray.train import resources
from mmray.train.resources import num_data_actors, scaling_config, torch_config


@pytest.mark.parametrize(
    ("cpus", "taken", "memory_gib", "block_mb", "actors"),
    [
        (16, 2, 1000.0, 24.0, 14),  # limited by cores
        (16, 2, 8.0, 128.0, 4),  # 1 GiB per actor (0.5 GiB and four blocks), within half of the memory
        (16, 2, 8.0, 512.0, 1),
        (16, 2, float("inf"), 512.0, 14),  # Ray reports no memory
        (2, 2, 1000.0, 24.0, 1),  # workers use all cores of a laptop and share them
        (16, 2, 0.1, 24.0, 1),
    ],
)
def test_decode_actors_are_limited_by_cores_and_memory(cpus, taken, memory_gib, block_mb, actors):
    assert num_decode_actors(cpus, taken, memory_gib, block_mb) == actors


@pytest.fixture
def here(monkeypatch):
    """One node with 12 CPUs and 2 GPUs in Ray, on a machine of 8 cores with 20 GiB free."""
    counted = {"CPU": 12.0, "GPU": 2.0}
    monkeypatch.setattr(resources.placement, "alive_nodes", lambda: [Node(counted)])
    monkeypatch.setattr(resources.placement, "autoscaling_pools", list)
    monkeypatch.setattr(resources.ray, "cluster_resources", lambda: counted)
    monkeypatch.setattr(resources, "cores", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: 20 * 2**30)


@pytest.mark.parametrize(
    ("workers", "data", "actors"),
    [
        (2, Data(), 6),  # limited by real cores, not by Ray's CPUs
        (2, Data(block_mb=512), 4),  # 2.5 GiB each, of 10
        ("2-8", Data(), 1),
        (2, Data(workers=11), 11),  # an explicit number is kept
    ],
)
def test_decode_actors_on_one_node_use_real_cores_and_free_memory(here, workers, data, actors):
    assert num_data_actors(Config(cluster=Cluster(workers=workers), data=data)) == actors


class Two(SimpleNamespace):
    """A group of two workers."""

    def __len__(self):
        return 2


@pytest.mark.parametrize(("accelerator", "backend"), [("gpu", "nccl"), ("auto", "nccl"), ("cpu", "gloo")])
@pytest.mark.parametrize(("settings", "seconds"), [({}, 300), ({"hang_timeout_s": 400.3}, 601)])
def test_process_group_uses_nccl_or_gloo_with_timeout(here, monkeypatch, accelerator, backend, settings, seconds):
    """Arguments that reach init_process_group from our TorchConfig through Ray."""
    config = Config(cluster=Cluster(workers=2, accelerator=accelerator, **settings))
    ranks, made = [], []
    group = Two(
        get_resources_per_worker=lambda: scaling_config(config).resources_per_worker,
        execute=lambda *_, **__: None,
        execute_single=lambda *_: ("127.0.0.1", 1),
        execute_single_async=lambda _, call, **given: ranks.append((call, given)),
    )
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # otherwise Ray sets it permanently
    monkeypatch.setattr(ray_torch.ray, "get", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **given: made.append(given))
    ours = torch_config(config)
    ours.backend_cls().on_start(group, ours)
    for call, given in ranks:
        call(**given)
    assert [each["rank"] for each in made] == [0, 1]
    assert all(each["backend"] == backend and each["timeout"] == timedelta(seconds=seconds) for each in made)
