"""Timing for the benchmarks: rates, epoch stalls and paired ratios from arrivals; CPU time and memory per process.

An arrival is a block of rows received by one consumer: clock, number of rows, last epoch in it.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from mmray.machine import cores

SAMPLE_INTERVAL_S = 0.25


class ProcessMonitor:
    """Sample peak memory and CPU time of this process and its children, by role, while the block runs.

    Unlike a rate, CPU time per row does not depend on other load of the machine.
    """

    def __init__(self) -> None:
        self._peaks: dict[tuple[str, int], float] = defaultdict(float)
        self._seen_s: dict[int, float] = {}  # CPU seconds by child process
        self._spent_s: dict[str, float] = defaultdict(float)  # CPU seconds by role, including processes that ended
        self.history: list[tuple[float, dict[str, float]]] = []  # (clock, CPU seconds by role so far)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmray-processes", daemon=True)

    def __enter__(self) -> ProcessMonitor:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def peaks_mib(self) -> dict[str, tuple[int, float]]:
        """Return {role: (number of processes, largest private memory in MiB)}; object store pages are not counted."""
        roles: dict[str, list[float]] = defaultdict(list)
        for (role, _), peak in self._peaks.items():
            roles[role].append(peak)
        return {role: (len(peaks), round(max(peaks), 1)) for role, peaks in sorted(roles.items())}

    def _run(self) -> None:
        driver = psutil.Process()
        while True:
            for process in (driver, *driver.children(recursive=True)):
                try:
                    self._sample(process, driver)
                except psutil.Error:  # the process ended
                    continue
            self.history.append((time.time(), dict(self._spent_s)))
            if self._ended.wait(SAMPLE_INTERVAL_S):
                return

    def _sample(self, process: psutil.Process, driver: psutil.Process) -> None:
        with process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            role = "driver" if process == driver else process_role(process.cmdline(), process.parent())
        own_mib = (memory.rss - getattr(memory, "shared", 0)) / 2**20
        self._peaks[role, process.pid] = max(self._peaks[role, process.pid], own_mib)
        if process != driver:  # the driver also runs this sampling thread
            spent_s = times.user + times.system
            self._spent_s[role] += spent_s - self._seen_s.get(process.pid, 0.0)
            self._seen_s[process.pid] = spent_s


def cpu_seconds(
    history: list[tuple[float, dict[str, float]]], start_s: float, stop_s: float
) -> tuple[dict[str, float], float, float] | None:
    """Return (CPU seconds by role, first clock, last clock) over [start, stop]; None with fewer than two samples."""
    first = bisect_right(history, start_s, key=lambda sample: sample[0])
    last = bisect_right(history, stop_s, key=lambda sample: sample[0]) - 1
    if last <= first:
        return None
    (first_s, before), (last_s, after) = history[first], history[last]
    return {role: spent - before.get(role, 0.0) for role, spent in after.items()}, first_s, last_s


def process_role(command: list[str], parent: psutil.Process | None) -> str:
    """Return the role of a process from its title; a child of a Ray worker is a DataLoader worker."""
    title = command[0] if command else ""
    if not title.startswith("ray::"):
        return title.rpartition("/")[2].split(" ")[0] or "?"
    if parent is not None and (parent.cmdline() or [""])[0].startswith("ray::"):
        return "DataLoader worker"
    if title.startswith("ray::MapWorker("):
        return "stream actor"
    return re.split(r"[.(]", title.removeprefix("ray::"))[0]


WARMUP_ARRIVALS = 2  # first arrivals of a consumer, excluded because other processes are starting
MIN_STREAM_SHARE = 0.75  # below this share of the slowest stage, the stream itself is the bottleneck


@dataclass(frozen=True)
class Arrival:
    """A block of rows received by a consumer; the clock is wall time in seconds."""

    at_s: float
    rows: int
    epoch: int = 0
    num_bytes: int = 0


def rate(consumers: Sequence[Sequence[Arrival]], skip: int = WARMUP_ARRIVALS) -> float:
    """Return rows/s summed over consumers, without each consumer's first `skip` arrivals."""
    return sum(_rate(arrivals[min(skip, max(0, len(arrivals) - 2)) :]) for arrivals in consumers)


def _rate(arrivals: Sequence[Arrival]) -> float:
    took_s = arrivals[-1].at_s - arrivals[0].at_s
    return sum(arrival.rows for arrival in arrivals[1:]) / took_s if took_s > 0 else 0.0


def cpu_s_per_row(
    consumers: Sequence[Sequence[Arrival]], history: list[tuple[float, dict[str, float]]], skip: int = WARMUP_ARRIVALS
) -> dict[str, float] | None:
    """Return CPU seconds per row by process role, over the window that `rate` counts; None if it is too short."""
    counted = [arrivals[min(skip, max(0, len(arrivals) - 2)) :] for arrivals in consumers]
    spent = cpu_seconds(history, max(each[0].at_s for each in counted), min(each[-1].at_s for each in counted))
    if spent is None:
        return None
    roles, first_s, last_s = spent
    rows = sum(_rate(each) for each in counted) * (last_s - first_s)
    return {role: seconds / rows for role, seconds in roles.items()} if rows else None


def epoch_stall_s(consumers: Sequence[Sequence[Arrival]], skip: int = WARMUP_ARRIVALS) -> float | None:
    """Return how much longer the first block of an epoch takes than others (medians, s); None without one."""
    at_end: list[float] = []
    within: list[float] = []
    for arrivals in consumers:
        for before, after in zip(arrivals[skip:], arrivals[skip + 1 :], strict=False):
            (within if before.epoch == after.epoch else at_end).append(after.at_s - before.at_s)
    if not at_end or not within:
        return None
    return max(0.0, statistics.median(at_end) - statistics.median(within))


def ratios(rounds: Sequence[Mapping[str, float]], named: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Return {name: {median, min, max, pairs}} of the ratio of two arms, paired by round."""
    out = {}
    for name, (over, under) in named.items():
        found = [each[over] / each[under] for each in rounds if each.get(over) and each.get(under)]
        if found:
            spread = {"min": round(min(found), 4), "max": round(max(found), 4), "pairs": len(found)}
            out[name] = {"median": round(statistics.median(found), 4), **spread}
    return out


def order(arms: Sequence[str], turn: int) -> list[str]:
    """Return the arms in the order of round `turn` (ABBA), so that machine slowdown affects all arms equally."""
    return list(arms) if turn % 2 == 0 else list(reversed(arms))


def bottleneck(limits: Mapping[str, float], stream: float) -> str:
    """Return the slowest stage, or the stream itself if its rate is far below every stage."""
    slowest = min(limits, key=lambda name: limits[name])
    return slowest if stream >= MIN_STREAM_SHARE * limits[slowest] else "the stream itself (Ray, and copies of blocks)"


def workers_for(gpu_rate: float, rate_of_all: float, workers: int) -> int:
    """Return how many CPU workers feed a device of `gpu_rate` rows/s, given the rate of `workers` of them."""
    return math.ceil(gpu_rate / (rate_of_all / workers))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the machine of a measurement: CPU, cores, device, load and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
