"""Writes checkpoints beside the training: a copy of the state is taken at once, the disk is left to a thread.

Between loop.py, whose weights change with the next step, and checkpoint.py, which takes its time with hashing and with
the storage. Rank 0's alone, or each rank's for its own part of a sharded model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from mmray.engine.checkpoint import tree
from mmray.errors import StorageError


class AsyncSaver:
    """At most one write is under way.

    What the storage does not take is told (`tell`) and the training goes on with the checkpoint before; only the last
    write has to succeed. Any other error of a write, such as a lost lease, is raised at the next call.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._failed: StorageError | None = None  # of the last write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmray-checkpoint")
        self._under_way: Future[float] | None = None
        self.cost_s: float | None = None  # of the last write: the copy, any wait for the one before, and the write

    def submit(self, state: Any, write: Callable[[Any], Any], patience_s: float | None = None) -> bool:
        """Copy `state` and have `write` called with the copy, once the write before has ended; whether it will be.

        Where that one takes longer than `patience_s` from here (None: as long as it takes) nothing comes of it.
        """
        began_s = time.perf_counter()
        if self._under_way is not None and not wait([self._under_way], patience_s).done:
            return False
        self._settle()
        copied = copy_to_cpu(state)
        stood_s = time.perf_counter() - began_s
        self._under_way = self._thread.submit(_timed, write, copied, stood_s)
        return True

    def check(self) -> None:
        """Take note of a write that has ended."""
        if self._under_way is not None and self._under_way.done():
            self._settle()

    def close(self) -> None:
        """Wait for the last write and end the thread. Raises its error, told or not."""
        try:
            if self._under_way is not None:
                self._wait(self._under_way)
            if self._failed is not None:
                raise self._failed
        finally:
            self._thread.shutdown()

    def _settle(self) -> None:
        """Return when nothing is under way."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        self._wait(under_way)
        if self._failed is not None:
            self._tell(f"{self._failed}. The run goes on, and will try again at its next checkpoint")

    def _wait(self, under_way: Future[float]) -> None:
        try:
            self.cost_s, self._failed = under_way.result(), None
        except StorageError as error:
            self._failed = error


def copy_to_cpu(state: Any) -> Any:
    """The same nest of dicts, lists and tuples with every tensor copied to the CPU; other values as they are."""
    return tree.mapped(state, lambda _, tensor: tensor.detach().to("cpu", copy=True))


def _timed(write: Callable[[Any], Any], copied: Any, stood_s: float) -> float:
    began_s = time.perf_counter()
    write(copied)
    return stood_s + time.perf_counter() - began_s
