"""Token counts of the rows of a set: 4 bytes a row, computed once for each set, columns of captions
and processor.

All rows of a shard are counted, whatever a run selects. Sizes and texts are enough: no image is
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from mmray.data.prepare.map_shards import map_shards, row_batches
from mmray.data.store.mixture import PreparedMixture, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.errors import ResourceError

COLUMN = "tokens-"  # with a digest
# Count of a row that cannot be read or encoded. Its reason is written when the run reads it.
NOT_COUNTED = 0
RowCounter = Callable[[Row], int]


class TokenCounter(Protocol):
    """Counts the tokens of rows; pickled to the tasks.

    A class implements both: `digest` is a hex digest of what determines the counts (tokenizer, chat
    template and sizes of images), and `build()` returns a function that is called with a Row and
    returns its number of tokens, an int.
    """

    @property
    def digest(self) -> str:
        """Hex digest of what determines the counts: tokenizer, chat template, sizes of images."""
        ...

    def build(self) -> RowCounter:
        """Return a function that counts the tokens of a stored row (text and sizes of images, no
        pixels).

        It is called once in each process. The function is called with a Row and returns an int; it
        raises ValueError for a row that cannot be encoded.
        """
        ...


def token_counts(
    prepared: PreparedSet | PreparedMixture,
    counter: TokenCounter,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Return the number of tokens of each row of a set, counting rows that have no stored counts
    yet.

    Args:
        prepared: The set, or a mixture, whose rows are numbered set by set.
        counter: Counts the tokens of a row. Counts are stored as a column of the set, whose name
            depends on its `digest` and the set's columns of captions.
        on_rows: Called with (done, total): numbers of rows that are counted and of all rows.

    Returns:
        uint32 [num_rows]; 0 for a row that cannot be read or encoded. Counting runs as Ray tasks if
        Ray is initialized, otherwise in child processes.

    Raises:
        ResourceError: The counts cannot be written, or tasks die.
        DataError: The counter needs the sizes of media, and the set was prepared without them.
    """
    if isinstance(prepared, PreparedMixture):
        return np.concatenate([token_counts(each, counter, on_rows) for each in prepared.sets])
    digest = counter.digest
    if prepared.captions is not None:
        digest = hashlib.sha256(repr((digest, sorted(prepared.captions))).encode()).hexdigest()
    name = f"{COLUMN}{digest[:32]}"
    compute = partial(_count_rows, counter=counter, name=name)
    try:
        values = map_shards(prepared, {name: "uint32"}, compute, on_rows)
    except OSError as error:
        raise ResourceError(
            f"cannot write the token counts of {prepared.folder}: {error}. Make the folder of the "
            "set writable, or copy the set"
        ) from error
    shards = [shard for shard in prepared.shards if shard.num_kept]
    counts = [np.zeros(0, np.uint32)]
    parts = values.read([shard.key for shard in shards], [name])
    for shard, columns in zip(shards, parts, strict=True):
        counts.append(columns[name].to_numpy()[shard.kept])
    return np.concatenate(counts)


# The counter of this process by its digest: building one takes seconds.
_COUNTERS: dict[str, RowCounter] = {}


def _count_rows(prepared: PreparedSet, counter: TokenCounter, name: str) -> dict[str, pa.Array]:
    """Return the token counts of the rows of a shard. Raises DataError."""
    if counter.digest not in _COUNTERS:
        _COUNTERS.clear()
        _COUNTERS[counter.digest] = counter.build()
    count = _COUNTERS[counter.digest]
    counts = np.full(prepared.num_rows, NOT_COUNTED, np.uint32)
    for numbers in row_batches(prepared):
        try:
            rows: list[Row | Exception] = [*prepared.read_without_references(numbers)]
        except ValueError:  # one of them is damaged
            rows = read_each(prepared, numbers)
        for number, row in zip(numbers.tolist(), rows, strict=True):
            if isinstance(row, Row):
                with suppress(ValueError):
                    counts[number] = count(row)
    return {name: pa.array(counts)}
