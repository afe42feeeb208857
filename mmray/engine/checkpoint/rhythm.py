"""When to write a checkpoint: after a fixed number of steps, or so rarely that writing takes a small share of the time.

Pure; loop.py asks it after each step. Every rank must come to the same answer, so what rank 0 measured goes to all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

COST_SHARE = 0.02  # of the training time, at most, for checkpoints
FIRST_STEPS = 10  # until something is measured: after so many steps, then after twice as many, and so on


def interval(step_s: float | None, cost_s: float | None, steps_taken: int) -> int:
    """Steps to the next checkpoint from the seconds of a step and of a write; None: not measured yet."""
    if not step_s or cost_s is None:
        return max(FIRST_STEPS, steps_taken)
    return max(1, math.ceil(cost_s / (COST_SHARE * step_s)))


@dataclass
class Rhythm:
    """The step of the next checkpoint, for a run that goes on after `begin` steps."""

    every: int | Literal["auto"]
    begin: int
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.begin + FIRST_STEPS

    def due(self, step: int) -> bool:
        if self.every == "auto":
            return step >= self._next
        return self.every > 0 and step % self.every == 0

    def written(self, step: int, steps: int) -> None:
        """A checkpoint was taken at `step`; with `auto` the next one is `steps` later."""
        self._next = step + steps
