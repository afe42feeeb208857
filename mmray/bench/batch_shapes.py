"""`mmray bench step --space batch.micro=8,16,32`: time and memory of each batch shape.

Each combination runs the training loop on synthetic batches in new processes, so that memory is measured independently.
A combination that does not fit is a row with the reason. Uses no Ray and no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from mmray import objectives
from mmray.bench.spawn import WorkerFailed, device_of, idle_gpu_notes, spawn_workers
from mmray.bench.step import WARM_STEPS, Bench, build_bench
from mmray.bench.timing import describe_machine
from mmray.config.search_space import parse_space, setting_value, with_settings
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.run_state import TrainSpec
from mmray.errors import UsageError
from mmray.objectives.protocol import Batch

if TYPE_CHECKING:
    from mmray.config import Config

MIN_STEPS = 5  # minimum of timed steps for a 95th percentile
MAX_STEPS = 100_000
FIGURES = (
    *("micro", "accumulation", "workers", "global"),
    *("samples_per_s", "step_p50_s", "step_p95_s", "peak_gib", "peak_reserved_gib"),
)
Notify = Callable[[str], None]
STEP_SETTINGS = (
    *("model.", "objective.", "batch.", "optimizer.", "cluster.", "train.precision", "train.deterministic"),
    *("train.activation_checkpointing", "train.compile", "train.channels_last"),
)


def bench_shapes(
    config: Config, given: Sequence[str], window_s: float = 3.0, notify: Notify = lambda _: None
) -> dict[str, Any]:
    """Measure each combination of `--space`; return {"machine", "ratios": {}, "rows"}. `say` is called for each row.

    A row has the searched `settings`, micro, accumulation, workers, global, `status` (measured, out_of_memory, failed
    or infeasible), samples_per_s, step_p50_s, step_p95_s, peak_gib (GPU: allocated by torch; CPU: resident memory of
    rank 0), peak_reserved_gib (GPU), and `reason`. Missing values are None.
    Raises UsageError, ResourceError.
    """
    space = parse_space(given)
    for key in space.axes:
        if not key.startswith(STEP_SETTINGS):
            raise UsageError(
                f"bench step --space {key}: this setting does not affect a step; use one of {', '.join(STEP_SETTINGS)}"
            )
    if "batch.global" not in space.axes:  # derived, otherwise every micro-batch would have the recipe's global batch
        config = config.replace(batch=config.batch.replace(global_=None))
    configs = [with_settings(config, typed) for typed in space.combinations()]  # validated before the first runs
    rows = []
    for number, each in enumerate(configs, 1):
        row = _row(each, {key: setting_value(each, key) for key in space.axes}, window_s)
        chosen = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
        notify(f"{number} of {len(configs)}, {chosen}: {row['status'].replace('_', ' ')}")
        rows.append(row)
    return {"machine": describe_machine(device_of(config)), "ratios": {}, "rows": rows, "notes": idle_gpu_notes(config)}


def _row(config: Config, settings: dict[str, Any], window_s: float) -> dict[str, Any]:
    row = {"settings": settings, "status": "measured", **dict.fromkeys(FIGURES), "reason": None}
    try:
        shape = resolve_batch_shape(config.batch, config.cluster.max_workers)
        row |= {"micro": shape.micro, "accumulation": shape.accumulation}
        row |= {"workers": shape.workers, "global": shape.global_rows}
        return row | spawn_workers(partial(measure_shape, shape=shape, window_s=window_s), config)
    except UsageError as error:
        return row | {"status": "infeasible", "reason": str(error)}
    except WorkerFailed as error:
        return row | {"status": "out_of_memory" if error.out_of_memory else "failed", "reason": str(error)}


@dataclass
class StepTimes:
    """Callback: seconds of each step after the warm-up, synchronized with the device."""

    device: torch.device
    window_s: float
    times_s: list[float] = field(default_factory=list)
    _last_s: float = 0.0

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # wait for queued kernels
        now_s = time.perf_counter()
        if step > WARM_STEPS:
            self.times_s.append(now_s - self._last_s)
        self._last_s = now_s

    def enough(self) -> bool:
        """Return whether the next step is the last; any rank may decide, and all stop together."""
        return len(self.times_s) + 1 >= MIN_STEPS and sum(self.times_s) >= self.window_s


def measure_shape(config: Config, group: Group, _: Path, shape: BatchShape, window_s: float) -> dict[str, Any]:
    """Measure steps of `shape` on one worker for about `window_s` seconds."""
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)
    bench = build_bench(config, group, shape.micro)
    times = StepTimes(group.device, window_s)
    plan = SamplePlan(
        num_rows=shape.global_rows,
        global_rows=shape.global_rows,
        world=group.world,
        micro=shape.micro,
        seed=config.train.seed,
        steps=MAX_STEPS,
    )
    task = TrainSpec(
        model=bench.model,
        objective=objectives.build(config.objective),
        plan=plan,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        callbacks=(times,),
        stop=times.enough,
    )
    loop.run(task, _steps(bench, plan))
    p50_s, p95_s = np.percentile(times.times_s, (50, 95))
    rate = shape.global_rows * len(times.times_s) / sum(times.times_s)
    return {
        "samples_per_s": round(rate, 2),
        "step_p50_s": round(float(p50_s), 6),
        "step_p95_s": round(float(p95_s), 6),
        **_peak_memory(group.device),
    }


def _steps(bench: Bench, plan: SamplePlan) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step; the last of a step may be smaller."""
    for step in range(plan.steps):
        positions = torch.from_numpy(plan.positions(step, bench.group.rank))
        micro_batches = []
        for index, start in enumerate(range(0, plan.rank_rows, plan.micro)):
            pos = positions[start : start + plan.micro]
            batch = bench.batches[(step + index) % len(bench.batches)]
            micro_batches.append(
                {name: column[: len(pos)] for name, column in batch.items()} | {"pos": pos, "valid": pos >= 0}
            )
        yield micro_batches


def _peak_memory(device: torch.device) -> dict[str, float | None]:
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = {"peak_gib": "allocated_bytes.all.peak", "peak_reserved_gib": "reserved_bytes.all.peak"}
        return {name: round(stats[key] / 2**30, 4) for name, key in names.items()}
    return {"peak_gib": round(peak_resident_bytes() / 2**30, 4), "peak_reserved_gib": None}


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process.

    Reads VmHWM, because ru_maxrss of a forked process starts at the parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)  # without /proc: current memory
