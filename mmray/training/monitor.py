"""Supervision of a running attempt: progress, hung ranks, preempted nodes, capacity for more
workers, signals.

`AttemptMonitor.poll` is called several times per second while Ray Train runs. Its requests reach
the ranks through the coordinator actor, and the ranks agree on them in the next step, so no rank
waits in the hot path. The driver reads the draining nodes itself, because
`ray.train.get_preemption_info` is a barrier over all ranks.
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

from mmray.config import Config
from mmray.engine.worker_context import TRAINING
from mmray.errors import ForceExit, Log, ResourceError
from mmray.training import RunReporter
from mmray.training.workers.coordinator import Request, Updates

if TYPE_CHECKING:
    from mmray.engine.batch import BatchShape

WASTED_STEPS = "wasted_steps"
CHECK_INTERVAL_S = 1.0
CAPACITY_INTERVAL_S = 5.0
CAPACITY_POLLS = 2  # polls in a row before a resize; four times as many after each failed one
STACKS_WAIT_S = 3.0  # time for all ranks to write their stacks: a heartbeat comes each second
# a rank that waits for data is logged after this time, then after twice as long, and so on
DATA_WAIT_LOG_S = 60.0
SILENT_S = 5.0  # a process that is stopped, or holds its interpreter, sends no heartbeat
STATE_TEXTS = {  # states in which other ranks wait for a rank longer than for a step
    "waiting_for_data": "waits for data at",
    "compiling": "is compiling at",
    "saving": "waits for a checkpoint to be written at",
}

StopReason = Literal["user", "resize", "preempted"]


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a rank.

    Attributes:
        node: ID of its node.
        host: Name of its node for messages.
        started_s: Start time of the process in seconds since the epoch.
        step: Number of steps that it has taken.
        progress: Counter that grows with each step, and while starting, evaluating or saving
            advances.
        where: `file:line in function` of the innermost call of mmray or of the user's code.
        in_collective: Whether it is in a collective, or in a backward with collectives: it waits
            for other ranks.
        state: A state of `Cluster.state_limits_s`.
        age_s: Seconds since the coordinator received it.
    """

    rank: int
    node: str
    host: str
    pid: int
    started_s: float
    step: int
    progress: int
    where: str
    in_collective: bool
    state: str = "training"
    age_s: float = 0.0

    @property
    def process(self) -> str:
        """Its process, for messages."""
        return f"rank {self.rank} (process {self.pid}, node {self.host})"

    def __str__(self) -> str:
        state = STATE_TEXTS.get(self.state, "is at")
        if self.in_collective:
            state = "waits in a collective at"
        if self.age_s > SILENT_S:
            state = f"has not responded for {self.age_s:.0f} s, last at"
        return f"{self.process} {state} {self.where}"


class Workers(Protocol):
    """The workers of one attempt, as the driver sees them; the defaults are those of workers
    outside a cluster.
    """

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        """Wait until the workers have ended, and return the result of rank 0; raise a worker's
        error.

        Args:
            poll: Called several times per second.
        """

    def drain(self, num_received: int) -> Updates:
        """Return the new messages and the last heartbeats of the workers, as `Coordinator.drain`.

        Args:
            num_received: Number of messages that earlier calls returned; they are not returned
                again.
        """

    def request(self, name: Request) -> None:
        """Send a request to all ranks."""

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        """Send SIGKILL to the processes of the ranks."""

    def draining_nodes(self) -> dict[str, float]:
        """Return the nodes that will be preempted: time in seconds since the epoch (0: unknown) by
        node ID.
        """
        return {}

    def waits_for_resources(self, log: Log) -> bool:
        """Return whether the workers have no resources yet.

        Args:
            log: Called with (line, label), if the wait is long.
        """
        return False

    def share_resources(self) -> None:
        """Give back CPUs that the workers can do without, if other jobs wait for resources."""
        return

    def num_more_workers(self) -> int:
        """Return how many more workers would fit next to the running ones.

        If the cluster can grow, nodes for more workers are requested first.
        """
        return 0

    def describe_data(self) -> str:
        """Return the state of the processes that read and decode, for a line of the log while ranks
        wait for rows.
        """

    def close(self) -> None:
        """Release the processes and actors of the workers."""


@dataclass
class HangDetector:
    """Detects ranks that made no progress for longer than the limit of their state.

    A new state counts as progress: a rank that waited longer than a step may take has just received
    its rows, or a rank that waited for it has just left the collective.

    Attributes:
        limits_s: `Cluster.state_limits_s`.
    """

    limits_s: dict[str, float]
    # rank: progress, and since when
    _last: dict[int, tuple[tuple[Any, ...], float]] = field(default_factory=dict)
    # rank: how long it has waited for data
    _waits_s: dict[int, float] = field(default_factory=dict)

    def check(self, records: Sequence[HeartbeatRecord], now_s: float) -> str | None:
        """Compare the heartbeats with those of earlier checks, and detect a hang.

        Args:
            records: The last heartbeat of each rank.
            now_s: The present time, of time.monotonic().

        Returns:
            A message that names the ranks for which the others wait; None without a hang.
        """
        stalled = []
        stalled_s = 0.0
        some_within_limit = False
        self._waits_s = {}
        some_wait = any(
            record.state in STATE_TEXTS and record.age_s <= SILENT_S for record in records
        )
        for record in records:
            progress = record.progress, record.state, record.in_collective
            # On a GPU a rank waits for another wherever it launches work behind a collective.
            is_excused = some_wait and record.state not in STATE_TEXTS and record.age_s <= SILENT_S
            if is_excused or self._last.get(record.rank, ((), 0.0))[0] != progress:
                self._last[record.rank] = progress, now_s
            idle_s = now_s - self._last[record.rank][1]
            limit_s = self.limits_s[record.state]
            if record.state == "waiting_for_data":
                self._waits_s[record.rank] = idle_s
            if record.state in STATE_TEXTS and record.age_s > SILENT_S:
                # perhaps stopped (SIGSTOP) since then
                idle_s = record.age_s
                limit_s = self.limits_s["training"]
            if idle_s > limit_s:
                stalled.append(record)
                stalled_s = max(stalled_s, idle_s)
            some_within_limit |= idle_s < limit_s
        all_wait = all(record.in_collective and record.age_s <= SILENT_S for record in stalled)
        # they wait for the rank that is within its limit
        if not stalled or (all_wait and some_within_limit):
            return None
        return (
            f"no progress for {stalled_s:.0f} s: "
            f"{'; '.join(str(record) for record in stuck_ranks(records))}"
        )

    def missing_ranks(self, world: int) -> list[int]:
        """Return the ranks of which no call of `check` has had a heartbeat yet."""
        return sorted(set(range(world)) - self._last.keys())

    def waits_for_data(self) -> tuple[list[int], float]:
        """Return which ranks waited for data at the last check, and the longest of their waits in
        seconds.
        """
        return sorted(self._waits_s), max(self._waits_s.values(), default=0.0)


def stuck_ranks(records: Sequence[HeartbeatRecord]) -> list[HeartbeatRecord]:
    """Return the heartbeats of the ranks that the others probably wait for: of processes that have
    sent none for 5 s, otherwise of ranks that are not in a collective, otherwise all.
    """
    silent = [record for record in records if record.age_s > SILENT_S]
    outside = [record for record in records if not record.in_collective]
    return silent or outside or list(records)


@dataclass
class RunProgress:
    """Progress of a run, from the messages of its workers; kept when workers are restarted.

    Attributes:
        last_step: The last logged step; before the first one, the step from which the workers
            resumed.
        logged: Whether a step of the run was logged.
        wasted_steps: Steps that were taken again after restarts.
    """

    last_step: int = 0
    logged: bool = False
    wasted_steps: int = 0


@dataclass
class AttemptMonitor:
    """Monitors one attempt from the driver, which calls `poll()` several times a second: hung
    ranks, nodes that will be preempted, capacity for more workers, and signals.

    Attributes:
        batch_shape: The batch shape of the attempt; the one that was searched, once it is known.
        retried_errors: Errors of checks of the cluster after which training continues.
        failed_resizes: How often this number of workers stopped so that the run could restart with
            more, but more workers did not start.
        should_stop: Returns True if the caller wants the run to stop at a checkpoint.
        hang: Message that names the hung ranks; None: no hang.
        stop_reason: Why the workers were asked to stop; None: they were not.
        started: Whether a worker has sent a heartbeat.
        trained: Whether the first step has been taken.
    """

    config: Config
    batch_shape: BatchShape
    workers: Workers
    reporter: RunReporter
    total_steps: int
    start_step: int
    progress: RunProgress
    retried_errors: tuple[type[Exception], ...] = (OSError,)
    failed_resizes: int = 0
    should_stop: Callable[[], bool] = lambda: False
    hang: str | None = None
    preempted: bool = False
    stop_reason: StopReason | None = None
    started: bool = False
    trained: bool = False
    heartbeats: list[HeartbeatRecord] = field(default_factory=list)
    _num_received: int = 0  # messages
    _next_check_s: float = 0.0
    _data_wait_logs: int = 0  # lines logged about the present wait
    _next_capacity_s: float = 0.0
    _capacity_polls: int = 0
    _signalled: bool = False

    @property
    def world(self) -> int:
        """Number of workers, torch's world size."""
        return self.batch_shape.world_size

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        self.progress.last_step = self.start_step
        self._start_s = time.monotonic()
        self._detector = HangDetector(cluster.state_limits_s)

    def poll(self) -> None:
        """Read messages and heartbeats of the workers, and check for hangs, preemptions, a
        requested stop and capacity for more workers, each at its own interval.

        Raises:
            ResourceError: A worker has sent no first heartbeat in time.
        """
        self.read_updates()
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        if not self.started and self.workers.waits_for_resources(self.reporter.log):
            self._start_s = now_s
        self._check_start(now_s)
        try:
            if self.stop_reason != "user" and self.should_stop():
                self.stop_reason = None  # overrides a resize or a preemption
                self.request_stop("user", "stopping after this step, with a checkpoint")
            self._check_hang(now_s)
            self._log_data_wait()
            self._check_preemption()
            if now_s >= self._next_capacity_s:
                self._next_capacity_s = now_s + CAPACITY_INTERVAL_S
                self.workers.share_resources()
                if self.world < self.config.cluster.max_workers:
                    self._check_capacity()
        except self.retried_errors as error:  # training continues meanwhile
            self.reporter.log(f"no response from Ray, retrying: {error}", "cluster")

    def request_stop(self, reason: StopReason, message: str) -> None:
        """Request that all ranks save a checkpoint after the next step and end.

        Without effect after an earlier request, whose reason is kept.
        """
        if self.stop_reason is None:
            self.stop_reason = reason
            self.reporter.log(message, "stop")
            self.workers.request("stop")

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """Handle Ctrl-C or SIGTERM (a handler of signal.signal): stop at a checkpoint after the
        next step.

        Raises:
            ForceExit: It is the second signal, or the first step has not been taken.
        """
        if self._signalled or not self.trained:
            raise ForceExit
        # It overrides a resize or a preemption.
        self._signalled = True
        self.stop_reason = None
        self.request_stop(
            "user",
            "stopping after this step, with a checkpoint; press Ctrl-C again to exit immediately",
        )

    def read_updates(self) -> None:
        """Read messages and heartbeats of the workers, and pass them to the reporter."""
        messages, records = self.workers.drain(self._num_received)
        self._num_received += len(messages)
        self.heartbeats = [HeartbeatRecord(**record) for record in records]
        self.started |= bool(records)
        for message in messages:  # `Coordinator.push` lists them
            self.progress.wasted_steps += message.get(WASTED_STEPS, 0)
            self.batch_shape = message.get("batch_shape", self.batch_shape)
            if "stage" in message:  # sent by DriverHandle.stage
                self.trained |= message["stage"] == TRAINING
                self.reporter.status(message["stage"])
            if "phase" in message:
                self.reporter.phase(message["phase"])
            if "note" in message:  # a console line, of DriverHandle.notify
                self.reporter.log(message["note"], message["label"])
            if "step" in message:  # a logged line of metrics
                self.progress.last_step = message["step"]
                self.progress.logged = True
                self.reporter.step(message, self.total_steps)

    def _check_start(self, now_s: float) -> None:
        """Raise ResourceError if a worker sends no first heartbeat: Ray would wait for its import
        of torch forever.
        """
        limit_s = self.config.cluster.first_heartbeat_s
        if now_s - self._start_s > limit_s and (
            missing := self._detector.missing_ranks(self.world)
        ):
            raise ResourceError(
                f"no heartbeat of rank {', '.join(map(str, missing))} (of {self.world}) within "
                f"{limit_s:.0f} s: "
                "a process may hang in an import. Check the file systems of the nodes and rerun "
                "the same command"
            )

    def _check_hang(self, now_s: float) -> None:
        """Kill the processes of a hung group, after all that can have written their stacks."""
        if self.hang is not None:
            return
        hang = self._detector.check(self.heartbeats, now_s)
        if hang is None:
            return
        self.hang = hang
        self.reporter.log(f"{hang}; stacks are written to stacks/ in the run's folder", "hang")
        self.workers.request("stacks")
        time.sleep(STACKS_WAIT_S)
        self.workers.kill(self.heartbeats)

    def _log_data_wait(self) -> None:
        """Log what ranks wait for, at intervals that double until rows arrive."""
        ranks, wait_s = self._detector.waits_for_data()
        if self._data_wait_logs and wait_s < DATA_WAIT_LOG_S and self.heartbeats:
            self._data_wait_logs = 0
            self.reporter.log("rows arrive again", "data")
        if wait_s < DATA_WAIT_LOG_S * 2**self._data_wait_logs:
            return
        self._data_wait_logs += 1
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        limit_s = self.config.cluster.state_limits_s["waiting_for_data"]
        data = self.workers.describe_data()
        text = f"{names} waited {wait_s:.0f} s for rows, a failure after {limit_s:.0f} s; {data}"
        self.reporter.log(text, "data")

    def _check_preemption(self) -> None:
        """Request a checkpoint if a node of the group is being preempted."""
        draining = self.workers.draining_nodes()
        deadlines = [draining[record.node] for record in self.heartbeats if record.node in draining]
        if not deadlines:
            return
        self.preempted = True
        first_s = min(deadlines)
        when = f"in {first_s - time.time():.0f} s" if first_s else "soon"
        self.request_stop(
            "preempted", f"node will be preempted {when}; checkpointing and moving to another node"
        )

    def _check_capacity(self) -> None:
        """Request a resize if more workers fit at several polls in a row."""
        extra = self.workers.num_more_workers()  # also requests nodes, until the workers start
        extra = extra if self.heartbeats else 0
        self._capacity_polls = self._capacity_polls + 1 if extra else 0
        if self._capacity_polls >= CAPACITY_POLLS * 4**self.failed_resizes:
            self.request_stop(
                "resize", f"{self.world + extra} workers fit now; checkpointing to restart with all"
            )


@contextmanager
def signal_handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager that handles SIGINT and SIGTERM in the block; without effect outside the main
    thread.

    Args:
        handle: Called with (number of the signal, stack frame), as by signal.signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
