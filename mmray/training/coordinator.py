"""Messages between driver and workers: an actor under Ray, where `ray.train.report` would be a
barrier of all ranks.
"""

from __future__ import annotations

import time
from typing import Any

Message = dict[str, Any]  # `Coordinator.push` lists them
Updates = tuple[list[Message], list[dict[str, Any]]]  # messages, last heartbeat of each rank
IMPORTING = "importing the engine"  # a worker's first stage


class Coordinator:
    """Messages between the driver and the workers, an actor under Ray.

    Args:
        bad_rows: Indices in the training set of the rows that could not be read before the workers
            were restarted.
    """

    def __init__(self, bad_rows: set[int]) -> None:
        self._messages: list[Message] = []
        self._num_received = 0  # messages that the driver has received
        self._heartbeats: dict[int, tuple[dict[str, Any], float]] = {}
        self._bad_rows = bad_rows
        self._stop_requested = self._stacks_requested = False
        self._must_yield = False

    def push(self, message: Message) -> None:
        """Store a message of a worker for the driver.

        Args:
            message: One of: a line of metrics (with `step`); {"stage": title} of the start;
                {"phase": title} of long work between two steps; {"note": text, "label": word}, a
                line for the console; {"batch_shape": BatchShape} of the dry run;
                {"wasted_steps": number of steps that are taken again}; or, of an evaluation,
                {"rows": number of rows of a batch}.
        """
        self._messages.append(message)

    def drain(self, num_received: int) -> Updates:
        """Return the messages that the driver has not received, and each rank's last heartbeat with
        its age in seconds as `age_s`.

        A message is kept until a later call counts it as received, because a reply may not reach
        the driver in time.
        """
        del self._messages[: num_received - self._num_received]
        self._num_received = num_received
        # a copy: without Ray, threads share this
        now_s = time.monotonic()
        latest = list(self._heartbeats.values())
        return list(self._messages), [
            {**record, "age_s": now_s - received_s} for record, received_s in latest
        ]

    def heartbeat(self, record: dict[str, Any]) -> tuple[bool, bool, bool]:
        """Store the heartbeat of a rank, the fields of HeartbeatRecord; with `ended` the rank is
        removed.

        Returns:
            Three flags: a stop is requested, stacks are requested, and CPUs that the run can do
            without must be given back.
        """
        if "ended" in record:
            self._heartbeats.pop(record["rank"], None)
        else:
            self._heartbeats[record["rank"]] = (record, time.monotonic())
        return self._stop_requested, self._stacks_requested, self._must_yield

    def record_bad_row(self, row: int) -> int:
        """Count an unreadable row.

        Returns:
            The number of bad rows of all ranks; 0 if this row was counted before.
        """
        if row in self._bad_rows:
            return 0
        self._bad_rows.add(row)
        return len(self._bad_rows)

    def call(self, message: tuple[str, Any]) -> Any:
        """Call the method that a message of a process names, (name, argument)."""
        name, argument = message
        return getattr(self, name)(argument)

    def request_stop(self) -> None:
        """Request that all ranks save a checkpoint after the next step and end, with the reply to
        their next heartbeat.
        """
        self._stop_requested = True

    def set_must_yield(self, must_yield: bool) -> None:
        """Set whether other jobs wait for resources, so that ranks give back CPUs that they can do
        without.
        """
        self._must_yield = must_yield

    def request_stacks(self) -> None:
        """Request that all ranks write the stacks of their threads to the run's folder, with the
        reply to their next heartbeat.
        """
        self._stacks_requested = True
