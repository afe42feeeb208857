"""What a run asks of Ray: training workers, their devices and process group, and data actors beside them."""

from __future__ import annotations

import os

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig

from mmray.cluster.join import data_workers, free_memory_gib
from mmray.config import Config
from mmray.errors import ResourceError


def worker_resources(config: Config) -> ScalingConfig:
    """The training workers, a GPU each where GPUs are used."""
    use_gpu = _use_gpu(config)
    resources = {"CPU": config.cluster.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    return ScalingConfig(num_workers=config.cluster.workers, use_gpu=use_gpu, resources_per_worker=resources)


def torch_config(config: Config) -> TorchConfig:
    """NCCL with GPUs and gloo without, as Ray Train chooses; with a timeout, which neither has by default."""
    return TorchConfig(timeout_s=int(config.cluster.collective_timeout_s))


def data_actors(config: Config) -> int:
    """Decoding actors of the stream: as configured, or what cores and memory leave."""
    if isinstance(config.data.workers, int):
        return config.data.workers
    taken = config.cluster.workers * config.cluster.cpus_per_worker
    cpus = ray.cluster_resources().get("CPU", 1)
    if len(ray.nodes()) == 1:  # a cluster on this machine has more logical CPUs than real cores
        cpus = min(cpus, os.cpu_count() or 1)
    return data_workers(cpus, taken, free_memory_gib(), config.data.block_mb)


def _use_gpu(config: Config) -> bool:
    """Whether the workers get GPUs; raises ResourceError where GPUs are asked for and a lone machine has too few."""
    have = ray.cluster_resources().get("GPU", 0)
    wanted = config.cluster.accelerator
    joined_cluster = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if wanted == "gpu" and have < config.cluster.workers and not joined_cluster:
        raise ResourceError(
            f"cluster.workers {config.cluster.workers} with a GPU each: this machine has {have:g} GPUs; "
            "ask for fewer, join a cluster (--cluster.address), or train on the CPU (--cluster.accelerator cpu)"
        )
    return wanted == "gpu" or (wanted == "auto" and have >= config.cluster.workers)
