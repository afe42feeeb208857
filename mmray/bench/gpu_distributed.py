"""Stage `nccl` of bench/gpu.py: distributed code in a group of one rank, with NCCL or gloo.

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

from mmray.bench import device_checks
from mmray.bench.device_checks import compare, tolerance
from mmray.engine.checkpoint.state_io import HostStager
from mmray.engine.collectives import BACKENDS, Group, is_dtensor
from mmray.engine.parallel import strategy
from mmray.models.synthetic import synthetic_batch

Case = tuple[str, Callable[[], dict[str, Any]]]
KIND = "clip"
MICRO_BATCHES = 2
BYTES = 2**28


def nccl(device: torch.device) -> Iterator[Case]:
    """Process group, DDP with and without compressed gradients, FSDP2, and the copy of a checkpoint
    into pinned memory.
    """
    yield "process group", partial(process_group, device)
    yield "ddp", partial(ddp, device)
    yield "fsdp", partial(fsdp, device)
    yield "checkpoint staging", partial(staging, device)


def process_group(device: torch.device) -> dict[str, Any]:
    """Start the group as a worker does; the time of each collective, of 256 MiB on a GPU."""
    start_s = time.perf_counter()
    folder = tempfile.mkdtemp(prefix="mmray-bench-")
    dist.init_process_group(
        BACKENDS[device.type], init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    row = {"start_s": time.perf_counter() - start_s, "backend": dist.get_backend()}
    size = BYTES // 4 if device.type == "cuda" else 2**10
    tensor = torch.ones(size, device=device)
    output = torch.empty_like(tensor)
    texts: list[Any] = [None]
    collectives: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(output, tensor),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, tensor),
        "all_gather_object": lambda: dist.all_gather_object(texts, "text"),
        "barrier": dist.barrier,
    }
    for name, collective in collectives.items():
        collective()  # the first of each allocates buffers
        synchronize(device)
        start_s = time.perf_counter()
        collective()
        synchronize(device)
        row[f"{name}_ms"] = 1e3 * (time.perf_counter() - start_s)
    assert bool((tensor == 1).all()) and bool((output == 1).all())
    return row


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ddp(device: torch.device) -> dict[str, float]:
    """Accumulated gradients of DDP's reducer equal those of the module alone."""
    expected = gradients(device, model_of(device))
    model = strategy._replicate(model_of(device))
    largest = expected.abs().max()
    return compare(
        tolerance(KIND, device),
        from_module=(gradients(device, model) / largest, expected / largest),
    )


def fsdp(device: torch.device) -> dict[str, float]:
    """Gradients of FSDP2 on a mesh of one rank equal those of the module alone."""
    expected = gradients(device, model_of(device))
    model = strategy.shard(model_of(device), Group.current(device), None)
    return compare(tolerance(KIND, device), from_module=(gradients(device, model), expected))


def staging(device: torch.device) -> dict[str, float]:
    """The state of a model, copied as for a checkpoint, equals that on the device."""
    state = {name: value.detach() for name, value in model_of(device).state_dict().items()}
    stager = HostStager()
    staged = stager.stage(state)
    stager.synchronize_staging()
    pairs = {name: (staged[name], value.cpu()) for name, value in state.items()}
    differences = compare(0, **pairs)
    stager.close()
    return {"tensors": len(pairs), "largest_difference": max(differences.values())}


def model_of(device: torch.device) -> nn.Module:
    """A tiny model in float64, with the same weights in each call."""
    return device_checks.spec_of(KIND, device).model


def gradients(device: torch.device, model: nn.Module) -> Tensor:
    """Gradients of an accumulated step, on the CPU."""
    for index in range(MICRO_BATCHES):
        inputs = device_checks.MODELS[KIND][0].inputs
        batch = synthetic_batch(inputs, device_checks.VOCAB, 4, device, seed=index)
        with strategy.maybe_no_sync(model, last=index == MICRO_BATCHES - 1):
            outputs = model(batch)
            scores = outputs["logit_scale"] * outputs["image_embed"] @ outputs["text_embed"].T
            scores.square().mean().backward()
    values = [weight.grad for weight in model.parameters()]
    full = [value.full_tensor() if is_dtensor(value) else value for value in values]
    return torch.cat([value.flatten().cpu() for value in full if value is not None])
