"""The line between the driver and the training workers: metrics and heartbeats one way, the wish to stop the other.

`ray.train.report` would do for metrics, but each call waits for the controller's next look (half a second to two), on
all ranks; the board is an actor that ranks write to without waiting.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.errors import AtOnce
from mmray.train.hang_detector import HeartbeatRecord

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import Progress  # not for the actor: it would import Ray Data

WASTED, CHECKPOINT_S = "wasted_steps", "checkpoint_s"
StopReason = Literal["user", "resize", "preempted"]


class ProgressReporter(Protocol):
    """Who is told what a run does (the command line); called on the driver's main thread."""

    def log(self, text: str, label: str = "") -> None: ...
    def status(self, title: str) -> None: ...
    def prepare_progress(self, progress: Progress) -> None: ...
    def step(self, metrics: dict[str, Any], total_steps: int) -> None: ...


class Coordinator:
    """Between the driver and the ranks: metrics, heartbeats and bad rows one way, wishes the other."""

    def __init__(self, bad_rows: set[int]) -> None:
        self._news: list[dict[str, Any]] = []
        self._beats: dict[int, tuple[dict[str, Any], float]] = {}
        self._bad_rows = bad_rows
        self._stop = self._stacks = False

    def push(self, metrics: dict[str, Any]) -> None:
        self._news.append(metrics)

    def take(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What is new, and the last heartbeat of each rank with its age."""
        news, self._news = self._news, []
        now_s = time.monotonic()
        return news, [{**beat, "age_s": now_s - came_s} for beat, came_s in self._beats.values()]

    def beat(self, beat: dict[str, Any]) -> bool:
        """Keep a rank's heartbeat, or forget the rank where it has ended; answers whether its stacks are wanted."""
        if "ended" in beat:
            self._beats.pop(beat["rank"], None)
        else:
            self._beats[beat["rank"]] = (beat, time.monotonic())
        return self._stacks

    def bad_row(self, row: int) -> int:
        """Count a row that could not be read; answers how many there are on all ranks together, 0 for one known."""
        if row in self._bad_rows:
            return 0
        self._bad_rows.add(row)
        return len(self._bad_rows)

    def ask_to_stop(self) -> None:
        self._stop = True

    def asked_to_stop(self) -> bool:
        return self._stop

    def ask_for_stacks(self) -> None:
        self._stacks = True


def start_coordinator(bad_rows: set[int]) -> Any:
    """A board as an actor that needs no CPU, on the driver's node: it is there as long as the driver is.

    `bad_rows` are those that earlier attempts have named.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Coordinator).options(num_cpus=0, scheduling_strategy=here).remote(bad_rows)


@dataclass
class StopFlag:
    """Rank 0's view of the board's stop flag, asked for at most once a second and never waited for."""

    coordinator: Any
    every_s: float = 1.0
    _answer: Any = None
    _asked_s: float = field(default=-1e9)
    _stop: bool = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._answer is None and now - self._asked_s > self.every_s:
            self._answer, self._asked_s = self.coordinator.asked_to_stop.remote(), now
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._stop, self._answer = ray.get(self._answer), None
        return self._stop


@dataclass
class RunMonitor:
    """The driver's eyes on an attempt, and the one who asks it to stop."""

    coordinator: Any
    reporter: ProgressReporter
    total_steps: int
    last_step: int = 0  # that was logged; of an attempt that has logged none, where it began
    logged: bool = False  # this attempt or one before it has logged a step
    wasted_steps: int = 0
    step_s: float = 0.0  # as last measured, as are the seconds that a checkpoint takes; 0: not yet
    checkpoint_s: float = 0.0
    micro: int = 0  # rows of a micro-batch, as last logged
    beats: list[HeartbeatRecord] = field(default_factory=list)
    begun: bool = False  # a worker has been heard of
    stop_reason: StopReason | None = None  # why the group was asked to end

    def over(self, coordinator: Any, first_step: int) -> RunMonitor:
        """For the next attempt, which begins at `first_step`: what was measured stays known."""
        return replace(self, coordinator=coordinator, last_step=first_step, beats=[], begun=False, stop_reason=None)

    def look(self) -> None:
        """Pass on what is new."""
        try:
            news, beats = ray.get(self.coordinator.take.remote(), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # Ray is going down: the attempt itself will say so
        self.beats = [HeartbeatRecord(**beat) for beat in beats]
        self.begun = self.begun or bool(news or beats)
        for metrics in news:
            self.wasted_steps += metrics.get(WASTED, 0)
            if "note" in metrics:
                self.reporter.log(metrics["note"], metrics["label"])
            self.step_s = metrics.get("time/step_s", self.step_s)
            self.checkpoint_s = metrics.get(CHECKPOINT_S, self.checkpoint_s)
            self.micro = metrics.get("batch/micro", self.micro)
            if "step" in metrics:
                self.last_step, self.logged = metrics["step"], True
                self.reporter.step(metrics, self.total_steps)

    def ask(self, stop_reason: StopReason, told: str) -> None:
        """Ask the group to end after its step, with a checkpoint. What was asked for first is why."""
        if self.stop_reason is None:
            self.stop_reason = stop_reason
            self.reporter.log(told, "stopping")
            self.coordinator.ask_to_stop.remote()


@contextmanager
def stop_on_signal(run_monitor: RunMonitor) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the workers for a checkpoint and an end; the second leaves at once.

    Where no worker has begun, there is nothing to keep, and nobody to ask: the first one leaves.
    """
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1 or not run_monitor.begun:
            raise AtOnce
        run_monitor.stop_reason = None  # whatever else the group was asked to end for, the user does not want another
        run_monitor.ask("user", "after this step, with a checkpoint; once more leaves at once")

    with signal_handlers(ask):
        yield


@contextmanager
def signal_handlers(ask: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are answered by `ask` inside the block; outside the main thread none are heard."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
