"""Figures from arrivals: rates of a steady middle, gaps at an epoch's end, ratios of windows side by side.

Pure. An arrival is what a consumer saw: when a block of rows came, how many, and the last epoch among them.
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
from ray._private.internal_api import get_memory_info_reply
from ray._private.state import state

from mmray.machine import cores

# What the processes of a measurement cost, by what they are for: the most memory each held, and CPU time.
#
# CPU time a row says what a loader needs whatever else the machine does meanwhile; rates alone do not.
EVERY_S = 0.25


class ProcessWatch:
    """Looks at this process and all below it while the block runs."""

    def __init__(self) -> None:
        self._peaks: dict[tuple[str, int], float] = defaultdict(float)
        self._seen_s: dict[int, float] = {}  # CPU seconds by process below this one
        self._spent_s: dict[str, float] = defaultdict(float)  # the same by role, ended ones too
        self.history: list[tuple[float, dict[str, float]]] = []  # (clock, CPU seconds by role so far)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mmray-processes", daemon=True)

    def __enter__(self) -> ProcessWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def peaks_mib(self) -> dict[str, tuple[int, float]]:
        """{role: (processes, the largest)}: their own pages (the object store's are in everyone's resident size)."""
        roles: dict[str, list[float]] = defaultdict(list)
        for (role, _), peak in self._peaks.items():
            roles[role].append(peak)
        return {role: (len(peaks), round(max(peaks), 1)) for role, peaks in sorted(roles.items())}

    def _watch(self) -> None:
        driver = psutil.Process()
        while True:
            for process in (driver, *driver.children(recursive=True)):
                try:
                    self._look(process, driver)
                except psutil.Error:  # it ended while it was looked at
                    continue
            self.history.append((time.time(), dict(self._spent_s)))
            if self._ended.wait(EVERY_S):
                return

    def _look(self, process: psutil.Process, driver: psutil.Process) -> None:
        with process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            role = "driver" if process == driver else role_of(process.cmdline(), process.parent())
        own_mib = (memory.rss - getattr(memory, "shared", 0)) / 2**20
        self._peaks[role, process.pid] = max(self._peaks[role, process.pid], own_mib)
        if process != driver:  # which does the looking
            spent_s = times.user + times.system
            self._spent_s[role] += spent_s - self._seen_s.get(process.pid, 0.0)
            self._seen_s[process.pid] = spent_s


def spent_s(
    history: list[tuple[float, dict[str, float]]], start_s: float, stop_s: float
) -> tuple[dict[str, float], float, float] | None:
    """(CPU seconds by role, first clock, last clock) from the first look to the last within [start, stop].

    None: too short for two looks.
    """
    first = bisect_right(history, start_s, key=lambda look: look[0])
    last = bisect_right(history, stop_s, key=lambda look: look[0]) - 1
    if last <= first:
        return None
    (first_s, before), (last_s, after) = history[first], history[last]
    return {role: spent - before.get(role, 0.0) for role, spent in after.items()}, first_s, last_s


def role_of(command: list[str], parent: psutil.Process | None) -> str:
    """What a process is for, from the title that Ray gives its workers; a consumer's fork is a DataLoader's worker."""
    title = command[0] if command else ""
    if not title.startswith("ray::"):
        return title.rpartition("/")[2].split(" ")[0] or "?"
    if parent is not None and (parent.cmdline() or [""])[0].startswith("ray::"):
        return "DataLoader worker"
    if title.startswith("ray::MapWorker("):
        return "stream actor"
    return re.split(r"[.(]", title.removeprefix("ray::"))[0]


SKIP = 2  # first arrivals of a consumer that do not count: they were made while others started
OWN_SHARE = 0.75  # of what its slowest stage allows: a stream below that loses its time elsewhere


@dataclass(frozen=True)
class Arrival:
    """Rows that one consumer got at one moment (the machine's clock, in seconds)."""

    at_s: float
    rows: int
    epoch: int = 0
    num_bytes: int = 0


def rate(consumers: Sequence[Sequence[Arrival]], skip: int = SKIP) -> float:
    """Rows a second over all consumers, without what was ready before: each consumer's first `skip` arrivals."""
    return sum(_rate(arrivals[min(skip, max(0, len(arrivals) - 2)) :]) for arrivals in consumers)


def _rate(arrivals: Sequence[Arrival]) -> float:
    took_s = arrivals[-1].at_s - arrivals[0].at_s
    return sum(arrival.rows for arrival in arrivals[1:]) / took_s if took_s > 0 else 0.0


def cpu_s_per_row(
    consumers: Sequence[Sequence[Arrival]], history: list[tuple[float, dict[str, float]]], skip: int = SKIP
) -> dict[str, float] | None:
    """CPU seconds for a row by role of process, over the window that `rate` counts; None: too short to tell."""
    counted = [arrivals[min(skip, max(0, len(arrivals) - 2)) :] for arrivals in consumers]
    spent = spent_s(history, max(each[0].at_s for each in counted), min(each[-1].at_s for each in counted))
    if spent is None:
        return None
    roles, first_s, last_s = spent
    rows = sum(_rate(each) for each in counted) * (last_s - first_s)
    return {role: seconds / rows for role, seconds in roles.items()} if rows else None


def epoch_stall_s(consumers: Sequence[Sequence[Arrival]], skip: int = SKIP) -> float | None:
    """How much longer a consumer waits for a block that begins an epoch than for others: medians; None without one."""
    at_end: list[float] = []
    within: list[float] = []
    for arrivals in consumers:
        for before, after in zip(arrivals[skip:], arrivals[skip + 1 :], strict=False):
            (within if before.epoch == after.epoch else at_end).append(after.at_s - before.at_s)
    if not at_end or not within:
        return None
    return max(0.0, statistics.median(at_end) - statistics.median(within))


def ratios(rounds: Sequence[Mapping[str, float]], named: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """{name: median, min, max, pairs} of arm : arm, each pair from one round, where both were measured."""
    out = {}
    for name, (over, under) in named.items():
        found = [each[over] / each[under] for each in rounds if each.get(over) and each.get(under)]
        if found:
            spread = {"min": round(min(found), 4), "max": round(max(found), 4), "pairs": len(found)}
            out[name] = {"median": round(statistics.median(found), 4), **spread}
    return out


def order(arms: Sequence[str], turn: int) -> list[str]:
    """The arms of one round: forwards, then backwards, so that a machine that grows slower favours none (ABBA)."""
    return list(arms) if turn % 2 == 0 else list(reversed(arms))


def bottleneck(limits: Mapping[str, float], stream: float) -> str:
    """Name of the stage that lets the fewest rows a second through; the stream's own where it stays far below all."""
    slowest = min(limits, key=lambda name: limits[name])
    return slowest if stream >= OWN_SHARE * limits[slowest] else "the stream itself (Ray, and copies of blocks)"


def workers_for(gpu_rate: float, rate_of_all: float, workers: int) -> int:
    """CPU workers that feed a device of `gpu_rate` rows a second, where `workers` of them gave `rate_of_all`."""
    return math.ceil(gpu_rate / (rate_of_all / workers))


# The machine that a measurement was taken on: a figure without it says nothing.
def describe(device: torch.device) -> dict[str, Any]:
    """Processor, cores, accelerator, versions, and how busy the machine was with other things."""
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


# What has gone through Ray's object stores, as their own counters tell.
def created_bytes() -> int:
    """Bytes of all objects that the stores of this cluster ever took in: a copy on another node is one more.

    Those of whoever else uses the cluster are among them; what is below 100 KB is not, for Ray sends it with the
    answer. One node is asked, which asks the others: 10 to 40 ms.
    """
    # Internal to Ray 2.60, as `ray memory --stats-only` asks for it; Python has no other word for it.
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)
