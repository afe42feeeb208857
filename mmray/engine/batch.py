"""Batch arithmetic: global = micro x accumulation x workers, and the length of a run in steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Batch, Train


@dataclass(frozen=True)
class BatchShape:
    """Rows of an optimizer step and how they are divided among workers and micro-batches.

    The global batch size is fixed for a run. The micro-batch size may change with the memory and
    with the number of workers; each method returns the changed shape.
    """

    global_batch_size: int
    micro_batch_size: int  # rows of one forward pass; the last of a step may be smaller
    world_size: int
    # The dry run searches the largest micro-batch that fits, up to `micro_batch_size`.
    auto: bool = False

    @property
    def rank_batch_size(self) -> int:
        """Rows of one rank in a step, including padding."""
        return ceil(self.global_batch_size / self.world_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in a step."""
        return ceil(self.rank_batch_size / self.micro_batch_size)

    def with_world_size(self, world_size: int) -> BatchShape:
        """Return the shape for another number of workers."""
        rows = ceil(self.global_batch_size / world_size)
        micro_batch_size = rows if self.auto else min(self.micro_batch_size, rows)
        return replace(self, world_size=world_size, micro_batch_size=micro_batch_size)

    def with_micro_batch_size(self, size: int) -> BatchShape:
        """Return the shape with micro-batches of `size` rows, which is not searched any more."""
        return replace(self, micro_batch_size=min(size, self.rank_batch_size), auto=False)

    def halved(self) -> BatchShape | None:
        """Return the shape with half the micro-batch size; None if a micro-batch has one row.

        It is rounded up, so that accumulation at most doubles.
        """
        if self.micro_batch_size == 1:
            return None
        return self.with_micro_batch_size(ceil(self.micro_batch_size / 2))

    def __str__(self) -> str:
        if self.auto:
            return (
                f"{self.global_batch_size} rows per step over {self.world_size} workers, "
                "micro-batch: largest that fits"
            )
        padded = self.micro_batch_size * self.accumulation * self.world_size
        shape = (
            f"micro {self.micro_batch_size} x accumulation {self.accumulation} x "
            f"workers {self.world_size}"
        )
        if padded == self.global_batch_size:
            return f"{shape} = {self.global_batch_size} rows per step"
        return (
            f"{shape}, limited to {self.global_batch_size} rows per step (the last micro-batches "
            "are smaller)"
        )


def resolve_batch_shape(batch: Batch, world_size: int) -> BatchShape:
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
        return BatchShape(micro * (accumulation or 1) * world_size, micro, world_size)
    if total < world_size:
        raise UsageError(
            f"batch.global: {total} rows are fewer than {world_size} workers; "
            f"set at least {world_size}"
        )
    rows_per_rank = ceil(total / world_size)
    micro = micro or ceil(rows_per_rank / (accumulation or 1))
    shape = BatchShape(total, min(micro, rows_per_rank), world_size, auto)
    if accumulation is not None and accumulation != shape.accumulation:
        advice = (
            "omit one of the three"
            if batch.micro
            else (f"set --batch.accumulation {shape.accumulation}, or omit it")
        )
        raise UsageError(
            f"batch: global {total} over {world_size} workers in micro-batches of {micro} needs "
            f"accumulation {shape.accumulation}, not {accumulation}; {advice}"
        )
    return shape


def total_steps(train: Train, num_rows: int, global_rows: int) -> int:
    """Optimizer steps of the run: the fewest that cover its samples or epochs; one epoch by
    default.
    """
    if train.steps is not None:
        return train.steps
    samples = train.samples or round((train.epochs or 1.0) * num_rows)
    return max(1, ceil(samples / global_rows))
