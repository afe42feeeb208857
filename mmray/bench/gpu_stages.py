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
from collections import Counter, defaultdict
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
from mmray.bench.gpu_distributed import nccl
from mmray.bench.gpu_run import run
from mmray.bench.spawn import describe_machine
from mmray.bench.step import WARMUP_STEPS, Bench, StepTimer, build_bench, measure_loops
from mmray.config import Batch, Config, TwoTower, recipes
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.errors import first_line
from mmray.machine import free_memory

# several rows: each has its `case`
Case = tuple[str, Callable[[], dict[str, Any] | list[dict[str, Any]]]]
GLOBAL_ROWS, SMALL_ROWS = 1024, 128  # 128 is the share of eight GPUs in 1,024
TINY_GLOBAL_ROWS = 8
TINY_ROWS = 4
ROUNDS = 2  # of each measurement of a rate
TINY = {kind: model for kind, (model, _) in MODELS.items()} | {
    "two_tower": TwoTower(inputs=INPUTS, **TOWERS, embed_dim=8)
}
SMALLER = {"llava": 2}  # rows of a micro-batch; others take 16
PROFILED_STEPS = 5
NUM_GAPS = 5
NUM_KERNELS = 25
# parts of the names of kernels -> their kind; the first that matches
KERNEL_KINDS = {
    "attention": ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq"),
    "convolution": ("conv", "cudnn", "implicit_gemm", "wgrad", "dgrad"),
    "matrix product": ("gemm", "nvjet", "cutlass", "cublas", "addmm", "bmm"),
    "compiled": ("triton",),
    "copy": ("memcpy", "memset", "copy"),
    "optimizer": ("multi_tensor", "fused_adam"),
}


def recipe(name: str, device: torch.device, **train: Any) -> Config:
    """Return a recipe (a complete config) for one worker; on a CPU with a tiny model.

    Args:
        name: Name of a recipe, such as `clip`.
        device: The device of the worker.
        train: Fields of the section `train` to change, such as `precision="bf16"`.
    """
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
    """Yield cases (named measurements): versions, devices, and the rates that limit a step.

    The rates are those of a matrix product, of a copy in the device's memory, and of a copy to it.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """

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
        return {"side": side, "dtype": str(dtype)} | rates(
            "tflops", 2 * side**3 / 1e12, lambda: one @ other
        )

    def memory_copy() -> dict[str, Any]:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copy = torch.empty_like(source)
        return rates("gb_per_s_read_and_written", 2 * num_bytes / 1e9, lambda: copy.copy_(source))

    def copy_from_host() -> dict[str, Any]:
        source = torch.empty(num_bytes // 8, dtype=torch.uint8)
        source = source.pin_memory() if device.type == "cuda" else source
        copy = torch.empty_like(source, device=device)
        work = source.nbytes / 1e9
        return rates("gb_per_s", work, lambda: copy.copy_(source, non_blocking=True))

    def rates(name: str, work: float, function: Callable[[], Any]) -> dict[str, Any]:
        """Work in a second: median, lowest and highest of rounds of ten calls."""
        timer = StepTimer((device,))
        for step in range(1, WARMUP_STEPS + 13):
            for _ in range(10):
                function()
            timer.on_step(step)
        values = sorted(10 * work / time_s for time_s in timer.times_s)
        return {name: statistics.median(values), "lowest": values[0], "highest": values[-1]}

    num_bytes = 2**31 if device.type == "cuda" else 2**24
    yield "machine", machine
    for index in range(torch.cuda.device_count() if device.type == "cuda" else 0):
        yield f"gpu {index}", partial(gpu, index)
    yield "matrix product", matrix_product
    yield "copy in the device's memory", memory_copy
    yield "copy from pinned memory of the host", copy_from_host


def free_gib(device: torch.device) -> float:
    """Return the free memory in GiB of a GPU, or of the host if the device is a CPU."""
    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()) / 2**30


def checks(device: torch.device) -> Iterator[Case]:
    """Yield cases (named checks), each of which compares weights trained on the device with those
    of a CPU.

    The runs are accumulated, resumed, in half precision, with CUDA graphs, on two GPUs, and
    compiled.

    Args:
        device: The device to check.

    Yields:
        Name of the case, and a function that runs it and returns differences by name.
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
    """Callback of a training loop that records the seconds of each step, from the first.

    Attributes:
        metrics: The newest logged metrics.
    """

    metrics: dict[str, Any] = field(default_factory=dict)

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Record the time since the last step, from the first step on, and keep the newest metrics.

        Args:
            step: Number of steps taken; a call with 0 starts the clock.
            metrics: Metrics of the step; None if the step was not logged.
        """
        super().on_step(WARMUP_STEPS + step)
        self.metrics = metrics or self.metrics


def models(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) in which the model of every recipe takes two steps.

    Steps are eager in fp32, bf16 and fp16, and compiled in bf16.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """
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
        loss = log.metrics["train/loss"]
        peak_gib = log.metrics["memory/peak_gib"]
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

    # There are no synthetic batches of vision-language models, whose inputs their processor makes.
    names = [name for name, make in recipes.RECIPES.items() if make().model.kind in TINY]
    settings = [(precision, "none") for precision in ("fp32", "bf16", "fp16")]
    for precision, backend in [*settings, ("bf16", compile_backend(device))]:
        for name in names:
            label = f"{name} {precision} {'eager' if backend == 'none' else backend}"
            yield label, partial(two_steps, name, precision, backend)


def memory(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) about the search of the micro-batch for the recipe `clip`.

    The first case searches the largest micro-batch that fits (`batch.micro auto`) and predicts the
    memory; the second one measures the peak memory of a run with this micro-batch.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """
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
        bench = build(name)
        micro = micros[name]
        log = StepLog((device,))
        bench.train(bench.model, BatchShape(rows, micro, world_size=1), 3, log)
        row = {
            "micro_after": log.metrics["batch/micro"],
            "peak_gib": log.metrics["memory/peak_gib"],
        }
        if device.type == "cuda":
            row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
            row["total_gib"] = torch.cuda.mem_get_info(device)[1] / 2**30
        return row

    yield "clip, probe", partial(probe, "clip")
    yield "clip, run", partial(run, "clip")


def step(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that time mmray's loop and two loops written by hand, for
    the recipe `clip`.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """
    for rows in rows_of(device):
        yield f"clip, {rows} rows", partial(measure_step, device, "clip", rows)


def resnet(device: torch.device) -> Iterator[Case]:
    """Yield a case (named measurement) that times mmray's loop and two loops written by hand.

    It is for the recipe `resnet50-bert`, which takes longest to compile.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """
    rows = rows_of(device)[0]
    yield f"resnet50-bert, {rows} rows", partial(measure_step, device, "resnet50-bert", rows)


def rows_of(device: torch.device) -> tuple[int, int]:
    """Return the numbers of rows of a step in a slow and in a fast measurement.

    The device limits the speed of the first one. The second one is so small that starting kernels
    takes the host longer than running them takes the device.

    Args:
        device: The device to measure; on a CPU both numbers are small.
    """
    cuda = device.type == "cuda"
    return (GLOBAL_ROWS, SMALL_ROWS) if cuda else (TINY_GLOBAL_ROWS, TINY_ROWS)


def measure_step(device: torch.device, name: str, rows: int) -> dict[str, Any]:
    """Time mmray's loop and two loops written by hand.

    Args:
        device: The device to measure.
        name: Name of a recipe, such as `clip`.
        rows: Rows of a step.

    Returns:
        The ratios `loop_vs_bare` and `loop_vs_best`, and `ARM_samples_per_s` (ARM `loop`, `bare` or
        `best`), each as a median with the lowest and highest value of the rounds (such as
        `loop_lowest`); `loop_tflops`, `best_tflops`, `loop_mfu` and `best_mfu`.
    """
    bench = build_bench(recipe(name, device), Group(device=device), rows)
    result = measure_loops(bench, ROUNDS, 2.0 if device.type == "cuda" else 0.1)
    row: dict[str, Any] = {}
    for ratio, value in result["ratios"].items():
        spread = result["spread"][ratio]
        row |= {ratio: value, f"{ratio}_lowest": spread["min"], f"{ratio}_highest": spread["max"]}
    for arm in ("loop", "bare", "best"):
        rates = [each[f"{arm}_samples_per_s"] for each in result["rows"]]
        row |= {f"{arm}_samples_per_s": statistics.median(rates)}
        row |= {f"{arm}_lowest": min(rates), f"{arm}_highest": max(rates)}
    row |= {f"{arm}_tflops": value for arm, value in result["tflops"].items()}
    return row | {f"{arm}_mfu": value for arm, value in result["mfu"].items()}


class ProfiledSteps:
    """Callback of a training loop that profiles PROFILED_STEPS (5) steps after the warm-up.

    Args:
        device: The device whose kernels, or on a CPU operators, are recorded.
    """

    def __init__(self, device: torch.device) -> None:
        # Not the operators that start kernels: recording each delays the next kernel, and so widens
        # the gaps.
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._device, self.profile = device, profile(activities=[kind])

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Start the profile after the warm-up steps, and stop it after PROFILED_STEPS (5) further
        steps.

        Args:
            step: Number of steps taken, from 1.
            metrics: Unused.
        """
        if step in (WARMUP_STEPS, WARMUP_STEPS + PROFILED_STEPS):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            (self.profile.start if step == WARMUP_STEPS else self.profile.stop)()


def kernels(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that profile the kernels of a step, for the recipe `clip`.

    Measured are the kernels that take most time, the time by kind of kernel, the largest gaps
    between kernels, in which the device waits for the host, and host synchronizations.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns one or more dicts of values.
    """

    def profile_loop(rows: int) -> list[dict[str, Any]]:
        case = f"clip, {rows} rows"
        bench = build_bench(recipe("clip", device), Group(device=device), rows)
        recorder = ProfiledSteps(device)
        steps = WARMUP_STEPS + PROFILED_STEPS
        shape = BatchShape(rows, rows, world_size=1)
        bench.train(bench.copy_of_model(shape), shape, steps, recorder)
        spans = kernel_spans(recorder.profile.events(), device)
        assert spans, "the profiler recorded no kernel"
        busy_share, largest = largest_gaps(spans, NUM_GAPS)
        span_ms = (max(end for _, end, _ in spans) - min(start for start, _, _ in spans)) / 1e3
        row = {
            "case": case,
            "step_ms": span_ms / PROFILED_STEPS,
            "busy_share": busy_share,
            "kernels_per_step": len(spans) / PROFILED_STEPS,
        }
        return [
            row | kernel_kinds(spans),
            *({"case": f"{case}, kernel {rank}"} | row for rank, row in top_kernels(spans)),
            *({"case": f"{case}, gap {rank}"} | gap for rank, gap in enumerate(largest, 1)),
        ]

    for rows in rows_of(device):
        yield f"clip, {rows} rows", partial(profile_loop, rows)
    yield "host synchronizations", partial(count_synchronizations, device)


def top_kernels(spans: list[Span]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the kernels that take most time, in descending order.

    Args:
        spans: Start and end in microseconds, and name, of each kernel of PROFILED_STEPS (5) steps.

    Yields:
        The rank from 1, and `kernel` (name), `ms_per_step` and `launches_per_step`.
    """
    total_us: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for start, end, name in spans:
        total_us[name] += end - start
        launches[name] += 1
    by_time = sorted(total_us.items(), key=lambda item: -item[1])
    for rank, (name, us) in enumerate(by_time[:NUM_KERNELS], 1):
        yield (
            rank,
            {
                "kernel": name[:100],
                "ms_per_step": us / PROFILED_STEPS / 1e3,
                "launches_per_step": launches[name] / PROFILED_STEPS,
            },
        )


def kernel_kinds(spans: list[Span]) -> dict[str, float]:
    """Return the milliseconds of a step by kind of kernel.

    Args:
        spans: Start and end in microseconds, and name, of each kernel of PROFILED_STEPS (5) steps.
            The kind follows from the name.

    Returns:
        For example {"attention_ms": 1.2, "matrix product_ms": 8.1, "other_ms": 0.4}.
    """
    total_us: dict[str, float] = defaultdict(float)
    for start, end, name in spans:
        kinds = (
            kind
            for kind, words in KERNEL_KINDS.items()
            if any(word in name.lower() for word in words)
        )
        total_us[next(kinds, "other")] += end - start
    return {f"{kind}_ms": us / PROFILED_STEPS / 1e3 for kind, us in total_us.items()}


Span = tuple[float, float, str]  # start and end in microseconds, name


def kernel_spans(events: Any, device: torch.device) -> list[Span]:
    """Return the kernels and copies of a GPU in a profile; on a CPU the operators that call no
    others.

    Args:
        events: `events()` of a torch.profiler.profile.
        device: The device that was profiled.

    Returns:
        Start and end in microseconds, and name, of each.
    """

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
    """Find the times in which no kernel ran.

    Args:
        spans: Start and end in microseconds, and name, of each kernel; at least one.
        count: Number of gaps to return.

    Returns:
        The fraction of the time in which a kernel ran (0 to 1), and the largest gaps: `gap_us`, and
        the names of the kernels `after` which and `before` which it is.
    """
    spans = sorted(spans)
    start_us, covered_until, last = spans[0]
    found: list[tuple[float, str, str]] = []
    for start, end, name in spans:
        if start > covered_until:
            found.append((start - covered_until, last, name))
        if end > covered_until:
            covered_until = end
            last = name
    idle_us = sum(gap_us for gap_us, _, _ in found)
    found.sort(key=lambda gap: gap[0], reverse=True)
    rows = [
        {"gap_us": gap_us, "after": after[:60], "before": before[:60]}
        for gap_us, after, before in found[:count]
    ]
    return 1 - idle_us / max(covered_until - start_us, 1e-9), rows


def count_synchronizations(device: torch.device) -> dict[str, Any]:
    """Count how often the host waits for the device in a step that is not logged.

    Args:
        device: The device to measure.

    Returns:
        `per_step` (count) and `places` (counts by source line); `skipped` on a CPU.
    """
    rows = 16 if device.type == "cuda" else 4
    bench = build_bench(recipe("clip", device, log_every=100), Group(device=device), rows)
    with count_syncs() as counter:
        callback = SyncsPerStep(counter)
        bench.train(bench.model, BatchShape(2 * rows, rows, world_size=1), 6, callback)
    if device.type != "cuda":
        return {"skipped": "counts those of CUDA"}
    places = dict(counter.places.most_common(8))
    return {"per_step": max(callback.per_step()[2:-1]), "places": places}


STAGES: dict[str, Callable[[torch.device], Iterator[Case]]] = {
    stage.__name__: stage
    for stage in (environment, run, step, kernels, nccl, checks, memory, resnet, models)
}


def run_stage(
    name: str, device: torch.device, write: Callable[[list[dict[str, Any]]], None], end_s: float
) -> None:
    """Run the cases (measurements or checks) of a stage in turn; a failed case does not end the
    stage.

    Args:
        name: Name of the stage, a key of STAGES such as `step`.
        device: The device to measure.
        write: Called with the rows of all cases so far before and after each case. A row has
            `case`, its measurements and `seconds`, or `error` or `skipped` with the reason; the
            current one has `running`.
        end_s: time.monotonic() after which no further case starts; the others are skipped.
    """
    rows: list[dict[str, Any]] = []
    for case, measure in STAGES[name](device):
        start_s = time.monotonic()
        if start_s > end_s:
            rows.append({"case": case, "skipped": "time limit of the stage"})
            write(rows)
            continue
        write([*rows, {"case": case, "running": True}])
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
        if device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def describe_error(error: BaseException) -> str:
    """Format an error as `ValueError: message (file.py:12)`.

    Args:
        error: The error. The first line of its message is shown, and the innermost line of mmray in
            its traceback.
    """
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)[1:]
        if "mmray" in Path(frame.filename).parts
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"
