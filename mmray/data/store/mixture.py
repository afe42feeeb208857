"""Several prepared sets as one set, and reads whose bad rows become errors in their place."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mmray.data.store.manifest import MANIFEST
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.storage.outage import Outage, retry_until_back
from mmray.storage.paths import file_size

_log = logging.getLogger(__name__)

# errors of a row; any other error is a storage failure
ROW_ERRORS = (FileNotFoundError, ValueError)


class MixtureComponent(NamedTuple):
    """One set of a mixture.

    Attributes:
        num_rows: Number of rows of the set.
        per_epoch: How many of the rows of an epoch are from this set.
    """

    num_rows: int
    per_epoch: int


class PreparedMixture:
    """Several prepared sets with weights as one set.

    Rows are numbered set by set. Keys are `SET/KEY`, because two sets may use the same keys. Cheap
    to pickle.

    `read(numbers)` returns the rows with these numbers, each a Row: `key`, `media` (encoded bytes),
    `texts` or `messages`, `label` and others.

    Args:
        sets: The sets, in the order of their row numbers.
        weights: For each set, how often an epoch takes each of its rows on average, or its share.
        are_shares: Whether the weights are the proportions of the sets in an epoch.
    """

    def __init__(
        self, sets: Sequence[PreparedSet], weights: Sequence[float], are_shares: bool = False
    ) -> None:
        self.sets = tuple(sets)
        self.weights = tuple(weights)
        self.are_shares = are_shares
        names = [each.folder.name for each in sets]
        self.names = [
            name if names.count(name) == 1 else f"{name}-{number}"
            for number, name in enumerate(names)
        ]
        self._starts = np.cumsum([0, *(each.num_rows for each in sets)])

    @property
    def components(self) -> tuple[MixtureComponent, ...]:
        """The size of each set and its share of an epoch, in the order of `sets`.

        `num_rows` is the number of rows of a set. `per_epoch` is round(weight x num_rows), at least
        1: with weight 2 an epoch takes each row of the set twice. With weight 0.5 it takes half of
        the rows, and the next epoch the other half. With shares an epoch has as many positions as
        all sets have rows, and `per_epoch` is the share of a set in them, at least 1.
        """
        sizes = [each.num_rows for each in self.sets]
        counts = [weight * size for weight, size in zip(self.weights, sizes, strict=True)]
        if self.are_shares:
            counts = [weight * self.num_rows / sum(self.weights) for weight in self.weights]
        return tuple(
            MixtureComponent(size, max(1, round(count)))
            for size, count in zip(sizes, counts, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of all sets, each counted once, whatever the weights are."""
        return int(self._starts[-1])

    @property
    def max_pixels(self) -> int:
        """Largest `max_pixels` of the sets: maximum width x height of an image."""
        return max(each.max_pixels for each in self.sets)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rows and weights of all sets; mixtures with the same digest are the
        same.
        """
        components = [
            (each.fingerprint, weight) for each, weight in zip(self.sets, self.weights, strict=True)
        ]
        kind = " shares" if self.are_shares else ""
        return hashlib.sha256(f"{components!r}{kind}".encode()).hexdigest()

    @property
    def tokenizer_json(self) -> str | None:
        """Content of the tokenizer.json of the first set that has one; None if none has."""
        return next((text for each in self.sets if (text := each.tokenizer_json)), None)

    def read(self, rows: np.ndarray, whole_blocks: bool = True) -> list[Row]:
        """Read rows by their numbers as PreparedSet.read; their keys are `SET/KEY`.

        Args:
            rows: Row numbers int64 [N]: first those of the first set, then those of the next one.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of sets of {self.num_rows}")
        out: list[Row | None] = [None] * len(rows)
        for number, indices, in_set in self._by_set(rows):
            for index, row in zip(
                indices, self.sets[number].read(in_set, whole_blocks), strict=True
            ):
                out[index] = replace(row, key=f"{self.names[number]}/{row.key}")
        return out  # type: ignore[return-value]  # every row belongs to a set

    def columns(self, rows: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the values of columns that all sets have, as PreparedSet.columns."""
        out: list[dict[str, Any]] = [{} for _ in rows]
        for number, indices, in_set in self._by_set(np.asarray(rows, np.int64)):
            values = self.sets[number].columns(in_set, names)
            for index, value in zip(indices, values, strict=True):
                out[index] = value
        return out

    def fetch_blocks(self, rows: np.ndarray) -> None:
        """Fetch the blocks of rows into the caches of the sets that have one. Raises OSError, and
        ValueError for a shard that is shorter than its table states.
        """
        for number, _, in_set in self._by_set(rows):
            self.sets[number].fetch_blocks(in_set)

    @property
    def is_cached(self) -> bool:
        """Whether reads of at least one set go through a cache on the local disk."""
        return any(each.is_cached for each in self.sets)

    def _by_set(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the number of each set with rows, their indices in `rows`, and their numbers in the
        set.
        """
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(owner).tolist():
            indices = np.flatnonzero(owner == number)
            yield number, indices, rows[indices] - self._starts[number]


def read_each(
    prepared: PreparedSet | PreparedMixture,
    rows: np.ndarray,
    errors: tuple[type[Exception], ...] = ROW_ERRORS,
    whole_blocks: bool = True,
) -> list[Row | Exception]:
    """Read rows by their numbers; a row that cannot be read becomes an error in its place.

    Args:
        errors: Types of errors that belong to a row and are returned; others are raised.
        whole_blocks: As for `PreparedSet.read`.
    """
    try:
        return list(prepared.read(rows, whole_blocks))
    except errors as error:
        if len(rows) <= 1:
            return [error] * len(rows)
        middle = len(rows) // 2
        halves = (rows[:middle], rows[middle:])
        first, second = (read_each(prepared, half, errors, whole_blocks) for half in halves)
        return first + second


def read_each_when_mounted(
    prepared: PreparedSet | PreparedMixture, rows: np.ndarray, whole_blocks: bool = True
) -> list[Row | Exception]:
    """Read rows as `read_each`, and wait while the storage of their set has vanished: a missing
    shard is otherwise a fault of its rows.

    Raises:
        OSError: The storage was away for an hour.
    """
    sets = prepared.sets if isinstance(prepared, PreparedMixture) else (prepared,)
    while True:
        read = read_each(prepared, rows, whole_blocks=whole_blocks)
        if not any(isinstance(each, FileNotFoundError) for each in read):
            return read
        away = [each.folder for each in sets if file_size(each.folder / MANIFEST) is None]
        if not away:
            return read
        outage = Outage(away[0], _log.warning, "its rows are waited for")
        retry_until_back((away[0] / MANIFEST).stat, outage)
