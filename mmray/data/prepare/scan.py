"""Scan the source of a set, and store the scan in the folder of the set, so that the next prepare
only scans what has changed; and what identifies the source, so that a folder is of one source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import orjson

from mmray.data.formats.source import RawRow, Scan, Source, SourceChunk
from mmray.data.labels import Labels, find_names, label_number, summarize_labels
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.preview import check_columns, describe_source
from mmray.data.prepare.records import PackedRows, map_rows
from mmray.data.store.manifest import SCAN, Manifest
from mmray.errors import UsageError
from mmray.storage.paths import write_atomic

NUM_FIRST_ROWS = 100
MAX_LABELED_ROWS = 100_000  # rows whose labels are read on the driver, not in tasks


def scan_source(
    job: PrepareJob, on_rows: Callable[[int], None], log: Callable[[str, str], None]
) -> tuple[Source, Scan]:
    """Scan a source, and find the names of its classes.

    Args:
        job: Its output folder must exist, because some formats write a list of files.
        on_rows: Called with the number of rows that were scanned so far; 0 at the start.
        log: Called with (message, heading) of what `prepare` understood.

    Raises:
        DataError: The source is invalid, or has no columns of images or texts.
        UsageError: It has no column of `prepare.keep`.
    """
    source = job.open()
    source.earlier = _read_scan(job)
    on_rows(0)  # some formats list all files before the first chunk
    chunks: list[SourceChunk] = []
    rows = 0
    for chunk in source.scan(job.rows_per_shard):
        chunks.append(chunk)
        rows += chunk.num_rows or 0
        on_rows(rows)
    first_rows = list(islice(chain.from_iterable(map(source.read, chunks)), NUM_FIRST_ROWS))
    check_columns(job, source, first_rows)
    scan = Scan(source.files, chunks, source.class_names)
    if not scan.class_names and _has_names(scan, first_rows):
        scan = replace(scan, labels=_read_labels(job, chunks, source.earlier))
        source.class_names = find_names(scan.labels, str(source.folder))
    if scan != source.earlier:
        data = orjson.dumps(vars(scan) | {"job": job.digest})
        write_atomic(job.out / SCAN, data)
    for text, heading in describe_source(job, source, scan, first_rows):
        log(text, heading)
    return source, scan


def _read_scan(job: PrepareJob) -> Scan:
    """Return the scan of an earlier prepare with the same settings; an empty one without it."""
    try:
        values = orjson.loads((job.out / SCAN).read_bytes())
        if values.pop("job") != job.digest:
            return Scan()
        chunks = [SourceChunk(**chunk) for chunk in values["chunks"]]
        names = tuple(values["class_names"])
        return Scan(**values | {"chunks": chunks, "class_names": names})
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # or damaged
        return Scan()


def _has_names(scan: Scan, first_rows: Sequence[RawRow]) -> bool:
    """Return whether labels may be names of classes: one of the first rows is a text; of tars a
    name, because reading their labels takes long.
    """
    labels = [row.values.get("label") for row in first_rows if isinstance(row.values, dict)]
    texts = [label for label in labels if isinstance(label, str)]
    if scan.num_rows is None:
        return None in map(label_number, texts)
    return bool(texts)


def _read_labels(job: PrepareJob, chunks: Sequence[SourceChunk], earlier: Scan) -> list[Labels]:
    """Return the labels of each chunk; those of chunks of an earlier scan are not read again."""
    labels = dict(zip(earlier.chunks, earlier.labels, strict=False))
    todo = [chunk for chunk in chunks if chunk not in labels]
    num_rows = sum(
        (chunk.stop - chunk.start) >> 10 if chunk.num_rows is None else chunk.num_rows
        for chunk in todo
    )
    labels |= map_rows(partial(_read_chunk_labels, job=job), todo, num_rows, MAX_LABELED_ROWS)
    return [labels[chunk] for chunk in chunks]


def _read_chunk_labels(chunk: SourceChunk, job: PrepareJob) -> tuple[SourceChunk, Labels]:
    """Task: return a chunk and its labels."""
    return chunk, summarize_labels(job.open().labels(chunk))


def is_continued(before: Manifest, job: PrepareJob, chunks: list[SourceChunk]) -> bool:
    """Return whether the chunks are those of an earlier set, maybe with appended ones.

    Raises UsageError if that set was made from another source.
    """
    identity = _source_identity(job, chunks[: before.source["num_chunks"]])
    if identity.items() <= before.source.items():
        return True
    name = before.source["name"]
    other = job.source.display_name
    if name != other:
        raise UsageError(
            f"{job.out} holds the set made from {name}: choose another folder for {other}"
        )
    return False


def _source_identity(job: PrepareJob, chunks: list[SourceChunk]) -> dict[str, Any]:
    """Return what identifies a source; with --index-only its address too, because the images stay
    there.
    """
    digest = hashlib.sha256("".join(chunk.signature for chunk in chunks).encode()).hexdigest()
    address = {"address": job.source.address} if job.settings.index_only else {}
    return {"name": job.source.display_name, "num_chunks": len(chunks), "sha256": digest, **address}


def source_fields(job: PrepareJob, chunks: list[SourceChunk], packed: PackedRows) -> dict[str, Any]:
    """Return the manifest's entry of the source; `packed` shows which files its chunks are in."""
    names = "".join(shard.file for shard in packed.shards)
    return _source_identity(job, chunks) | {
        "format": job.source.format,
        "folder": job.source.address,
        "file": job.source.name,
        "packed": hashlib.sha256(names.encode()).hexdigest(),
    }
