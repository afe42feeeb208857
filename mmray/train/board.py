"""The line between the driver and the training workers: metrics one way, the wish to stop the other.

`ray.train.report` would do for metrics, but each call waits for the controller's next look (half a second to two), on
all ranks; the board is an actor that rank 0 writes to without waiting.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import ray
import ray.exceptions

from mmray.data.prepare import Progress

WASTED = "wasted_steps"


class Listener(Protocol):
    """Who is told what a run does (the command line); called on the driver's main thread."""

    def note(self, text: str, label: str = "") -> None: ...
    def phase(self, title: str) -> None: ...
    def preparing(self, progress: Progress) -> None: ...
    def step(self, metrics: dict[str, Any], total_steps: int) -> None: ...


class Board:
    """Between the driver and rank 0: metrics one way, the wish to stop the other."""

    def __init__(self) -> None:
        self._news: list[dict[str, Any]] = []
        self._stop = False

    def push(self, metrics: dict[str, Any]) -> None:
        self._news.append(metrics)

    def take(self) -> list[dict[str, Any]]:
        news, self._news = self._news, []
        return news

    def ask_to_stop(self) -> None:
        self._stop = True

    def asked_to_stop(self) -> bool:
        return self._stop


def new_board() -> Any:
    """A board as an actor that needs no CPU, wherever Ray puts it."""
    return ray.remote(Board).options(num_cpus=0).remote()


@dataclass
class StopWish:
    """Rank 0's view of the board's stop flag, asked for at most once a second and never waited for."""

    board: Any
    every_s: float = 1.0
    _answer: Any = None
    _asked_s: float = field(default=-1e9)
    _stop: bool = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._answer is None and now - self._asked_s > self.every_s:
            self._answer, self._asked_s = self.board.asked_to_stop.remote(), now
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._stop, self._answer = ray.get(self._answer), None
        return self._stop


@dataclass
class Watch:
    """The driver's eyes on an attempt; `last_step` and `wasted_steps` go on from the attempt before."""

    board: Any
    listener: Listener
    total_steps: int
    last_step: int = 0
    wasted_steps: int = 0

    def look(self) -> None:
        """Pass on what is new."""
        try:
            news = ray.get(self.board.take.remote(), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # the node of the board is gone, or Ray is: the attempt itself will say so
        for metrics in news:
            self.wasted_steps += metrics.get(WASTED, 0)
            if "step" in metrics:
                self.last_step = max(self.last_step, metrics["step"])
                self.listener.step(metrics, self.total_steps)


@contextmanager
def stopping(watch: Watch) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the workers for a checkpoint and an end; the second leaves at once."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        watch.board.ask_to_stop.remote()
        watch.listener.note("after this step, with a checkpoint; once more leaves at once", "stopping")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
