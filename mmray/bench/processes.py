"""What the processes of a measurement cost, by what they are for: the most memory each held, and CPU time.

CPU time a row says what a loader needs whatever else the machine does meanwhile; rates alone do not.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from types import TracebackType

import psutil

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
