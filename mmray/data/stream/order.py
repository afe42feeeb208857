"""Sample order as a pure function: the rows of each optimizer step, for any step, seed and number of workers.

Position p of a run is row `rows_at(p)`. An epoch is `num_rows` positions; a step takes the next `global_rows` positions
of its epoch. Nothing is stored, so a resumed or resized run takes the same rows. The shuffle is a keyed bijection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

PADDING = -1
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(value: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, any shape (finaliser of splitmix64; Steele, Lea, Flood 2014)."""
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Keyed bijection of 0..size-1: uint64 `index` and `key` of one shape in, uint64 of that shape out.

    A Feistel network over Z_a x Z_b with a*b >= size, applied again until the result is below size (cycle walking).
    """
    return _cycle_walk(lambda inside, keys: _feistel(inside, size, keys), index, size, key)


def chunked_permutation(index: np.ndarray, size: int, key: np.ndarray, chunk: int, window: int) -> np.ndarray:
    """Keyed bijection of 0..size-1 that shuffles chunks of neighbouring rows, and rows within windows of chunks.

    Rows that are stored next to each other stay close, so that few large reads fetch them. A window has `window` to
    2 * window - 1 chunks (or all). If the last chunk is ragged, fewer than `chunk` rows fall outside their window.
    """
    if chunk == 1:
        return permute(index, size, key)
    chunk = min(chunk, size)  # otherwise most of the cycle walk would be outside
    chunks = -(-size // chunk)

    def both(inside: np.ndarray, keys: np.ndarray) -> np.ndarray:
        slot, row = np.divmod(windowed_permutation(inside, chunks, keys, window, chunk), np.uint64(chunk))
        return permute(slot, chunks, keys) * np.uint64(chunk) + row

    return _cycle_walk(both, index, size, key)


def windowed_permutation(index: np.ndarray, units: int, key: np.ndarray, window: int, unit: int = 1) -> np.ndarray:
    """Keyed bijection of 0..units*unit-1 that keeps a number in its window of at least `window` units."""
    windows = max(1, units // window)
    length, longer = divmod(units, windows)  # number of windows that are one unit longer
    edge = longer * (length + 1) * unit
    out = np.empty_like(index)
    for first, size, selected in ((0, (length + 1) * unit, index < edge), (edge, length * unit, index >= edge)):
        number, inside = np.divmod(index[selected] - np.uint64(first), np.uint64(size))
        salt = splitmix64(key[selected] ^ splitmix64(number + np.uint64(first)))
        out[selected] = permute(inside, size, salt) + number * np.uint64(size) + np.uint64(first)
    return out


def _cycle_walk(
    bijection: Callable[[np.ndarray, np.ndarray], np.ndarray], index: np.ndarray, size: int, key: np.ndarray
) -> np.ndarray:
    """Restrict a bijection of a larger domain to 0..size-1 (Black and Rogaway 2002)."""
    out = bijection(index, key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = bijection(out[outside], key[outside])
        outside = outside[out[outside] >= size]
    return out


def _feistel(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    a: Any = np.uint64(int(np.ceil(np.sqrt(size))))
    b: Any = np.uint64(-(-size // int(a)))
    left, right = index // b, index % b
    for turn in range(_ROUNDS):
        salt = key + np.uint64(turn)
        if turn % 2:
            right = (right + splitmix64(left ^ splitmix64(salt)) % b) % b
        else:
            left = (left + splitmix64(right ^ splitmix64(salt)) % a) % a
    return left * b + right


def hash_choice(seed: int, epoch: np.ndarray, key: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Return a choice 0..choices-1 for each row (all int64, one shape), determined by (seed, epoch, key)."""
    return (_row_hash(seed, epoch, key) % choices.astype(np.uint64)).astype(np.int64)


def hash_uniform(seed: int, epoch: np.ndarray, key: np.ndarray, count: int) -> np.ndarray:
    """Return numbers in [0, 1) for each row: float64 [R, count], determined by (seed, epoch [R], key [R])."""
    numbers = splitmix64(_row_hash(seed, epoch, key)[:, None] ^ splitmix64(np.arange(1, count + 1, dtype=np.uint64)))
    return (numbers >> np.uint64(11)) * 2.0**-53


def _row_hash(seed: int, epoch: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of (seed, epoch, key) of each row."""
    salt = splitmix64(epoch.astype(np.uint64) ^ splitmix64(np.full(epoch.shape, seed, np.uint64)))
    return splitmix64(key.view(np.uint64) ^ salt)


@dataclass(frozen=True)
class MixtureComponent:
    """One set of a mixture: its rows, and its rows per epoch."""

    num_rows: int
    per_epoch: int


def mixture_rows(
    parts: tuple[MixtureComponent, ...],
    slots: np.ndarray,
    epoch: np.ndarray,
    seed: int,
    shuffle: bool,
    chunk: int,
    window: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, pass over its set) int64 of the slots of an epoch, all of one shape; rows are numbered set by set.

    An epoch has a slot for each of its rows, set by set. The order of a set continues from epoch to epoch and takes
    each row once in each pass. So row counts of a set never differ by more than one, and e epochs of weight w take each
    row e x w times if that is an integer.
    """
    rows, passes = np.zeros(slots.shape, np.int64), np.zeros(slots.shape, np.int64)
    first_slot = first_row = 0
    for number, part in enumerate(parts):
        selected = (slots >= first_slot) & (slots < first_slot + part.per_epoch)
        passed, row = np.divmod(epoch[selected] * part.per_epoch + slots[selected] - first_slot, part.num_rows)
        if shuffle:
            key = splitmix64(splitmix64(splitmix64(passed.astype(np.uint64)) ^ np.uint64(seed)) ^ np.uint64(number + 1))
            row = chunked_permutation(row.astype(np.uint64), part.num_rows, key, chunk, window).astype(np.int64)
        rows[selected], passes[selected] = row + first_row, passed
        first_slot, first_row = first_slot + part.per_epoch, first_row + part.num_rows
    return rows, passes


def interleave(parts: tuple[MixtureComponent, ...], positions: np.ndarray) -> np.ndarray:
    """Return the slots (see `mixture_rows`) of positions of an epoch, int64; each set is in order and evenly spread."""
    slots, rest = np.empty(positions.size, np.int64), np.arange(positions.size)
    offset, left, first = positions.ravel(), sum(part.per_epoch for part in parts), 0
    for part in parts:  # every (left / per_epoch)th of the remaining positions belongs to this set
        before = offset * part.per_epoch // left
        selected = (offset + 1) * part.per_epoch // left > before
        slots[rest[selected]] = first + before[selected]
        rest, offset = rest[~selected], (offset - before)[~selected]
        left, first = left - part.per_epoch, first + part.per_epoch
    return slots.reshape(positions.shape)


@dataclass(frozen=True)
class SamplePlan:
    """The rows of each step of a run at one world size."""

    num_rows: int  # of an epoch
    global_rows: int  # of a step, over all workers
    world: int
    micro: int  # rows of one forward pass
    seed: int
    steps: int  # of the run
    shuffle: bool = True
    parts: tuple[MixtureComponent, ...] = ()  # sets of a mixture; their `per_epoch` add up to num_rows
    chunk: int = 1  # see `chunked_permutation`; 1: full shuffle
    window: int = 1

    @property
    def rank_rows(self) -> int:
        """Rows of one rank in a step, including padding."""
        return -(-self.global_rows // self.world)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of one rank in a step; the last may be smaller."""
        return -(-self.rank_rows // self.micro)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.global_rows)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows_start(self, step: int) -> int:
        """Return the position of the first row of a step: rows consumed by all steps before it."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + index * self.global_rows

    def rows_stop(self, step: int) -> int:
        """Return the rows consumed after this step."""
        return min(self.rows_start(step) + self.global_rows, (self.epoch(step) + 1) * self.num_rows)

    def step_at(self, rows_consumed: int) -> int:
        """Return the step that starts after this many consumed rows (inverse of `rows_start`)."""
        epoch, offset = divmod(rows_consumed, self.num_rows)
        step = epoch * self.steps_per_epoch + offset // self.global_rows
        if self.rows_start(step) != rows_consumed:
            raise ValueError(f"no step of {self.global_rows} rows starts at row {rows_consumed}")
        return step

    def positions(self, step: int, rank: int) -> np.ndarray:
        """Return the positions [rank_rows] int64 of a rank's rows in a step, followed by PADDING."""
        first = self.rows_start(step) + rank * self.rank_rows
        last = min(self.rows_start(step) + (rank + 1) * self.rank_rows, self.rows_stop(step))
        out = np.full(self.rank_rows, PADDING, np.int64)
        out[: max(0, last - first)] = np.arange(first, max(first, last))
        return out

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the row ids of positions, int64 of one shape; PADDING is unchanged."""
        return np.where(positions >= 0, self._lookup(positions)[0], PADDING)

    def passes_at(self, positions: np.ndarray) -> np.ndarray:
        """Return how often each row was seen before this position, int64; seeds augmentation. 0 for PADDING."""
        return self._lookup(positions)[1]

    def _lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch, offset = np.divmod(np.maximum(positions, 0), self.num_rows)
        if self.shuffle:
            key = splitmix64(splitmix64(epoch.astype(np.uint64)) ^ np.uint64(self.seed))
            rows = offset.astype(np.uint64)
            if self.parts and self.chunk > 1:  # slots of a mixture
                shuffled = windowed_permutation(rows, self.num_rows, key, self.chunk * self.window)
                offset = interleave(self.parts, shuffled.astype(np.int64))
            else:
                offset = chunked_permutation(rows, self.num_rows, key, self.chunk, self.window).astype(np.int64)
        if not self.parts:
            return offset, np.where(positions >= 0, epoch, 0)
        rows, passes = mixture_rows(self.parts, offset, epoch, self.seed, self.shuffle, self.chunk, self.window)
        return rows, np.where(positions >= 0, passes, 0)


@dataclass(frozen=True)
class Blocks:
    """Positions of each block of a stream: one rank's rows of several steps, or a part of its rows of one step.

    Blocks are assigned to the ranks in turn. `parts` divides `plan.rank_rows`; if it is more than 1, `steps_per_block`
    is 1.
    """

    plan: SamplePlan
    first_step: int
    steps_per_block: int
    parts: int = 1

    @property
    def count(self) -> int:
        groups = -(-(self.plan.steps - self.first_step) // self.steps_per_block)
        return groups * self.parts * self.plan.world

    def positions(self, block: int) -> np.ndarray:
        """Return the positions [rows] of a block; blocks of all ranks for the same steps have the same length."""
        group, rank = divmod(block, self.plan.world)
        group, part = divmod(group, self.parts)
        first = self.first_step + group * self.steps_per_block
        last = min(first + self.steps_per_block, self.plan.steps)
        rows = np.concatenate([self.plan.positions(step, rank) for step in range(first, last)])
        size = len(rows) // self.parts
        return rows[part * size : (part + 1) * size]


@dataclass(frozen=True)
class ResumePoint:
    """Start of a worker group: the plan at its size, the first step, and the checkpoint folder to load."""

    plan: SamplePlan
    step: int
    checkpoint: str | None = None
