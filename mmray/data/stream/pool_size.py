"""The number of decode actors of a rank: it grows while the rank waits for blocks, and shrinks
while it does not. Pure: the caller passes the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Grow if the rank waited for this share of the window.
GROW_WINDOW_S = 5.0
GROW_SHARE = 0.05
MAX_GROWTH = 3.0  # processes to add, relative to those there are
# Shrink by this share if the rank has hardly waited in the window, or in several windows: their
# number is doubled each time the processes had to grow again, up to the maximum.
SHRINK_WINDOW_S = 60.0
MAX_SHRINK_WINDOWS = 32
SHRINK_SHARE = 0.01
SHRINKAGE = 0.125
# Without an update for this long the rank evaluates: it does not wait, because it reads nothing.
IDLE_S = 60.0


@dataclass(frozen=True)
class DecoderLimits:
    """How many decode actors a rank may have, and on which nodes.

    Attributes:
        reserved: Number of actors on the rank's node that use CPUs which Ray reserved together with
            the rank. Further actors reserve a CPU each.
        minimum: Smallest number of actors, with which the rank starts.
        maximum: Largest number of actors.
        label_selector: Labels of the nodes that may have actors with a CPU of their own; {}: any
            node.
    """

    reserved: int
    minimum: int
    maximum: int
    label_selector: dict[str, str] = field(default_factory=dict)


@dataclass
class _Window:
    start_s: float
    waited_s: float  # waiting time of the rank before the window

    def share(self, now_s: float, waited_s: float) -> float:
        """Return the share of the window that the rank has waited."""
        return (waited_s - self.waited_s) / max(1e-9, now_s - self.start_s)


class PoolSize:
    """Chooses the number of data processes of a rank, which calls `update` regularly.

    Args:
        minimum: Smallest number of processes, with which the rank starts.
        maximum: Largest number of processes.
        now_s: The present time, in seconds of any clock that does not jump.

    Attributes:
        target: The number that the rank should have.
    """

    def __init__(self, minimum: int, maximum: int, now_s: float) -> None:
        self.target = minimum
        self._minimum = minimum
        self._maximum = maximum
        self._grow_window = _Window(now_s, 0.0)
        self._shrink_window = _Window(now_s, 0.0)
        self._shrink_windows = 1  # windows without waiting before the pool shrinks
        self._idle_windows = 0
        self._has_shrunk = False
        self._updated_s = now_s

    def update(self, now_s: float, waited_s: float, num_running: int, must_yield: bool) -> None:
        """Choose `target` again.

        It grows if the rank has waited for rows in more than 5 % of the last 5 s, and shrinks if it
        has waited in less than 1 % of the last 60 s (a time that doubles when shrinking was a
        mistake).

        Args:
            now_s: The present time, of the same clock as before.
            waited_s: Seconds that the rank has waited for rows since its start.
            num_running: Number of processes that have started. The target does not grow before all
                requested processes run.
            must_yield: Whether another run waits for resources. If so, the target is the minimum.
        """
        was_idle = now_s - self._updated_s > IDLE_S
        self._updated_s = now_s
        if must_yield:
            self.target = self._minimum
        if must_yield or was_idle:
            self._shrink_window = _Window(now_s, waited_s)
        if must_yield or was_idle or num_running < self.target:
            # A window that starts now: what is measured before they run is not about them.
            self._grow_window = _Window(now_s, waited_s)
        if now_s - self._grow_window.start_s >= GROW_WINDOW_S:
            share = self._grow_window.share(now_s, waited_s)
            if share > GROW_SHARE:
                self._grow(now_s, waited_s, share)
            self._grow_window = _Window(now_s, waited_s)
        if now_s - self._shrink_window.start_s >= SHRINK_WINDOW_S:
            share = self._shrink_window.share(now_s, waited_s)
            self._idle_windows = self._idle_windows + 1 if share < SHRINK_SHARE else 0
            # Fewer than run, so none of those that have not started.
            running = min(self.target, num_running)
            fewer = max(self._minimum, running - math.ceil(running * SHRINKAGE))
            if self._idle_windows >= self._shrink_windows:
                self._has_shrunk = self._has_shrunk or self.target > self._minimum
                self._idle_windows = 0
                self.target = min(self.target, fewer)
            self._shrink_window = _Window(now_s, waited_s)

    def _grow(self, now_s: float, waited_s: float, share: float) -> None:
        """Add as many processes as the share of waiting shows to be missing."""
        if self.target >= self._maximum:
            return
        missing_fraction = share / max(1e-9, 1.0 - share)  # relative to the present number
        num_added = math.ceil(self.target * min(MAX_GROWTH, missing_fraction))
        self.target = min(self._maximum, self.target + num_added)
        self._shrink_window = _Window(now_s, waited_s)
        self._idle_windows = 0
        if self._has_shrunk:
            self._shrink_windows = min(MAX_SHRINK_WINDOWS, 2 * self._shrink_windows)
            self._has_shrunk = False
