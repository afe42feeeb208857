"""What a rank measures of itself when a line is due: rates, model FLOP/s, the branches' idle time, load, memory.

loop.py keeps a Meter and reduces over ranks what it tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import Throughput
from mmray.engine.metrics.writers import Metrics
from mmray.engine.parallel import wrap
from mmray.engine.parallel.branches import BranchParallel
from mmray.engine.parallel.wrap import preserve_buffers
from mmray.engine.precision import Precision
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import TrainState
from mmray.errors import is_out_of_memory
from mmray.objectives.protocol import Batch


@dataclass
class Padding:
    """One rank's tokens and places for them since the last line; `over` makes of the ranks' sums the run's shares."""

    tokens: int = 0
    places: int = 0
    padded_tokens_unbucketed: int = 0

    def add(self, share: LocalBatch) -> None:
        self.tokens += share.tokens
        self.places += share.places
        self.padded_tokens_unbucketed += share.padded_tokens_unbucketed

    def compute(self, device: torch.device) -> list[Tensor]:
        """Scalars to be summed over ranks; counted anew from here."""
        counted = [self.tokens, self.places, self.padded_tokens_unbucketed]
        self.tokens = self.places = self.padded_tokens_unbucketed = 0
        return list(torch.tensor(counted, dtype=torch.float64, device=device))

    @staticmethod
    def over(sums: list[float], group_by_length: bool) -> Metrics:
        """The share of the places that no token stands in; with buckets also what it were without."""
        tokens, places, plain = sums
        if not places:
            return {}
        unsorted = {"batch/padding_unsorted": 1 - tokens / plain} if group_by_length else {}
        return {"batch/padding": 1 - tokens / places} | unsorted


@dataclass
class Meter:
    """One rank's figures; `devices`: how many a worker has."""

    rates: Throughput
    devices: int = 1
    padding: Padding = field(default_factory=Padding)
    flops_of_row: float | None = None  # a forward and a backward

    def count_flops(self, state: TrainState, share: LocalBatch) -> None:
        """Count the model's work once, on the first rows that come.

        Without room for it, it waits for the next step: this one meets the same end, and takes smaller micro-batches.
        Raises what says so where ranks wait for each other in a forward.
        """
        if self.flops_of_row is not None:
            return
        first = share.micro_batches[0]
        try:
            flops = model_flops(wrap.unwrap(state.model), first, state.precision)
        except (RuntimeError, MemoryError) as error:
            if not state.can_recover_oom or not is_out_of_memory(error):
                raise
            return
        self.flops_of_row = flops / len(first["valid"])

    def compute(self, state: TrainState) -> Metrics:
        """Figures since the last call."""
        device: torch.device = state.group.device
        metrics = self.rates.compute(state.group.world)
        if metrics:
            rate = (self.flops_of_row or 0.0) * metrics["throughput/samples_per_s"] / state.group.world / self.devices
            metrics["throughput/tflops_per_device"] = rate / 1e12
            if device.type == "cuda":
                metrics["throughput/utilisation"] = rate / peak_flops(device, state.precision)
        if isinstance(state.model, BranchParallel):
            metrics |= state.model.idle()
        return metrics | machine_load(device) | {"memory/peak_gib": self.rates.timers.memory.compute_gib(device)}


# How a figure that each rank has of its own becomes the run's; what is not named is the mean.
REDUCTIONS = {"time/step_p95_s": "max", "time/first_step_s": "max", "memory/": "max", "host/memory_gib": "max"}


def reduce_over_ranks(group: Group, sums: list[Tensor], own: Metrics) -> tuple[list[float], Metrics]:
    """Sums over ranks, and every rank's own figures reduced to the run's, in one collective.

    Throughput is of the whole run on each rank already: its mean is the run's.
    """
    figures = torch.tensor([float(value) for value in own.values()], dtype=torch.float64, device=group.device)
    local = torch.cat([*(value.to(torch.float64).reshape(1) for value in sums), figures])
    everyone = group.to_host(group.all_gather(local[None]))
    found = everyone[:, len(sums) :]
    reduced = {
        name: (found[:, index].max() if _reduction(name) == "max" else found[:, index].mean()).item()
        for index, name in enumerate(own)
    }
    return everyone[:, : len(sums)].sum(0).tolist(), reduced


def _reduction(name: str) -> str:
    return next((how for prefix, how in REDUCTIONS.items() if name.startswith(prefix)), "mean")


def rows_sha(keys: Tensor) -> str:
    """16 hex digits that name a set of rows: sha256 of the sorted int64 little-endian key ids, whatever their order."""
    return sha256(keys.cpu().sort().values.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def machine_load(device: torch.device) -> dict[str, float]:
    """CPU in percent since the last look, memory in use in GiB; of a GPU its busy share in percent and memory.

    What NVML does not tell is NaN: every rank must bring the same figures.
    """
    load = {"host/cpu_percent": psutil.cpu_percent(), "host/memory_gib": psutil.virtual_memory().used / 2**30}
    return load | _gpu_load(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else load


def _gpu_load(uuid: str) -> dict[str, float]:
    nothing = {"gpu/busy_percent": float("nan"), "gpu/memory_gib": float("nan")}
    nvml, handle = _handle(uuid)
    if handle is None:
        return nothing
    try:
        busy, used = nvml.nvmlDeviceGetUtilizationRates(handle).gpu, nvml.nvmlDeviceGetMemoryInfo(handle).used
    except nvml.NVMLError:  # a slice of a GPU does not tell
        return nothing
    return {"gpu/busy_percent": float(busy), "gpu/memory_gib": used / 2**30}


@lru_cache
def _handle(uuid: str) -> tuple[Any, Any]:
    """NVML, and its handle of a GPU by UUID, for the numbers of torch and NVML differ; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml, None


# Dense tensor-core peaks of the makers' data sheets, in TFLOP/s: (bf16 and fp16, fp32 as torch computes it by default).
# By words of a device's name, the longer ones first.
PEAKS = {
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "GH200": (989, 67),
    "B200": (2250, 75),
    "GB200": (2500, 80),
    "A100": (312, 19.5),
    "A10G": (70, 35),
    "A10": (125, 31),
    "A30": (165, 10.3),
    "A40": (150, 37),
    "L40S": (362, 92),
    "L40": (181, 90.5),
    "L4": (121, 30),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}


WITH_BIAS = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)  # whose first argument is added


@torch.no_grad()
def model_flops(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Floating point operations of a forward and a backward of `batch`, without what accumulation computes again.

    A backward is two forwards (Narayanan et al. 2021, section 5.1) where everything learns. Where weights are frozen,
    their own gradients are left out, and what no weight that learns comes before, altogether.
    """
    work = _Work()
    with preserve_buffers(model), precision.autocast(), work:
        model(batch)
    return work.total


def peak_flops(device: torch.device, precision: Precision) -> float:
    """What a GPU does at most in a second at this precision; NaN for one that is not in the table."""
    name = torch.cuda.get_device_name(device)
    # Whole words: an RTX A4000 is no A40, nor an L40 an L4.
    known = next((peaks for key, peaks in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
    return float("nan") if known is None else known[0 if precision.dtype is not None else 1] * 1e12


class _Work(TorchDispatchMode):
    """Adds up the products of matrices (and convolutions) of a forward, and what their backward will take.

    A product's backward is another of the same size for each of its two operands that a gradient is asked for: a weight
    that learns, or what comes after one. It is followed here and not by autograd, so that no graph is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.supports_higher_order_operators = True  # such as flex_attention
        self._followed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what comes after a weight that learns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        out = func(*args, **kwargs)
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.total += flops * (1 + self._backward(packet, args))
        if packet is not torch.ops.aten.detach and any(self._learns(value) for value in tree_leaves((args, kwargs))):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._followed[tensor] = True
        return out

    def _backward(self, packet: Any, args: Any) -> float:
        """The backward's work as a multiple of the forward's."""
        if "attention" in str(packet):  # two products: queries with keys, what comes of them with values
            query, key, value = (self._learns(tensor) for tensor in args[:3])
            return (query + key + value + (query or key)) / 2
        first = 1 if packet in WITH_BIAS else 0
        return sum(self._learns(tensor) for tensor in args[first : first + 2])

    def _learns(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value in self._followed or (value.is_leaf and value.requires_grad))
