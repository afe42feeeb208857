"""Batch arithmetic: global = micro x accumulation x workers, and the length of a run in steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from mmray.errors import OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from mmray.config import Batch, Train


@dataclass(frozen=True)
class BatchShape:
    """Rows of an optimizer step and how they are divided among workers and micro-batches.

    The global batch size is fixed for a run. The micro-batch size may change with the memory and
    with the number of workers; each method returns the changed shape.

    `with_world_size`, `with_micro_batch_size` and `halved` return another shape with the same
    global batch.

    Attributes:
        global_batch_size: Rows of a step, over all workers.
        micro_batch_size: Rows of one forward pass; the last one of a step may have fewer.
        world_size: Number of workers.
        auto: Whether a synthetic step before the first one searches the largest micro-batch that
            fits into memory, up to `micro_batch_size`.
        micro_tokens: Most tokens of a micro-batch if `batch.tokens` is set; `micro_batch_size` is
            then how many rows of the maximum length it holds. Otherwise None.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    auto: bool = False
    micro_tokens: int | None = None

    @property
    def rank_batch_size(self) -> int:
        """Rows of one rank in a step, including padding: global batch size / world size, rounded
        up.
        """
        return ceil(self.global_batch_size / self.world_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in a step: its rows / micro-batch size, rounded up."""
        return ceil(self.rank_batch_size / self.micro_batch_size)

    def with_world_size(self, world_size: int) -> BatchShape:
        """Return the shape for another number of workers, with the same global batch size.

        If the micro-batch size is to be searched (`auto`), it becomes all rows of a rank, the upper
        limit of the search. Otherwise it shrinks only if a rank has fewer rows. It does not change
        if micro-batches are limited by tokens (`micro_tokens`).
        """
        if self.micro_tokens is not None:
            return replace(self, world_size=world_size)
        rows = ceil(self.global_batch_size / world_size)
        micro_batch_size = rows if self.auto else min(self.micro_batch_size, rows)
        return replace(self, world_size=world_size, micro_batch_size=micro_batch_size)

    def with_micro_batch_size(self, size: int) -> BatchShape:
        """Return the shape with another micro-batch size, which is not searched (`auto` is False).

        If micro-batches are limited by tokens (`micro_tokens`), this limit changes in proportion.
        """
        if self.micro_tokens is not None:
            tokens = self.micro_tokens * size // self.micro_batch_size
            return replace(self, micro_batch_size=size, micro_tokens=tokens)
        return replace(self, micro_batch_size=min(size, self.rank_batch_size), auto=False)

    def halved(self) -> BatchShape | None:
        """Return the shape with half the micro-batch size, rounded up; None if it has one row."""
        if self.micro_batch_size == 1:
            return None
        return self.with_micro_batch_size(ceil(self.micro_batch_size / 2))

    def to_settings(self, batch: Batch) -> Batch:
        """Return a `batch` section with this shape, for config.yaml: the one given, with this
        `global`, and as `micro` the micro-batch size, `auto` if it is searched, or None if
        micro-batches are limited by tokens.
        """
        micro: int | Literal["auto"] | None = "auto" if self.auto else self.micro_batch_size
        if self.micro_tokens is not None:
            micro = None
        return batch.replace(global_=self.global_batch_size, micro=micro)

    def __str__(self) -> str:
        if self.auto:
            return (
                f"{self.global_batch_size} rows per step over {self.world_size} workers, "
                "micro-batch: largest that fits"
            )
        if self.micro_tokens is not None:
            return (
                f"{self.global_batch_size} rows per step over {self.world_size} workers, "
                f"micro-batches of at most {self.micro_tokens:,} tokens"
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


def out_of_memory_error(
    cause: str, detail: str, shape: BatchShape, advice: str, fitting: int = 0
) -> OutOfMemoryError:
    """Return the error of a rank that ran out of memory, with the smaller shape to continue with.

    Args:
        cause: What happened, such as `out of memory at step 5`.
        detail: Where, such as `rank 0: CUDA out of memory`.
        advice: What the user can do if a micro-batch has one row already.
        fitting: A micro-batch size that fits; 0: half the size of `shape`.
    """
    smaller = shape.halved()
    if 0 < fitting < shape.micro_batch_size:
        smaller = shape.with_micro_batch_size(fitting)
    message = f"{cause} with micro-batches of {shape.micro_batch_size} rows ({detail})"
    if smaller is None:
        return OutOfMemoryError(f"{message}; {advice}")
    return OutOfMemoryError(
        f"{message}; continuing with {smaller.micro_batch_size} at a time", smaller
    )


def resolve_batch_shape(
    batch: Batch, world_size: int, max_row_tokens: int = 1, may_search: bool = False
) -> BatchShape:
    """Compute the batch shape of the `batch` settings for a number of workers.

    Args:
        batch: The `batch` section: `micro`, `accumulation`, `global_` and `tokens`.
        max_row_tokens: Maximum number of tokens of a row; used only with `batch.tokens`.
        may_search: Whether the micro-batch is searched also if none of `micro`, `accumulation` and
            `tokens` is set.

    Returns:
        A BatchShape: `global_batch_size` and `micro_batch_size` in rows, `world_size`, `auto`
        (whether the micro-batch is to be searched) and `micro_tokens` (with `batch.tokens`, most
        tokens of a micro-batch; otherwise None).

    Raises:
        UsageError: The settings contradict each other, or too few are given.
    """
    if batch.tokens is not None:
        return _resolve_by_tokens(batch, world_size, max_row_tokens)
    accumulation = batch.accumulation
    total = batch.global_
    auto = batch.is_searched or (may_search and batch.micro is None and accumulation is None)
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
            f"batch.global: {total} rows are fewer than {world_size} workers; set at least "
            f"{world_size}"
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


def _resolve_by_tokens(batch: Batch, world_size: int, max_row_tokens: int) -> BatchShape:
    assert batch.tokens is not None
    if batch.global_ is None or batch.micro is not None or batch.accumulation is not None:
        raise UsageError(
            "batch.tokens: it needs `--batch.global` and neither `--batch.micro` nor "
            "`--batch.accumulation`, which follow from the tokens of each step; add "
            "`--batch.tokens None` to set these"
        )
    if batch.tokens < max_row_tokens:
        raise UsageError(
            f"batch.tokens: {batch.tokens:,} tokens are fewer than a row may have "
            f"({max_row_tokens:,} by model.inputs.max_tokens); set at least {max_row_tokens}, or "
            "lower --model.inputs.max-tokens"
        )
    rows = batch.tokens // max_row_tokens
    return BatchShape(batch.global_, rows, world_size, micro_tokens=batch.tokens)


def total_steps(train: Train, num_rows: int, global_batch_size: int) -> int:
    """Return the steps of a run: the fewest that cover its samples or epochs."""
    if train.steps is not None:
        return train.steps
    samples = train.samples or round((train.epochs or 1.0) * num_rows)
    return max(1, ceil(samples / global_batch_size))
