"""`mmray select`: a smaller prepared set of the rows that a condition selects, without rows whose
images are similar to those of others.

Tasks copy the stored rows, so no image is decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from mmray.data.prepare.pipeline import SHARD_ROWS, PrepareProgress, create_folders
from mmray.data.prepare.tasks import Result, map_tasks
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import (
    SHARDS,
    TOKENIZER,
    Manifest,
    RowCounts,
    shard_fields,
    write_manifest,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.data.store.row_values import update_index, write_values
from mmray.data.store.selection import check_where, drop_rows
from mmray.data.store.shard_table import Shard
from mmray.data.store.shard_writer import open_shard
from mmray.errors import ResourceError, UsageError, suggest
from mmray.storage.lease import FOLDER as LEASE_FOLDER
from mmray.storage.lease import Lease
from mmray.storage.paths import AnyPath, list_names, to_path, write_atomic

SEMANTIC = "semantic"
_READ_ROWS = 64
_BLOCK = 2048  # embeddings that are compared at a time
_CHUNK = 1 << 14  # kept embeddings that they are compared with at a time
_ROUNDING = 1e-6  # rounding error of a cosine in float32
_HINT = "Fix it, delete the folder and rerun the command."


def check_selection(source: str, where: str | None, deduplicate: str | None) -> PreparedSet:
    """Open a set, and check the arguments of `select_set` against its columns.

    Args:
        where: Condition on the columns of a row, such as `clip_score > 0.25`; None: all rows.
        deduplicate: `COLUMN=COSINE`, such as `semantic=0.95`: a column of embeddings that `mmray
            score --embeddings` wrote (`semantic`: the only one), and the cosine (above 0, at most
            1) from which images count as equal. None: not requested.

    Raises:
        UsageError: One is invalid, or names a column that the set does not have.
        DataError: `source` is not a prepared set.
    """
    prepared = PreparedSet.open(source)
    if where is not None:
        check_where(where, column_types(prepared.manifest.columns), source, "--where")
    _embedding_column(prepared, deduplicate)
    return prepared


def select_set(
    prepared: PreparedSet,
    out: str,
    where: str | None,
    deduplicate: str | None,
    progress: Callable[[PrepareProgress], None],
    log: Callable[[str, str], None],
) -> Manifest:
    """Write a set of some rows of a set, with their columns and in their order.

    Args:
        prepared: The set, as `check_selection` returns it.
        out: Folder of the smaller set, which is empty or does not exist.
        where: Condition on the columns of a row, such as `similarity > 0.3 and width >= 200`; None:
            all rows.
        deduplicate: `semantic=0.95` drops a row whose image has an embedding with at least this
            cosine to that of a held-out or an earlier row that is kept. None: none are dropped.
        progress: Called with a PrepareProgress, whose `stage` is `select`, `compare` or `copy`;
            `done_rows` and `total_rows` are set.
        log: Called with (message, label): `selected`, with the number of rows for which `where`
            holds, and `similar`, with the number of those that `deduplicate` drops.

    Returns:
        The Manifest of the smaller set, which is written to `out`.

    Raises:
        UsageError: The condition is invalid, no row is left, or `out` is not empty.
        DataError: The set cannot be read, or a column is missing in a shard.
        ResourceError: Storage or cluster failed, maybe temporarily.
    """
    column = _embedding_column(prepared, deduplicate)
    folder = to_path(out)
    try:
        names = set(list_names(folder)) - {LEASE_FOLDER}
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error}; choose another folder") from None
    if names:
        raise UsageError(
            f"{out} is not empty: choose another folder, or delete what an interrupted select left"
        )
    num_all = prepared.num_rows
    if where is not None:
        prepared = drop_rows(
            prepared,
            where,
            "--where",
            lambda done, total: progress(PrepareProgress("select", done, total)),
        )
        log(f"{prepared.num_rows:,} of {num_all:,} rows: {where}", "selected")
    if column is not None:
        name, cosine = column
        before = prepared.num_rows
        prepared = _without_similar_rows(prepared, name, cosine, progress)
        log(
            f"{before - prepared.num_rows:,} of {before:,} rows, with a cosine of at least "
            f"{cosine:g} to a kept one",
            "similar",
        )
    selection = {"where": where, "deduplicate": deduplicate}
    create_folders(folder)
    try:
        with Lease(folder, activity="being written", advice="choose another folder") as lease:
            manifest = _copy(prepared, folder, selection, progress)
            lease.check()
            if prepared.manifest.tokenizer:
                write_atomic(folder / TOKENIZER, (prepared.folder / TOKENIZER).read_bytes())
            write_manifest(folder, manifest)
    except OSError as error:
        raise ResourceError(f"select failed at {out}: {error}. {_HINT}") from error
    return manifest


def _embedding_column(prepared: PreparedSet, deduplicate: str | None) -> tuple[str, float] | None:
    """Return the column of embeddings and the cosine that `--deduplicate` names; None without it.

    Raises UsageError.
    """
    if deduplicate is None:
        return None
    name, _, number = deduplicate.partition("=")
    try:
        cosine = float(number)
    except ValueError:
        cosine = 0.0
    if not 0 < cosine <= 1:
        raise UsageError(
            f"--deduplicate {deduplicate}: write for example semantic=0.95, with a cosine above 0 "
            "and at most 1 from which images count as equal"
        )
    types = column_types(prepared.manifest.columns)
    known = [column for column, kind in types.items() if kind.startswith("float16[")]
    if not known:
        raise UsageError(
            f"--deduplicate {deduplicate}: {prepared.folder} has no embeddings; "
            f"`mmray score {prepared.folder} --weights FILE --embeddings` writes them"
        )
    if name == SEMANTIC and len(known) == 1:
        return known[0], cosine
    if name not in known:
        raise UsageError(
            f"--deduplicate {deduplicate}: {prepared.folder} has no column of embeddings `{name}`; "
            f"{suggest(name, known)}"
        )
    return name, cosine


def _without_similar_rows(
    prepared: PreparedSet,
    column: str,
    cosine: float,
    progress: Callable[[PrepareProgress], None],
) -> PreparedSet:
    table = prepared.table
    shards = prepared.shard_numbers.tolist()
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # of a shard rows and their embeddings
    columns = prepared.values.read([*map(table.key, shards)], [column])
    for number, values in zip(shards, columns, strict=True):
        has_value = np.flatnonzero(np.asarray(values[column].is_valid()))
        rows = np.setdiff1d(has_value, table.dropped(number))
        chosen = values[column].take(pa.array(rows))
        vectors = chosen.flatten().to_numpy().reshape(len(rows), chosen.type.list_size)
        parts.append((rows, vectors))
    sizes = [len(rows) for rows, _ in parts]
    embeddings = np.concatenate([each for _, each in parts])
    is_training = [table[number].split not in HELD_OUT_SPLITS for number in shards]
    later = np.repeat(is_training, sizes)
    order = np.argsort(later, kind="stable")
    similar = np.zeros(len(order), bool)
    similar[order] = find_similar(
        embeddings[order],
        cosine,
        lambda done: progress(PrepareProgress("compare", done, len(order))),
    )
    similar_in = np.split(similar, np.cumsum(sizes)[:-1])
    dropped = {
        number: np.union1d(table.dropped(number), rows[is_similar])
        for number, (rows, _), is_similar in zip(shards, parts, similar_in, strict=True)
        if is_similar.any()
    }
    return prepared.with_shards(table.with_dropped(dropped))


def find_similar(
    embeddings: np.ndarray, cosine: float, on_rows: Callable[[int], None]
) -> np.ndarray:
    """Return which rows are near-duplicates: similar to an earlier row that is none itself.

    So the first of several similar rows is kept. The time grows with the square of the number of
    rows.

    Args:
        embeddings: Float [N, D], one for each row; they need not be normalized.
        cosine: Cosine similarity from which two rows are similar.
        on_rows: Called with the number of rows compared so far.

    Returns:
        bool [N], True for a near-duplicate.
    """
    kept_embeddings = np.empty(embeddings.shape, np.float32)
    num_kept = 0
    limit = cosine - _ROUNDING
    similar = np.zeros(len(embeddings), bool)
    for start in range(0, len(embeddings), _BLOCK):
        block = embeddings[start : start + _BLOCK].astype(np.float32)
        block /= np.linalg.norm(block, axis=1, keepdims=True)  # float16 rounds the length too
        is_similar = np.zeros(len(block), bool)
        for first in range(0, num_kept, _CHUNK):
            part = kept_embeddings[first : min(first + _CHUNK, num_kept)]
            is_similar |= (block @ part.T >= limit).any(axis=1)
        pairs = block @ block.T >= limit
        for number in range(len(block)):
            if not is_similar[number]:
                is_similar[number + 1 :] |= pairs[number, number + 1 :]
        new = block[~is_similar]
        kept_embeddings[num_kept : num_kept + len(new)] = new
        num_kept += len(new)
        similar[start : start + len(block)] = is_similar
        on_rows(start + len(block))
    return similar


def _groups(prepared: PreparedSet) -> Iterator[list[Shard]]:
    """Yield adjacent shards of one split whose kept rows become one shard."""
    setting = prepared.manifest.settings.get("rows_per_shard")
    size = setting if isinstance(setting, int) else SHARD_ROWS
    group: list[Shard] = []
    for shard in prepared.shards:
        is_full = sum(each.num_kept for each in group) + shard.num_kept > size
        if group and (is_full or group[0].split != shard.split):
            yield group
            group = []
        if shard.num_kept:
            group.append(shard)
    if group:
        yield group


def _copy(
    prepared: PreparedSet,
    folder: AnyPath,
    selection: dict[str, Any],
    progress: Callable[[PrepareProgress], None],
) -> Manifest:
    """Write the shards of the kept rows; return the manifest."""
    groups = list(_groups(prepared))
    work = partial(
        _copy_task,
        source=prepared.with_shards(()),
        out=str(folder),
    )
    items = [
        {"number": number, "shards": [dict(vars(shard)) for shard in group]}
        for number, group in enumerate(groups)
    ]
    entries: dict[int, Shard] = {}
    counts = RowCounts()
    done = 0
    with closing(map_tasks(work, items, hint=_HINT)) as results:
        for result in results:
            shard = Shard.from_json(result["shard"])
            entries[result["number"]] = shard
            for language, kinds, number in result["rows"]:
                counts.add(shard.split, language, kinds, number)
            done += shard.num_rows
            progress(PrepareProgress("copy", done, prepared.num_rows))
    before = prepared.manifest
    for each in before.columns:
        update_index(folder, each)
    return replace(
        before,
        num_read=done,
        num_quarantined=0,
        reasons={},
        # Another name, so that `mmray prepare` does not take the set for the one of the source.
        source=before.source | {"name": f"a selection of {before.source.get('name')}"} | selection,
        num_same_text=0,
        leakage={},
        **shard_fields([entries[number] for number in range(len(groups))]),
        **counts.fields(),
    )


def _copy_task(item: dict[str, Any], source: PreparedSet, out: str) -> Result:
    """Ray task: copy the kept rows of adjacent shards to one shard, with their columns."""
    shards = [Shard.from_json(each) for each in item["shards"]]
    folder = to_path(out)
    prepared = source.with_shards(tuple(shards))
    split = shards[0].split
    name = f"{SHARDS}/{item['number']:05d}-{split or 'rows'}.arrow"
    rows: Counter[tuple[str | None, str]] = Counter()
    with open_shard(folder, name, split) as writer:
        for start in range(0, prepared.num_rows, _READ_ROWS):
            numbers = np.arange(start, min(start + _READ_ROWS, prepared.num_rows))
            for row in prepared.read_without_references(numbers):
                writer.append(row)
                rows[row.language, row.media_kinds] += 1
    for group in source.manifest.columns:
        _copy_columns(prepared, shards, group, folder, writer.entry())
    return {
        "number": item["number"],
        "shard": vars(writer.entry()),
        "rows": [[*kind, count] for kind, count in rows.items()],
    }


def _copy_columns(
    prepared: PreparedSet, shards: Sequence[Shard], group: str, folder: AnyPath, copied: Shard
) -> None:
    """Write the columns of the kept rows of some shards, of one folder of columns."""
    names = list(prepared.manifest.columns[group])
    batches = []
    parts = prepared.values.read([shard.key for shard in shards], names)
    for shard, columns in zip(shards, parts, strict=True):
        rows = np.setdiff1d(np.arange(shard.num_rows), np.array(shard.dropped, np.int64))
        batches.append(pa.table(columns).take(pa.array(rows)))
    joined = pa.concat_tables(batches).combine_chunks().to_batches()
    write_values(folder, group, {copied.key: joined[0]})
