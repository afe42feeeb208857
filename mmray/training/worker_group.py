"""The workers of a running attempt and their heartbeats, as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SILENT_S = 5.0  # a process that is stopped, or holds its interpreter, sends no heartbeat
STATE_TEXTS = {  # states in which other ranks wait for a rank longer than for a step
    "waiting_for_data": "waits for data at",
    "compiling": "is compiling at",
    "saving": "waits for a checkpoint to be written at",
}


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last heartbeat of a rank; `age_s` by the coordinator's clock."""

    rank: int
    node: str
    pid: int
    started_s: float  # start time of the process, seconds since the epoch
    step: int
    # grows with each step, and while starting, evaluating or saving advances (see README.md)
    progress: int
    where: str  # file:line in function, the innermost of mmray or user code
    in_collective: bool  # or in a backward with collectives: it waits for the other ranks
    state: str = "training"  # or another key of Cluster.state_limits_s
    age_s: float = 0.0

    def __str__(self) -> str:
        if self.age_s > SILENT_S:
            state = f"has not responded for {self.age_s:.0f} s, last at"
        else:
            state = (
                ("waits in a collective at")
                if self.in_collective
                else STATE_TEXTS.get(self.state, "is at")
            )
        return f"rank {self.rank} (process {self.pid}, node {self.node[:8]}) {state} {self.where}"


class Workers(Protocol):
    """The workers of a running attempt."""

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        """Return the outcome of rank 0, or raise why the attempt failed; calls `poll` several times
        per second.
        """

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages after the first `num_received`, and the last heartbeat of each
        rank.
        """

    def request_stop(self) -> None:
        """Request a checkpoint and the end of the attempt after the next step."""

    def request_stacks(self) -> None:
        """Request the stacks of all ranks, written to the run's folder."""

    def kill(self, heartbeats: Sequence[HeartbeatRecord]) -> None:
        """Send SIGKILL to the processes of the ranks."""

    def draining_nodes(self) -> dict[str, float]:
        """Return the nodes that will be preempted: ID and time (epoch seconds, 0: unknown)."""

    def num_more_workers(self) -> int:
        """Return how many workers fit in addition, after requesting nodes for them if the cluster
        can grow.
        """

    def describe_data(self) -> str:
        """Return the state of the processes that read and decode, for a log line while ranks wait
        for rows.
        """

    def close(self) -> None:
        """Release what the attempt holds."""
