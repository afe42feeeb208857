"""The stages of `python -m mmray.bench.gpu`: each yields cases, which bench/gpu.py runs in a
process of the stage.

On a CPU the same code runs with tiny models.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import extract_tb, print_exc
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmray.bench.device_checks import (
    CHECKS,
    INPUTS,
    MODELS,
    TOWERS,
    SyncsPerStep,
    compile_backend,
    count_syncs,
)
from mmray.bench.spawn import describe_machine
from mmray.bench.step import WARMUP_STEPS, Bench, StepTimer, build_bench, measure_loops
from mmray.bench.strategies import bench_strategies
from mmray.config import Batch, Config, TwoTower, recipes
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.errors import first_line
from mmray.machine import free_memory

# several rows: each has its `case`
Case = tuple[str, Callable[[], dict[str, Any] | list[dict[str, Any]]]]
RECIPES = ("resnet50-bert", "clip")  # of the stages about speed
GLOBAL_ROWS, MICROS = 1024, (1024, 256, 64)
TINY_GLOBAL_ROWS, TINY_MICROS = 8, (8, 4)
TINY = {kind: model for kind, (model, _) in MODELS.items()} | {
    "two_tower": TwoTower(inputs=INPUTS, **TOWERS, embed_dim=8)
}
SMALLER = {"llava": 2}  # rows of a micro-batch; others take 16
PROFILED_STEPS = 5
NUM_GAPS = 10


def recipe(name: str, device: torch.device, **train: Any) -> Config:
    """A recipe on one worker, with random weights; on a CPU its model is tiny."""
    config = recipes.load(name)
    model = config.model if device.type == "cuda" else TINY[config.model.kind]
    settings = {
        "parallel": "single",
        "steps": None,
        "samples": None,
        "epochs": None,
        "log_every": 5,
    } | train
    cluster = config.cluster.replace(
        workers=1, accelerator="gpu" if device.type == "cuda" else "cpu"
    )
    return config.replace(model=model, cluster=cluster, train=config.train.replace(**settings))


def environment(device: torch.device) -> Iterator[Case]:
    """Versions, devices, and the speed of a large matrix product."""

    def machine() -> dict[str, Any]:
        packages = {
            name: importlib.import_module(name)
            for name in ("torchvision", "transformers", "numpy", "PIL")
        }
        row = describe_machine(device) | {
            name: module.__version__ for name, module in packages.items()
        }
        row |= {"platform": platform.platform(), "free_memory_gib": round(free_gib(device), 1)}
        if device.type == "cuda":
            row |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            row |= {
                "triton": importlib.import_module("triton").__version__,
                "gpus": torch.cuda.device_count(),
            }
        return row | {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PYTORCH_", "NCCL_"))
        }

    def gpu(index: int) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(index)
        return {
            "name": properties.name,
            "capability": f"sm{properties.major}{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }

    def matrix_product() -> dict[str, Any]:
        side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
        one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        timer = StepTimer((device,))
        for step in range(1, WARMUP_STEPS + 101):  # 0.2 s on an H100, in which its clock rises
            one @ other
            timer.on_step(step)
        tflops = 2 * side**3 / statistics.median(timer.times_s) / 1e12
        return {"side": side, "dtype": str(dtype), "tflops": tflops}

    yield "machine", machine
    for index in range(torch.cuda.device_count() if device.type == "cuda" else 0):
        yield f"gpu {index}", partial(gpu, index)
    yield "matrix product", matrix_product


def free_gib(device: torch.device) -> float:
    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()) / 2**30


def checks(device: torch.device) -> Iterator[Case]:
    """Runs on the device equal those of a CPU: accumulated, resumed, compiled, in half precision,
    on two GPUs.
    """
    for check, kinds in CHECKS:
        name = check.__name__.removeprefix("check_")
        for kind in kinds:
            if name == "branches" and device.type == "cuda" and torch.cuda.device_count() < 2:
                yield f"{name} {kind}", lambda: {"skipped": "needs two GPUs"}
            else:
                yield f"{name} {kind}", partial(check, kind, device)


@dataclass
class StepLog(StepTimer):
    """Callback: seconds of each step, from the first."""

    metrics: dict[str, Any] = field(default_factory=dict)

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        super().on_step(WARMUP_STEPS + step)
        self.metrics = metrics or self.metrics


def models(device: torch.device) -> Iterator[Case]:
    """The model of every recipe takes two steps: eager and compiled, in each precision."""
    eager_losses: dict[str, float] = {}

    def two_steps(name: str, precision: str, backend: str) -> dict[str, Any]:
        if backend != "none":
            torch.compiler.reset()
        settings = {"precision": precision, "compile": backend, "log_every": 1}
        rows = SMALLER.get(name, 16) if device.type == "cuda" else 4
        bench = build_bench(recipe(name, device, **settings), Group(device=device), rows)
        log = StepLog((device,))
        log.on_step(0)
        bench.train(bench.model, BatchShape(rows, rows, world_size=1), 2, log)
        first_s, second_s = log.times_s[-2:]
        loss, peak_gib = log.metrics["train/loss"], log.metrics["memory/peak_gib"]
        assert math.isfinite(loss), f"the loss is {loss}"
        if (precision, backend) == ("fp32", "none"):
            eager_losses[name] = loss
        row = {
            "rows": rows,
            "first_step_s": first_s,
            "step_s": second_s,
            "loss": loss,
            "peak_gib": peak_gib,
        }
        return row | (
            {"loss_vs_fp32_eager": loss / eager_losses[name] - 1} if name in eager_losses else {}
        )

    for backend in ("none", compile_backend(device)):
        for precision in ("fp32", "bf16", "fp16"):
            for name in recipes.RECIPES:
                label = f"{name} {precision} {'eager' if backend == 'none' else backend}"
                yield label, partial(two_steps, name, precision, backend)


def memory(device: torch.device) -> Iterator[Case]:
    """The micro-batch of `batch.micro auto`, its memory table, and the peak of a run with it."""
    rows = GLOBAL_ROWS if device.type == "cuda" else TINY_GLOBAL_ROWS
    micros: dict[str, int] = {}

    def build(name: str) -> Bench:
        config = recipe(name, device, log_every=1).replace(batch=Batch(micro="auto", global_=rows))
        return build_bench(config, Group(device=device), rows)

    def probe(name: str) -> dict[str, Any]:
        shape, table = build(name).probe_memory(BatchShape(rows, rows, world_size=1, auto=True))
        micros[name] = shape.micro_batch_size
        return {"rows": rows, "micro": micros[name], "probe_gib": sum(table.values())}

    def run(name: str) -> dict[str, Any]:
        bench, micro, log = build(name), micros[name], StepLog((device,))
        bench.train(bench.model, BatchShape(rows, micro, world_size=1), 3, log)
        row = {
            "micro_after": log.metrics["batch/micro"],
            "peak_gib": log.metrics["memory/peak_gib"],
        }
        if device.type == "cuda":
            row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
            row["total_gib"] = torch.cuda.mem_get_info(device)[1] / 2**30
        return row

    # first, because they run eagerly: a run compiles, which may exceed the limit of the stage
    for name in RECIPES:
        yield f"{name}, probe", partial(probe, name)
    for name in RECIPES:
        yield f"{name}, run", partial(run, name)


def step(device: torch.device) -> Iterator[Case]:
    """`mmray bench step`: mmray's loop, the same by hand, and the best by hand on the whole global
    batch.
    """
    global_rows, micros = (
        (GLOBAL_ROWS, MICROS) if device.type == "cuda" else (TINY_GLOBAL_ROWS, TINY_MICROS)
    )

    def measure(name: str, micro: int) -> dict[str, Any]:
        bench = build_bench(
            recipe(name, device), Group(device=device), micro, rank_rows=global_rows
        )
        window_s = 2.0 if device.type == "cuda" else 0.2
        result = measure_loops(bench, 1, window_s)
        flops = {f"{arm}_tflops": value for arm, value in result["tflops"].items()}
        mfu = {f"{arm}_mfu": value for arm, value in result["mfu"].items()}
        return result["ratios"] | mfu | flops | result["rows"][0]

    for micro in micros:
        for name in RECIPES:
            yield f"{name}, micro {micro} of {global_rows}", partial(measure, name, micro)


class ProfiledSteps:
    """Callback: a profile of the last steps of a run."""

    def __init__(self, device: torch.device) -> None:
        # Not the operators that start kernels: recording each delays the next kernel, and so widens
        # the gaps.
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._device, self.profile = device, profile(activities=[kind])

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        if step in (WARMUP_STEPS, WARMUP_STEPS + PROFILED_STEPS):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            (self.profile.start if step == WARMUP_STEPS else self.profile.stop)()


def gaps(device: torch.device) -> Iterator[Case]:
    """The share of time in kernels, and the largest gaps between them, where the device waits for
    the host.
    """

    def profile_loop(name: str) -> list[dict[str, Any]]:
        rows = 64 if device.type == "cuda" else 4
        bench, recorder = (
            build_bench(recipe(name, device), Group(device=device), rows),
            ProfiledSteps(device),
        )
        bench.train(
            bench.model,
            BatchShape(rows, rows, world_size=1),
            WARMUP_STEPS + PROFILED_STEPS,
            recorder,
        )
        spans = kernel_spans(recorder.profile.events(), device)
        assert spans, "the profiler recorded no kernel"
        busy_share, largest = largest_gaps(spans, NUM_GAPS)
        row = {
            "case": name,
            "kernels_per_step": len(spans) / PROFILED_STEPS,
            "busy_share": busy_share,
        }
        return [
            row,
            *({"case": f"{name}, gap {rank}"} | gap for rank, gap in enumerate(largest, 1)),
        ]

    for name in RECIPES:
        yield name, partial(profile_loop, name)


Span = tuple[float, float, str]  # start and end in microseconds, name


def kernel_spans(events: Any, device: torch.device) -> list[Span]:
    """Kernels and copies of a GPU; on a CPU the operators that call no others."""

    def is_kernel(event: Any) -> bool:
        if device.type == "cuda":
            return event.device_type == DeviceType.CUDA and not getattr(
                event, "is_user_annotation", False
            )
        return not event.cpu_children

    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if is_kernel(event)
    ]


def largest_gaps(spans: list[Span], count: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the share of time in any span, and the largest gaps between spans with the names on
    both sides.
    """
    spans = sorted(spans)
    start_us, covered_until, last = spans[0]
    found: list[tuple[float, str, str]] = []
    for start, end, name in spans:
        if start > covered_until:
            found.append((start - covered_until, last, name))
        if end > covered_until:
            covered_until, last = end, name
    idle_us = sum(gap_us for gap_us, _, _ in found)
    found.sort(key=lambda gap: gap[0], reverse=True)
    rows = [
        {"gap_us": gap_us, "after": after[:60], "before": before[:60]}
        for gap_us, after, before in found[:count]
    ]
    return 1 - idle_us / max(covered_until - start_us, 1e-9), rows


def syncs(device: torch.device) -> Iterator[Case]:
    """How often the host waits for the device in a step that is not logged, and where."""

    def count(name: str) -> dict[str, Any]:
        rows = 16 if device.type == "cuda" else 4
        bench = build_bench(recipe(name, device, log_every=100), Group(device=device), rows)
        with count_syncs() as counter:
            callback = SyncsPerStep(counter)
            bench.train(bench.model, BatchShape(2 * rows, rows, world_size=1), 6, callback)
        row: dict[str, Any] = {"per_step": max(callback.per_step()[2:-1])}
        if device.type != "cuda":
            return row | {"skipped": "counts those of CUDA"}
        return row | {"places": dict(counter.places.most_common(8))}

    for name in RECIPES:
        yield name, partial(count, name)


def distributed(device: torch.device) -> Iterator[Case]:
    """DDP, FSDP2 and branches on two devices, with NCCL or gloo: `mmray bench strategies`."""

    def strategies() -> list[dict[str, Any]]:
        micro, steps = (64, 5) if device.type == "cuda" else (2, 2)
        config = recipe("clip", device, parallel="ddp").replace(
            batch=Batch(micro=micro, global_=4 * micro)
        )
        only = (
            ("ddp bf16", "fsdp fp32", "fsdp bf16", "branches fp32")
            if device.type == "cuda"
            else ("fsdp fp32",)
        )
        rows = bench_strategies(config.with_cluster(workers=2), steps, only)["rows"]
        return [
            {"case": row.pop("strategy")} | {k: v for k, v in row.items() if v is not None}
            for row in rows
        ]

    if device.type == "cuda" and torch.cuda.device_count() < 2:
        yield "two devices", lambda: {"skipped": "needs two GPUs"}
    else:
        yield "two devices", strategies


STAGES: dict[str, Callable[[torch.device], Iterator[Case]]] = {
    stage.__name__: stage
    for stage in (environment, checks, step, memory, models, gaps, syncs, distributed)
}


def run_stage(
    name: str, device: torch.device, write: Callable[[list[dict[str, Any]]], None], end_s: float
) -> None:
    """Run the cases of a stage and `write` all rows after each; a failed case is a row with
    `error`.

    Cases that would start after `end_s` of the monotonic clock are rows with `skipped`.
    """
    rows: list[dict[str, Any]] = []
    for case, measure in STAGES[name](device):
        start_s = time.monotonic()
        if start_s > end_s:
            rows.append({"case": case, "skipped": "time limit of the stage"})
            write(rows)
            continue
        try:
            result = measure()
        except Exception as error:  # noqa: BLE001 - any failure is a line of the result
            # into the log of the stage: the first line may lack the reason, as of torch.compile
            print_exc()
            result = {"error": describe_error(error)}
        results: list[dict[str, Any]] = (
            result if isinstance(result, list) else [{"case": case, **result}]
        )
        results[0] |= {"seconds": time.monotonic() - start_s}
        rows += results
        write(rows)
        del result, results
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def describe_error(error: BaseException) -> str:
    """Type, first line, and the innermost line of mmray in the traceback."""
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)[1:]
        if "mmray" in Path(frame.filename).parts
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"
