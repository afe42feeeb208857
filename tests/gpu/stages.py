"""The stages of `python -m tests.gpu`: each yields cases, which command.py runs in a
process of the stage.

On a CPU the same code runs with tiny models.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from traceback import extract_tb, print_exc
from typing import Any

import torch

from mmray.bench.results import compare, describe_machine
from mmray.bench.step import WARMUP_STEPS, Bench, build_bench, measure_loops
from mmray.config import Batch, recipes
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.errors import UsageError, first_line
from mmray.machine import free_memory
from tests.gpu.device_checks import CHECKS, compile_backend
from tests.gpu.distributed import nccl
from tests.gpu.kernels import kernels
from tests.gpu.peers import peers
from tests.gpu.train_command import run
from tests.gpu.workload import (
    GLOBAL_BATCH_SIZE,
    TINY,
    TINY_GLOBAL_BATCH_SIZE,
    VIT_L,
    VIT_L_ROWS,
    Case,
    recipe,
    rows_of,
    time_calls,
)

ROUNDS = 2  # repetitions of each measurement of a rate
FLOAT8_STEPS = 10  # timed steps of a measurement; one takes 0.23 s on an H200 in bf16


def environment(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements): versions, devices, and the rates that limit a step.

    The rates are those of a matrix product, of a copy in the device's memory, of a copy to it from
    pinned memory of the host, and of launches of kernels.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict:
        of `machine` what `describe_machine` returns, with further versions, the free memory and the
        GPUs; of the others a rate (`tflops`, `gb_per_s_read_and_written`, `gb_per_s` or
        `launches_per_s`) with its `lowest` and `highest`.
    """

    is_gpu = device.type == "cuda"
    num_bytes = 2**31 if is_gpu else 2**24

    def machine() -> dict[str, Any]:
        free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else free_memory()
        row = describe_machine(device) | {"platform": platform.platform()}
        row |= {name: version(name) for name in ("torchvision", "transformers", "numpy", "pillow")}
        row |= {"free_memory_gib": free_bytes / 2**30}
        if is_gpu:
            row |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            # Its distribution has another name in some builds.
            row |= {"triton": importlib.import_module("triton").__version__}
            gpus = range(torch.cuda.device_count())
            row |= {f"gpu {index}": str(torch.cuda.get_device_properties(index)) for index in gpus}
        settings = [name for name in os.environ if name.startswith(("PYTORCH_", "NCCL_"))]
        return row | {name: os.environ[name] for name in settings}

    def matrix_product() -> dict[str, Any]:
        side = 8192 if is_gpu else 512
        matrix = torch.randn(side, side, device=device)
        matrix = matrix.bfloat16() if is_gpu else matrix
        measured = rates("tflops", 2 * side**3 / 1e12, lambda: matrix @ matrix)
        return {"side": side, "dtype": str(matrix.dtype)} | measured

    def memory_copy() -> dict[str, Any]:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copy = torch.empty_like(source)
        return rates("gb_per_s_read_and_written", 2 * num_bytes / 1e9, lambda: copy.copy_(source))

    def copy_from_host() -> dict[str, Any]:
        source = torch.empty(num_bytes // 8, dtype=torch.uint8, pin_memory=is_gpu)
        copy = torch.empty_like(source, device=device)
        work = source.nbytes / 1e9
        return rates("gb_per_s", work, lambda: copy.copy_(source, non_blocking=True))

    def launches() -> dict[str, Any]:
        number = torch.zeros(1, device=device)
        return rates("launches_per_s", 1, lambda: number.add_(1))

    yield "machine", machine
    yield "matrix product", matrix_product
    yield "copy in the device's memory", memory_copy
    yield "copy from pinned memory of the host", copy_from_host
    yield "launches of a small kernel", launches


def rates(name: str, work: float, function: Callable[[], Any]) -> dict[str, Any]:
    """Measure how much work a function does per second, including the kernels that it queues.

    Args:
        name: Name of the rate, a key of the result.
        work: Work of one call, in any unit, such as the number of 10^12 operations.
        function: Called without arguments, several times.

    Returns:
        Work per second: the median of several measurements under `name`, and their `lowest` and
        `highest`.
    """
    measured = time_calls(function)
    return {
        name: work / measured.median,
        "lowest": work / max(measured.times),
        "highest": work / min(measured.times),
    }


def checks(device: torch.device) -> Iterator[Case]:
    """Yield cases (named checks), each of which compares weights trained on the device with those
    of a CPU.

    The runs are accumulated, resumed, in half precision, with CUDA graphs, on two GPUs, and
    compiled.

    Args:
        device: The device to check.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict:
        the differences or losses that the check_... functions of device_checks return, or
        {"skipped": reason}. A failed check raises AssertionError.
    """
    for check, kinds in CHECKS:
        name = check.__name__.removeprefix("check_")
        for kind in kinds:
            if name == "branches" and device.type == "cuda" and torch.cuda.device_count() < 2:
                yield f"{name} {kind}", lambda: {"skipped": "needs two GPUs"}
            else:
                yield f"{name} {kind}", partial(check, kind, device)


def models(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) in which the model of each recipe of images and texts (not
    `vlm` or `towers`) takes two steps.

    Steps are eager in fp32, bf16 and fp16, and compiled in bf16.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict:
        `rows` (of a step), `first_step_s`, `step_s` (of the second one), `loss`, `peak_gib`, and
        `loss_vs_fp32_eager` (relative difference).
    """
    eager_losses: dict[str, float] = {}

    def two_steps(name: str, precision: str, backend: str) -> dict[str, Any]:
        if backend != "none":
            torch.compiler.reset()
        settings = {"precision": precision, "compile": backend, "log_every": 1}
        rows = 16 if device.type == "cuda" else 4
        bench = build_bench(recipe(name, device, **settings), Group(device=device), rows)
        steps = StepEnds(device)
        steps.on_step(0)
        shape = BatchShape(rows, rows, world_size=1)
        metrics = bench.train(bench.model, shape, 2, callbacks=(steps,)).metrics
        start_s, first_s, second_s = steps.at_s[-3:]
        loss = metrics["train/loss"]
        assert math.isfinite(loss), f"the loss is {loss}"
        if (precision, backend) == ("fp32", "none"):
            eager_losses[name] = loss
        row = {
            "rows": rows,
            "first_step_s": first_s - start_s,
            "step_s": second_s - first_s,
            "loss": loss,
            "peak_gib": metrics["memory/peak_gib"],
        }
        return row | (
            {"loss_vs_fp32_eager": loss / eager_losses[name] - 1} if name in eager_losses else {}
        )

    # There are no synthetic batches of vision-language models, whose inputs their processor makes.
    models = {name: make().model for name, make in recipes.RECIPES.items()}
    names = [name for name, model in models.items() if model.kind in TINY and not model.takes_clips]
    settings = [(precision, "none") for precision in ("fp32", "bf16", "fp16")]
    for precision, backend in [*settings, ("bf16", compile_backend(device))]:
        for name in names:
            label = f"{name} {precision} {'eager' if backend == 'none' else backend}"
            yield label, partial(two_steps, name, precision, backend)


class StepEnds:
    """Callback of a training loop that records when the device has finished each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_s: list[float] = []

    def on_step(self, step: int, metrics: Any = None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.at_s.append(time.perf_counter())


def memory(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) about the search of the micro-batch for the recipe `clip`.

    The first case searches the largest micro-batch that fits (`batch.micro auto`) and predicts the
    memory; the second one measures the peak memory of a run with this micro-batch.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict:
        first `rows` (global batch), `micro` (rows of the micro-batch that was found) and
        `probe_gib` (predicted memory); then `peak_gib`, and on a GPU `reserved_gib`
        and `total_gib`.
    """
    rows = GLOBAL_BATCH_SIZE if device.type == "cuda" else TINY_GLOBAL_BATCH_SIZE
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
        shape = BatchShape(rows, micro, world_size=1)
        metrics = bench.train(bench.model, shape, 3).metrics
        row = {"peak_gib": metrics["memory/peak_gib"]}
        if device.type == "cuda":
            row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
            row["total_gib"] = torch.cuda.mem_get_info(device)[1] / 2**30
        return row

    yield "clip, probe", partial(probe, "clip")
    yield "clip, run", partial(run, "clip")


def step(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that time mmray's loop and two loops written by hand, for
    the recipe `clip`: one with many and one with few rows in a step, as `rows_of` returns them; and
    mmray's loop in float8 and in bf16, for ViT-L/14.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns what
        `measure_step` or `measure_float8` returns, a list of dicts, or {"skipped": reason}.
    """
    for rows in rows_of(device):
        yield f"clip, {rows} rows", partial(measure_step, device, "clip", rows)
    yield "ViT-L/14, float8", partial(measure_float8, device)


def resnet(device: torch.device) -> Iterator[Case]:
    """Yield a case (named measurement) that times mmray's loop and two loops written by hand.

    It is for the recipe `resnet50-bert`, which takes longest to compile.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns what
        `measure_step` returns, a list of dicts.
    """
    rows = rows_of(device)[0]
    yield f"resnet50-bert, {rows} rows", partial(measure_step, device, "resnet50-bert", rows)


def measure_step(device: torch.device, name: str, rows: int) -> list[dict[str, Any]]:
    """Time mmray's loop and two loops written by hand.

    Args:
        device: The device to measure.
        name: Name of a built-in recipe with the objective `contrastive`, such as `clip`.
        rows: Rows of a step.

    Returns:
        Dicts with a `case`. The first has the ratios of samples/s, `loop_vs_bare` and
        `loop_vs_best`, each also as NAME_lowest and NAME_highest of the rounds. Then follows one
        per loop, mmray's (`loop`) and those by hand, with the settings of the recipe (`bare`) and
        with the fastest ones (`best`): `samples_per_s` with its `lowest` and `highest`, the last
        `loss`.
    """
    bench = build_bench(recipe(name, device), Group(device=device), rows)
    result = measure_loops(bench, ROUNDS, 2.0 if device.type == "cuda" else 0.1)
    return _format_comparison(f"{name}, {rows} rows", result)


def _format_comparison(case: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a dict of the ratios that `compare` returned, then one for each arm."""
    ratios: dict[str, Any] = {"case": case}
    for ratio, spread in result["spread"].items():
        ratios[ratio] = result["ratios"][ratio]
        ratios |= {f"{ratio}_lowest": spread["min"], f"{ratio}_highest": spread["max"]}
    return [ratios, *({"case": f"{case}, {row.pop('arm')}"} | row for row in result["rows"])]


def measure_float8(device: torch.device) -> list[dict[str, Any]] | dict[str, Any]:
    """Time mmray's loop with `train.float8 tensorwise` and without it, for ViT-L/14.

    Args:
        device: The device to measure.

    Returns:
        Dicts with a `case`. The first has the ratio of samples/s `float8_vs_bf16`, also as
        float8_vs_bf16_lowest and float8_vs_bf16_highest of the rounds. Then follow those of
        `float8` and `bf16`: `samples_per_s` with its `lowest` and `highest`, and the last `loss`.
        {"skipped": reason} if the device has no float8, or torchao is not installed.
    """

    def arm(float8: str) -> Callable[[], dict[str, float]]:
        settings = {"precision": "bf16", "float8": float8}
        config = recipe("clip", device, **settings)
        bench = build_bench(config.replace(model=VIT_L), Group(device=device), VIT_L_ROWS)

        def measure() -> dict[str, float]:
            seconds, loss = bench.loop_window(WARMUP_STEPS + FLOAT8_STEPS)
            return {"samples_per_s": VIT_L_ROWS * FLOAT8_STEPS / seconds, "loss": loss}

        return measure

    try:
        arms = {"float8": arm("tensorwise")}
    except UsageError as error:
        return {"skipped": str(error)}
    arms["bf16"] = arm("none")
    for measure in arms.values():
        measure()  # compiles
    result = compare(arms, ROUNDS, "samples_per_s", {"float8_vs_bf16": ("float8", "bf16")})
    return _format_comparison(f"ViT-L/14, {VIT_L_ROWS} rows", result)


STAGES: dict[str, Callable[[torch.device], Iterator[Case]]] = {
    stage.__name__: stage
    for stage in (environment, run, step, kernels, nccl, checks, memory, resnet, models, peers)
}


def run_stage(
    name: str, device: torch.device, write: Callable[[list[dict[str, Any]]], None], end_s: float
) -> None:
    """Run the cases (measurements or checks) of a stage, a group of them, in turn.

    A failed case does not end the stage.

    Args:
        name: Name of the stage: `environment`, `run`, `step`, `kernels`, `nccl`, `checks`,
            `memory`, `resnet` or `models`.
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
        error: The error. The first line of its message is shown, and the innermost line of mmray
            or of its tests in its traceback.
    """
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)[1:]
        if {"mmray", "tests"} & {*Path(frame.filename).parts}
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
