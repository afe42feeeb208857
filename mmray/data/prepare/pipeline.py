"""Prepare pipeline: raw rows to a prepared set.

Scan the source into chunks, pack the chunks that are not done (Ray), deduplicate, write the manifest.

A chunk is done when its record exists. So a killed prepare resumes, a source that grew is appended to, and a larger
error budget reuses all finished work. manifest.json is written last; without it the folder is not a prepared set.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.data.formats.detect import class_names, companion_file, detect_source, label_names
from mmray.data.formats.source import SourceChanged, SourceChunk, SourceUnreadable
from mmray.data.prepare import assemble, contamination, sample
from mmray.data.prepare.error_budget import check_budget, max_bad_rows
from mmray.data.prepare.output_dir import create_output_dir, exclusive_lock, remove_stale_files, remove_temp_files
from mmray.data.prepare.pack import (
    ChunkResult,
    PrepareJob,
    has_retryable,
    is_current,
    pack_chunk,
    read_record,
    record_path,
)
from mmray.data.prepare.tasks import RESUME_HINT, Result, contain_crashes, map_tasks
from mmray.data.store.manifest import MANIFEST, PARTS, QUARANTINE, TOKENIZER, Manifest, read_manifest
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage.paths import AnyPath, RemotePath, to_path
from mmray.storage.storage import Storage

if TYPE_CHECKING:
    from mmray.config import Prepare


@dataclass(frozen=True)
class Progress:
    """Progress of a prepare."""

    stage: str  # scan, pack, deduplicate, hash or tokenize
    done_rows: int
    total_rows: int  # 0 during the scan
    bad_rows: int = 0
    kept_rows: int = 0  # of the done rows: finished by an earlier prepare


OnProgress = Callable[[Progress], None]
Notify = Callable[[str, str], None]  # message, label


def prepare(
    source: str,
    out: str,
    settings: Prepare,
    progress: OnProgress | None = None,
    notify: Notify | None = None,
    retry: bool = False,
) -> Manifest:
    """Validate, clean and pack the image-text rows of `source` into the folder `out`. Ray must be initialised.

    `retry` packs the chunks again whose rows an earlier prepare could not read or decode. Returns the manifest. Raises
    DataError (invalid source, or more bad rows than `settings` allow), UsageError, and ResourceError for failures that
    may be temporary.
    """
    contamination.validate(settings, out)
    job = make_job(source, out, settings)
    folder = Storage(job.out)
    create_output_dir(folder)
    with exclusive_lock(folder):
        try:
            return _prepare(job, settings, progress or (lambda _: None), notify or (lambda _, __: None), retry)
        except OSError as error:
            raise ResourceError(f"prepare failed: {error}. {RESUME_HINT}") from error


def make_job(source: str, out: str, settings: Prepare) -> PrepareJob:
    """Return the settings that determine how a chunk is packed. Raises DataError and UsageError."""
    return PrepareJob(
        source=detect_source(source, settings.format),
        out=Storage(out).address,
        columns=tuple(settings.column_names.items()),
        template=settings.caption,
        check=settings.check,
        index_only=settings.index_only,
        image_side=settings.image_side,
        max_pixels=settings.max_pixels,
        holdout=settings.holdout,
        rows_per_shard=settings.rows_per_shard,
        allow_urls=settings.allow_urls,
        run_id=uuid.uuid4().hex,
    )


def _prepare(job: PrepareJob, settings: Prepare, progress: OnProgress, notify: Notify, retry: bool) -> Manifest:
    out, where = Storage(job.out), _source_uri(job)
    remove_temp_files(out)
    before = read_manifest(out)
    chunks = _scan(job, progress)
    total, title = _total_rows(chunks), job.open().title
    if not chunks or total == 0:
        raise DataError(f"{where} holds no rows of {title}")
    notify(
        f"{where}: {len(chunks):,} files of {title}" if total is None else f"{where}: {total:,} rows of {title}",
        "source",
    )
    if companion := companion_file(job.source):
        notify(f"found {companion} next to it; pass {where},{companion} to use both", "hint")
    if job.allow_urls:
        notify(f"images by URL, only from {', '.join(job.allow_urls)}", "download")
    if before is not None and not _is_continued(before, job, chunks):
        if (name := before.source["name"]) != job.source.display_name:
            raise UsageError(
                f"{job.out} holds the set made from {name}: choose another folder for {job.source.display_name}"
            )
        before = None
    done, over = _pack(job, chunks, total, settings, progress, retry)
    total = sum(_record_rows(read_record(out, index)) for index in done) if total is None else total
    if not total:
        raise DataError(f"{where} holds no rows of {title}")
    progress(Progress("deduplicate", total, total))
    found = assemble.find_duplicates(out, done, settings.duplicates)
    found, leakage = (found, {}) if over else _check_contamination(job, settings, done, found, progress, notify)
    shards, reasons, languages = assemble.write_quarantine(out, done, found)
    num_read = found.num_rows + reasons.total() - found.num_dropped
    check_budget(where, out, num_read, total, reasons, settings.max_bad_fraction)
    progress(Progress("tokenize", num_read, total, reasons.total()))
    has_tokenizer = _write_tokenizer(out, shards, settings, before)
    manifest = assemble.make_manifest(
        settings,
        _identity(job, chunks) | _source_location(job),
        shards,
        reasons,
        languages,
        found,
        leakage,
        has_tokenizer,
        label_names(job.source),
        class_names(job.source),
    )
    out.write(MANIFEST, manifest.to_json())
    remove_stale_files(out, shards, len(chunks))
    return manifest


def _check_contamination(
    job: PrepareJob,
    settings: Prepare,
    done: list[int],
    found: assemble.DedupResult,
    progress: OnProgress,
    notify: Notify,
) -> tuple[assemble.DedupResult, dict[str, Any]]:
    """Return the result with the leaks to drop, and the manifest summary, if the check is enabled."""
    if not contamination.is_enabled(settings):
        return found, {}
    leaked, summary = contamination.check_contamination(
        Storage(job.out),
        done,
        job.source.address if job.index_only else "",
        found,
        settings,
        lambda rows, total: progress(Progress("hash", rows, total)),
        notify,
    )
    return replace(found, leaked=leaked) if settings.drop_overlap else found, summary


def _scan(job: PrepareJob, progress: OnProgress) -> list[SourceChunk]:
    """Return the chunks of the source, with the same ends as in an earlier prepare with the same settings."""
    out, digest = Storage(job.out), job.digest()
    records = (read_record(out, index) for index in range(len(out.listdir(PARTS))))
    stops = {record["chunk"]["stop"] for record in records if record and record["job"] == digest}
    chunks, rows = [], 0
    for chunk in job.open().scan(job.rows_per_shard, stops):
        chunks.append(chunk)
        rows += chunk.num_rows or 0
        progress(Progress("scan", rows, 0))
    return chunks


def _source_uri(job: PrepareJob) -> str:
    return f"{job.source.address}/{job.source.name}".rstrip("/")


def _total_rows(chunks: list[SourceChunk]) -> int | None:
    """Return the number of rows of these chunks; None if some are only counted while they are read."""
    counts = [chunk.num_rows for chunk in chunks if chunk.num_rows is not None]
    return sum(counts) if len(counts) == len(chunks) else None


def _record_rows(record: dict[str, Any] | None) -> int:
    """Return the number of rows of a record, good and bad."""
    return len(record["rows"]["key"]) + len(record["faults"]) if record else 0


def _pack(
    job: PrepareJob, chunks: list[SourceChunk], total: int | None, settings: Prepare, progress: OnProgress, retry: bool
) -> tuple[list[int], bool]:
    """Pack the chunks that are not done; return the indices of the done ones, and whether too many rows are bad.

    Stops early in that case, if the number of rows is known in advance.
    """
    out, max_bad = Storage(job.out), None if total is None else max_bad_rows(settings.max_bad_fraction, total)
    done: list[int] = []
    todo: list[SourceChunk] = []
    rows = bad = 0
    for chunk in chunks:
        record = read_record(out, chunk.index)
        if record is None or not is_current(record, job, chunk) or (retry and has_retryable(record)):
            todo.append(chunk)
            continue
        done.append(chunk.index)
        rows, bad = rows + _record_rows(record), bad + len(record["faults"])
    kept, over = rows, max_bad is not None and bad > max_bad
    progress(Progress("pack", rows, _estimate_total(total, rows, done, chunks), bad, kept))
    with closing(pack_chunks(job, [] if over else todo)) as results:  # an error in `progress` also stops the job
        for index, num_rows, num_bad in results:
            done.append(index)
            rows, bad = rows + num_rows, bad + num_bad
            progress(Progress("pack", rows, _estimate_total(total, rows, done, chunks), bad, kept))
            if over := max_bad is not None and bad > max_bad:
                break
    return sorted(done), over


def _estimate_total(total: int | None, rows: int, done: list[int], chunks: list[SourceChunk]) -> int:
    """Return the number of rows; estimated from the finished chunks if it is unknown."""
    return total if total is not None else round(rows * len(chunks) / max(1, len(done)))


def pack_chunks(job: PrepareJob, chunks: list[SourceChunk]) -> Generator[tuple[int, int, int], None, None]:
    """Yield (index, rows, bad rows) of each chunk, in order of completion."""
    with closing(map_tasks(partial(_pack_task, job=job), [asdict(chunk) for chunk in chunks])) as results:
        for result in results:
            yield result["index"], result["num_rows"], result["num_bad"]


def _pack_task(item: dict[str, Any], job: PrepareJob) -> Result:
    """Ray task: pack one chunk. Ray retries it if its worker dies; the retry decodes images in a child process."""
    chunk = SourceChunk(**item)
    name, where = record_path(chunk.index), f"{chunk.file} from row {chunk.first_line}"
    try:
        return asdict(contain_crashes(partial(_pack_one, job, chunk), Storage(job.out), name, where))
    except SourceChanged as error:
        raise DataError(str(error)) from error
    except SourceUnreadable as error:
        raise ResourceError(f"{error}. {RESUME_HINT}") from error
    except OSError as error:
        raise ResourceError(f"cannot write to {job.out}: {error}. {RESUME_HINT}") from error


def _pack_one(job: PrepareJob, chunk: SourceChunk, sandboxed: bool) -> ChunkResult:
    return pack_chunk(job, chunk, sandboxed=sandboxed)


def _is_continued(before: Manifest, job: PrepareJob, chunks: list[SourceChunk]) -> bool:
    """Return whether the source is the one of this manifest, possibly with rows appended."""
    same = _identity(job, chunks[: before.source["num_chunks"]])
    return same.items() <= before.source.items()


def _identity(job: PrepareJob, chunks: list[SourceChunk]) -> dict[str, Any]:
    """Return what identifies a source; with --index-only its address too, because the images stay there."""
    digest = hashlib.sha256("".join(chunk.sha256 for chunk in chunks).encode()).hexdigest()
    identity = {
        "name": job.source.display_name,
        "num_chunks": len(chunks),
        "num_bytes": chunks[-1].stop,
        "sha256": digest,
    }
    return identity | ({"address": job.source.address} if job.index_only else {})


def _source_location(job: PrepareJob) -> dict[str, str]:
    """Return the location of the source, for a report that shows quarantined rows; it may have moved since."""
    return {"format": job.source.format, "folder": job.source.address, "file": job.source.name}


def _write_tokenizer(out: Storage, shards: list[assemble.Shard], settings: Prepare, before: Manifest | None) -> bool:
    """Train the tokenizer. A set that grew keeps its tokenizer, because models were trained with it."""
    if before is not None and before.tokenizer and before.settings["vocab_size"] == settings.vocab_size:
        return True
    text = assemble.fit_tokenizer(out, shards, settings.vocab_size)
    if text is not None:
        out.write(TOKENIZER, text.encode())
    return text is not None


NOT_IN_CACHE_KEY = {"max_bad_fraction"}  # a prepare with another budget reuses finished chunks
_NO_NAME = re.compile(r"[^\w.-]+")


def ensure_prepared(source: str, cache: str, settings: Prepare, notify: Notify, progress: OnProgress) -> AnyPath:
    """Return the folder of the prepared set `source`; a raw source is prepared first. Ray must be initialized.

    A raw source is prepared into CACHE/NAME-HASH. The hash covers its address and all settings except the error budget,
    so the next run finds it. Raises DataError and UsageError.
    """
    if source == "sample":
        if isinstance(to_path(cache), RemotePath):
            raise UsageError(
                f"the sample set needs a local disk, and data.cache is {cache}: set data.cache to a local folder, or "
                "data.train to your own data"
            )
        source = str(sample.draw(Path(cache) / "sample-drawn"))
    folder = to_path(source)
    if (folder / MANIFEST).exists():
        return folder
    if not folder.exists() and "," not in folder.name:
        raise DataError(f"{folder} does not exist: give a prepared set, a source of rows, or `sample`")
    name = hashlib.sha256(f"{folder}\n{settings.model_dump_json(exclude=NOT_IN_CACHE_KEY)}".encode()).hexdigest()[:8]
    out = to_path(cache) / f"{_NO_NAME.sub('_', folder.stem)}-{name}"
    manifest = prepare(str(folder), str(out), settings, progress, notify)
    quarantined = f"{manifest.num_quarantined:,} quarantined ({QUARANTINE} has the reasons)"
    notify(f"{out}: {manifest.num_rows:,} rows of {folder.name}, {quarantined}", "prepared")
    return out
