"""Batch arithmetic: global = micro x accumulation x workers, and the length of a run in steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Batch, Train


@dataclass(frozen=True)
class BatchShape:
    """Rows of a step and their division;

    `global_rows` is fixed for the run, the rest depends on the workers.
    """

    global_rows: int
    micro: int
    accumulation: int
    workers: int
    auto: bool = False  # the memory probe finds the micro-batch: `micro` is its upper limit

    def __str__(self) -> str:
        if self.auto:
            return (
                f"{self.global_rows} rows per step over {self.workers} workers, micro-batch: "
                "largest that fits"
            )
        padded = self.micro * self.accumulation * self.workers
        shape = f"micro {self.micro} x accumulation {self.accumulation} x workers {self.workers}"
        if padded == self.global_rows:
            return f"{shape} = {self.global_rows} rows per step"
        return (
            f"{shape}, limited to {self.global_rows} rows per step (the last micro-batches are "
            "smaller)"
        )


def resolve_batch_shape(batch: Batch, workers: int) -> BatchShape:
    """Resolve the batch settings for a number of workers.

    Raises UsageError if they contradict each other.
    """
    accumulation, total, auto = batch.accumulation, batch.global_, batch.micro == "auto"
    micro = None if batch.micro == "auto" else batch.micro
    if auto and (total is None or accumulation is not None):
        raise UsageError(
            "batch.micro: `auto` needs `--batch.global` and no "
            "`--batch.accumulation`, which is derived"
        )
    if total is None:
        if micro is None:
            raise UsageError(
                "batch: set `--batch.global` and `--batch.micro`, or `--batch.micro` "
                "(and accumulation)"
            )
        accumulation = accumulation or 1
        return BatchShape(micro * accumulation * workers, micro, accumulation, workers)
    if total < workers:
        raise UsageError(
            f"batch.global: {total} rows are fewer than {workers} workers; set at least {workers}"
        )
    rows_per_rank = ceil(total / workers)
    micro = micro or ceil(rows_per_rank / (accumulation or 1))
    derived = ceil(rows_per_rank / micro)
    if accumulation is not None and accumulation != derived:
        advice = (
            "omit one of the three"
            if batch.micro
            else (f"set --batch.accumulation {derived}, or omit it")
        )
        raise UsageError(
            f"batch: global {total} over {workers} workers in micro-batches of {micro} needs "
            f"accumulation {derived}, "
            f"not {accumulation}; {advice}"
        )
    return BatchShape(total, min(micro, rows_per_rank), derived, workers, auto)


def halve(micro: int) -> int:
    """Return half a micro-batch size, rounded up so that accumulation at most doubles; 0 if there
    is no smaller one.
    """
    return -(-micro // 2) if micro > 1 else 0


def total_steps(train: Train, num_rows: int, global_rows: int) -> int:
    """Optimizer steps of the run: the fewest that cover its samples or epochs; one epoch by
    default.
    """
    if train.steps is not None:
        return train.steps
    samples = train.samples or round((train.epochs or 1.0) * num_rows)
    return max(1, ceil(samples / global_rows))
