"""`mmray bench strategies`: one model and global batch under every parallel strategy and precision
of this machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from mmray.bench.results import describe_machine
from mmray.bench.spawn import WorkerFailed, select_device, spawn_workers
from mmray.bench.step import WARMUP_STEPS, StepTimer, build_bench
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import Metrics
from mmray.engine.parallel.strategy import two_devices
from mmray.errors import UsageError, suggest
from mmray.training.validate import unsupported_reasons

if TYPE_CHECKING:
    from mmray.config import Config

BASELINE = "ddp fp32"
PROFILED_STEPS = 2
# Name: settings of `train`. The kinds in ONE_WORKER run with one worker.
STRATEGIES: dict[str, dict[str, Any]] = {
    BASELINE: {"parallel": "ddp", "precision": "fp32"},
    "ddp bf16": {"parallel": "ddp", "precision": "bf16"},
    "ddp fp16": {"parallel": "ddp", "precision": "fp16"},
    "fsdp fp32": {"parallel": "fsdp", "precision": "fp32"},
    "fsdp bf16": {"parallel": "fsdp", "precision": "bf16"},
    "single fp32": {"parallel": "single", "precision": "fp32"},
    "branches fp32": {"parallel": "branches", "precision": "fp32"},
}
ONE_WORKER = ("single", "branches")


def bench_strategies(
    config: Config,
    steps: int = 10,
    only: tuple[str, ...] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time every parallel strategy and precision that this machine supports.

    All have the same model and global batch, with at least two workers where the strategy has
    several.

    Args:
        config: The model and the batch.
        steps: Timed steps, after 3 warm-up steps.
        only: Names of the strategies to run in addition to `ddp fp32`: `ddp bf16`, `ddp fp16`,
            `fsdp fp32`, `fsdp bf16`, `single fp32` or `branches fp32`; empty: all.
        notify: Called with one line of text after each strategy.

    Returns:
        `machine` (a dict: `cpu`, `cores`, `device`, `load_1min`, and versions `python` and
        `torch`), `batch` (text), `ratios` (samples/s relative to `ddp fp32`, by STRATEGY_vs_ddp
        such as `fsdp_bf16_vs_ddp`), `rows` and `notes` (texts on columns, failures). A row has
        `strategy`, `workers`, `samples_per_s`, `p50_s` and `p95_s` of a step, `comm_share` (0 to 1,
        of the time in collectives), `peak_gib`, `loss` after the last step, `loss_vs_ddp` (relative
        difference) and `error`. If the strategy failed, `error` is the reason and there are no
        measurements.

    Raises:
        UsageError: A name in `only` is unknown.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    if unknown := [name for name in only if name not in STRATEGIES]:
        raise UsageError(
            f"--only: unknown strategy `{unknown[0]}`; {suggest(unknown[0], STRATEGIES)}"
        )
    config = config.with_cluster(workers=max(2, config.cluster.max_workers))
    shape = resolve_batch_shape(config.batch, config.cluster.max_workers)
    device_type = select_device(config.cluster).type  # the same for all rows, with one worker too
    strategies = {
        name: train for name, train in STRATEGIES.items() if not only or name in (BASELINE, *only)
    }
    rows: list[dict[str, Any]] = []
    for number, (name, train) in enumerate(strategies.items(), 1):
        row = {"strategy": name} | _time_row(config, train, shape, device_type, steps)
        result = "failed" if row["error"] else f"{row['samples_per_s']:,.0f} samples/s"
        notify(f"{number} of {len(strategies)}, {name}: {result}")
        rows.append(row)
    base = rows[0]
    ratios = {}
    for row in rows:
        if base["error"] is None and row["error"] is None:
            row["loss_vs_ddp"] = round(row["loss"] / base["loss"] - 1, 6)
            name = row["strategy"].replace(" ", "_").replace(",", "")
            ratios[f"{name}_vs_ddp"] = row["samples_per_s"] / base["samples_per_s"]
    machine = describe_machine(torch.device(device_type))
    # the upper limit of `batch.micro auto`, because no row is probed
    batch = str(replace(shape, auto=False))
    notes = ["comm share: share of the time in collectives; loss: after the last step"]
    notes += [f"{row['strategy']}: {row['error']}" for row in rows if row["error"]]
    return {"machine": machine, "batch": batch, "ratios": ratios, "rows": rows, "notes": notes}


def _time_row(
    config: Config, train: dict[str, Any], shape: BatchShape, device_type: str, steps: int
) -> dict[str, Any]:
    """Measure one strategy in new processes, with the same rows per step; on failure `error` is the
    reason.
    """
    if train["parallel"] in ONE_WORKER:
        config = config.with_cluster(workers=1)
    config = config.replace(
        train=config.train.replace(**{"profile": 0} | train),
        batch=config.batch.replace(
            global_=shape.global_batch_size, micro=shape.micro_batch_size, accumulation=None
        ),
    )
    row: dict[str, Any] = {"workers": config.cluster.max_workers, "error": None}
    if reasons := unsupported_reasons(config):
        return row | {"error": "; ".join(reasons)}
    try:
        return row | spawn_workers(partial(_measure_rank, steps=steps), config, device_type)
    except WorkerFailed as error:
        return row | {"error": str(error)}


@dataclass
class ProfiledTimer(StepTimer):
    """Callback of a training loop that records step times, and then profiles PROFILED_STEPS (2)
    steps.

    The loop calls `on_step(step, metrics)`, whose metrics give the peak memory.

    Attributes:
        last_timed_step: Step after which the profile starts.
        peak_gib: Sum of the peak memory of the devices until then, in GiB; None before.
        communication_share: Fraction of the profiled time in which a collective ran.
    """

    last_timed_step: int = 0
    peak_gib: float | None = None
    communication_share: float = 0.0
    _profile: Any = None
    _profile_start_s: float = 0.0

    def on_step(self, step: int, metrics: Metrics | None = None) -> None:
        """Record the time of a step; profile the steps after `last_timed_step`.

        Args:
            step: Number of steps taken, from 1.
            metrics: Logged metrics of the step, with `memory/peak_gib` at `last_timed_step`.
        """
        super().on_step(step, metrics)
        if step == self.last_timed_step:
            # The metric has the peak of the first device only.
            others = [device for device in self.devices[1:] if device.type == "cuda"]
            bytes_of_others = sum(torch.cuda.max_memory_allocated(device) for device in others)
            # Read before the profiler starts, which needs memory too.
            self.peak_gib = self.metrics["memory/peak_gib"] + bytes_of_others / 2**30
            kinds = [
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if self.devices[0].type == "cuda" else []),
            ]
            self._profile = profile(activities=kinds)
            self._profile.start()
            self._profile_start_s = time.perf_counter()
        if step == self.last_timed_step + PROFILED_STEPS:
            took_s = time.perf_counter() - self._profile_start_s
            self._profile.stop()
            self.communication_share = communication_us(self._profile.events()) / 1e6 / took_s


def communication_us(events: Any) -> float:
    """Return the microseconds of a profile during which at least one collective ran.

    Collectives that overlap in time count once.

    Args:
        events: `events()` of a torch.profiler.profile. Collectives are the events whose name starts
            with `gloo:`, `nccl:` or `ncclDevKernel`.
    """
    collectives = (
        event.time_range
        for event in events
        if event.name.startswith(("gloo:", "nccl:", "ncclDevKernel"))
    )
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted((span.start, span.end) for span in collectives):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def _measure_rank(config: Config, group: Group, _: Path, *, steps: int) -> dict[str, Any]:
    shape = resolve_batch_shape(config.batch, group.world_size)
    last_timed_step = WARMUP_STEPS + steps
    devices = two_devices(group.device) if config.train.parallel == "branches" else (group.device,)
    config = config.replace(train=config.train.replace(log_every=last_timed_step))
    # Every rank generates the same global batches, as rank 0 of 1, and takes its share of the rows.
    bench = build_bench(config, Group(device=group.device), shape.global_batch_size)
    batches = [rank_share(batch, group.rank, group.world_size) for batch in bench.batches]
    timer = ProfiledTimer(devices, last_timed_step=last_timed_step)
    replace(bench, group=group, batches=batches).train(
        bench.model, shape, last_timed_step + PROFILED_STEPS, callbacks=(timer,)
    )
    times_s = timer.times_s[:steps]
    p50_s, p95_s = np.percentile(times_s, (50, 95)).tolist()
    return {
        "samples_per_s": shape.global_batch_size / statistics.mean(times_s),
        "p50_s": p50_s,
        "p95_s": p95_s,
        "comm_share": timer.communication_share,
        "peak_gib": timer.peak_gib,
        "loss": timer.metrics["train/loss"],
    }


def rank_share(batch: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return the rows of one rank of a global batch.

    Args:
        batch: Columns by name, with `image`; each is [global rows, ...].
        rank: The rank.
        world: Number of ranks.

    Returns:
        Columns [ceil(global rows / world), ...]. The last row of the batch is repeated as padding.
    """
    num_rows = len(batch["image"])
    rows_per_rank = -(-num_rows // world)
    rows = torch.arange(rank * rows_per_rank, (rank + 1) * rows_per_rank).clamp(max=num_rows - 1)
    return {name: column[rows] for name, column in batch.items()}
