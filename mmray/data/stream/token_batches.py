"""Assign the rows of a step to ranks and micro-batches by their numbers of tokens.

A pure function of the token counts of the step, so a resumed run repeats it, and a resized run
takes the same rows in each step. All ranks take the same number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmray.data.store.shard_table import MappedArray
from mmray.data.stream.order import PADDING, SamplePlan
from mmray.errors import DataError

# The rows of each micro-batch of each rank: [rank][micro-batch] -> int64 indices in the step.
Assignment = list[list[np.ndarray]]


def assign_rows(
    num_tokens: np.ndarray,
    world_size: int,
    max_tokens: int,
    padded: bool = False,
    ranks_per_group: int | None = None,
) -> Assignment:
    """Divide the rows of a step into micro-batches of similar numbers of tokens for all ranks.

    All ranks get the same number of micro-batches, the smallest for which the rows fit.
    Micro-batches with the same index have similar sizes on all ranks, and the totals of the ranks
    are similar too. A micro-batch may be empty.

    Args:
        num_tokens: Tokens of each row of a step, int [R]; 0 for a row that is not used.
        max_tokens: Maximum number of tokens of a micro-batch.
        padded: Whether rows are padded to the longest of the micro-batch, so that its size is its
            number of rows x the longest. Otherwise they are packed, and the size is their sum.
        ranks_per_group: Number of consecutive ranks that divide their consecutive rows of the step
            among themselves, such as the ranks of a node whose cache has these rows; None: all
            ranks.

    Returns:
        For each rank a list with the rows of each micro-batch: indices into `num_tokens`, int64 in
        ascending order.

    Raises:
        DataError: A row has more than `max_tokens`.
    """
    num_tokens = np.asarray(num_tokens, np.int64)
    if num_tokens.size and num_tokens.max() > max_tokens:
        index = int(num_tokens.argmax())
        raise DataError(
            f"row {index} of the step has {num_tokens[index]:,} tokens, over batch.tokens "
            f"{max_tokens:,}: raise --batch.tokens, or lower --model.inputs.max-tokens, so that "
            "longer rows are quarantined"
        )
    divide = _divide_padded if padded else _divide_packed
    rank_rows = -(-len(num_tokens) // world_size)
    ranks_per_group = ranks_per_group or world_size
    groups = []
    for first in range(0, world_size, ranks_per_group):
        ranks = min(ranks_per_group, world_size - first)
        start = min(first * rank_rows, len(num_tokens))
        stop = min((first + ranks) * rank_rows, len(num_tokens))
        groups.append((ranks, start, num_tokens[start:stop]))
    num_micro_batches = max(
        max(1, -(-int(tokens.sum()) // (ranks * max_tokens))) for ranks, _, tokens in groups
    )
    while True:
        divided = [
            divide(tokens, ranks * num_micro_batches, max_tokens) for ranks, _, tokens in groups
        ]
        if None not in divided:
            break
        num_micro_batches += 1
    assignment: Assignment = []
    for (ranks, start, tokens), parts in zip(groups, divided, strict=True):
        sizes = [_size(tokens[part], padded) for part in parts or ()]
        for micro_batches in _deal(sizes, ranks):
            assignment.append([np.sort((parts or [])[index]) + start for index in micro_batches])
    return assignment


def _size(tokens: np.ndarray, padded: bool) -> int:
    """Return the tokens of a micro-batch of these rows."""
    if not tokens.size:
        return 0
    return int(tokens.max()) * len(tokens) if padded else int(tokens.sum())


def _divide_packed(tokens: np.ndarray, num_parts: int, max_tokens: int) -> list[np.ndarray] | None:
    """Divide rows into parts of about equal sums, the longest row first, each to the part with the
    smallest sum. None if a part exceeds `max_tokens`.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    smallest = [(0, part) for part in range(num_parts)]
    for row in np.argsort(-tokens, kind="stable").tolist():
        size, part = smallest[0]
        size += int(tokens[row])
        if size > max_tokens:
            return None
        parts[part].append(row)
        heapq.heapreplace(smallest, (size, part))
    return [np.array(part, np.int64) for part in parts]


def _divide_padded(tokens: np.ndarray, num_parts: int, max_tokens: int) -> list[np.ndarray] | None:
    """Divide rows into parts of similar lengths whose largest padded size is as small as possible.
    None if a part exceeds `max_tokens`.
    """
    order = np.argsort(-tokens, kind="stable")
    longest_first = tokens[order]

    def ends_of(most: int) -> list[int]:
        """Return the ends of the parts if each takes as many rows as `most` tokens allow."""
        ends = []
        start = 0
        while start < len(order):
            longest = int(longest_first[start])
            start = min(len(order), start + (most // longest if longest else len(order)))
            ends.append(start)
        return ends

    if len(ends_of(max_tokens)) > num_parts:
        return None
    least = int(tokens.max(initial=0))
    most = max_tokens
    while least < most:
        middle = (least + most) // 2
        if len(ends_of(middle)) > num_parts:
            least = middle + 1
        else:
            most = middle
    ends = ends_of(most)
    parts = np.split(order, ends[:-1])
    return parts + [order[:0]] * (num_parts - len(parts))


def _deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the parts of each rank: in each round the largest ones left, the largest of them to
    the rank with the fewest tokens so far.
    """
    order = sorted(range(len(sizes)), key=lambda part: -sizes[part])
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for first in range(0, len(order), ranks):
        fewest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, part in zip(fewest_first, order[first : first + ranks], strict=True):
            dealt[rank].append(part)
            totals[rank] += sizes[part]
    return dealt


@dataclass(frozen=True, kw_only=True)
class TokenPlan(SamplePlan):
    """The rows of each step of a run, whose micro-batches are limited by tokens, not by a number of
    rows.

    Each step has the same rows as without a limit of tokens. They are divided among the ranks and
    their micro-batches so that numbers of tokens are similar.

    Args:
        num_tokens: Tokens of each row of the set, uint32; of a mixture, set by set.
        max_row_tokens: Rows with more tokens are not used: they count as 0 tokens.
        max_tokens: `batch.tokens`, the maximum number of tokens of a micro-batch.
        padded: As for `assign_rows`.
        ranks_per_group: As for `assign_rows`.
    """

    num_tokens: np.ndarray | MappedArray = field(compare=False)
    max_row_tokens: int
    max_tokens: int
    padded: bool = False
    ranks_per_group: int | None = None

    def positions(self, step: int, rank: int) -> np.ndarray:
        micro_batches, width = self._micro_batches(step, rank)
        rows = self.rows_start(step) + np.concatenate(micro_batches)
        return np.pad(rows, (0, width - len(rows)), constant_values=PADDING)

    def micro_batch_sizes(self, step: int, rank: int) -> list[int]:
        """Return the number of rows of each micro-batch of a rank in a step, the last one with
        padding.
        """
        micro_batches, width = self._micro_batches(step, rank)
        sizes = [len(rows) for rows in micro_batches]
        sizes[-1] += width - sum(sizes)
        return sizes

    def _micro_batches(self, step: int, rank: int) -> tuple[list[np.ndarray], int]:
        """Return the rows of each micro-batch of a rank, and the most rows of a rank."""
        positions = self.rows_start(step) + np.arange(self.global_batch_size)
        tokens = self.num_tokens[self.row_ids_at(positions)].astype(np.int64)
        tokens[tokens > self.max_row_tokens] = 0
        assignment = assign_rows(
            tokens, self.world_size, self.max_tokens, self.padded, self.ranks_per_group
        )
        return assignment[rank], max(sum(map(len, each)) for each in assignment)
