"""What the windows of `bench loader` showed, as rows of a table and as sentences.

Pure: images/s of each arm in, figures and the bottleneck by name out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmray.bench import timing

SHOWN = ("Consumer", "DataLoader worker", "stream actor", "SplitCoordinator", "driver", "raylet")
LEAST_SHARE = 0.03  # of the processors' time, for a role to be named
RATIOS = {
    "stream_original_vs_textbook": ("stream original", "textbook original"),
    "stream_prepared_vs_textbook": ("stream prepared", "textbook original"),
    "stream_vs_tuned": ("stream prepared", "tuned prepared"),
    "stream_original_vs_tuned": ("stream original", "tuned original"),
    "stream_vs_reader": ("stream prepared", "reader prepared"),
    "prepare_vs_decode": ("prepare", "decode"),
}


@dataclass
class Found:
    """What the windows of one arm showed."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[dict[str, float]] = field(default_factory=list)  # a row's, by role of process
    first_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    stored_bytes: list[float] = field(default_factory=list)  # that an image put into the object store
    rows_per_block: float = 0.0
    memory_mib: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """What the place of the images gives, read once before all else: later the system would hold them in memory."""

    images_per_s: float
    mb_per_s: float
    where: str


@dataclass(frozen=True)
class Copies:
    """Pinned copies to the device: bytes and images a second."""

    bytes_per_s: float
    images_per_s: float


def rows(rates: dict[str, float], found: dict[str, Found], raw: Raw, copies: Copies | None) -> list[dict[str, Any]]:
    """A row an arm, images/s being the median window, between what the disk gives and what the device takes."""
    out = [{"arm": "raw read", "images_per_s": round(raw.images_per_s, 1), "mb_per_s": round(raw.mb_per_s, 1)}]
    out += [_row(name, rates[name], each) for name, each in found.items()]
    if copies is not None:
        rate, mb_per_s = round(copies.images_per_s, 1), round(copies.bytes_per_s / 1e6, 1)
        out.append({"arm": "host to device", "images_per_s": rate, "mb_per_s": mb_per_s})
    return out


def _row(name: str, rate: float, found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "images_per_s": round(rate, 1)}
    row["cpu_ms_per_image"] = round(_median(sum(each.values()) for each in found.cpu_ms), 3) if found.cpu_ms else None
    row["cpu_ms_by_role"] = _by_role(found)
    row |= dict.fromkeys(("first_batch_s", "epoch_stall_s"))
    row["peaks_mib"] = {role: found.memory_mib[role][1] for role in SHOWN if role in found.memory_mib}
    if name.startswith(("stream", "textbook", "tuned")):
        row["first_batch_s"] = round(float(np.median(found.first_s)), 3)
    if name.startswith("stream"):
        row["epoch_stall_s"] = round(float(np.median(found.stalls_s)), 3) if found.stalls_s else None
        row["store_bytes_per_image"] = round(_median(found.stored_bytes))
        row["rows_per_block"] = found.rows_per_block
    return row


def _by_role(found: Found, num_rows: float = 1) -> dict[str, float]:
    """Milliseconds of processors that so many rows cost, by role of process, the largest first."""
    roles = {role for each in found.cpu_ms for role in each}
    cost = {role: num_rows * _median(each.get(role, 0.0) for each in found.cpu_ms) for role in roles}
    return {role: round(ms, 3) for role, ms in sorted(cost.items(), key=lambda item: -item[1]) if ms}


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def notes(rates: dict[str, float], raw: Raw, copies: Copies | None, gpu_rate: float | None, actors: int) -> list[str]:
    """What the disk gives, the bottleneck by name, and the workers that a device of a given rate needs."""
    said = [f"raw read: {raw.mb_per_s:,.0f} MB/s from {raw.where}"]
    if copies is not None:
        said.append(f"host to device: {copies.bytes_per_s / 1e9:,.1f} GB/s, pinned")
    for name in ("original", "prepared"):
        limits = {"reading and decoding on the CPU": rates[f"reader {name}"]}
        if name == "original":
            limits["reading the files"] = raw.images_per_s
        if copies is not None:
            limits["the copy to the device"] = copies.images_per_s
        if gpu_rate is not None:
            limits["the device"] = gpu_rate
        said.append(f"{name}: the bottleneck is {timing.bottleneck(limits, rates[f'stream {name}'])}")
        if gpu_rate is not None:
            needed = timing.workers_for(gpu_rate, rates[f"stream {name}"], actors)
            said.append(f"{name}: a device of {gpu_rate:,.0f} images/s needs {needed} CPU workers like these")
    return said


def processors(found: dict[str, Found]) -> list[str]:
    """The start of the streams, and what a row of a prepare and a block of each stream costs, by role of process.

    A stream of blank blocks costs what Ray does: the rest of another's is reading and decoding.
    """
    names = ("original", "prepared", "blank")
    first_s = [f"{_median(found[f'stream {name}'].first_s):.1f} s ({name})" for name in names]
    said = [f"first batch after {', '.join(first_s)}: a blank one is Ray's own start"]
    for name, amount in (("prepare", "row"), *((f"stream {name}", "block") for name in names)):
        num_rows = found[name].rows_per_block if amount == "block" else 1
        if cost := _by_role(found[name], num_rows):
            whole = f"a block of {num_rows:.0f} rows" if amount == "block" else "a row"
            beside = " beside the driver, which hands out its tasks" if name == "prepare" else ""
            said.append(f"{name}: {whole} takes {sum(cost.values()):.1f} ms of processors{beside}: {_named(cost)}")
    return said


def _named(cost: dict[str, float]) -> str:
    """The roles that cost more than a little, and the rest in one."""
    least = LEAST_SHARE * sum(cost.values())
    named = {role: ms for role, ms in cost.items() if ms >= least}
    rest = sum(cost.values()) - sum(named.values())
    parts = [f"{role} {ms:.1f}" for role, ms in named.items()]
    return ", ".join([*parts, f"others {rest:.1f}"] if round(rest, 1) else parts)


def memory(peaks: dict[str, tuple[int, float]]) -> str:
    """What every process of the stream held at most."""
    told = ", ".join(
        f"{role} {mib:,.0f}" + (f" (x {number})" if number > 1 else "") for role, (number, mib) in peaks.items()
    )
    elsewhere = "" if "raylet" in peaks else "; processes of the cluster that was joined are not seen from here"
    return f"memory of the stream's processes at most, MiB: {told}{elsewhere}"
