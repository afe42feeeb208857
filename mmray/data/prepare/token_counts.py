"""Token counts of the rows of a set: 4 bytes a row, computed once for each set and processor.

Counts are files next to the shards, `tokens/PROCESSOR/SHARD.npy`. A shard that has one is not
counted again, so a killed job resumes, and a set that grew is counted where it is new. Sizes and
texts are enough: no image is decoded.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mmray.data.images.decode import BadImage, header_size
from mmray.data.media.decode import read_header
from mmray.data.prepare.tasks import Result, map_tasks
from mmray.data.store.manifest import Manifest
from mmray.data.store.mixture import PreparedMixture, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard
from mmray.data.store.stored_row import Media, Row
from mmray.errors import ResourceError
from mmray.storage.paths import AnyPath, list_names, to_path, write_atomic
from mmray.storage.requests import iter_parallel

TOKENS_DIR = "tokens"
# Count of a row that cannot be read or encoded. Its reason is written when the run reads it.
NOT_COUNTED = 0
READ_BATCH_ROWS = 64
RowCounter = Callable[[Row], int]


class TokenCounter(Protocol):
    """Counts the tokens of rows; pickled to the tasks.

    `digest` identifies what determines the counts: tokenizer, chat template and sizes of images.
    """

    @property
    def digest(self) -> str:
        """Hex digest of what determines the counts: tokenizer, chat template, sizes of images."""
        ...

    def build(self) -> RowCounter:
        """Return a function that counts the tokens of a stored row (text and sizes of images, no
        pixels).

        It is called once in each process. The function raises ValueError for a row that cannot be
        encoded.
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
        counter: Counts the tokens of a row. Counts are stored in the folder of the set, in a file
            named by its `digest` (hash of tokenizer, chat template and sizes of images).
        on_rows: Called with the number of rows counted so far and the number to count.

    Returns:
        uint32 [num_rows]; 0 for a row that cannot be read or encoded. Counting runs as Ray tasks if
        Ray is initialized, otherwise in child processes.

    Raises:
        ResourceError: The counts cannot be written, or tasks die.
    """
    if isinstance(prepared, PreparedMixture):
        return np.concatenate([token_counts(each, counter, on_rows) for each in prepared.sets])
    folder = prepared.folder / TOKENS_DIR / counter.digest[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        existing = set(list_names(folder))
        missing = [shard for shard in prepared.shards if _file_name(shard) not in existing]
        done = 0
        total = sum(shard.num_kept for shard in missing)
        on_rows(done, total)
        without_shards = replace(prepared.manifest, shards=())
        work = partial(
            _count_task,
            set_address=str(prepared.folder),
            manifest=without_shards,
            counts_address=str(folder),
            counter=counter,
        )
        with closing(map_tasks(work, [asdict(shard) for shard in missing])) as results:
            for result in results:
                done += result["num_rows"]
                on_rows(done, total)
        return _load(folder, prepared.shards)
    except OSError as error:
        raise ResourceError(
            f"cannot write the token counts of {prepared.folder} to {folder}: {error}. Make the "
            "folder of the set writable, or copy the set"
        ) from error


def _file_name(shard: Shard) -> str:
    """Return the name of the counts of a shard, which are of the rows that are not dropped."""
    return f"{hashlib.sha256(f'{shard.sha256} {shard.dropped}'.encode()).hexdigest()[:32]}.npy"


def _load(folder: AnyPath, shards: tuple[Shard, ...]) -> np.ndarray:
    def read(shard: Shard) -> np.ndarray:
        data = (folder / _file_name(shard)).read_bytes()
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False), np.uint32)

    return np.concatenate([np.zeros(0, np.uint32), *iter_parallel(read, shards)])


# The counter of this process by its digest: building one takes seconds.
_COUNTERS: dict[str, RowCounter] = {}


def _count_task(
    item: dict[str, Any],
    set_address: str,
    manifest: Manifest,
    counts_address: str,
    counter: TokenCounter,
) -> Result:
    """Ray task: write the token counts of a shard."""
    if counter.digest not in _COUNTERS:
        _COUNTERS.clear()
        _COUNTERS[counter.digest] = counter.build()
    count = _COUNTERS[counter.digest]
    shard = Shard.from_json(item)
    prepared = PreparedSet(to_path(set_address), replace(manifest, shards=(shard,)))
    counts = np.full(prepared.num_rows, NOT_COUNTED, np.uint32)
    for start in range(0, prepared.num_rows, READ_BATCH_ROWS):
        numbers = np.arange(start, min(start + READ_BATCH_ROWS, prepared.num_rows))
        for number, row in zip(numbers.tolist(), _read_sized(prepared, numbers), strict=True):
            if isinstance(row, Exception):
                continue
            try:
                counts[number] = count(row)
            except ValueError:
                counts[number] = NOT_COUNTED
    file = io.BytesIO()
    np.save(file, counts)
    write_atomic(to_path(counts_address) / _file_name(shard), file.getvalue())
    return {"num_rows": prepared.num_rows}


def _read_sized(prepared: PreparedSet, numbers: np.ndarray) -> list[Row | Exception]:
    """Return rows, or the error of a row, with the sizes of their images; images are read only if
    the set does not have their sizes.
    """
    try:
        rows: list[Row | Exception] = [*prepared.read_without_references(numbers)]
    except ValueError:
        rows = read_each(prepared, numbers)
    if not any(isinstance(row, Row) and _lacks_size(row) for row in rows):
        return rows
    rows = read_each(prepared, numbers)
    for index, row in enumerate(rows):
        if isinstance(row, Row) and _lacks_size(row):
            try:
                for media in filter(_lacks_header, row.media):
                    _read_header(media)
            except BadImage as error:
                rows[index] = error
    return rows


def _lacks_size(row: Row) -> bool:
    return any(_lacks_header(media) for media in row.media)


def _lacks_header(media: Media) -> bool:
    return not media.width if media.kind == "image" else media.duration is None


def _read_header(media: Media) -> None:
    """Set the size, and the duration of audio and video. Raises BadImage."""
    if media.kind == "image":
        media.width, media.height = header_size(media.data)
        return
    info = read_header(media.data, media.kind)
    media.width = info.width
    media.height = info.height
    media.duration = info.duration_s
