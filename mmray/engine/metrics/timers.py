"""Seconds that work took where it ran: the clock on a CPU, events on a GPU, which the host does not wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_EVENTS = 1024  # kept before the older half is read, which by then is long done


class Stopwatch:
    """Adds up stretches of work of one device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device
        self._took_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A stretch of work, queued inside."""
        if not self._cuda:
            began_s = time.perf_counter()
            try:
                yield
            finally:
                self._took_s += time.perf_counter() - began_s
            return
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        try:
            yield
        finally:
            ended.record(stream)
            self._events.append((began, ended))
            if len(self._events) > MOST_EVENTS:
                self._read(MOST_EVENTS // 2)

    def take_s(self) -> float:
        """Seconds since the last call; waits until a GPU has done what was queued inside the stretches."""
        self._read(len(self._events))
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def _read(self, count: int) -> None:
        """Add up the oldest `count` stretches; another thread may be adding newer ones."""
        for began, ended in self._events[:count]:
            ended.synchronize()
            self._took_s += began.elapsed_time(ended) / 1000
        del self._events[:count]
