"""Sample order as a pure function: the rows of each optimizer step, for any step, seed and number
of workers.

An epoch is `num_rows` positions; a step takes the next `global_batch_size` positions, also across
the end of an epoch. Nothing is stored, so a resumed or resized run takes the same rows. The shuffle
is a keyed bijection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mmray.data.store.mixture import MixtureComponent

PADDING = -1
ORDER_VERSION = 1  # raise it if a change of this module moves rows; runs then do not resume
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(value: np.ndarray) -> np.ndarray:
    """Hash uint64 numbers (finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, size: int | np.ndarray, shuffle_key: np.ndarray) -> np.ndarray:
    """Permute the numbers 0..size-1 by a Feistel network over Z_a x Z_b with a * b >= size."""
    return _cycle_walk(_feistel, index, size, shuffle_key)


def permute_blocks(
    index: np.ndarray, size: int, shuffle_key: np.ndarray, rows_per_block: int
) -> np.ndarray:
    """Permute blocks of adjacent numbers of 0..size-1; the order inside a block is kept.

    The last block may be shorter. Indices that would be mapped to a row that it lacks are mapped
    again, to another block. All arrays are uint64 [P].
    """
    if rows_per_block == 1:
        return permute(index, size, shuffle_key)
    rows = np.uint64(min(rows_per_block, size))  # longer blocks would only make the walk longer
    num_blocks = -(-size // int(rows))

    def move_blocks(index: np.ndarray, _: int | np.ndarray, keys: np.ndarray) -> np.ndarray:
        block, row = np.divmod(index, rows)
        return permute(block, num_blocks, keys) * rows + row

    return _cycle_walk(move_blocks, index, size, shuffle_key)


def _cycle_walk(
    bijection: Callable[[np.ndarray, Any, np.ndarray], np.ndarray],
    index: np.ndarray,
    size: int | np.ndarray,
    shuffle_key: np.ndarray,
) -> np.ndarray:
    """Restrict a bijection of a larger domain to 0..size-1 (Black and Rogaway 2002).

    Args:
        bijection: Called with index, size and key; permutes a domain that contains 0..size-1.
    """
    out = bijection(index, size, shuffle_key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        sizes = size[outside] if isinstance(size, np.ndarray) else size
        walked = bijection(out[outside], sizes, shuffle_key[outside])
        out[outside] = walked
        outside = outside[walked >= sizes]
    return out


def _feistel(index: np.ndarray, size: int | np.ndarray, shuffle_key: np.ndarray) -> np.ndarray:
    sizes = np.asarray(size, np.uint64)
    a = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    b = (sizes + a - np.uint64(1)) // a
    left = index // b
    right = index % b
    for number in range(_ROUNDS):
        salt = shuffle_key + np.uint64(number)
        if number % 2:
            right = (right + splitmix64(left ^ splitmix64(salt)) % b) % b
        else:
            left = (left + splitmix64(right ^ splitmix64(salt)) % a) % a
    return left * b + right


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffle of blocks of adjacent rows (shuffle blocks): each node reads few and large ranges.

    The columns of the global batch (places 0..global-1 of a step) are divided evenly into lanes.
    The blocks of an epoch are permuted, and each lane takes a contiguous slice of that list. In a
    slice, the rows of a window of blocks are permuted. So the ranks of a node, whose columns are
    adjacent, read their own slices, whatever the number of workers is.

    Args:
        lanes: Number of lanes.
        rows_per_block: Adjacent rows of a block.
        blocks_per_window: Blocks whose rows are mixed with each other.
    """

    lanes: int
    rows_per_block: int
    blocks_per_window: int

    def __str__(self) -> str:
        """The value of `data.shuffle_blocks`."""
        return f"{self.lanes}x{self.rows_per_block}x{self.blocks_per_window}"

    def epoch_index(
        self, positions: np.ndarray, num_rows: int, global_batch_size: int, shuffle_key: np.ndarray
    ) -> np.ndarray:
        """Return which row of an epoch each position of the sample order takes, in a list of all
        rows with the blocks in permuted order; `permute_blocks` with the same key maps it to a row
        of the set.

        Args:
            positions: Positions in the run, int64 [P], not negative.
            num_rows: Number of rows of an epoch.
            shuffle_key: Key of the epoch of each position, uint64 [P].

        Returns:
            int64 [P], each in 0..num_rows-1. The positions of one epoch have different indices.
        """
        lane, first_column, num_columns = _even_part(
            positions % global_batch_size, self.lanes, global_batch_size
        )

        def rows_before(position: np.ndarray, column: np.ndarray, columns: np.ndarray) -> Any:
            """Return the positions before `position` in columns column..column+columns-1."""
            step, in_step = np.divmod(position, global_batch_size)
            return step * columns + np.clip(in_step - column, 0, columns)

        start = positions // num_rows * num_rows
        # An epoch may end within a step, so the lanes of an epoch may differ by a few rows.
        slice_start = rows_before(start + num_rows, np.zeros_like(lane), first_column)
        slice_start -= rows_before(start, np.zeros_like(lane), first_column)
        rows_at_start = rows_before(start, first_column, num_columns)
        slice_rows = rows_before(start + num_rows, first_column, num_columns) - rows_at_start
        index = rows_before(positions, first_column, num_columns) - rows_at_start

        window_rows = self.rows_per_block * self.blocks_per_window
        _, first, size = _even_part(index, -(-slice_rows // window_rows), slice_rows)
        window_start = slice_start + first
        salt = splitmix64(shuffle_key ^ splitmix64(window_start.astype(np.uint64)))
        in_window = (index - first).astype(np.uint64)
        return window_start + permute(in_window, size.astype(np.uint64), salt).astype(np.int64)


def _even_part(
    index: np.ndarray, num_parts: int | np.ndarray, size: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (number, first index, length) of the part that contains an index, if 0..size-1 is
    divided into parts of about equal length.
    """
    number = index * num_parts // size
    first = -(-number * size // num_parts)
    end = -(-(number + 1) * size // num_parts)
    return number, first, end - first


def hash_choice(
    seed: int, pass_index: np.ndarray, row_hash: np.ndarray, num_choices: np.ndarray
) -> np.ndarray:
    """Return one of `num_choices` alternatives for each row, a pure function of the other
    arguments, int64 [R].
    """
    return (_sample_hash(seed, pass_index, row_hash) % num_choices.astype(np.uint64)).astype(
        np.int64
    )


def weighted_choice(seed: int, pass_index: int, row_hash: int, weights: Sequence[float]) -> int:
    """Return an alternative for a row, with frequencies in proportion to their weights (above 0); a
    pure function of the arguments.
    """
    hashed = _sample_hash(seed, np.array([pass_index]), np.array([row_hash]))
    uniform = float(hashed[0] >> np.uint64(11)) * 2.0**-53
    ends = np.cumsum(weights)
    return min(int(np.searchsorted(ends, uniform * ends[-1], "right")), len(ends) - 1)


def hash_uniform(seed: int, pass_index: np.ndarray, row_hash: np.ndarray, count: int) -> np.ndarray:
    """Return numbers float64 [R, count] in [0, 1), a pure function of the other arguments."""
    columns = splitmix64(np.arange(1, count + 1, dtype=np.uint64))
    numbers = splitmix64(_sample_hash(seed, pass_index, row_hash)[:, None] ^ columns)
    return (numbers >> np.uint64(11)) * 2.0**-53


def _sample_hash(seed: int, pass_index: np.ndarray, row_hash: np.ndarray) -> np.ndarray:
    salt = splitmix64(
        pass_index.astype(np.uint64) ^ splitmix64(np.full(pass_index.shape, seed, np.uint64))
    )
    return splitmix64(row_hash.view(np.uint64) ^ salt)


def interleave(components: tuple[MixtureComponent, ...], positions: np.ndarray) -> np.ndarray:
    """Spread the rows of each set of a mixture evenly over an epoch.

    Args:
        positions: Places in the epoch, int64 of any shape, below the sum of `per_epoch`.

    Returns:
        int64 in the same shape: the row that each place gets, numbered set by set, up to
        `per_epoch` of each. Any range of places has about the same proportions of the sets.
    """
    epoch_index = np.empty(positions.size, np.int64)
    remaining = np.arange(positions.size)
    offset = positions.ravel()
    num_left = sum(component.per_epoch for component in components)
    first = 0
    # evenly spread: every (num_left / per_epoch)th of the remaining positions is its
    for component in components:
        before = offset * component.per_epoch // num_left
        selected = (offset + 1) * component.per_epoch // num_left > before
        epoch_index[remaining[selected]] = first + before[selected]
        remaining = remaining[~selected]
        offset = (offset - before)[~selected]
        num_left = num_left - component.per_epoch
        first = first + component.per_epoch
    return epoch_index.reshape(positions.shape)


@dataclass(frozen=True)
class SamplePlan:
    """The rows of each step of a run at one world size.

    A position counts the rows that a run takes, over all workers and through all epochs: position p
    is in step p // global_batch_size and in epoch p // num_rows.

    Args:
        num_rows: Rows of an epoch.
        global_batch_size: Rows of a step, over all workers.
        seed: Seed of the shuffle.
        steps: Steps of the run.
        components: Sets of a mixture, whose `per_epoch` add up to `num_rows`. Empty for one set.
        block_shuffle: Shuffle of blocks of adjacent rows; None: full shuffle.
    """

    num_rows: int
    global_batch_size: int
    world_size: int
    seed: int
    steps: int
    shuffle: bool = True
    components: tuple[MixtureComponent, ...] = ()
    block_shuffle: BlockShuffle | None = None

    @property
    def rank_rows(self) -> int:
        """Number of rows of one rank in a step, including padding."""
        return -(-self.global_batch_size // self.world_size)

    def rows_start(self, step: int) -> int:
        """Return the position of the first row of a step."""
        return step * self.global_batch_size

    def positions(self, step: int, rank: int) -> np.ndarray:
        """Return the positions of a rank's rows in a step, int64 [rank_rows]; PADDING (-1) follows
        if the rank has fewer rows.
        """
        index = np.arange(rank * self.rank_rows, (rank + 1) * self.rank_rows)
        return np.where(index < self.global_batch_size, self.rows_start(step) + index, PADDING)

    def row_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the first value of `row_ids_and_pass_indices_at`."""
        return self.row_ids_and_pass_indices_at(positions)[0]

    def sources_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the set from which each position takes a row, int64 [P];
        any for PADDING.
        """
        row_ids, _ = self.row_ids_and_pass_indices_at(positions)
        ends = np.cumsum([component.num_rows for component in self.components])
        return np.searchsorted(ends, np.maximum(row_ids, 0), side="right").astype(np.int64)

    def row_ids_and_pass_indices_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which row of the set each position takes, and how often that row was taken before.

        Args:
            positions: int64 [P]; PADDING (-1) for none.

        Returns:
            Row numbers int64 [P], PADDING for PADDING; the rows of a mixture are numbered set by
            set. And how often each row was taken before, int64 [P], 0 for PADDING; it seeds the
            augmentation.
        """
        known = np.maximum(positions, 0)
        epoch, index = np.divmod(known, self.num_rows)
        key = self._shuffle_key(epoch)
        if self.shuffle and self.block_shuffle is not None:
            index = self.block_shuffle.epoch_index(
                known, self.num_rows, self.global_batch_size, key
            )
            index = interleave(self.components, index) if self.components else index
        elif self.shuffle and self.components:
            index = permute(index.astype(np.uint64), self.num_rows, key).astype(np.int64)
        rows = index
        pass_index = epoch
        if self.components:
            rows, pass_index = self._mixture_rows(index, epoch)
        elif self.shuffle:
            rows = self._permute_set(index, self.num_rows, key)
        return np.where(positions >= 0, rows, PADDING), np.where(positions >= 0, pass_index, 0)

    def one_window_later(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions whose rows a reader should fetch ahead while it reads these: those
        one window later, up to the end of the run. Empty for a full shuffle, whose rows are far
        apart.
        """
        if self.block_shuffle is None or not self.shuffle:
            return positions[:0]
        later = positions[positions != PADDING] + self.window_positions
        return later[later < self.steps * self.global_batch_size]

    @property
    def window_positions(self) -> int:
        """Number of rows of the run, in whole steps, after which a block shuffle reaches its next
        window; of a full shuffle that of an epoch.
        """
        if self.block_shuffle is None or not self.shuffle:
            return self.num_rows
        shape = self.block_shuffle
        rows = shape.lanes * shape.rows_per_block * shape.blocks_per_window
        return -(-rows // self.global_batch_size) * self.global_batch_size

    def _shuffle_key(self, epoch: np.ndarray) -> np.ndarray:
        return splitmix64(splitmix64(epoch.astype(np.uint64)) ^ np.uint64(self.seed))

    def _permute_set(self, index: np.ndarray, num_rows: int, key: np.ndarray) -> np.ndarray:
        """Return the rows int64 of indices in the permuted rows, or blocks of rows, of a set."""
        rows_per_block = 1 if self.block_shuffle is None else self.block_shuffle.rows_per_block
        shuffled = permute_blocks(index.astype(np.uint64), num_rows, key, rows_per_block)
        return shuffled.astype(np.int64)

    def _mixture_rows(
        self, epoch_index: np.ndarray, epoch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, pass index) int64 of indices from `interleave`; rows are numbered set by
        set.

        The order of a set continues from epoch to epoch and takes each row once in each pass. So
        row counts of a set never differ by more than one, and e epochs of weight w take each row e
        x w times if that is an integer.
        """
        rows = np.zeros(epoch_index.shape, np.int64)
        pass_index = np.zeros(epoch_index.shape, np.int64)
        first_index = first_row = 0
        for number, (num_rows, per_epoch) in enumerate(self.components):
            selected = (epoch_index >= first_index) & (epoch_index < first_index + per_epoch)
            set_pass, row = np.divmod(
                epoch[selected] * per_epoch + epoch_index[selected] - first_index, num_rows
            )
            if self.shuffle:
                key = splitmix64(self._shuffle_key(set_pass) ^ np.uint64(number + 1))
                row = self._permute_set(row, num_rows, key)
            rows[selected] = row + first_row
            pass_index[selected] = set_pass
            first_index = first_index + per_epoch
            first_row = first_row + num_rows
        return rows, pass_index


@dataclass(frozen=True)
class BlockPlan:
    """Which rows of the sample order each block of a stream has.

    A block has one rank's rows of several steps, or a part of its rows of one step. Blocks are
    assigned to the ranks in turn. One of `steps_per_block` and `blocks_per_step` is 1. The first
    block has one step, and the number doubles up to `steps_per_block`, so that training starts
    early.

    Args:
        first_step: The first step of the stream.
        steps_per_block: Most steps whose rows a block has.
        blocks_per_step: Blocks into which the rows of one rank in a step are divided.
    """

    plan: SamplePlan
    first_step: int
    steps_per_block: int
    blocks_per_step: int = 1

    @classmethod
    def sized(cls, plan: SamplePlan, first_step: int, row_bytes: int, block_mb: float) -> BlockPlan:
        """Divide a rank's rows into blocks of about `block_mb`.

        A block has all rows of one or more steps if they fit. Otherwise the rows of a step are
        divided equally, into blocks of at least a quarter of the size, or not at all.
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
        """Number of blocks of all ranks."""
        num_steps = self.plan.steps - self.first_step
        doublings = self.steps_per_block.bit_length()
        full_blocks = -(-(num_steps - self._steps_before(doublings)) // self.steps_per_block)
        groups = min(num_steps.bit_length(), doublings) + max(0, full_blocks)
        return groups * self.blocks_per_step * self.plan.world_size

    @property
    def max_rows(self) -> int:
        """Number of rows of the largest blocks."""
        return -(-self.plan.rank_rows * self.steps_per_block // self.blocks_per_step)

    def _steps_before(self, group: int) -> int:
        """Return the number of steps of the first groups: of 1, 2, 4, ... and of
        `steps_per_block`.
        """
        doublings = min(group, self.steps_per_block.bit_length())
        return 2**doublings - 1 + (group - doublings) * self.steps_per_block

    def positions(self, block: int) -> np.ndarray:
        """Return the positions of the rows of a block, int64 [R], or PADDING (-1).

        Block b belongs to rank b % world_size. R is equal for the blocks of all ranks for the same
        steps.
        """
        group, rank = divmod(block, self.plan.world_size)
        group, slice_index = divmod(group, self.blocks_per_step)
        first = self.first_step + self._steps_before(group)
        last = min(self.first_step + self._steps_before(group + 1), self.plan.steps)
        rows = np.concatenate([self.plan.positions(step, rank) for step in range(first, last)])
        return np.array_split(rows, self.blocks_per_step)[slice_index]


@dataclass(frozen=True)
class ResumePoint:
    """The step and the checkpoint from which workers start.

    Args:
        plan: The rows of each step, for this number of workers.
        step: The first step that they take.
        checkpoint: Folder of the checkpoint to load; None: start with initial weights.
    """

    plan: SamplePlan
    step: int
    checkpoint: str | None = None
