"""The learning rate as a pure function of the step: linear warm-up, then the schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmray.config import Optimizer as Section


def lr_at(step: int, section: Section, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 0.

    Step `warmup_steps` is the first at the peak; the step after the last would be at the peak x final_lr_fraction,
    except for `constant`. `cosine`: Loshchilov & Hutter 2017, SGDR, equation 5, one period. `cooldown`: the peak, then
    linear (Hägele et al. 2024).
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    progress = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    height = _height(progress, section)
    return section.lr * (section.final_lr_fraction + (1 - section.final_lr_fraction) * height)


def _height(progress: float, section: Section) -> float:
    """From 1, at the peak, to 0, at the end, by the share of the steps after warm-up that are done."""
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    length = section.cooldown_fraction if section.schedule == "cooldown" else 1.0
    return min(1.0, (1 - progress) / length)
