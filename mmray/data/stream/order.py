"""Sample order as a pure function: the rows of each optimizer step, for any step, seed and number
of workers.

An epoch is `num_rows` positions; a step takes the next `global_rows` positions, also across the end
of an epoch. Nothing is stored, so a resumed or resized run takes the same rows. The shuffle is a
keyed bijection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mmray.data.store.prepared_set import MixtureComponent

PADDING = -1
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(value: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, any shape (finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, size: int, shuffle_key: np.ndarray) -> np.ndarray:
    """Keyed bijection of 0..size-1 by a Feistel network over Z_a x Z_b with a*b >= size; uint64 of
    equal shape.
    """
    return _cycle_walk(lambda index, keys: _feistel(index, size, keys), index, size, shuffle_key)


def block_shuffle(
    index: np.ndarray, size: int, shuffle_key: np.ndarray, shuffle_block: int, window: int
) -> np.ndarray:
    """Keyed bijection of 0..size-1 that shuffles blocks of adjacent rows, and rows within windows
    of blocks.

    Adjacent rows stay close, so that few large reads fetch them. A window has `window` to 2 *
    window - 1 blocks.
    """
    if shuffle_block == 1:
        return permute(index, size, shuffle_key)
    shuffle_block = min(shuffle_block, size)  # otherwise most of the cycle walk would be outside
    num_blocks = -(-size // shuffle_block)

    def shuffle_both(index: np.ndarray, keys: np.ndarray) -> np.ndarray:
        in_windows = windowed_permutation(index, num_blocks, keys, window, shuffle_block)
        block, row = np.divmod(in_windows, np.uint64(shuffle_block))
        return permute(block, num_blocks, keys) * np.uint64(shuffle_block) + row

    return _cycle_walk(shuffle_both, index, size, shuffle_key)


def windowed_permutation(
    index: np.ndarray,
    num_blocks: int,
    shuffle_key: np.ndarray,
    window: int,
    rows_per_block: int = 1,
) -> np.ndarray:
    """Keyed bijection that shuffles rows within consecutive windows of at least `window` blocks (or
    all).
    """
    num_windows = max(1, num_blocks // window)
    # the longer ones have one more block
    blocks_per_window, num_longer_windows = divmod(num_blocks, num_windows)
    longer, shorter = (blocks_per_window + 1) * rows_per_block, blocks_per_window * rows_per_block
    edge = num_longer_windows * longer
    out = np.empty_like(index)
    for first, size, selected in ((0, longer, index < edge), (edge, shorter, index >= edge)):
        number, row = np.divmod(index[selected] - np.uint64(first), np.uint64(size))
        salt = splitmix64(shuffle_key[selected] ^ splitmix64(number + np.uint64(first)))
        out[selected] = permute(row, size, salt) + number * np.uint64(size) + np.uint64(first)
    return out


def _cycle_walk(
    bijection: Callable[[np.ndarray, np.ndarray], np.ndarray],
    index: np.ndarray,
    size: int,
    shuffle_key: np.ndarray,
) -> np.ndarray:
    """Restrict a bijection of a larger domain to 0..size-1 (Black and Rogaway 2002)."""
    out = bijection(index, shuffle_key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = bijection(out[outside], shuffle_key[outside])
        outside = outside[out[outside] >= size]
    return out


def _feistel(index: np.ndarray, size: int, shuffle_key: np.ndarray) -> np.ndarray:
    a: Any = np.uint64(int(np.ceil(np.sqrt(size))))
    b: Any = np.uint64(-(-size // int(a)))
    left, right = index // b, index % b
    for number in range(_ROUNDS):
        salt = shuffle_key + np.uint64(number)
        if number % 2:
            right = (right + splitmix64(left ^ splitmix64(salt)) % b) % b
        else:
            left = (left + splitmix64(right ^ splitmix64(salt)) % a) % a
    return left * b + right


def hash_choice(
    seed: int, pass_index: np.ndarray, row_hash: np.ndarray, num_choices: np.ndarray
) -> np.ndarray:
    """Return a choice 0..num_choices-1 for each row (all int64, one shape), determined by the first
    three arguments.
    """
    return (_sample_hash(seed, pass_index, row_hash) % num_choices.astype(np.uint64)).astype(
        np.int64
    )


def hash_uniform(seed: int, pass_index: np.ndarray, row_hash: np.ndarray, count: int) -> np.ndarray:
    """Return numbers in [0, 1) for each row: float64 [R, count], determined by the first three
    arguments.
    """
    columns = splitmix64(np.arange(1, count + 1, dtype=np.uint64))
    numbers = splitmix64(_sample_hash(seed, pass_index, row_hash)[:, None] ^ columns)
    return (numbers >> np.uint64(11)) * 2.0**-53


def _sample_hash(seed: int, pass_index: np.ndarray, row_hash: np.ndarray) -> np.ndarray:
    salt = splitmix64(
        pass_index.astype(np.uint64) ^ splitmix64(np.full(pass_index.shape, seed, np.uint64))
    )
    return splitmix64(row_hash.view(np.uint64) ^ salt)


def interleave(components: tuple[MixtureComponent, ...], positions: np.ndarray) -> np.ndarray:
    """Map positions in an epoch to int64 indices in which the rows of the first set come first,
    then the next.
    """
    epoch_index, remaining = np.empty(positions.size, np.int64), np.arange(positions.size)
    offset, num_left, first = (
        positions.ravel(),
        sum(component.per_epoch for component in components),
        0,
    )
    # evenly spread: every (num_left / per_epoch)th of the remaining positions is its
    for component in components:
        before = offset * component.per_epoch // num_left
        selected = (offset + 1) * component.per_epoch // num_left > before
        epoch_index[remaining[selected]] = first + before[selected]
        remaining, offset = remaining[~selected], (offset - before)[~selected]
        num_left, first = num_left - component.per_epoch, first + component.per_epoch
    return epoch_index.reshape(positions.shape)


@dataclass(frozen=True)
class SamplePlan:
    """The rows of each step of a run at one world size."""

    num_rows: int  # of an epoch
    global_rows: int  # of a step, over all workers
    world_size: int
    seed: int
    steps: int  # of the run
    shuffle: bool = True
    # sets of a mixture; their `per_epoch` add up to num_rows
    components: tuple[MixtureComponent, ...] = ()
    shuffle_block: int = 1  # rows; see `block_shuffle`; 1: full shuffle
    blocks_per_window: int = 1

    @property
    def rank_rows(self) -> int:
        """Rows of one rank in a step, including padding."""
        return -(-self.global_rows // self.world_size)

    def rows_start(self, step: int) -> int:
        """Return the position of the first row of a step: rows consumed by all steps before it."""
        return step * self.global_rows

    def positions(self, step: int, rank: int) -> np.ndarray:
        """Return the positions [rank_rows] int64 of a rank's rows in a step, followed by
        PADDING.
        """
        index = np.arange(rank * self.rank_rows, (rank + 1) * self.rank_rows)
        return np.where(index < self.global_rows, self.rows_start(step) + index, PADDING)

    def row_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the row ids of positions; PADDING is unchanged."""
        return self.row_ids_and_pass_indices_at(positions)[0]

    def row_ids_and_pass_indices_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `row_ids_at`, and how often each row was seen before its position, which seeds
        augmentation.
        """
        epoch, offset = np.divmod(np.maximum(positions, 0), self.num_rows)
        if self.shuffle:
            shuffle_key = splitmix64(splitmix64(epoch.astype(np.uint64)) ^ np.uint64(self.seed))
            index = offset.astype(np.uint64)
            # indices of a mixture's epoch sorted by set
            if self.components and self.shuffle_block > 1:
                shuffled = windowed_permutation(
                    index, self.num_rows, shuffle_key, self.shuffle_block * self.blocks_per_window
                )
                offset = interleave(self.components, shuffled.astype(np.int64))
            else:
                shuffled = block_shuffle(
                    index, self.num_rows, shuffle_key, self.shuffle_block, self.blocks_per_window
                )
                offset = shuffled.astype(np.int64)
        rows, pass_index = self._mixture_rows(offset, epoch) if self.components else (offset, epoch)
        return np.where(positions >= 0, rows, PADDING), np.where(positions >= 0, pass_index, 0)

    def _mixture_rows(
        self, epoch_index: np.ndarray, epoch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, pass index) int64 of indices from `interleave`; rows are numbered set by
        set.

        The order of a set continues from epoch to epoch and takes each row once in each pass. So
        row counts of a set never differ by more than one, and e epochs of weight w take each row e
        x w times if that is an integer.
        """
        rows, pass_index = (
            np.zeros(epoch_index.shape, np.int64),
            np.zeros(epoch_index.shape, np.int64),
        )
        first_index = first_row = 0
        for number, (num_rows, per_epoch) in enumerate(self.components):
            selected = (epoch_index >= first_index) & (epoch_index < first_index + per_epoch)
            seen, row = np.divmod(
                epoch[selected] * per_epoch + epoch_index[selected] - first_index, num_rows
            )
            if self.shuffle:
                seeded = splitmix64(splitmix64(seen.astype(np.uint64)) ^ np.uint64(self.seed))
                shuffle_key = splitmix64(seeded ^ np.uint64(number + 1))
                shuffled = block_shuffle(
                    row.astype(np.uint64),
                    num_rows,
                    shuffle_key,
                    self.shuffle_block,
                    self.blocks_per_window,
                )
                row = shuffled.astype(np.int64)
            rows[selected], pass_index[selected] = row + first_row, seen
            first_index, first_row = first_index + per_epoch, first_row + num_rows
        return rows, pass_index


@dataclass(frozen=True)
class BlockPlan:
    """Positions of each block of a stream: one rank's rows of several steps, or a part of its rows
    of one step.

    Blocks are assigned to the ranks in turn. One of `steps_per_block` and `blocks_per_step` is 1.
    """

    plan: SamplePlan
    first_step: int
    steps_per_block: int
    blocks_per_step: int = 1  # of one rank

    @classmethod
    def sized(cls, plan: SamplePlan, first_step: int, row_bytes: int, block_mb: float) -> BlockPlan:
        """Return blocks of about `block_mb`, or down to a quarter of it if the rows of a step are
        not divisible.

        They are larger if there is no divisor (a prime number of rows).
        """
        fitting_rows = max(1, int(block_mb * 1e6 / row_bytes))
        if fitting_rows >= plan.rank_rows:
            return cls(plan, first_step, max(1, min(fitting_rows // plan.rank_rows, plan.steps)))
        min_blocks = -(-plan.rank_rows // fitting_rows)
        counts = range(min_blocks, 4 * min_blocks)
        return cls(
            plan, first_step, 1, next((count for count in counts if plan.rank_rows % count == 0), 1)
        )

    @property
    def count(self) -> int:
        groups = -(-(self.plan.steps - self.first_step) // self.steps_per_block)
        return groups * self.blocks_per_step * self.plan.world_size

    def positions(self, block: int) -> np.ndarray:
        """Return the positions [rows] of a block; blocks of all ranks for the same steps have the
        same length.
        """
        group, rank = divmod(block, self.plan.world_size)
        group, slice_index = divmod(group, self.blocks_per_step)
        first = self.first_step + group * self.steps_per_block
        last = min(first + self.steps_per_block, self.plan.steps)
        rows = np.concatenate([self.plan.positions(step, rank) for step in range(first, last)])
        size = len(rows) // self.blocks_per_step
        return rows[slice_index * size : (slice_index + 1) * size]


@dataclass(frozen=True)
class ResumePoint:
    """Start of a worker group: the plan at its size, the first step, and the checkpoint folder to
    load.
    """

    plan: SamplePlan
    step: int
    checkpoint: str | None = None
