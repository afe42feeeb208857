"""Supervision of a running attempt: progress, hung ranks, preempted nodes, capacity for more workers, signals.

`AttemptMonitor.poll` is called several times per second while Ray Train runs. Its requests reach the ranks through the
coordinator actor, and the ranks agree on them in the next step, so no rank waits in the hot path. The driver reads the
draining nodes itself, because `ray.train.get_preemption_info` is a barrier over all ranks.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import ray
import ray.exceptions

from mmray.cluster.placement import AutoscalerRequest, draining_nodes, kill_processes, live_nodes
from mmray.config import Config
from mmray.errors import ForceExit
from mmray.train.resources import num_additional_workers, request_nodes

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import Progress

WASTED_STEPS, CHECKPOINT_S = "wasted_steps", "checkpoint_s"
HANG_INTERVAL_S, DRAIN_INTERVAL_S, CAPACITY_INTERVAL_S = 1.0, 1.0, 5.0
CAPACITY_POLLS = 2  # in a row before a resize; four times as many after each failed resize
STACKS_WAIT_S = 3.0  # until all ranks have written their stacks: a heartbeat comes each second
REQUEST_DELAY_S = 3.0  # from the driver's request to the ranks' agreement, in addition to a step
SILENT_S = 5.0  # a process that is stopped, or holds its interpreter, sends no heartbeat
StopReason = Literal["user", "resize", "preempted"]


class ProgressReporter(Protocol):
    """Receives the progress of a run (the console); called on the driver's main thread."""

    def log(self, text: str, label: str = "") -> None: ...
    def status(self, title: str) -> None: ...
    def prepare_progress(self, progress: Progress) -> None: ...
    def step(self, metrics: dict[str, Any], total_steps: int) -> None: ...


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a rank; `age_s` by the coordinator's clock."""

    rank: int
    node: str
    pid: int
    started_s: float  # start time of the process, seconds since the epoch
    step: int
    progress: int  # grows with each step, and while starting, evaluating or saving advances
    where: str  # file:line in function, the innermost of mmray or user code
    in_collective: bool  # or in a backward with collectives: it waits for the other ranks
    waits_for_data: bool = False
    age_s: float = 0.0

    def __str__(self) -> str:
        if self.age_s > SILENT_S:
            state = f"has not responded for {self.age_s:.0f} s, last at"
        else:
            waits = "in a collective" if self.in_collective else "for data" if self.waits_for_data else ""
            state = f"waits {waits} at" if waits else "is at"
        return f"rank {self.rank} (process {self.pid}, node {self.node[:8]}) {state} {self.where}"


@dataclass(frozen=True)
class Hang:
    """Ranks that block the others, and a message that names them."""

    ranks: tuple[int, ...]
    message: str


@dataclass
class HangDetector:
    """Detect ranks that made no progress for `limit_s`."""

    limit_s: float
    start_limit_s: float  # until the first step, and while a rank waits for data: nodes may have to start
    first_step: int = 0
    _last: dict[int, tuple[int, float]] = field(default_factory=dict)

    def check(self, records: Sequence[HeartbeatRecord], now_s: float) -> Hang | None:
        """Return the hang that these heartbeats show; None without one."""
        idle_s = [self._idle_s(record, now_s) for record in records]
        limits_s = [self._limit_s(record) for record in records]
        late = [each for each, idle, limit in zip(records, idle_s, limits_s, strict=True) if idle > limit]
        all_wait = all(record.in_collective and record.age_s <= SILENT_S for record in late)
        others_may = any(idle < limit for idle, limit in zip(idle_s, limits_s, strict=True))
        if not late or (all_wait and others_may):  # they wait for a rank that writes, evaluates or waits for data
            return None
        stuck = stuck_ranks(records)
        names = "; ".join(str(record) for record in stuck)
        return Hang(tuple(record.rank for record in stuck), f"no step for {max(idle_s):.0f} s: {names}")

    def _limit_s(self, record: HeartbeatRecord) -> float:
        if record.step > self.first_step and not record.waits_for_data:
            return self.limit_s
        return max(self.limit_s, self.start_limit_s)

    def _idle_s(self, record: HeartbeatRecord, now_s: float) -> float:
        progress, since_s = self._last.get(record.rank, (-1, now_s))
        if progress != record.progress:
            since_s = now_s
        self._last[record.rank] = (record.progress, since_s)
        return now_s - since_s


def stuck_ranks(records: Sequence[HeartbeatRecord]) -> list[HeartbeatRecord]:
    """Ranks the others wait for: silent processes, otherwise ranks outside a collective, otherwise all."""
    silent = [record for record in records if record.age_s > SILENT_S]
    outside = [record for record in records if not record.in_collective]
    return silent or outside or list(records)


def checkpoint_deadline_s(preemption_s: float, checkpoint_s: float, step_s: float) -> float:
    """Time at which to request the last checkpoint before a node is preempted; 0 (at once) if a duration is unknown.

    Allows twice the measured checkpoint time and two steps: the current one, and the one that carries the request.
    """
    if not preemption_s or not checkpoint_s:
        return 0.0
    return preemption_s - 2 * checkpoint_s - 2 * step_s - REQUEST_DELAY_S


@dataclass
class RunProgress:
    """State of a run, from its logged metrics; kept over attempts."""

    last_step: int = 0  # last logged step; the first step of an attempt that has logged none
    logged: bool = False  # some attempt logged a step
    wasted_steps: int = 0
    step_s: float = 0.0  # newest measurement, like the next two; 0: unknown
    checkpoint_s: float = 0.0
    micro: int = 0

    def update(self, metrics: dict[str, Any]) -> None:
        self.wasted_steps += metrics.get(WASTED_STEPS, 0)
        self.step_s = metrics.get("time/step_s", self.step_s)
        self.checkpoint_s = metrics.get(CHECKPOINT_S, self.checkpoint_s)
        self.micro = metrics.get("batch/micro", self.micro)
        if "step" in metrics:
            self.last_step, self.logged = metrics["step"], True


@dataclass
class AttemptMonitor:
    """The driver's part in one running attempt of `world` workers."""

    config: Config  # with the range of workers that the user set
    world: int
    coordinator: Any
    reporter: ProgressReporter
    total_steps: int
    first_step: int
    progress: RunProgress
    autoscaler: AutoscalerRequest
    failed_resizes: int = 0  # resizes from this number of workers after which no larger group started
    hang: Hang | None = None
    preempted: bool = False  # a node of the group is being preempted
    stop_reason: StopReason | None = None
    started: bool = False  # a worker has reported
    heartbeats: list[HeartbeatRecord] = field(default_factory=list)
    _next_s: dict[str, float] = field(default_factory=dict)
    _capacity_polls: int = 0
    _detector: HangDetector = field(init=False)

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        self.progress.last_step = self.first_step
        self._detector = HangDetector(cluster.hang_timeout_s, cluster.start_timeout_s, self.first_step)

    def poll(self) -> None:
        """Read metrics and heartbeats from the coordinator, and run each check that is due."""
        self._read_news()
        self._if_due(HANG_INTERVAL_S, self._check_hang)
        self._if_due(DRAIN_INTERVAL_S, self._check_preemption)
        if self.world < self.config.cluster.max_workers:
            self._if_due(CAPACITY_INTERVAL_S, self._check_capacity)

    def request_stop(self, reason: StopReason, message: str) -> None:
        """Request a checkpoint and the end of the run after the next step; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.reporter.log(message, "stop")
            self.coordinator.request_stop.remote()

    def _read_news(self) -> None:
        try:
            news, records = ray.get(self.coordinator.take.remote(), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # Ray is shutting down: the attempt itself raises
        self.heartbeats = [HeartbeatRecord(**record) for record in records]
        self.started = self.started or bool(news or records)
        for metrics in news:
            self.progress.update(metrics)
            if "note" in metrics:
                self.reporter.log(metrics["note"], metrics["label"])
            if "step" in metrics:
                self.reporter.step(metrics, self.total_steps)

    def _if_due(self, interval_s: float, check: Callable[[], None]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s.get(check.__name__, 0.0):
            return
        self._next_s[check.__name__] = now_s + interval_s
        try:
            check()
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:  # training continues meanwhile
            self.reporter.log(f"no response from Ray, retrying: {error}", "cluster")

    def _check_hang(self) -> None:
        """Kill the processes of a hung group, after all that can have written their stacks."""
        hang = self._detector.check(self.heartbeats, time.monotonic())
        if hang is None or self.hang is not None:
            return
        self.hang = hang
        self.reporter.log(f"{hang.message}; stacks are written to stacks/ in the run's folder", "hang")
        self.coordinator.request_stacks.remote()
        records = self.heartbeats
        time.sleep(STACKS_WAIT_S)
        kill_processes((record.node, record.pid, record.started_s) for record in records)

    def _check_preemption(self) -> None:
        """Request a checkpoint in time if a node of the group is being preempted."""
        draining = draining_nodes()
        deadlines = [draining[record.node] for record in self.heartbeats if record.node in draining]
        if not deadlines:
            return
        self.preempted, known = True, self.progress
        latest_s = min(checkpoint_deadline_s(deadline, known.checkpoint_s, known.step_s) for deadline in deadlines)
        if time.time() >= latest_s:
            when = f"in {min(deadlines) - time.time():.0f} s" if min(deadlines) else "soon"
            self.request_stop("preempted", f"node will be preempted {when}; checkpointing and moving to another node")

    def _check_capacity(self) -> None:
        """Request a resize if more workers fit at several polls in a row."""
        request_nodes(self.config, self.autoscaler, self.world)
        more = num_additional_workers(self.config, live_nodes().nodes, self.world) if self.heartbeats else 0
        self._capacity_polls = self._capacity_polls + 1 if more else 0
        if self._capacity_polls >= CAPACITY_POLLS * 4**self.failed_resizes:
            self.request_stop("resize", f"{self.world + more} workers fit now; checkpointing to restart with all")


@contextmanager
def stop_on_signal(monitor: AttemptMonitor) -> Iterator[None]:
    """Stop at a checkpoint on the first Ctrl-C or SIGTERM; exit on the second, or if no worker has started."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or not monitor.started:
            raise ForceExit
        monitor.stop_reason = None  # overrides a resize or a preemption
        monitor.request_stop("user", "after this step, with a checkpoint; press Ctrl-C again to exit at once")

    with signal_handlers(handle):
        yield


@contextmanager
def signal_handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `handle` inside the block; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
