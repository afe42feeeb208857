"""Stage `kernels`: which GPU kernels a training step runs, and the gaps between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmray.bench.step import WARMUP_STEPS, build_bench
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from tests.gpu.blocks import blocks
from tests.gpu.workload import Case, recipe, rows_of

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


class ProfiledSteps:
    """Callback of a training loop that profiles 5 steps after the first 3 (warm-up).

    The loop calls `on_step(step, metrics)`, which starts and stops the profile.

    Args:
        device: The device whose kernels, or on a CPU operators, are recorded.

    Attributes:
        profile: The torch.profiler.profile, with its events after these steps.
    """

    def __init__(self, device: torch.device) -> None:
        # Not the operators that start kernels: recording each delays the next kernel, and so widens
        # the gaps.
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._device = device
        self.profile = profile(activities=[kind])

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Start the profile after step 3, and stop it after PROFILED_STEPS (5) further steps.

        Args:
            step: Number of steps taken, from 1.
            metrics: Unused.
        """
        if step in (WARMUP_STEPS, WARMUP_STEPS + PROFILED_STEPS):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            (self.profile.start if step == WARMUP_STEPS else self.profile.stop)()


def kernels(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that profile the kernels of a step, for the recipe `clip`,
    then those of `blocks`.

    There is a case for many and one for few rows in a step, as `rows_of` returns them.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a list
        of dicts with a `case`. The first of a step has `step_ms`, `busy_share` (0 to 1, of the time
        in which a kernel ran), `kernels_per_step`, and what `kernel_kinds` returns; then follow
        those of `top_kernels` and of `largest_gaps`.
    """
    for rows in rows_of(device):
        yield f"clip, {rows} rows", partial(_profile_loop, device, rows)
    yield from blocks(device)


def _profile_loop(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Return the results of a case with `rows` rows in a step."""
    case = f"clip, {rows} rows"
    bench = build_bench(recipe("clip", device), Group(device=device), rows)
    recorder = ProfiledSteps(device)
    steps = WARMUP_STEPS + PROFILED_STEPS
    shape = BatchShape(rows, rows, world_size=1)
    model = bench.copy_of_model(shape)
    bench.train(model, shape, steps, callbacks=(recorder,))
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


def top_kernels(spans: list[Span]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the NUM_KERNELS (25) kernels that take most time, in descending order.

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
            The kind is the first of `attention`, `convolution`, `matrix product`, `compiled`,
            `copy` and `optimizer` whose words are in the name, otherwise `other`.

    Returns:
        KIND_ms for each kind that occurs, such as {"attention_ms": 1.2, "matrix product_ms": 8.1}.
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
    gaps: list[tuple[float, str, str]] = []
    for start, end, name in spans:
        if start > covered_until:
            gaps.append((start - covered_until, last, name))
        if end > covered_until:
            covered_until = end
            last = name
    idle_us = sum(gap_us for gap_us, _, _ in gaps)
    gaps.sort(key=lambda gap: gap[0], reverse=True)
    rows = [
        {"gap_us": gap_us, "after": after[:60], "before": before[:60]}
        for gap_us, after, before in gaps[:count]
    ]
    return 1 - idle_us / max(covered_until - start_us, 1e-9), rows
