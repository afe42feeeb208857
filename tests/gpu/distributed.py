"""Stage `nccl` of command.py: distributed code in a group of one rank, with NCCL or gloo.

A run on one GPU enters none of it. What needs two ranks stays untested here: messages between
devices, and their order.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmray.builtin import BACKENDS
from mmray.engine.checkpoint.staging import HostStager
from mmray.engine.collectives import Group, is_dtensor
from mmray.engine.parallel import sharding
from mmray.engine.parallel.ddp import DDP, replicate
from mmray.models.synthetic import synthetic_batch
from tests.gpu import device_checks
from tests.gpu.device_checks import TOLERANCE, compare
from tests.gpu.workload import Case

KIND = "clip"
MICRO_BATCHES = 2


def nccl(device: torch.device) -> Iterator[Case]:
    """Yield cases (named checks) that run distributed code in a process group of one rank.

    Their backend is NCCL on a GPU and gloo on a CPU.

    Args:
        device: The device to check.

    Yields:
        (name, function) of each case: the function is called without arguments and returns a dict.
        The cases are `process group` (returns what `process_group` returns, and must run first),
        `ddp` and `fsdp` (what `compare_gradients` returns), `evaluation` (of a sharded model; what
        `evaluation` returns) and `checkpoint staging` (what `staging` returns).
    """
    yield "process group", partial(process_group, device)
    yield "ddp", partial(compare_gradients, device, replicate)
    yield "fsdp", partial(compare_gradients, device, partial(shard, device))
    yield "evaluation", partial(evaluation, device)
    yield "checkpoint staging", partial(staging, device)


def process_group(device: torch.device) -> dict[str, Any]:
    """Start a process group of this process alone, which stays open, and run each collective once.

    Args:
        device: The device; the backend is NCCL on a GPU and gloo on a CPU.

    Returns:
        `start_s` (seconds) and `backend`.

    Raises:
        AssertionError: A collective returned other values.
    """
    start_s = time.perf_counter()
    folder = tempfile.mkdtemp(prefix="mmray-bench-")
    dist.init_process_group(
        BACKENDS[device.type], init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    row = {"start_s": time.perf_counter() - start_s, "backend": dist.get_backend()}
    tensor = torch.ones(2**10, device=device)
    gathered = torch.zeros_like(tensor)
    scattered = torch.zeros_like(tensor)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(gathered, tensor)
    dist.reduce_scatter_tensor(scattered, tensor)
    for result in (tensor, gathered, scattered):
        assert bool((result == 1).all())
    return row


def compare_gradients(
    device: torch.device, wrap: Callable[[nn.Module], nn.Module]
) -> dict[str, float]:
    """Check that accumulated gradients of a wrapped module equal those of the module alone.

    Call `process_group(device)` first: it starts the process group, of this process alone.

    Args:
        device: The device to check.
        wrap: Called with a module; returns it wrapped with DDP or FSDP2.

    Returns:
        {"from_module": largest difference, relative to the largest gradient}.

    Raises:
        AssertionError: The difference is above the tolerance.
    """
    expected = gradients(device, model_of(device))
    wrapped = gradients(device, wrap(model_of(device)))
    largest = expected.abs().max()
    return compare(TOLERANCE, from_module=(wrapped / largest, expected / largest))


def shard(device: torch.device, model: nn.Module) -> nn.Module:
    """Shard a model in place with FSDP2, in a group of this process alone, and return it.

    Args:
        device: The device of the model.
        model: The model.
    """
    # FSDP needs it, and the tiny model was built for one device.
    model.to(memory_format=torch.contiguous_format)
    return sharding.shard(model, Group.current(device), None)


def evaluation(device: torch.device) -> dict[str, float]:
    """Check that embeddings of a model that FSDP2 shards equal those of the model alone.

    Call `process_group(device)` first: it starts a group of this process alone.

    Args:
        device: The device to check.

    Returns:
        {"from_module": largest difference}.

    Raises:
        AssertionError: The difference is above the tolerance.
    """
    inputs = device_checks.MODELS[KIND][0].inputs
    batch = synthetic_batch(inputs, device_checks.VOCAB, 4, device)

    def embed(model: Any) -> Tensor:
        with torch.no_grad():
            image = model.embed_image(batch["image"])
            text = model.embed_text(batch["input_ids"], batch["attention_mask"])
        return torch.cat([image, text]).cpu()

    sharded = shard(device, model_of(device))
    return compare(TOLERANCE, from_module=(embed(sharded), embed(model_of(device))))


def staging(device: torch.device) -> dict[str, float]:
    """Check that the state of a model, copied to the host as for a checkpoint, equals the original.

    Args:
        device: The device to check.

    Returns:
        `tensors` (count) and `largest_difference`, which is 0.

    Raises:
        AssertionError: A copy differs.
    """
    state = {name: value.detach() for name, value in model_of(device).state_dict().items()}
    stager = HostStager()
    staged = stager.stage(state)
    stager.synchronize_staging()
    pairs = {name: (staged[name], value.cpu()) for name, value in state.items()}
    differences = compare(0, **pairs)
    stager.close()
    return {"tensors": len(pairs), "largest_difference": max(differences.values())}


def model_of(device: torch.device) -> nn.Module:
    """Return a tiny CLIP model in float64, with the same weights in each call."""
    return device_checks.bench_of(KIND, device).model


def gradients(device: torch.device, model: nn.Module) -> Tensor:
    """Return the gradients of a step of two micro-batches.

    Args:
        device: The device of the batches.
        model: The model on this device, alone or wrapped by DDP or FSDP2.

    Returns:
        The gradients of all parameters in one vector on the CPU.
    """
    for index in range(MICRO_BATCHES):
        inputs = device_checks.MODELS[KIND][0].inputs
        batch = synthetic_batch(inputs, device_checks.VOCAB, 4, device, seed=index)
        last = index == MICRO_BATCHES - 1
        with DDP(Group.current(device)).micro_batch(model, last):
            outputs = model(batch)
            scores = outputs["logit_scale"] * outputs["image_embed"] @ outputs["text_embed"].T
            scores.square().mean().backward()
    values = [weight.grad for weight in model.parameters()]
    full = [value.full_tensor() if is_dtensor(value) else value for value in values]
    return torch.cat([value.flatten().cpu() for value in full if value is not None])
