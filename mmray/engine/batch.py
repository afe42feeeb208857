"""Batch arithmetic: global = micro x accumulation x workers, and the length of a run in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmray.data.stream.order import SamplePlan
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Batch, Train


@dataclass(frozen=True)
class BatchShape:
    """Rows of a step and how they are cut; `global_rows` is fixed for the run, the rest follows the workers."""

    global_rows: int
    micro: int
    accumulation: int
    workers: int
    auto: bool = False  # the workers look for the micro-batch: `micro` is the most it can be

    def __str__(self) -> str:
        if self.auto:
            return f"{self.global_rows} rows a step over {self.workers} workers, in micro-batches as large as fit"
        padded = self.micro * self.accumulation * self.workers
        cut = f"micro {self.micro} x accumulation {self.accumulation} x workers {self.workers}"
        if padded == self.global_rows:
            return f"{cut} = {self.global_rows} rows a step"
        return f"{cut}, cut to {self.global_rows} rows a step (the last micro-batches are smaller)"


def resolve_batch_shape(batch: Batch, workers: int) -> BatchShape:
    """The batch shape that the settings mean at this many workers; raises UsageError when they contradict."""
    micro, accumulation, total = batch.micro, batch.accumulation, batch.global_
    if micro == "auto":
        return _auto_shape(batch, workers)
    if total is None:
        if micro is None:
            raise UsageError("batch: give `--batch.global` and `--batch.micro`, or `--batch.micro` (and accumulation)")
        accumulation = accumulation or 1
        return BatchShape(micro * accumulation * workers, micro, accumulation, workers)
    if total < workers:
        raise UsageError(f"batch.global: {total} rows cannot feed {workers} workers; ask for at least {workers}")
    share = -(-total // workers)
    if micro is None:
        micro = -(-share // (accumulation or 1))
    derived = -(-share // micro)
    if accumulation is not None and accumulation != derived:
        raise UsageError(
            f"batch: global {total} over {workers} workers in micro-batches of {micro} takes accumulation {derived}, "
            f"not {accumulation}; leave one of the three out"
        )
    return BatchShape(total, min(micro, share), derived, workers)


def _auto_shape(batch: Batch, workers: int) -> BatchShape:
    if batch.global_ is None or batch.accumulation is not None:
        raise UsageError("batch.micro: `auto` needs `--batch.global`, from which accumulation follows; give that alone")
    if batch.global_ < workers:
        raise UsageError(
            f"batch.global: {batch.global_} rows cannot feed {workers} workers; ask for at least {workers}"
        )
    return BatchShape(batch.global_, -(-batch.global_ // workers), 1, workers, auto=True)


def total_steps(train: Train, num_rows: int, global_rows: int) -> int:
    """Optimizer steps of the run; a run without any length is one epoch."""
    if train.steps is not None:
        return train.steps
    plan = SamplePlan(num_rows=num_rows, global_rows=global_rows, world=1, micro=global_rows, seed=0, steps=0)
    if train.samples is not None:
        epochs, rest = divmod(train.samples, num_rows)
        return epochs * plan.steps_per_epoch + -(-rest // global_rows)
    return max(1, round((train.epochs or 1.0) * plan.steps_per_epoch))


def divisors(number: int) -> list[int]:
    """Its divisors, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def smaller_micro(micro: int, share: int) -> int:
    """The largest divisor of a rank's share of the global batch that is at most half of `micro`; 0 after 1."""
    return max((d for d in divisors(share) if d <= micro // 2), default=0)
