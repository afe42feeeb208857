"""`mmray select`: a smaller prepared set of the rows that a condition selects, without rows whose
images are similar to those of others.

Tasks copy the stored rows, so no image is decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa

from mmray.data.partitions import read_part, write_parts
from mmray.data.prepare.map_shards import row_batches
from mmray.data.prepare.pipeline import SHARD_ROWS, Log, OnProgress, PrepareProgress, create_folders
from mmray.data.prepare.tasks import map_tasks
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import (
    SHARDS,
    TOKENIZER,
    Manifest,
    media_fields,
    shard_fields,
    write_manifest,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.data.store.row_values import update_index, write_values
from mmray.data.store.selection import check_where, drop_rows
from mmray.data.store.shard_table import Shard, pack_rows
from mmray.data.store.shard_writer import open_shard
from mmray.errors import ResourceError, UsageError, suggest
from mmray.storage.lease import FOLDER as LEASE_FOLDER
from mmray.storage.lease import Lease
from mmray.storage.paths import (
    AnyPath,
    list_names,
    remove_tree,
    to_path,
    write_atomic,
)

SEMANTIC = "semantic"
_BLOCK = 256  # embeddings that are compared with the earlier ones at a time
CLUSTER_ROWS = 1 << 15  # on average; a set with no more rows is one cluster
SAMPLE_ROWS = 1 << 17  # from which centroids are computed: 43 a centroid at 100 million rows
FILE_ROWS = 1 << 18  # embeddings of a task that divides them into clusters
CLUSTERS_DIR = "clusters"  # deleted at the end
MAX_SHARD_ROWS = 1 << 32  # in the ID of a row: number of its shard times this, plus its own
_ROUNDING = 1e-6  # rounding error of a cosine in float32
_HINT = "Fix it, delete the folder and rerun the command."


def check_selection(source: str, where: str | None, deduplicate: str | None) -> PreparedSet:
    """Open a set, and check the arguments of `select_set` against its columns.

    Args:
        deduplicate: `COLUMN=COSINE`, a column of embeddings (`semantic`: the only one) and the
            cosine from which images count as equal; None: not requested.

    Raises:
        UsageError: An argument is invalid, or names a column that the set does not have.
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
    progress: OnProgress,
    log: Log,
) -> Manifest:
    """Write a set of some rows of a set, with their columns and in their order.

    Args:
        prepared: The set, as `check_selection` returns it.
        out: Folder of the smaller set, which is empty or does not exist.
        where: Condition on the columns of a row, such as `similarity > 0.3 and width >= 200`; None:
            all rows.
        deduplicate: `semantic=0.95` drops a row whose image has an embedding with at least this
            cosine to that of a held-out or an earlier row that is kept. None: none are dropped.
        log: Called with (message, label): `selected`, with the number of rows for which `where`
            holds, `not compared`, with the number of those without an embedding, and `similar`,
            with the number of those that `deduplicate` drops.

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
    selection = {"where": where, "deduplicate": deduplicate}
    create_folders(folder)
    try:
        with Lease(folder, activity="being written", advice="choose another folder") as lease:
            if column is not None:
                before = prepared.num_rows
                prepared, num_compared = _without_similar_rows(prepared, *column, folder, progress)
                if num_compared < before:
                    log(
                        f"{before - num_compared:,} of {before:,} rows have no embedding in "
                        f"{column[0]}, and all of them are kept",
                        "not compared",
                    )
                log(
                    f"{before - prepared.num_rows:,} of {before:,} rows, with a cosine of at least "
                    f"{column[1]:g} to a kept one",
                    "similar",
                )
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
    if prepared.num_rows > CLUSTER_ROWS and find_spec("faiss") is None:
        raise UsageError(
            f"--deduplicate {deduplicate} of more than {CLUSTER_ROWS:,} rows needs the package "
            "faiss: pip install 'mmray[leakage]'"
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
    folder: AnyPath,
    progress: OnProgress,
) -> tuple[PreparedSet, int]:
    """Drop rows whose embedding is similar to that of an earlier row of the same cluster (SemDeDup;
    Abbas et al. 2023), and return the number of rows with an embedding too. The clusters are
    written to a folder, so no process has all embeddings.
    """
    table = prepared.table
    shards = prepared.shard_numbers
    is_training = [table[number].split not in HELD_OUT_SPLITS for number in shards.tolist()]
    num_files = -(-prepared.num_rows // FILE_ROWS)
    parts = np.array_split(shards[np.argsort(is_training, kind="stable")], num_files)
    (folder / CLUSTERS_DIR).mkdir()
    files = [folder / CLUSTERS_DIR / f"{number}.arrow" for number in range(num_files)]
    items = []
    for file, part in zip(files, parts, strict=True):
        items.append((file, [(number, table[number]) for number in part.tolist()]))
    centroids = _centroids(prepared, column)
    bare = prepared.with_shards(())
    divide = partial(_divide_task, source=bare, column=column, centroids=centroids)
    with closing(map_tasks(divide, items, hint=_HINT)) as results:
        total = sum(results)
    compare = partial(_compare_task, files=files, cosine=cosine)
    similar = [np.zeros(0, np.int64)]
    done = 0
    with closing(map_tasks(compare, range(len(centroids)), hint=_HINT)) as results:
        for num_rows, ids in results:
            similar.append(ids)
            done += num_rows
            progress(PrepareProgress("compare", done, total))
    remove_tree(folder / CLUSTERS_DIR)
    numbers, rows = np.divmod(np.sort(np.concatenate(similar)), MAX_SHARD_ROWS)
    numbers, first = np.unique(numbers, return_index=True)
    dropped = {
        number: pack_rows(np.union1d(table.dropped(number), of_shard), int(table.num_rows[number]))
        for number, of_shard in zip(numbers.tolist(), np.split(rows, first)[1:], strict=True)
    }
    return prepared.with_shards(table.with_dropped(dropped)), total


def _centroids(prepared: PreparedSet, column: str) -> np.ndarray:
    """Return the centroids of the clusters of a set, float32 [K, D], from a sample of its rows."""
    shards = np.random.default_rng(0).permutation(prepared.shard_numbers)
    shards = shards[: -(-len(shards) * SAMPLE_ROWS // prepared.num_rows)]
    sample = [(number, prepared.table[number]) for number in shards.tolist()]
    vectors = _vectors(pa.concat_tables(_embeddings(prepared, column, sample)))
    num_clusters = -(-prepared.num_rows // CLUSTER_ROWS)
    if num_clusters == 1:
        return np.zeros((1, vectors.shape[1]), np.float32)
    import faiss  # optional dependency

    kmeans = faiss.Kmeans(vectors.shape[1], num_clusters, niter=10, spherical=True)
    kmeans.train(vectors)
    return np.asarray(kmeans.centroids)


def _embeddings(
    prepared: PreparedSet, column: str, shards: Sequence[tuple[int, Shard]]
) -> Iterator[pa.Table]:
    """Yield `id` and `embedding` of the kept rows of each shard that have one."""
    columns = prepared.values.read([shard.key for _, shard in shards], [column])
    for (number, shard), values in zip(shards, columns, strict=True):
        has_value = np.flatnonzero(np.asarray(values[column].is_valid()))
        rows = np.intersect1d(has_value, shard.kept)
        ids = number * MAX_SHARD_ROWS + rows
        yield pa.table({"id": ids, "embedding": values[column].take(pa.array(rows))})


def _vectors(table: pa.Table) -> np.ndarray:
    """Return the embeddings with length 1, float32 [N, D]."""
    column = table["embedding"].combine_chunks()
    values = column.flatten().to_numpy().astype(np.float32)
    vectors: np.ndarray = values.reshape(-1, column.type.list_size)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # float16 rounds the length too
    return vectors


def _divide_task(
    item: tuple[AnyPath, list[tuple[int, Shard]]],
    source: PreparedSet,
    column: str,
    centroids: np.ndarray,
) -> int:
    """Ray task: write the embeddings of some shards to a file, divided by their clusters; return
    their number.
    """
    file, shards = item
    tables = list(_embeddings(source, column, shards))
    clusters = [(_vectors(table) @ centroids.T).argmax(axis=1) for table in tables]
    table = pa.concat_tables(tables)
    write_parts(file, table, np.concatenate(clusters), len(centroids))
    return len(table)


def _compare_task(cluster: int, files: Sequence[AnyPath], cosine: float) -> tuple[int, np.ndarray]:
    """Ray task: return the number of rows of a cluster, and which are similar to earlier ones."""
    table = read_part(files, cluster)
    similar = find_similar(_vectors(table), cosine)
    return len(table), table["id"].filter(similar).to_numpy()


def find_similar(vectors: np.ndarray, cosine: float) -> np.ndarray:
    """Return which rows, bool [N], are similar to an earlier row that is not similar itself.

    The time grows with the square of the number of rows.

    Args:
        vectors: Embeddings of length 1, float [N, D].
        cosine: Cosine similarity from which two rows are similar.
    """
    limit = cosine - _ROUNDING
    similar = np.zeros(len(vectors), bool)
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK]
        is_similar = ((block @ vectors[:start].T >= limit) & ~similar[:start]).any(axis=1)
        pairs = block @ block.T >= limit
        for number in range(len(block)):
            if not is_similar[number]:
                is_similar[number + 1 :] |= pairs[number, number + 1 :]
        similar[start : start + _BLOCK] = is_similar
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
    prepared: PreparedSet, folder: AnyPath, selection: dict[str, Any], progress: OnProgress
) -> Manifest:
    """Write the shards of the kept rows; return the manifest."""
    groups = list(enumerate(_groups(prepared)))
    work = partial(_copy_task, source=prepared.with_shards(()), folder=folder)
    shards: dict[int, Shard] = {}
    counts: Counter[tuple[str, str]] = Counter()
    done = 0
    with closing(map_tasks(work, groups, hint=_HINT)) as results:
        for number, shard, rows in results:
            shards[number] = shard
            for kinds, count in rows.items():
                counts[shard.split or "", kinds] += count
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
        **shard_fields([shards[number] for number in sorted(shards)]),
        **media_fields(counts),
    )


def _copy_task(
    item: tuple[int, list[Shard]], source: PreparedSet, folder: AnyPath
) -> tuple[int, Shard, Counter[str]]:
    """Ray task: copy the kept rows of adjacent shards to one shard, with their columns."""
    number, shards = item
    prepared = source.with_shards(tuple(shards))
    split = shards[0].split
    rows: Counter[str] = Counter()
    with open_shard(folder, f"{SHARDS}/{number:05d}-{split or 'rows'}.arrow", split) as writer:
        for numbers in row_batches(prepared):
            for row in prepared.read_without_references(numbers):
                writer.append(row)
                rows[row.media_kinds] += 1
    for group in source.manifest.columns:
        _copy_columns(prepared, shards, group, folder, writer.entry())
    return number, writer.entry(), rows


def _copy_columns(
    prepared: PreparedSet, shards: Sequence[Shard], group: str, folder: AnyPath, copied: Shard
) -> None:
    """Write the columns of the kept rows of some shards, of one folder of columns."""
    names = list(prepared.manifest.columns[group])
    batches = []
    parts = prepared.values.read([shard.key for shard in shards], names)
    for shard, columns in zip(shards, parts, strict=True):
        batches.append(pa.table(columns).take(pa.array(shard.kept)))
    joined = pa.concat_tables(batches).combine_chunks().to_batches()
    write_values(folder, group, {copied.key: joined[0]})
