"""Fetch the next window of shuffle blocks into the cache of the node, while this one is read."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.order import SamplePlan
from mmray.errors import UsageError

Request = tuple[SamplePlan, list[np.ndarray]]


class BlockFetcher:
    """Fetches rows that will be needed later into the cache of the node, in a background thread.

    The thread starts with the first request. An instance is cheap to pickle; the copy has a thread
    of its own.
    """

    def __init__(self, prepared: PreparedSet | PreparedMixture) -> None:
        self._prepared = prepared
        self._requests: SimpleQueue[Request | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockFetcher, (self._prepared,)

    def request(self, plan: SamplePlan, positions: np.ndarray, in_first_window: bool) -> None:
        """Fetch the shuffle blocks that the run reads one window after these positions (int64 [P],
        without PADDING).

        Errors are ignored here; the process that reads these rows raises them.
        """
        if self._requests is None:
            self._requests = SimpleQueue()
            arguments = (self._prepared, self._requests)
            threading.Thread(target=_fetch_all, args=arguments, daemon=True).start()
        current = [positions] if in_first_window else []
        self._requests.put((plan, [*current, plan.one_window_later(positions)]))

    def __del__(self) -> None:
        if self._requests is not None:
            self._requests.put(None)


def _fetch_all(
    prepared: PreparedSet | PreparedMixture, requests: SimpleQueue[Request | None]
) -> None:
    while (request := requests.get()) is not None:
        plan, parts = request
        for positions in parts:
            # The process that reads these rows raises the error.
            with suppress(OSError, ValueError, UsageError):
                prepared.fetch_blocks(plan.row_ids_at(positions))
