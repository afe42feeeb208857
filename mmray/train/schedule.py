"""The learning rate as a pure function of the step: linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmray.config import Optimizer as Section


def lr_at(step: int, section: Section, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 0 (Loshchilov & Hutter 2017, SGDR, equation 5, one period).

    Step `warmup_steps` is the first at the peak; the step after the last would be at the peak x final_lr_fraction.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    progress = (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return section.lr * (section.final_lr_fraction + (1 - section.final_lr_fraction) * cosine)
