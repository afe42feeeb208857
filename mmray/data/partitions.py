"""Rows divided into parts, such as ranges of hashes: files with a record batch for each part, so
that a task reads one part of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from mmray.storage.paths import AnyPath, open_input, open_output
from mmray.storage.requests import iter_parallel


def write_parts(file: AnyPath, table: pa.Table, part_of: np.ndarray, num_parts: int) -> None:
    """Write rows to a file, those of each part in their order.

    Args:
        part_of: Part of each row, below `num_parts`, int [N].
    """
    order = np.argsort(part_of, kind="stable")
    ends = np.searchsorted(part_of[order], np.arange(num_parts + 1))
    rows = table.take(pa.array(order)).to_struct_array().combine_chunks()
    batch = pa.RecordBatch.from_struct_array(rows)
    with open_output(file) as stream, pa.ipc.new_file(stream, batch.schema) as writer:
        for start, end in pairwise(ends.tolist()):
            writer.write_batch(batch.slice(start, end - start))


def read_part(files: Sequence[AnyPath], part: int) -> pa.Table:
    """Return the rows of a part from several files, in their order."""
    return pa.Table.from_batches(iter_parallel(partial(_read_batch, part=part), files))


def _read_batch(file: AnyPath, part: int) -> pa.RecordBatch:
    with open_input(file, mapped=True) as stream, pa.ipc.open_file(stream) as reader:
        return reader.get_batch(part)
