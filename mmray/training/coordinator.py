"""Messages between driver and workers: an actor under Ray, where `ray.train.report` would be a
barrier of all ranks.
"""

from __future__ import annotations

import time
from typing import Any

IMPORTING = "importing the engine"  # a worker's first stage


class Coordinator:
    """Keeps new messages (metrics, stages, notes, durations), each rank's last heartbeat, bad rows
    and requests.
    """

    def __init__(self, bad_rows: set[int]) -> None:
        self._messages: list[dict[str, Any]] = []
        self._num_received = 0  # messages that the driver has received
        self._heartbeats: dict[int, tuple[dict[str, Any], float]] = {}
        self._bad_rows = bad_rows
        self._stop_requested = self._stacks_requested = False
        self._must_yield = False

    def push(self, message: dict[str, Any]) -> None:
        self._messages.append(message)

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages after the first `num_received`, and the last heartbeat of each rank
        with its age.

        A message is kept until a later call counts it as received, because a reply may not reach
        the driver in time.
        """
        del self._messages[: num_received - self._num_received]
        self._num_received = num_received
        # a copy: without Ray, threads share this
        now_s, latest = time.monotonic(), list(self._heartbeats.values())
        return list(self._messages), [
            {**record, "age_s": now_s - received_s} for record, received_s in latest
        ]

    def heartbeat(self, record: dict[str, Any]) -> tuple[bool, bool, bool]:
        """Store a rank's heartbeat, or remove a rank that ended; return whether a stop and stacks
        are requested, and whether CPUs that the run can do without are.
        """
        if "ended" in record:
            self._heartbeats.pop(record["rank"], None)
        else:
            self._heartbeats[record["rank"]] = (record, time.monotonic())
        return self._stop_requested, self._stacks_requested, self._must_yield

    def record_bad_row(self, row: int) -> int:
        """Count an unreadable row; return the total over all ranks, 0 if the row was known."""
        if row in self._bad_rows:
            return 0
        self._bad_rows.add(row)
        return len(self._bad_rows)

    def request_stop(self) -> None:
        self._stop_requested = True

    def set_must_yield(self, must_yield: bool) -> None:
        """Set whether others wait for resources of the cluster."""
        self._must_yield = must_yield

    def request_stacks(self) -> None:
        self._stacks_requested = True
