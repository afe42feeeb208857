"""What would make a run faster, in a line for people: from the share of time that training waited for rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from mmray.engine.metrics.writers import Metrics

BOUND = 0.15  # of the time: below it, more data workers would hardly be felt
EVERY = 100  # steps between two lines


def advice(wait_share: float, data_workers: int, prepared_side: int, model_side: int, device: str) -> str | None:
    """The line for a run that waits for rows `wait_share` of its time; None for one that hardly does.

    With w workers the rows come at the pace of (1 - wait) of what training could take, so w / (1 - wait) would do.
    prepared_side: shorter side that images were re-encoded to, 0 for their own; model_side: what the model sees.
    """
    if wait_share < BOUND:
        return None
    more = max(1, ceil(data_workers * wait_share / max(0.01, 1 - wait_share)))
    smaller = -(-round(model_side * 1.14) // 32) * 32  # room for a crop
    shrink = f" or --prepare.image-side {smaller}" if prepared_side == 0 or prepared_side > smaller else ""
    workers = "CPU worker" if more == 1 else "CPU workers"
    return f"input-bound {wait_share:.0%}: {more} more {workers}{shrink} would feed this {device}"


@dataclass
class Advising:
    """Says so every EVERY steps, over all that was logged between; a callback of the loop."""

    say: Callable[[float], None]
    _next: int = EVERY
    _shares: tuple[float, ...] = ()

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        if metrics is not None and "time/data_wait_share" in metrics:
            self._shares += (metrics["time/data_wait_share"],)
        if step >= self._next and self._shares:
            self.say(sum(self._shares) / len(self._shares))
            self._next, self._shares = step + EVERY, ()
