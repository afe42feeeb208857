"""`mmray doctor --recipe R --gpus N`: the CPUs that decode for N GPUs, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmray.bench.synthetic_images import photos_per_s
from mmray.config import Config, Inputs
from mmray.data.images.decode import decode
from mmray.data.images.transform import transform

DECODE_S = 2.0
STEP_WINDOW_S = 2.0
HEADROOM = 1.25  # more than the mean rate: images differ, and nodes are lost


@dataclass(frozen=True)
class DataNodes:
    """CPUs that a run needs for data, as `plan_data_nodes` computes them.

    Args:
        samples_per_s: Rows per second that all GPUs train.
        decodes_per_s: Rows per second that a core decodes.
        cpus: Number of cores for data, with some in reserve.
        cost_per_hour: Price of the GPUs and of the CPUs together; None: no prices given.
        device: Device on which `samples_per_s` was measured; `given` if the caller passed it.
    """

    samples_per_s: float
    decodes_per_s: float
    cpus: int
    cost_per_hour: float | None
    device: str


def plan_data_nodes(
    config: Config,
    gpus: int,
    samples_per_s: float | None = None,
    gpu_price: float | None = None,
    cpu_price: float | None = None,
) -> DataNodes:
    """Return how many CPUs decode for a number of GPUs.

    Args:
        samples_per_s: Rows per second of one GPU, as `throughput/samples_per_s` of a run with one;
            None: measured on this machine, on its GPU if it has one.

    Returns:
        A DataNodes: `cpus` (number of cores), the rates `samples_per_s` (of all GPUs) and
        `decodes_per_s` (of a core), `cost_per_hour` (None without prices) and `device`.

    Raises:
        UsageError: The step of the recipe cannot be measured.
    """
    device = "given"
    if samples_per_s is None:
        samples_per_s, device = measure_step(config)
    decodes_per_s = measure_decoding(config.model.inputs)
    total = samples_per_s * gpus
    cpus = math.ceil(HEADROOM * total / decodes_per_s)
    cost = None
    if gpu_price is not None or cpu_price is not None:
        cost = gpus * (gpu_price or 0.0) + cpus * (cpu_price or 0.0)
    return DataNodes(total, decodes_per_s, cpus, cost, device)


def measure_decoding(inputs: Inputs) -> float:
    """Return how many JPEGs of 500 x 375 pixels a core decodes and resizes per second."""
    return photos_per_s(lambda data: transform(decode(data), inputs), DECODE_S)


def measure_step(config: Config) -> tuple[float, str]:
    """Return the samples/s of the training step on synthetic batches, and the name of the device.

    Args:
        config: The recipe; one worker is measured.
    """
    from mmray.bench.step import bench_step

    measured = bench_step(config.with_cluster(workers=1), pairs=1, window_s=STEP_WINDOW_S)
    rates = {row["arm"]: row["samples_per_s"] for row in measured["rows"]}
    return rates["loop"], str(measured["machine"]["device"])
