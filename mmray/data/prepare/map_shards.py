"""Compute columns of the rows of a set in tasks: token counts, hashes of images, scores.

Shards that have the columns are not computed again. So a killed job resumes, and of a set that grew
only the new shards are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from mmray.data.prepare.tasks import map_tasks
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import separate_columns
from mmray.data.store.row_values import COLUMNS_DIR, RowValues, update_index, write_values
from mmray.data.store.shard_table import Shard
from mmray.storage.paths import AnyPath

READ_ROWS = 64
MAX_FILES = 2000  # that a call writes of a column

Compute = Callable[[PreparedSet], Mapping[str, pa.Array]]


def map_shards(
    prepared: PreparedSet,
    types: Mapping[str, str],
    compute: Compute,
    on_rows: Callable[[int, int], None],
    folder: AnyPath | None = None,
    runs_model: bool = False,
) -> RowValues:
    """Return columns of a set, computing those of the shards that do not have them.

    Args:
        types: Types of the columns by name; each is stored in `columns/NAME`.
        compute: Picklable function, called in a task with the set of all stored rows of one shard;
            returns a value for each of them by column.
        on_rows: Called with (done, total): numbers of rows that have values, and of all rows of the
            shards. Not called if none are computed.
        folder: Folder of a set in which the columns are stored; None: that of `prepared`.
        runs_model: Whether tasks use GPUs, if there are any.

    Returns:
        The columns. Tasks run on Ray if it is initialized, otherwise in child processes.

    Raises:
        OSError: The columns cannot be written.
        ResourceError: Tasks die.
    """
    folder = prepared.folder if folder is None else folder
    columns = separate_columns(types)
    for name in types:
        (folder / COLUMNS_DIR / name).mkdir(parents=True, exist_ok=True)
    values = RowValues(folder, columns)
    shards = [replace(shard, dropped=b"") for shard in prepared.shards if shard.num_kept]
    missing = [shard for shard in shards if not values.has(shard.key)]
    if not missing:
        return values
    total = sum(shard.num_rows for shard in shards)
    done = total - sum(shard.num_rows for shard in missing)
    on_rows(done, total)
    size = -(-len(missing) // MAX_FILES)
    items = [missing[start : start + size] for start in range(0, len(missing), size)]
    # Without a cache.
    manifest = replace(prepared.manifest, shards=())
    bare = PreparedSet(prepared.folder, manifest, captions=prepared.captions)
    work = partial(_compute_task, prepared=bare, folder=folder, compute=compute)
    with closing(map_tasks(work, items, runs_model=runs_model)) as results:
        for num_rows in results:
            done += num_rows
            on_rows(done, total)
    for name in types:
        update_index(folder, name)
    return RowValues(folder, columns)


def _compute_task(
    shards: list[Shard], prepared: PreparedSet, folder: AnyPath, compute: Compute
) -> int:
    """Ray task: write the columns of some shards; return their number of rows."""
    computed = {shard.key: compute(prepared.with_shards((shard,))) for shard in shards}
    for name in computed[shards[0].key]:
        values = {
            key: pa.RecordBatch.from_pydict({name: columns[name]})
            for key, columns in computed.items()
        }
        write_values(folder, name, values)
    return sum(shard.num_rows for shard in shards)


def row_batches(prepared: PreparedSet) -> list[np.ndarray]:
    """Return the numbers of the rows of a set in groups of READ_ROWS (64), to read them."""
    return np.split(np.arange(prepared.num_rows), range(READ_ROWS, prepared.num_rows, READ_ROWS))
