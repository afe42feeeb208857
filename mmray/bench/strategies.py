"""`mmray bench strategies`: one model and global batch under every parallel strategy and precision of this machine.

Each strategy runs the training loop in new processes (gloo on CPUs, NCCL on GPUs) on the same synthetic rows and
initial weights. The loss after the last step is compared with DDP in float32. A strategy that cannot run is a row with
its reason. Uses no Ray and no data.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from mmray import objectives
from mmray.bench.batch_shapes import peak_resident_bytes
from mmray.bench.spawn import WorkerFailed, device_of, idle_gpu_notes, spawn_workers
from mmray.bench.step import build_bench
from mmray.bench.timing import describe_machine
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import slower_branch
from mmray.engine.metrics.writers import Metrics
from mmray.engine.run_state import TrainSpec
from mmray.errors import ResourceError
from mmray.train.validate import unsupported_reasons

if TYPE_CHECKING:
    from mmray.config import Config

BASE = "ddp fp32"
Notify = Callable[[str], None]
WARM_STEPS, PROFILED_STEPS = 3, 2
METRIC_KEYS = {"branches/idle_share_0": "idle_share_0", "branches/idle_share_1": "idle_share_1"}
FIGURES = (
    *("samples_per_s", "step_p50_s", "step_p95_s", "communication_share"),
    *(*METRIC_KEYS.values(), "peak_gib", "loss", "loss_vs_ddp"),
)


@dataclass(frozen=True)
class Strategy:
    """One row: settings of `train`, and whether it runs with one worker."""

    name: str
    train: dict[str, Any]
    alone: bool = False


STRATEGIES = (
    Strategy(BASE, {"parallel": "ddp", "precision": "fp32"}),
    Strategy("ddp fp32, bf16 gradients", {"parallel": "ddp", "precision": "fp32", "grad_compression": "bf16"}),
    Strategy("ddp fp32, fp16 gradients", {"parallel": "ddp", "precision": "fp32", "grad_compression": "fp16"}),
    Strategy("ddp bf16", {"parallel": "ddp", "precision": "bf16"}),
    Strategy("ddp fp16", {"parallel": "ddp", "precision": "fp16"}),
    Strategy("fsdp fp32", {"parallel": "fsdp", "precision": "fp32"}),
    Strategy("fsdp bf16", {"parallel": "fsdp", "precision": "bf16"}),
    Strategy("single fp32", {"parallel": "single", "precision": "fp32"}, alone=True),
    Strategy("branches fp32", {"parallel": "branches", "precision": "fp32"}, alone=True),
)


def bench_strategies(
    config: Config, steps: int = 10, only: tuple[str, ...] = (), notify: Notify = lambda _: None
) -> dict[str, Any]:
    """Return {"machine", "batch", "ratios", "rows", "notes"}, a row per strategy; a failed one has only `error`.

    `steps` are timed after a warm-up; `only` selects strategies by name (the baseline is always measured).
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    workers = max(2, config.cluster.max_workers)
    shape = resolve_batch_shape(config.batch, workers)
    kind = device_of(config.with_cluster(workers=workers)).type  # the same for all rows, with one worker too
    chosen = [strategy for strategy in STRATEGIES if not only or strategy.name in (BASE, *only)]
    rows = []
    for number, strategy in enumerate(chosen, 1):
        row = _row(strategy, _settings(config, strategy, workers, shape), kind, steps)
        result = "failed" if row["error"] else f"{row['samples_per_s']:,.0f} samples/s"
        notify(f"{number} of {len(chosen)}, {strategy.name}: {result}")
        rows.append(row)
    base = rows[0]
    for row in rows:
        if row["loss"] is not None and base["loss"] is not None:
            row["loss_vs_ddp"] = round(row["loss"] / base["loss"] - 1, 6)
    rates = {row["strategy"]: row["samples_per_s"] for row in rows if row["samples_per_s"] is not None}
    return {
        "machine": describe_machine(torch.device(kind)),
        "batch": str(shape),
        "ratios": _ratios(rates),
        "rows": rows,
        "notes": idle_gpu_notes(config.with_cluster(workers=workers)),
    }


def _ratios(rates: dict[str, float]) -> dict[str, float]:
    """Return samples/s of each strategy over the baseline's; empty if the baseline failed."""
    if BASE not in rates:
        return {}
    return {f"{name.replace(' ', '_').replace(',', '')}_vs_ddp": rate / rates[BASE] for name, rate in rates.items()}


def _settings(config: Config, strategy: Strategy, workers: int, shape: Any) -> Config:
    """Return the config of one strategy, with the same rows per step and micro-batch."""
    return config.with_cluster(workers=1 if strategy.alone else workers).replace(
        train=config.train.replace(**{"grad_compression": "none", "profile": 0, **strategy.train}),
        batch=config.batch.replace(global_=shape.global_rows, micro=shape.micro, accumulation=None),
    )


def _row(strategy: Strategy, config: Config, kind: str, steps: int) -> dict[str, Any]:
    """Measure one strategy in new processes; on failure `error` is the reason."""
    row: dict[str, Any] = {"strategy": strategy.name, "workers": config.cluster.max_workers, **dict.fromkeys(FIGURES)}
    reasons = unsupported_reasons(config)
    if reasons:
        return row | {"error": "; ".join(reasons)}
    try:
        return row | spawn_workers(partial(_measure, steps=steps), config, kind) | {"error": None}
    except WorkerFailed as error:
        return row | {"error": str(error)}


@dataclass
class Timer:
    """Callback: step times after the warm-up, metrics of the last timed step, and a profile of the steps after it."""

    timed: int  # last timed step
    devices: tuple[torch.device, ...]  # of this worker
    peak_gib: float = 0.0
    times_s: list[float] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    communication_share: float = 0.0
    _last_s: float = 0.0
    _began_s: float = 0.0
    _profile: Any = None

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # wait for queued kernels
        now_s = time.perf_counter()
        if WARM_STEPS < step <= self.timed:
            self.times_s.append(now_s - self._last_s)
        if step == self.timed:
            self.metrics, self.peak_gib = metrics or {}, _peak_gib(self.devices)  # before the profiler allocates
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.devices[0].type == "cuda" else [])]
            self._profile = profile(activities=kinds)
            self._profile.start()
        if step == self.timed + PROFILED_STEPS:
            self._profile.stop()
            self.communication_share = _communication_us(self._profile) / 1e6 / (now_s - self._began_s)
        self._last_s = time.perf_counter()
        if step == self.timed:
            self._began_s = self._last_s


def _peak_gib(devices: tuple[torch.device, ...]) -> float:
    """Return peak memory: allocated by torch over all GPUs of the worker, or resident on a CPU."""
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) / 2**30
    return peak_resident_bytes() / 2**30


def _communication_us(profiled: Any) -> float:
    """Return the microseconds of a profile during which any collective ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.name.startswith(("gloo:", "nccl:", "ncclDevKernel"))
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _measure(config: Config, group: Group, _: Path, *, steps: int) -> dict[str, Any]:
    """Measure one strategy on one rank."""
    shape = resolve_batch_shape(config.batch, group.world)
    timed = WARM_STEPS + steps
    plan = SamplePlan(
        num_rows=2**30,
        global_rows=shape.global_rows,
        world=group.world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=timed + PROFILED_STEPS,
    )
    # Built as rank 0 of 1, because every rank generates full global batches and slices its rows.
    bench = build_bench(config, Group(device=group.device), micro=shape.global_rows)
    devices, slower = _devices(config, group.device), "image"
    timer = Timer(timed, devices)
    if config.train.parallel == "branches":
        batch = {name: column[: shape.micro].to(group.device) for name, column in bench.batches[0].items()}
        slower = slower_branch(bench.model, batch)
    train = config.train.replace(log_every=timed)
    task = TrainSpec(
        model=bench.model,
        objective=objectives.build(config.objective),
        plan=plan,
        group=group,
        train=train,
        optimizer=config.optimizer,
        callbacks=(timer,),
        devices=devices,
        slower=slower,
    )
    loop.run(task, _steps(plan, group.rank, bench.batches))
    found = {key: timer.metrics[name] for name, key in METRIC_KEYS.items() if name in timer.metrics}
    return {
        "samples_per_s": shape.global_rows / statistics.mean(timer.times_s),
        **step_times(timer.times_s),
        "communication_share": timer.communication_share,
        "peak_gib": timer.peak_gib,
        "loss": timer.metrics["train/loss"],
        **found,
    }


def step_times(times_s: Sequence[float]) -> dict[str, float]:
    """Return step_p50_s and step_p95_s of step times."""
    p50_s, p95_s = np.percentile(times_s, (50, 95)).tolist()
    return {"step_p50_s": p50_s, "step_p95_s": p95_s}


def _devices(config: Config, device: torch.device) -> tuple[torch.device, ...]:
    if config.train.parallel != "branches":
        return (device,)
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ResourceError("parallel branches needs two GPUs, this machine has one")
    return (device, torch.device("cuda", 1)) if device.type == "cuda" else (device, device)


def _steps(
    plan: SamplePlan, rank: int, batches: list[dict[str, torch.Tensor]]
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield this rank's micro-batches of each step, sliced from the global batches."""
    for step in range(plan.steps):
        positions = plan.positions(step, rank)
        rows = torch.arange(rank * plan.rank_rows, rank * plan.rank_rows + len(positions))
        batch, real = batches[step % len(batches)], torch.from_numpy(positions >= 0)
        mine = {name: column[rows.clamp(max=len(column) - 1)] for name, column in batch.items()}
        mine |= {"pos": torch.from_numpy(positions), "valid": real}
        parts = [slice(first, first + plan.micro) for first in range(0, plan.rank_rows, plan.micro)]
        yield [{name: column[part] for name, column in mine.items()} for part in parts]
