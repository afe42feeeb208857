"""Arrays that tasks compute for each shard of a set, and store: token counts, hashes of images.

A shard that has a file is not computed again. So a killed job resumes, and of a set that grew only
the new shards are computed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mmray.data.prepare.tasks import Result, map_tasks
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard
from mmray.storage.paths import AnyPath, list_names, to_path, write_atomic
from mmray.storage.requests import iter_parallel


def array_file(shard: Shard) -> str:
    """Return the name of the .npy file in which `shard_arrays` stores the array that was computed
    for a shard, such as numbers of tokens.

    The array has no values for dropped rows, so the name depends on them.

    Args:
        shard: Entry of the shard in the manifest; its digest and dropped rows are read.
    """
    return f"{hashlib.sha256(f'{shard.sha256} {shard.dropped}'.encode()).hexdigest()[:32]}.npy"


def shard_arrays(
    prepared: PreparedSet,
    folder: AnyPath,
    compute: Callable[[PreparedSet], np.ndarray],
    on_rows: Callable[[int, int], None],
) -> list[np.ndarray]:
    """Return an array of each shard of a set, computing those that are not stored yet.

    Args:
        folder: Folder of the arrays, which is created, and which all nodes can write. Each array is
            a file in it, named by `array_file`.
        compute: Picklable function, called in a task with a PreparedSet of the rows of one shard;
            returns an array of any shape without Python objects, such as a value for each row.
        on_rows: Called with (done, total): numbers of rows computed so far and to compute, without
            those of stored arrays.

    Returns:
        What `compute` returned for each shard, in order. Tasks run on Ray if it is initialized,
        otherwise in child processes.

    Raises:
        OSError: The arrays cannot be written.
        ResourceError: Tasks die.
    """
    folder.mkdir(parents=True, exist_ok=True)
    existing = set(list_names(folder))
    shards = prepared.shards
    missing = [shard for shard in shards if array_file(shard) not in existing]
    done = 0
    total = sum(shard.num_kept for shard in missing)
    on_rows(done, total)
    # Without a cache.
    manifest = replace(prepared.manifest, shards=())
    bare = PreparedSet(prepared.folder, manifest, captions=prepared.captions)
    work = partial(_compute_task, prepared=bare, folder=str(folder), compute=compute)
    with closing(map_tasks(work, [dict(vars(shard)) for shard in missing])) as results:
        for result in results:
            done += result["num_rows"]
            on_rows(done, total)

    def read(shard: Shard) -> np.ndarray:
        data = (folder / array_file(shard)).read_bytes()
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        return array

    return list(iter_parallel(read, shards))


def _compute_task(
    item: dict[str, Any],
    prepared: PreparedSet,
    folder: str,
    compute: Callable[[PreparedSet], np.ndarray],
) -> Result:
    """Ray task: write the array of a shard."""
    shard = Shard.from_json(item)
    file = io.BytesIO()
    np.save(file, compute(prepared.with_shards((shard,))))
    write_atomic(to_path(folder) / array_file(shard), file.getvalue())
    return {"num_rows": shard.num_kept}
