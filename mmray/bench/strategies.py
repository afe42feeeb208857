"""`mmray bench strategies`: one model, data and global batch through every way to lay it on a machine's devices.

Each strategy runs train/loop.py in a fresh process group (gloo on a CPU, NCCL on GPUs) on the same synthetic rows, from
the same weights. Its loss after the last step beside that of DDP in float32 says whether formats and shards still learn
the same. A strategy that cannot run is a row with its reason. No Ray, no data, no disk.
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
from mmray.bench.spawn import RankFailed, device_of, left_idle, run_ranks
from mmray.bench.step import prepared
from mmray.bench.timing import describe
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.batch import shape_of
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import slower_branch
from mmray.engine.metrics.writers import Metrics
from mmray.engine.state import Task
from mmray.errors import ResourceError
from mmray.train.validate import unsupported_reasons

if TYPE_CHECKING:
    from mmray.config import Config

BASE = "ddp fp32"
Say = Callable[[str], None]
WARM_STEPS, PROFILED_STEPS = 3, 2
TOLD = {"branches/idle_share_0": "idle_share_0", "branches/idle_share_1": "idle_share_1"}
FIGURES = (
    *("samples_per_s", "step_p50_s", "step_p95_s", "communication_share"),
    *(*TOLD.values(), "peak_gib", "loss", "loss_vs_ddp"),
)


@dataclass(frozen=True)
class Strategy:
    """One row: settings of `train`, and whether it is one worker's."""

    name: str
    train: dict[str, Any]
    alone: bool = False


STRATEGIES = (
    Strategy(BASE, {"parallel": "ddp", "precision": "fp32"}),
    Strategy("ddp fp32, sent as bf16", {"parallel": "ddp", "precision": "fp32", "compress": "bf16"}),
    Strategy("ddp fp32, sent as fp16", {"parallel": "ddp", "precision": "fp32", "compress": "fp16"}),
    Strategy("ddp bf16", {"parallel": "ddp", "precision": "bf16"}),
    Strategy("ddp fp16", {"parallel": "ddp", "precision": "fp16"}),
    Strategy("fsdp fp32", {"parallel": "fsdp", "precision": "fp32"}),
    Strategy("fsdp bf16", {"parallel": "fsdp", "precision": "bf16"}),
    Strategy("single fp32", {"parallel": "single", "precision": "fp32"}, alone=True),
    Strategy("branches fp32", {"parallel": "branches", "precision": "fp32", "refit_every": 2}, alone=True),
)


def bench_strategies(
    config: Config, steps: int = 10, only: tuple[str, ...] = (), say: Say = lambda _: None
) -> dict[str, Any]:
    """{"machine", "batch", "ratios", "rows", "notes"}: a row for each strategy; of one that failed no figures, `error`.

    `steps` are timed after a few to warm up; `only` names some of them (the base is always measured). `say` hears of
    each when it is done.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells its own doings otherwise
    workers = max(2, config.cluster.most_workers)
    shape = shape_of(config.batch, workers)
    kind = device_of(config.on_cluster(workers=workers)).type  # of all rows, those of one worker too
    chosen = [strategy for strategy in STRATEGIES if not only or strategy.name in (BASE, *only)]
    rows = []
    for number, strategy in enumerate(chosen, 1):
        row = _row(strategy, _settings(config, strategy, workers, shape), kind, steps)
        told = "no figures" if row["error"] else f"{row['samples_per_s']:,.0f} samples/s"
        say(f"{number} of {len(chosen)}, {strategy.name}: {told}")
        rows.append(row)
    base = rows[0]
    for row in rows:
        if row["loss"] is not None and base["loss"] is not None:
            row["loss_vs_ddp"] = round(row["loss"] / base["loss"] - 1, 6)
    rates = {row["strategy"]: row["samples_per_s"] for row in rows if row["samples_per_s"] is not None}
    return {
        "machine": describe(torch.device(kind)),
        "batch": str(shape),
        "ratios": _ratios(rates),
        "rows": rows,
        "notes": left_idle(config.on_cluster(workers=workers)),
    }


def _ratios(rates: dict[str, float]) -> dict[str, float]:
    """Samples a second of each over the base's; none where the base failed."""
    if BASE not in rates:
        return {}
    return {f"{name.replace(' ', '_').replace(',', '')}_vs_ddp": rate / rates[BASE] for name, rate in rates.items()}


def _settings(config: Config, strategy: Strategy, workers: int, shape: Any) -> Config:
    """The config of one strategy: the same rows a step, in the same micro-batches."""
    return config.on_cluster(workers=1 if strategy.alone else workers).replace(
        train=config.train.replace(**{"compress": "none", "profile": 0, **strategy.train}),
        batch=config.batch.replace(global_=shape.global_rows, micro=shape.micro, accumulation=None),
    )


def _row(strategy: Strategy, config: Config, kind: str, steps: int) -> dict[str, Any]:
    """Figures of one strategy in processes of its own, or the reason why there are none."""
    row: dict[str, Any] = {"strategy": strategy.name, "workers": config.cluster.most_workers, **dict.fromkeys(FIGURES)}
    reasons = unsupported_reasons(config)
    if reasons:
        return row | {"error": "; ".join(reasons)}
    try:
        return row | run_ranks(partial(_measure, steps=steps), config, kind) | {"error": None}
    except RankFailed as error:
        return row | {"error": str(error)}


@dataclass
class Timer:
    """Step times after the warm-up, the metrics of the last timed step, and a profile of a few more; a callback."""

    timed: int  # the last step that is timed
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
                torch.cuda.synchronize(device)  # what was only queued is not done
        now_s = time.perf_counter()
        if WARM_STEPS < step <= self.timed:
            self.times_s.append(now_s - self._last_s)
        if step == self.timed:
            self.metrics, self.peak_gib = metrics or {}, _peak_gib(self.devices)  # before the profile takes its own
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
    """GPUs: what torch allocated at most, of all of the worker's together; a CPU: the most the process ever held."""
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) / 2**30
    return peak_resident_bytes() / 2**30


def _communication_us(profiled: Any) -> float:
    """Microseconds in which some collective was under way, by the profile."""
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
    """Figures of one strategy on one rank."""
    shape = shape_of(config.batch, group.world)
    timed = WARM_STEPS + steps
    plan = SamplePlan(
        num_rows=2**30,
        global_rows=shape.global_rows,
        world=group.world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=timed + PROFILED_STEPS,
    )
    # As rank 0 of one: every rank draws the whole global batches, and takes its own rows of them.
    bench = prepared(config, Group(device=group.device), micro=shape.global_rows)
    devices, slower = _devices(config, group.device), "image"
    timer = Timer(timed, devices)
    if config.train.parallel == "branches":
        batch = {name: column[: shape.micro].to(group.device) for name, column in bench.batches[0].items()}
        slower = slower_branch(bench.model, batch)
    train = config.train.replace(log_every=timed)
    task = Task(
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
    found = {told: timer.metrics[name] for name, told in TOLD.items() if name in timer.metrics}
    return {
        "samples_per_s": shape.global_rows / statistics.mean(timer.times_s),
        **step_times(timer.times_s),
        "communication_share": timer.communication_share,
        "peak_gib": timer.peak_gib,
        "loss": timer.metrics["train/loss"],
        **found,
    }


def step_times(times_s: Sequence[float]) -> dict[str, float]:
    """step_p50_s and step_p95_s of the times of steps."""
    p50_s, p95_s = np.percentile(times_s, (50, 95)).tolist()
    return {"step_p50_s": p50_s, "step_p95_s": p95_s}


def _devices(config: Config, device: torch.device) -> tuple[torch.device, ...]:
    if config.train.parallel != "branches":
        return (device,)
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ResourceError("branches needs two GPUs, and this machine has one")
    return (device, torch.device("cuda", 1)) if device.type == "cuda" else (device, device)


def _steps(
    plan: SamplePlan, rank: int, batches: list[dict[str, torch.Tensor]]
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """This rank's micro-batches of each step, cut from the global batches in turn."""
    for step in range(plan.steps):
        positions = plan.positions(step, rank)
        rows = torch.arange(rank * plan.rank_rows, rank * plan.rank_rows + len(positions))
        batch, real = batches[step % len(batches)], torch.from_numpy(positions >= 0)
        mine = {name: column[rows.clamp(max=len(column) - 1)] for name, column in batch.items()}
        mine |= {"pos": torch.from_numpy(positions), "valid": real}
        parts = [slice(first, first + plan.micro) for first in range(0, plan.rank_rows, plan.micro)]
        yield [{name: column[part] for name, column in mine.items()} for part in parts]
