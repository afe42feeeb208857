"""Several prepared sets as one: rows numbered through, set after set; which come when, order.py's Plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from mmray.data.store.prepared_set import PreparedSet, Row
from mmray.data.stream.order import Part


class MixedSet:
    """Prepared sets with the weight of each: an epoch has round(weight x rows) rows of it.

    A row's key is `SET/KEY`, for two sets may use the same keys for other rows. Cheap to pickle, as its sets are.
    """

    def __init__(self, sets: Sequence[PreparedSet], weights: Sequence[float]) -> None:
        self.sets, self.weights = tuple(sets), tuple(weights)
        self.names = _names([each.place.address for each in sets])
        self._starts = np.cumsum([0, *(each.num_rows for each in sets)])

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the order needs to know of each set."""
        return tuple(
            Part(each.num_rows, max(1, round(weight * each.num_rows)))
            for each, weight in zip(self.sets, self.weights, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """Rows of all sets."""
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rows of all sets, and of their weights."""
        parts = [(each.fingerprint, weight) for each, weight in zip(self.sets, self.weights, strict=True)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows of all sets."""
        return frozenset[str]().union(*(each.languages for each in self.sets))

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer of the first set that has one."""
        return next((found for each in self.sets if (found := each.tokenizer_json)), None)

    def read(self, rows: np.ndarray) -> list[Row]:
        """The rows of these numbers, in the order asked for. Raises as PreparedSet.read does."""
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of sets of {self.num_rows}")
        out: list[Row | None] = [None] * len(rows)
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(owner).tolist():
            places = np.flatnonzero(owner == number)
            for place, row in zip(places, self.sets[number].read(rows[places] - self._starts[number]), strict=True):
                out[place] = replace(row, key=f"{self.names[number]}/{row.key}")
        return out  # type: ignore[return-value]  # every row has an owner


def _names(addresses: Sequence[str]) -> list[str]:
    """The last part of each address, with a number where two are the same."""
    bases = [PurePosixPath(address.partition("?")[0]).name for address in addresses]
    return [base if bases.count(base) == 1 else f"{base}-{number}" for number, base in enumerate(bases)]
