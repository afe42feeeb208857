"""Results of `bench loader` as table rows and summary lines: rates of each arm in, the bottleneck by name out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmray.bench import timing

REPORTED_ROLES = ("Consumer", "DataLoader worker", "stream actor", "SplitCoordinator", "driver", "raylet")
MIN_SHARE = 0.03  # of CPU time, for a role to be listed
RATIOS = {
    "stream_original_vs_textbook": ("stream original", "textbook original"),
    "stream_prepared_vs_textbook": ("stream prepared", "textbook original"),
    "stream_vs_tuned": ("stream prepared", "tuned prepared"),
    "stream_original_vs_tuned": ("stream original", "tuned original"),
    "stream_vs_reader": ("stream prepared", "reader prepared"),
    "prepare_vs_decode": ("prepare", "decode"),
}


@dataclass
class ArmResult:
    """Measurements of one arm, a list entry per window."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[dict[str, float]] = field(default_factory=list)  # per row, by process role
    first_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    rows_per_block: float = 0.0
    memory_mib: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class DiskRead:
    """Read rate of the stored images, measured first because later they are in the page cache."""

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
        row["rows_per_block"] = found.rows_per_block
    return row


def _by_role(found: ArmResult, num_rows: float = 1) -> dict[str, float]:
    """Milliseconds of processors that so many rows cost, by role of process, the largest first."""
    roles = {role for each in found.cpu_ms for role in each}
    cost = {role: num_rows * _median(each.get(role, 0.0) for each in found.cpu_ms) for role in roles}
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


def cpu_summary(found: dict[str, ArmResult]) -> list[str]:
    """Return lines on time to the first batch, and CPU time per row of prepare and per block of each stream, by role.

    The no-op stream costs what Ray costs; the difference to the others is reading and decoding.
    """
    names = ("original", "prepared", "no-op")
    first_s = [f"{_median(found[f'stream {name}'].first_s):.1f} s ({name})" for name in names]
    lines = [f"first batch after {', '.join(first_s)}; no-op is the start of Ray alone"]
    for name, amount in (("prepare", "row"), *((f"stream {name}", "block") for name in names)):
        num_rows = found[name].rows_per_block if amount == "block" else 1
        if cost := _by_role(found[name], num_rows):
            whole = f"a block of {num_rows:.0f} rows" if amount == "block" else "a row"
            driver = " without the driver" if name == "prepare" else ""
            total_ms = sum(cost.values())
            lines.append(f"{name}: {whole} takes {total_ms:.1f} ms of CPU time{driver}: {_format_roles(cost)}")
    return lines


def _format_roles(cost: dict[str, float]) -> str:
    """Format the roles with at least MIN_SHARE of the cost, and the rest as one."""
    least = MIN_SHARE * sum(cost.values())
    named = {role: ms for role, ms in cost.items() if ms >= least}
    rest = sum(cost.values()) - sum(named.values())
    parts = [f"{role} {ms:.1f}" for role, ms in named.items()]
    return ", ".join([*parts, f"others {rest:.1f}"] if round(rest, 1) else parts)


def memory_summary(peaks: dict[str, tuple[int, float]]) -> str:
    """Return a line with the peak memory of the stream's processes by role."""
    roles = ", ".join(
        f"{role} {mib:,.0f}" + (f" (x {number})" if number > 1 else "") for role, (number, mib) in peaks.items()
    )
    remote = "" if "raylet" in peaks else "; processes of a remote cluster are not measured"
    return f"peak memory of the stream's processes, MiB: {roles}{remote}"
