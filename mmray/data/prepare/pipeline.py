"""Prepare pipeline: scan the source into chunks, pack those that are not done (Ray), deduplicate,
write the manifest.

A chunk is done when its record exists. So a killed prepare resumes, a source that grew is appended
to, and a larger max_bad_fraction reuses all finished work. manifest.json is written last; without
it the folder is not a prepared set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.builtin import SAMPLE_AV, SAMPLE_VLM
from mmray.data.formats.detect import detect_source
from mmray.data.formats.source import Source, SourceChunk
from mmray.data.images import sample
from mmray.data.media.sample import generate_clips
from mmray.data.prepare import assemble, contamination, duplicates
from mmray.data.prepare.contamination import is_enabled
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.kept_columns import merge_types
from mmray.data.prepare.pack import changed_chunks, is_current, pack_task
from mmray.data.prepare.records import PackedRows, Record, fold, plan_folds, read_records
from mmray.data.prepare.scan import is_continued, scan_source, source_fields
from mmray.data.prepare.tasks import ATTEMPT_SUFFIX, RESUME_HINT, map_tasks
from mmray.data.store.manifest import (
    CHUNK_RECORDS,
    MANIFEST,
    QUARANTINE,
    REJECTED_QUARANTINE,
    SHARDS,
    TOKENIZER,
    Manifest,
    media_fields,
    read_manifest,
    shard_fields,
    write_manifest,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import KEPT
from mmray.data.store.row_values import COLUMNS_DIR, update_index
from mmray.data.vlm.sample import generate_conversations
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage import lease
from mmray.storage.paths import (
    TEMP_SUFFIX,
    AnyPath,
    RemotePath,
    check_kept,
    list_names,
    list_sizes,
    to_path,
)
from mmray.storage.requests import parallel_map

if TYPE_CHECKING:
    from mmray.config import Prepare

_SAMPLES = {
    "sample": sample.generate,
    SAMPLE_VLM: generate_conversations,
    SAMPLE_AV: generate_clips,
}
_TOKENIZER_SETTINGS = ("vocab_size", "columns", "caption", "holdout", "duplicates", "drop_overlap")
# A request to a store takes as long as reading some MB.
SHARD_ROWS = 512
STORE_SHARD_ROWS = 4096
_FLAG = re.compile(r"(^|\s)--[a-z]")
_UNSAFE_CHARS = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of `prepare`, or of other work on the rows of a set.

    Attributes:
        stage: Of prepare `scan`, `pack`, `deduplicate`, `hash` (images, for the contamination
            check) or `tokenize` (train a tokenizer). Of `mmray select` `select` (by a condition;
            also before a run), `compare` (embeddings) or `copy`. Of others `score`, `evaluate` or
            `count tokens of` (rows of a training set, for `batch.tokens`).
        done_rows: Rows that the stage has processed.
        total_rows: Rows to process; 0: unknown, as during the scan.
        bad_rows: Rows so far that cannot be used.
        is_estimate: Whether `total_rows` is an estimate.
        unit: What is counted: `rows`, or the `prompts` of zero-shot classification (`evaluate`).
    """

    stage: str
    done_rows: int
    total_rows: int
    bad_rows: int = 0
    is_estimate: bool = False
    unit: str = "rows"


OnProgress = Callable[[PrepareProgress], None]
Log = Callable[[str, str], None]  # message, heading


def ensure_prepared(
    source: str, cache: str, settings: Prepare, log: Log, progress: OnProgress
) -> AnyPath:
    """Return the folder of a prepared set; a raw source is prepared first.

    A raw source is prepared into CACHE/NAME-HASH, on Ray if it is initialized, otherwise in child
    processes. The hash covers its address and all settings except max_bad_fraction, so the next run
    finds it.

    Args:
        source: Address of a prepared set or of a raw source; or `sample`, `sample-vlm` or
            `sample-av`, which are generated in the cache.
        cache: Folder for sets that are prepared here (`data.cache`).
        log: Called with (message, label), where the label, such as `prepared`, is the word to print
            before the message.
        progress: Called with a PrepareProgress: `stage` (`scan`, `pack`, `deduplicate`, `hash` or
            `tokenize`), `done_rows`, `total_rows` (0: unknown), `bad_rows` and `is_estimate`.

    Returns:
        `source` itself if it is a prepared set, otherwise the folder in the cache.

    Raises:
        DataError: The source does not exist, is invalid, or has too many bad rows.
        UsageError: The settings do not fit the source or the cache.
        ResourceError: A failure that may be temporary.
    """
    if is_sample := source in _SAMPLES:
        if isinstance(to_path(cache), RemotePath):
            raise UsageError(
                f"the {source} set needs a local disk, and data.cache is {cache}: set data.cache "
                "to a local folder, or data.train to your own data"
            )
        source = str(_SAMPLES[source](Path(cache) / f"{source}-source"))
    path = to_path(source)
    if (path / MANIFEST).exists():
        return path
    if not path.exists():
        hint = (
            "give a prepared set, a source (file or folder of JSON lines, CSV, Parquet, ...) "
            "or `sample`"
        )
        raise DataError(f"{path} does not exist: {hint}")
    if not is_sample:  # a sample is generated again
        check_kept("data.cache", cache)
    sized = _with_shard_size(settings, to_path(cache))
    hashed = f"{path}\n{sized.model_dump_json(exclude={'max_bad_fraction'})}"
    name = f"{_UNSAFE_CHARS.sub('_', path.stem)}-{hashlib.sha256(hashed.encode()).hexdigest()[:8]}"
    out = to_path(cache) / name
    try:
        manifest = prepare(str(path), str(out), settings, progress, log)
    except (DataError, UsageError) as error:
        if not _FLAG.search(str(error)):
            raise
        raise type(error)(
            f"{error}\nThese are flags of `mmray prepare {path} SET`: run it with them, and use "
            f"SET instead of {path.name}."
        ) from error
    quarantined = f"{manifest.num_quarantined:,} quarantined ({QUARANTINE} has the reasons)"
    log(f"{out}: {manifest.num_rows:,} rows of {path.name}, {quarantined}", "prepared")
    return out


def prepare(
    source: str,
    out: str,
    settings: Prepare,
    progress: OnProgress | None = None,
    log: Log | None = None,
    retry: bool = False,
) -> Manifest:
    """Validate, clean and pack the image-text rows of a source into a prepared set.

    The work runs on Ray if it is initialized, otherwise in child processes. An interrupted prepare
    resumes if it is called again with the same arguments.

    Args:
        out: Folder or URI of the set; it must be empty, or have this set from an earlier prepare.
        progress: Called with one argument, a PrepareProgress, many times per stage: its fields are
            `stage` (`scan`, `pack`, `deduplicate`, `hash` or `tokenize`), `done_rows`, `total_rows`
            (0: unknown), `bad_rows` and `is_estimate`. None: not reported.
        log: Called with (message, label): `source`, `splits`, `ignored`, `columns`, `kept`,
            `example` or `changed`. None: not logged.

    Raises:
        DataError: The source is invalid, or has more bad rows than the settings allow.
        UsageError: The settings do not fit the source, or `out` has other files.
        ResourceError: A failure that may be temporary.
        TrainingError: Another process has taken over the folder.
    """
    try:
        contamination.validate(settings, out)
        folder = to_path(out)
        spec = detect_source(source, settings.format)
        create_folders(folder)
        with lease.Lease(
            folder, activity="being prepared", advice="choose another folder"
        ) as write_lease:
            existing = read_manifest(folder)
            sized = _with_shard_size(settings, folder, existing)
            grows = settings.rows_per_shard == "auto"
            job = PrepareJob(spec, folder, sized, retry, grows=grows)
            return _prepare(
                job,
                existing,
                write_lease,
                progress or (lambda _: None),
                log or (lambda _, __: None),
            )
    except OSError as error:
        raise ResourceError(f"prepare failed: {error}. {RESUME_HINT}") from error


def _with_shard_size(settings: Prepare, out: AnyPath, before: Manifest | None = None) -> Prepare:
    """Return the settings with a number of rows of a shard in place of `auto`: that of the existing
    set `before`, otherwise by the kind of storage.
    """
    if settings.rows_per_shard != "auto":
        return settings
    rows = STORE_SHARD_ROWS if isinstance(out, RemotePath) else SHARD_ROWS
    if before is not None:
        rows = before.settings.get("rows_per_shard", rows)
    return settings.model_copy(update={"rows_per_shard": rows})


def create_folders(out: AnyPath) -> None:
    """Create the folder of a prepared set, and in it `shards`, and `parts` for the records of
    finished parts of the source.

    Args:
        out: Folder of the set; it may have an interrupted or a complete set.

    Raises:
        UsageError: It is not writable, or has other files.
    """
    try:
        names = set(list_names(out)) - {lease.FOLDER}
        if names and not names & {MANIFEST, CHUNK_RECORDS}:
            raise UsageError(f"{out} is not empty and is not a prepared set: choose another folder")
        for name in (CHUNK_RECORDS, SHARDS):
            (out / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error}): choose another folder") from None


def _prepare(
    job: PrepareJob,
    existing: Manifest | None,
    write_lease: lease.Lease,
    progress: OnProgress,
    log: Log,
) -> Manifest:
    out = job.out
    settings = job.settings
    outdated = (TEMP_SUFFIX, ATTEMPT_SUFFIX, REJECTED_QUARANTINE)
    _remove_files(out, lambda name: name.endswith(outdated), ("", SHARDS, CHUNK_RECORDS))
    source, scan = scan_source(job, lambda rows: progress(PrepareProgress("scan", rows, 0)), log)
    chunks = scan.chunks
    total = scan.num_rows
    job = replace(job, class_names=source.class_names)
    before = existing if existing and is_continued(existing, job, chunks) else None
    if changed := _changed_settings(existing, settings):
        log(f"{out} had other settings: {', '.join(changed)}", "changed")
    packed = _pack(job, chunks, total, progress)
    if before is not None and _is_unchanged(before, job, chunks, packed):
        return before
    _fold(packed, write_lease)
    total = packed.num_rows if total is None else total
    if not total:
        raise DataError(
            f"{source.folder / source.name} has no rows (it was read as {source.title}; --format "
            "sets another format)"
        )
    progress(PrepareProgress("deduplicate", total, total))
    with closing(duplicates.Digests(packed, settings.duplicates)) as digests:
        dedup = duplicates.find_duplicates(digests, settings.duplicates)
        num_bad = packed.num_bad + len(dedup.rows)
        is_over_limit = num_bad > assemble.max_bad_rows(settings.max_bad_fraction, total)
        leakage: dict[str, Any] = {}
        if not is_over_limit and is_enabled(settings):
            dedup, leakage = _check_contamination(job, packed, dedup, progress)
        is_rejected = is_over_limit or packed.num_bad + len(dedup.rows) == packed.num_rows
        # an existing set keeps its list
        quarantine = REJECTED_QUARANTINE if is_rejected and existing else QUARANTINE
        result = assemble.quarantine_rows(packed, dedup, quarantine)
        captions = duplicates.caption_fields(digests, dedup.rows, result.shards)
    if is_rejected:
        raise assemble.rejection_error(source, out, total, result, settings.max_bad_fraction)
    manifest = replace(
        _build_manifest(job, source, source_fields(job, chunks, packed), result, existing),
        **captions,
        leakage=leakage,
    )
    progress(PrepareProgress("tokenize", manifest.num_read, total, manifest.num_quarantined))
    # A set that only grew keeps its tokenizer, because models were trained with it.
    old = before.settings if before and before.tokenizer else {}
    values = manifest.settings
    same_captions = all(old.get(name) == values[name] for name in _TOKENIZER_SETTINGS)
    if same_captions or assemble.write_tokenizer(out, manifest, settings.vocab_size):
        manifest = replace(manifest, tokenizer=TOKENIZER)
    # a process that was paused must not overwrite or delete the files of the one that took over
    write_lease.check()
    write_manifest(out, manifest)
    write_lease.check()
    _remove_leftovers(out, result)
    return manifest


def _changed_settings(existing: Manifest | None, settings: Prepare) -> list[str]:
    """Return a text for each setting in which the existing set differs."""
    old = existing.settings if existing else {}
    return [
        f"{name} {old[name]} -> {new}"
        for name, new in settings.model_dump(mode="json").items()
        if name in old and old[name] != new
    ]


def _is_unchanged(
    before: Manifest, job: PrepareJob, chunks: list[SourceChunk], packed: PackedRows
) -> bool:
    """Return whether a set has the rows and the settings that it would get now."""
    return (
        source_fields(job, chunks, packed).items() <= before.source.items()
        and before.settings == job.settings.model_dump(mode="json")
        and not is_enabled(job.settings)  # other sets may have changed
        and (packed.out / QUARANTINE).is_file()
        and (before.tokenizer is None or (packed.out / before.tokenizer).is_file())
    )


def _fold(packed: PackedRows, write_lease: lease.Lease) -> None:
    """Join the records that tasks have written, so that a rerun reads few files."""
    out = packed.out
    if folds := plan_folds(packed.records, list_sizes(out / CHUNK_RECORDS)):
        list(packed.map(partial(fold, out=out), folds))
        write_lease.check()
        current_files = {record.file for record in packed.records}
        _remove_files(out, lambda name: name not in current_files, [CHUNK_RECORDS])


def _remove_leftovers(out: AnyPath, result: assemble.PrepareResult) -> None:
    """Delete the files of killed tasks and of earlier settings.

    The shards come from this process, not from the records, because another writer may have
    replaced one on a store.
    """
    current_files = {shard.file for shard in result.shards}
    _remove_files(out, lambda name: name not in current_files, [SHARDS])
    update_index(out, KEPT, {shard.key for shard in result.shards})


def _check_contamination(
    job: PrepareJob,
    packed: PackedRows,
    dedup: duplicates.DedupResult,
    progress: OnProgress,
) -> tuple[duplicates.DedupResult, dict[str, Any]]:
    """Return the dropped rows, with those that are also in another set or split if they are to be
    dropped, and the summary of the check.
    """
    settings = job.settings
    own = PreparedSet(
        packed.out,
        Manifest(
            num_read=packed.num_rows,
            num_quarantined=packed.num_bad,
            reasons={},
            tokenizer=None,
            source={"address": job.source.address},
            settings=settings.model_dump(mode="json"),
            **shard_fields(packed.without(packed.select(dedup.rows))),
        ),
    )
    found, leakage = contamination.check_contamination(
        own, settings, lambda *rows: progress(PrepareProgress("hash", *rows))
    )
    if settings.drop_overlap:
        rows = packed.row_numbers(*own.positions(np.array(list(found), np.int64)))
        dedup = dedup.with_contaminated(dict(zip(rows.tolist(), found.values(), strict=True)))
    return dedup, leakage


def _build_manifest(
    job: PrepareJob,
    source: Source,
    source_entry: dict[str, Any],
    result: assemble.PrepareResult,
    existing: Manifest | None,
) -> Manifest:
    """Return the manifest of the kept rows, without a tokenizer; scores of an existing set stay.

    Rows that were added have no score until `mmray score` runs again.
    """
    columns = existing.columns if existing else {}
    scores = {name: types for name, types in columns.items() if name != KEPT}
    shards = shard_fields([shard for shard in result.shards if shard.num_kept])
    num_bad = result.reasons.total()
    return Manifest(
        num_read=shards["num_rows"] + num_bad,
        num_quarantined=num_bad,
        reasons=dict(result.reasons.most_common()),
        tokenizer=None,
        source=source_entry,
        settings=job.settings.model_dump(mode="json"),
        class_names=source.class_names,
        columns=scores | merge_types(result.column_types, source.has_types),
        notices=result.notices,
        **shards,
        **media_fields(result.counts),
    )


def _pack(
    job: PrepareJob,
    chunks: list[SourceChunk],
    total: int | None,
    progress: OnProgress,
) -> PackedRows:
    """Pack the chunks that are not done; return the rows of the done ones.

    Stops early if too many rows are bad and the number of rows is known in advance.
    """
    done = _current_records(job, chunks)
    todo = [chunk for chunk in chunks if chunk.index not in done]
    if todo:
        with suppress(FileNotFoundError):
            base = (job.out / MANIFEST).read_bytes()
            job = replace(job, base=hashlib.sha256(base).hexdigest())
    rows = sum(record.num_rows for record in done.values())
    bad = sum(record.num_bad for record in done.values())
    tasks = map_tasks(partial(pack_task, job=job), todo)
    with closing(tasks):  # an error in `progress` also stops the job
        for record in chain([None], tasks):
            if record is not None:
                done[record.chunk.index] = record
                rows += record.num_rows
                bad += record.num_bad
            # an estimate, if the total is unknown
            all_rows = total if total is not None else round(rows * len(chunks) / max(1, len(done)))
            is_estimate = total is None and len(done) < len(chunks)
            progress(PrepareProgress("pack", rows, all_rows, bad, is_estimate))
            if total is not None and bad > assemble.max_bad_rows(
                job.settings.max_bad_fraction, total
            ):
                break
    return PackedRows(job.out, [done[index] for index in sorted(done)], job.class_names)


def _current_records(job: PrepareJob, chunks: list[SourceChunk]) -> dict[int, Record]:
    """Return the records of an earlier prepare that packing would repeat, by index of the chunk."""
    out = job.out
    earlier = read_records(out, job.digest)
    sizes = {
        f"{folder}/{name}": size
        for folder in (SHARDS, f"{COLUMNS_DIR}/{KEPT}")
        for name, size in (list_sizes(out / folder) if earlier else {}).items()
    }
    done = {
        chunk.index: record
        for chunk in chunks
        if (record := earlier.get(chunk.index)) and is_current(record, job, chunk, sizes)
    }
    packed = PackedRows(out, list(done.values()))
    with_files: dict[str, list[Record]] = {}
    for record in packed.records:
        if record.has_files:
            with_files.setdefault(record.file, []).append(record)
    work = partial(changed_chunks, job=job)
    for index in chain.from_iterable(packed.map(work, list(with_files.values()))):
        del done[index]
    return done


def _remove_files(out: AnyPath, is_stale: Callable[[str], bool], folders: Iterable[str]) -> None:
    """Delete the stale files of these folders; names are relative to `out`."""
    names = [
        f"{folder}/{name}".lstrip("/") for folder in folders for name in list_names(out / folder)
    ]
    parallel_map(lambda name: (out / name).unlink(), filter(is_stale, names))
