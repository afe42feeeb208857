"""An ordered map over processes that may be lost: child processes of this machine
(processes.py), or actors on the nodes of a cluster (data/stream/actors.py).

Without Ray. The work must be a pure function of its item, because an item may be computed twice.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

POLL_S = 0.25  # longest wait before losses, late items and the pool are checked again
LATE_FACTOR = 8.0  # an item is late after this many times the median
FIRST_LATE_S = 20.0  # limit of the first result: processes load their imports and files
NUM_DURATIONS = 32  # latest durations that the median is of
Item = TypeVar("Item")
Result = TypeVar("Result")


class Worker(Protocol[Item, Result]):  # type: ignore[misc]
    """A process that computes items in the order of their submission.

    A class implements `submit(item, careful)`, which returns a concurrent.futures.Future of the
    result. With `careful` the item may have killed another process, so the function must protect
    this one.

    Attributes:
        node: ID of the node whose memory has the results.
    """

    node: str

    def submit(self, item: Item, careful: bool) -> Future[Result]:
        """Start to compute an item, after the items that were submitted before.

        Args:
            item: The argument of the function that the map computes.
            careful: Whether the item may have killed another process, so that the function must
                protect this one.

        Returns:
            A future of the result, or of the error.
        """


class Pool(Protocol[Item, Result]):
    """Interface of the processes that compute the items of an OrderedMap, which iterates results in
    order.

    A class has all of its members. `workers` are the processes; `submit(item, careful)` of each
    returns a future of the result, with `careful` True for an item that may have killed another
    process. `max_in_flight` and `node_limit(node)` limit the items that are submitted and whose
    results were not taken yet. `is_lost_worker(error)` and `replace(worker)` are for lost
    processes, and `compute_here(item)` computes an item without one. `update(waited_s)` may change
    their number; `kill()` and `close()` end them.
    """

    @property
    def workers(self) -> Sequence[Worker[Item, Result]]:
        """The processes that have started and are not known to be lost, to which items can be
        submitted.
        """

    @property
    def max_in_flight(self) -> int:
        """Largest number of items that may be started and whose results the caller has not taken
        yet.
        """

    def node_limit(self, node: str) -> int:
        """Return for how many items a node may hold work or results in its memory.

        An item counts from its submission to a worker of the node until the caller has taken its
        result.

        Args:
            node: ID of the node of a worker, such as the ID of a node of Ray.
        """

    def is_lost_worker(self, error: BaseException) -> bool:
        """Return whether an error means that a process was lost, not that the function raised it.

        Args:
            error: The error of a future that `Worker.submit` returned.
        """

    def replace(self, worker: Worker[Item, Result]) -> None:
        """Start another process for a lost one; an error that this raises ends the map.

        Args:
            worker: The lost process, a member of `workers`.
        """

    def compute_here(self, item: Item) -> Result:
        """Compute an item in the caller's process, because no other process does it in time.

        Args:
            item: The argument of the function that the map computes.

        Returns:
            The result of the function.
        """

    def update(self, waited_s: float) -> None:
        """Start or end processes, depending on how long the caller waits for results.

        Called before each result and while the caller waits.

        Args:
            waited_s: Seconds that the caller of the map has waited in total so far.
        """

    def kill(self) -> None:
        """End the processes at once, without waiting for running work."""

    def close(self) -> None:
        """End the processes, and wait until they have ended.

        The caller takes no more results. Work that is queued or running may be completed first or
        be dropped, as the implementation decides.
        """


@dataclass
class _Attempt(Generic[Item, Result]):
    worker: Worker[Item, Result]
    future: Future[Result]
    start_s: float


@dataclass
class _Entry(Generic[Item, Result]):
    item: Item
    careful: bool
    attempts: list[_Attempt[Item, Result]] = field(default_factory=list)

    def result(self) -> Future[Result] | None:
        """Return the first attempt's future that is done; lost ones were removed before."""
        return next((each.future for each in self.attempts if each.future.done()), None)


class OrderedMap(Generic[Item, Result]):
    """Iterates the results of a function for `items`, in order, computed by the processes of a
    pool.

    Items are submitted before their results are requested, each to the process with the fewest
    items. Items of a lost process are submitted to others with a flag, `careful`: the function must
    protect its process, because the item may have killed the lost one. An item that is late is
    submitted to another process too, and the first result counts. If there is no other process, the
    caller's process computes it. Iterating raises what the function raises.

    Args:
        pool: The processes, which compute the function; closed with the map.
        items: Arguments of the function, one for each result; read as they are submitted.
        late_s: An item is late after this many seconds or 8 times the median time of an item,
            whichever is longer; None: items are never late.
        first_items: Number of items that are submitted before the first result is requested, while
            the caller may need the cores; None: as many as later.

    Attributes:
        careful: Set it to True to submit all further items with this flag.
        waited_s: Seconds that the caller has waited for results.
    """

    def __init__(
        self,
        pool: Pool[Item, Result],
        items: Iterable[Item],
        late_s: float | None = None,
        first_items: int | None = None,
    ) -> None:
        self.careful = False
        self.waited_s = 0.0
        self._pool = pool
        self._unsent = iter(items)
        self._late_s = late_s
        self._entries = deque[_Entry[Item, Result]]()
        self._durations_s = deque[float](maxlen=NUM_DURATIONS)
        self._outstanding: dict[Worker[Item, Result], list[Future[Result]]] = {}
        # Workers with a late item, and no result since.
        self._stalled: set[Worker[Item, Result]] = set()
        self._interrupted = False
        self._lock = threading.Lock()  # held while the next result is requested
        self._submit(pool.max_in_flight if first_items is None else first_items)

    def __iter__(self) -> OrderedMap[Item, Result]:
        return self

    def __next__(self) -> Result:
        with self._lock:
            return self._wait_for_next()

    def update_pool(self) -> None:
        """Let the pool start or end processes, by how long the caller has waited for results.

        Call it from time to time, also from another thread, while no result is requested: a request
        does the same, so the call has no effect during one.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._pool.update(self.waited_s)
            finally:
                self._lock.release()

    def _wait_for_next(self) -> Result:
        start_s = last_s = time.monotonic()
        while True:
            self._pool.update(self.waited_s)
            self._remove_lost()
            self._submit(self._pool.max_in_flight)
            if self._interrupted or not self._entries:
                raise StopIteration
            head = self._entries[0]
            done = head.result()
            if done is not None:
                error = done.exception()
                if error is not None and self._pool.is_lost_worker(error):
                    continue  # the process was lost after `_remove_lost`
                self._entries.popleft()
                return done.result()
            if self._is_late(head, start_s) and not self._submit_again(head):
                self._entries.popleft()
                return self._pool.compute_here(head.item)
            futures = [
                each.future
                for entry in self._entries
                for each in entry.attempts
                if not each.future.done()
            ]
            if futures:
                wait(futures, POLL_S, FIRST_COMPLETED)
            else:
                time.sleep(POLL_S / 5)  # no process has started
            now_s = time.monotonic()
            self.waited_s += now_s - last_s
            last_s = now_s

    def interrupt(self) -> None:
        """Kill the processes and end the iteration, also of a thread that waits for a result."""
        self._interrupted = True
        self._pool.kill()

    def close(self) -> None:
        """End the processes; no thread may be iterating."""
        self._interrupted = True
        self._pool.close()

    def _remove_lost(self) -> None:
        """Forget the attempts of lost processes, so that their items are submitted again."""
        lost = dict[Worker[Item, Result], None]()
        for entry in self._entries:
            for attempt in list(entry.attempts):
                error = attempt.future.exception() if attempt.future.done() else None
                if error is not None and self._pool.is_lost_worker(error):
                    entry.attempts.remove(attempt)
                    entry.careful = True
                    lost[attempt.worker] = None
        for worker in lost:
            if worker in self._outstanding:
                del self._outstanding[worker]
                self._stalled.discard(worker)
                if not self._interrupted:
                    self._pool.replace(worker)

    def _submit(self, max_in_flight: int) -> None:
        """Submit items that no process has, and as many new ones as the limits allow."""
        self._update_outstanding()
        for entry in self._entries:
            if not entry.attempts and not self._interrupted and not self._submit_entry(entry):
                return
        while len(self._entries) < max(1, max_in_flight) and not self._interrupted:
            # The first entry is appended also if no process can have it yet.
            if self._entries and self._select_worker() is None:
                return
            try:
                item = next(self._unsent)
            except StopIteration:
                return
            self._entries.append(_Entry(item, self.careful))
            self._submit_entry(self._entries[-1])

    def _update_outstanding(self) -> None:
        for worker in self._pool.workers:
            self._outstanding.setdefault(worker, [])
        for worker, futures in self._outstanding.items():
            unfinished = [future for future in futures if not future.done()]
            if len(unfinished) < len(futures):
                self._stalled.discard(worker)
            self._outstanding[worker] = unfinished

    def _select_worker(
        self, excluded: Sequence[Worker[Item, Result]] = (), is_late: bool = False
    ) -> Worker[Item, Result] | None:
        """Return the process with the fewest items, of those that may have another one.

        A late item may exceed the limits: the process that has it has returned nothing.
        """
        workers = self._pool.workers
        per_worker = math.ceil(self._pool.max_in_flight / max(1, len(workers))) + is_late
        on_node: dict[str, int] = {}
        for entry in self._entries:
            for node in {attempt.worker.node for attempt in entry.attempts}:
                on_node[node] = on_node.get(node, 0) + 1
        able = [
            worker
            for worker in workers
            if worker not in excluded
            and worker not in self._stalled
            and len(self._outstanding.get(worker, ())) < per_worker
            and (is_late or on_node.get(worker.node, 0) < self._pool.node_limit(worker.node))
        ]
        return min(able, key=lambda each: len(self._outstanding.get(each, ())), default=None)

    def _submit_entry(self, entry: _Entry[Item, Result], is_late: bool = False) -> bool:
        """Submit an item to a process that has not got it; False if there is none."""
        excluded = [attempt.worker for attempt in entry.attempts]
        worker = self._select_worker(excluded, is_late)
        if worker is None:
            return False
        start_s = time.monotonic()
        future = worker.submit(entry.item, entry.careful)
        future.add_done_callback(lambda _: self._durations_s.append(time.monotonic() - start_s))
        entry.attempts.append(_Attempt(worker, future, start_s))
        self._outstanding.setdefault(worker, []).append(future)
        return True

    def _is_late(self, entry: _Entry[Item, Result], awaited_s: float) -> bool:
        """Return whether the next item should be submitted again, or computed here."""
        if self._late_s is None:
            return False
        now_s = time.monotonic()
        if not entry.attempts:
            # Processes that all are lost or stalled are not awaited, those that start first are.
            able = [each for each in self._pool.workers if each not in self._stalled]
            return not able and (bool(self._durations_s) or now_s - awaited_s > FIRST_LATE_S)
        limit_s = FIRST_LATE_S
        if self._durations_s:
            limit_s = max(self._late_s, LATE_FACTOR * statistics.median(self._durations_s))
        return now_s - max(attempt.start_s for attempt in entry.attempts) > limit_s

    def _submit_again(self, head: _Entry[Item, Result]) -> bool:
        """Submit a late item, and the other items of its processes, to other processes; return
        False if there is none for the late item.
        """
        self._stalled.update(attempt.worker for attempt in head.attempts)
        is_submitted = self._submit_entry(head, is_late=True)
        for entry in self._entries:
            waits = entry.result() is None and entry is not head
            if waits and all(attempt.worker in self._stalled for attempt in entry.attempts):
                self._submit_entry(entry, is_late=True)
        return is_submitted
