"""Results of `bench loader` as table rows and summary lines, with the bottleneck by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmray.bench import timing

REPORTED_ROLES = ("Consumer", "DataLoader worker", "stream actor", "SplitCoordinator", "driver", "raylet")
RATIOS = {
    "stream_original_vs_textbook": ("stream original", "textbook original"),
    "stream_prepared_vs_textbook": ("stream prepared", "textbook original"),
    "stream_vs_tuned": ("stream prepared", "tuned prepared"),
    "stream_vs_reader": ("stream prepared", "reader prepared"),
}


@dataclass
class ArmResult:
    """Measurements of one arm, a list entry per window."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[dict[str, float]] = field(default_factory=list)  # per row, by process role
    first_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    memory_mib: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class DiskRead:
    """Read rate of the stored images, measured first because they are in the page cache later."""

    images_per_s: float
    mb_per_s: float
    where: str


@dataclass(frozen=True)
class HostToDevice:
    """Rate of pinned copies to the device."""

    bytes_per_s: float
    images_per_s: float


def rows(
    rates: dict[str, float], found: dict[str, ArmResult], raw: DiskRead, copies: HostToDevice | None
) -> list[dict[str, Any]]:
    """Return one row per arm (median window), between the disk read rate and the device copy rate."""
    out = [{"arm": "raw read", "images_per_s": round(raw.images_per_s, 1), "mb_per_s": round(raw.mb_per_s, 1)}]
    out += [_row(name, rates[name], each) for name, each in found.items()]
    if copies is not None:
        rate, mb_per_s = round(copies.images_per_s, 1), round(copies.bytes_per_s / 1e6, 1)
        out.append({"arm": "host to device", "images_per_s": rate, "mb_per_s": mb_per_s})
    return out


def _row(name: str, rate: float, found: ArmResult) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "images_per_s": round(rate, 1)}
    row["cpu_ms_per_image"] = round(_median(sum(each.values()) for each in found.cpu_ms), 3) if found.cpu_ms else None
    row["cpu_ms_by_role"] = _by_role(found)
    row |= dict.fromkeys(("first_batch_s", "epoch_stall_s"))
    row["peaks_mib"] = {role: found.memory_mib[role][1] for role in REPORTED_ROLES if role in found.memory_mib}
    if name.startswith(("stream", "textbook", "tuned")):
        row["first_batch_s"] = round(float(np.median(found.first_s)), 3)
    if name.startswith("stream"):
        row["epoch_stall_s"] = round(float(np.median(found.stalls_s)), 3) if found.stalls_s else None
    return row


def _by_role(found: ArmResult) -> dict[str, float]:
    """Return CPU milliseconds by process role, the largest first."""
    roles = {role for each in found.cpu_ms for role in each}
    cost = {role: _median(each.get(role, 0.0) for each in found.cpu_ms) for role in roles}
    return {role: round(ms, 3) for role, ms in sorted(cost.items(), key=lambda item: -item[1]) if ms}


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def summarize(
    rates: dict[str, float], raw: DiskRead, copies: HostToDevice | None, gpu_rate: float | None, actors: int
) -> list[str]:
    """Return lines on disk rate, the bottleneck, and the number of CPU workers that a device of `gpu_rate` needs."""
    lines = [f"raw read: {raw.mb_per_s:,.0f} MB/s from {raw.where}"]
    if copies is not None:
        lines.append(f"host to device: {copies.bytes_per_s / 1e9:,.1f} GB/s, pinned")
    for name in ("original", "prepared"):
        limits = {"reading and decoding on the CPU": rates[f"reader {name}"]}
        if name == "original":
            limits["reading the files"] = raw.images_per_s
        if copies is not None:
            limits["the copy to the device"] = copies.images_per_s
        if gpu_rate is not None:
            limits["the device"] = gpu_rate
        lines.append(f"{name}: the bottleneck is {timing.bottleneck(limits, rates[f'stream {name}'])}")
        if gpu_rate is not None:
            needed = timing.workers_for(gpu_rate, rates[f"stream {name}"], actors)
            lines.append(f"{name}: a device of {gpu_rate:,.0f} images/s needs {needed} CPU workers of this kind")
    return lines


def memory_summary(peaks: dict[str, tuple[int, float]]) -> str:
    """Return a line with the peak memory of the stream's processes by role."""
    roles = ", ".join(
        f"{role} {mib:,.0f}" + (f" (x {number})" if number > 1 else "") for role, (number, mib) in peaks.items()
    )
    remote = "" if "raylet" in peaks else "; processes of a remote cluster are not measured"
    return f"peak memory of the stream's processes, MiB: {roles}{remote}"
