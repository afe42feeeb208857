"""Metrics of a rank for a log line: throughput, model FLOPs, padding, machine load, memory; and
their reduction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mmray.data.stream.collate import is_flat
from mmray.engine.collectives import Group
from mmray.engine.metrics.table import METRICS
from mmray.engine.metrics.timers import PeakMemory, Throughput
from mmray.engine.metrics.writers import Metrics
from mmray.engine.optimizer import backward
from mmray.engine.parallel.transforms import (
    disable_recomputation,
    force_eager,
    num_compiled_graphs,
    preserve_buffers,
)
from mmray.engine.precision import Precision
from mmray.objectives.protocol import Batch


@dataclass
class Meter:
    """Metrics of one rank, which `compute` returns for a line of metrics.jsonl.

    Attributes:
        rates: Measures the times of steps.
        memory: Measures the peak memory.
        group: All ranks, with the device.
        precision: Precision of training, which determines the peak FLOP/s of a GPU.
        devices: Number of devices of a worker.
        compiles: Whether the model has compiled blocks, whose number of graphs is then a metric.
        token_counts: Numbers of caption tokens without and with padding, samples of audio without
            and with padding, and frames of video without and with padding, float64 [6]. The loop
            adds those of each step, and sets them to 0 after a logged line.
        flops_of_row: Floating point operations of a forward and a backward of one row, counted in
            the first step; None before.
    """

    rates: Throughput
    memory: PeakMemory
    group: Group
    precision: Precision
    devices: int = 1
    compiles: bool = False
    token_counts: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))
    flops_of_row: float | None = None

    def compute(self) -> Metrics:
        """Return the metrics of this rank since the last call, and start measuring again.

        Returns:
            Values by name: what `machine_load` returns, and `memory/peak_gib`. After the second
            step of the run also what `Throughput.compute` returns, `throughput/tflops_per_device`
            and, on a GPU, `throughput/mfu` (share of its peak FLOP/s, 0 to 1, NaN if that is
            unknown). If the model is compiled, `compile/graphs`, how many graphs so far.
        """
        device = self.group.device
        world_size = self.group.world_size
        metrics = self.rates.compute(world_size)
        if metrics:
            samples_per_s = metrics["throughput/samples_per_s"] / world_size / self.devices
            flops_per_s = (self.flops_of_row or 0.0) * samples_per_s
            metrics["throughput/tflops_per_device"] = flops_per_s / 1e12
            if device.type == "cuda":
                metrics["throughput/mfu"] = flops_per_s / peak_flops(device, self.precision)
        if self.compiles:
            metrics["compile/graphs"] = num_compiled_graphs()
        return metrics | machine_load(device) | {"memory/peak_gib": self.memory.peak_gib()}


def reduce_over_ranks(
    group: Group, sums: list[Tensor], local: Metrics
) -> tuple[list[list[float]], Metrics]:
    """Reduce sums and metrics over ranks, in one collective.

    Args:
        group: All ranks; each calls this function.
        sums: Tensors of this rank.
        local: Metrics of this rank, numbers by name; every rank has the same names.

    Returns:
        The elements of each tensor summed over ranks, and the metrics by name, reduced as METRICS
        has it; the mean of metrics that it does not have.
    """
    values = torch.tensor(
        [float(value) for value in local.values()], dtype=torch.float64, device=group.device
    )
    packed = [*(each.to(values).flatten() for each in sums), values]
    all_ranks = group.to_host(group.all_gather(torch.cat(packed)[None]))
    *parts, own = all_ranks.split([len(each) for each in packed], dim=1)
    columns = zip(local, own.unbind(1), strict=True)
    maxima = {name for name, info in METRICS.items() if info.reduction == "max"}
    reduced = {
        name: (column.max() if name in maxima else column.mean()).item() for name, column in columns
    }
    return [part.sum(0).tolist() for part in parts], reduced


def padding_fractions(token_counts: list[float]) -> Metrics:
    """Return the fractions of caption tokens, samples and frames that are padding.

    Returns:
        `batch/padding` of captions, `batch/padding_audio` and `batch/padding_video`, each 0 to 1.
        Those without tokens, samples or frames are omitted.
    """
    tokens, padded, samples, padded_samples, frames, padded_frames = token_counts
    pairs = {
        "batch/padding": (tokens, padded),
        "batch/padding_audio": (samples, padded_samples),
        "batch/padding_video": (frames, padded_frames),
    }
    return {name: 1 - real / total for name, (real, total) in pairs.items() if total}


def source_metrics(names: Sequence[str], by_source: list[float]) -> Metrics:
    """Return the mean loss of each set of a mixture, and its share of the gradient.

    Args:
        names: Names of the S sets.
        by_source: `GradCache.by_source` over all ranks, 3 x S numbers.

    Returns:
        `source/NAME/loss`, the mean over its rows in the step (or its target tokens), and
        `source/NAME/gradient_share`, its part of the sum over rows of the norms of the gradients at
        their embeddings. Without what is not known: the loss of a user's objective without
        ROW_LOSSES, and the gradients of losses that do not compare rows.
    """
    size = len(names)
    losses, counts, norms = (by_source[first : first + size] for first in (0, size, 2 * size))
    metrics: Metrics = {}
    for name, loss, count, norm in zip(names, losses, counts, norms, strict=True):
        if count and not math.isnan(loss):
            metrics[f"source/{name}/loss"] = loss / count
        if sum(norms):
            metrics[f"source/{name}/gradient_share"] = norm / sum(norms)
    return metrics


def rows_sha(keys: Tensor) -> str:
    """Return 16 hex digits of the SHA-256 of the sorted keys int64 [N], in any order of rows."""
    return sha256(keys.cpu().sort().values.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def machine_load(device: torch.device) -> dict[str, float]:
    """Return the load of this machine.

    Returns:
        `host/cpu_percent` (0 to 100, of all cores, since the last call) and `host/memory_gib` (used
        by all processes); on a GPU also `gpu/busy_percent` (0 to 100) and `gpu/memory_gib` (used by
        all processes). Busy percent is NaN without NVML (nvidia-ml-py) and on a MIG slice, because
        every rank must have the same keys.
    """
    load = {
        "host/cpu_percent": psutil.cpu_percent(),
        "host/memory_gib": psutil.virtual_memory().used / 2**30,
    }
    if device.type != "cuda":
        return load
    busy = math.nan
    with suppress(Exception):  # NVML's own error type cannot be imported without it
        busy = float(torch.cuda.utilization(device))
    free, total = torch.cuda.mem_get_info(device)
    return load | {"gpu/busy_percent": busy, "gpu/memory_gib": (total - free) / 2**30}


# Dense tensor-core peaks of the data sheets, in TFLOP/s: (bf16 and fp16, fp32 without TF32).
# Keys are words of the device name; a more specific key precedes its prefix.
PEAK_TFLOPS = {
    "H200 NVL": (835, 60),
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
FLOPS_ROWS = 2  # rows whose operations are counted; one would fail in BatchNorm


class _FlopCounter(TorchDispatchMode):
    """Count the operations that run by torch's formulas.

    torch's FlopCounterMode does the same, but its first operator imports torch._dynamo, which
    delays a run that compiles nothing by a second.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports it

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket if isinstance(func, OpOverload) else func)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def model_flops_of_row(model: nn.Module, batch: Batch, precision: Precision) -> float:
    """Count the floating point operations of a forward and a backward of a row, in eager code.

    Gradients of frozen weights, and of inputs that no trainable weight precedes, are not computed
    and do not count. The recomputation of activations does not count, either.

    Args:
        batch: Micro-batch (tensors [B, ...] by column) whose first two rows are taken, so captions
            have the lengths of real ones; of a vision-language model all rows are taken.
        precision: Autocast of the forward; kernels of attention depend on it.
    """
    rows = batch
    if not is_flat(batch):
        rows = {name: column[:FLOPS_ROWS] for name, column in batch.items()}
    counter = _FlopCounter()
    with preserve_buffers(model), force_eager(), disable_recomputation(), counter:
        with precision.autocast():
            outputs = model(rows)
        tensors = [output for output in outputs.values() if output.requires_grad]
        backward(tensors, [torch.zeros_like(output) for output in tensors])
    num_rows = len(rows["valid"]) if is_flat(rows) else len(next(iter(rows.values())))
    return counter.total / num_rows


def peak_flops(device: torch.device, precision: Precision) -> float:
    """Return the peak FLOP/s of a GPU's matrix products; NaN if the GPU is not in the table.

    Args:
        precision: Precision of training: half precision, or fp32.
    """
    name = torch.cuda.get_device_name(device)
    # Match full words: an RTX A4000 is not an A40, nor an L40 an L4.
    peak = next(
        (peaks for key, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None
    )
    return float("nan") if peak is None else peak[0 if precision.dtype is not None else 1] * 1e12
