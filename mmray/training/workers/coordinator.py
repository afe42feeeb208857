"""Messages between driver and workers: an actor under Ray, where `ray.train.report` would be a
barrier of all ranks.
"""

from __future__ import annotations

import time
from typing import Any, Literal

Message = dict[str, Any]  # `Coordinator.push` lists them
Updates = tuple[list[Message], list[dict[str, Any]]]  # messages, last heartbeat of each rank
IMPORTING = "importing the engine"  # a worker's first stage
# To the ranks: save a checkpoint after the next step and end; write the stacks of all threads to
# the run's folder; give back CPUs that the run can do without, because other jobs wait for them.
Request = Literal["stop", "stacks", "yield"]


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
        self._requests: set[Request] = set()

    def push(self, message: Message) -> None:
        """Store a message of a worker for the driver: a line of metrics (with `step`), or one of
        {"stage": title}, {"phase": title}, {"note": text, "label": word}, {"rows": int} (of an
        evaluation), {"batch_shape": BatchShape} and {"wasted_steps": int}.
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

    def heartbeat(self, record: dict[str, Any]) -> set[Request]:
        """Store the heartbeat of a rank, the fields of HeartbeatRecord; with `ended` the rank is
        removed.

        Returns:
            The requests to the ranks.
        """
        if "ended" in record:
            self._heartbeats.pop(record["rank"], None)
        else:
            self._heartbeats[record["rank"]] = (record, time.monotonic())
        return set(self._requests)

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

    def request(self, name: Request, is_active: bool = True) -> None:
        """Add a request to the ranks, which they get with the reply to their next heartbeat, or
        withdraw it.
        """
        if is_active:
            self._requests.add(name)
        else:
            self._requests.discard(name)
