"""Prepare pipeline: scan the source into chunks, pack those that are not done (Ray), deduplicate, write the manifest.

A chunk is done when its record exists. So a killed prepare resumes, a source that grew is appended to, and a larger
error budget reuses all finished work. manifest.json is written last; without it the folder is not a prepared set.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.data.formats.detect import class_names, companion_file, detect_source, label_names
from mmray.data.formats.source import SourceChanged, SourceChunk, SourceUnreadable
from mmray.data.prepare import assemble, contamination, sample
from mmray.data.prepare.pack import PrepareJob, is_current, num_record_rows, pack_chunk, read_record, record_path
from mmray.data.prepare.tasks import ATTEMPT_SUFFIX, RESUME_HINT, Result, contain_crashes, map_tasks
from mmray.data.store.manifest import (
    MANIFEST,
    PARTS,
    QUARANTINE,
    SHARDS,
    TOKENIZER,
    Manifest,
    fingerprint,
    read_manifest,
)
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage import lease
from mmray.storage.paths import AnyPath, RemotePath, to_path
from mmray.storage.storage import TEMP_SUFFIX, Storage

if TYPE_CHECKING:
    from mmray.config import Prepare

_NO_NAME = re.compile(r"[^\w.-]+")


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
        source = str(sample.draw(Path(cache) / "sample-source"))
    folder = to_path(source)
    if (folder / MANIFEST).exists():
        return folder
    if not folder.exists() and "," not in folder.name:
        hint = "give a prepared set, a source (file or folder of JSON lines, CSV, Parquet, ...) or `sample`"
        raise DataError(f"{folder} does not exist: {hint}")
    hashed = f"{folder}\n{settings.model_dump_json(exclude={'max_bad_fraction'})}"
    name = f"{_NO_NAME.sub('_', folder.stem)}-{hashlib.sha256(hashed.encode()).hexdigest()[:8]}"
    out = to_path(cache) / name
    manifest = prepare(str(folder), str(out), settings, progress, notify)
    quarantined = f"{manifest.num_quarantined:,} quarantined ({QUARANTINE} has the reasons)"
    notify(f"{out}: {manifest.num_rows:,} rows of {folder.name}, {quarantined}", "prepared")
    return out


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
    same = ("check", "index_only", "image_side", "max_pixels", "holdout", "rows_per_shard", "allow_urls")
    return PrepareJob(
        source=detect_source(source, settings.format),
        out=Storage(out).address,
        columns=tuple(settings.column_names.items()),
        template=settings.caption,
        run_id=uuid.uuid4().hex,
        **{name: getattr(settings, name) for name in same},
    )


def _prepare(job: PrepareJob, settings: Prepare, progress: OnProgress, notify: Notify, retry: bool) -> Manifest:
    out, where = Storage(job.out), f"{job.source.address}/{job.source.name}".rstrip("/")
    _remove_files(out, lambda name: name.endswith((TEMP_SUFFIX, ATTEMPT_SUFFIX)), ("", SHARDS, PARTS))
    before = read_manifest(out)
    chunks = _scan(job, progress)
    is_counted, title = all(chunk.num_rows is not None for chunk in chunks), job.open().title
    total = sum(chunk.num_rows or 0 for chunk in chunks) if is_counted else None  # None: only known after reading
    if not chunks or total == 0:
        raise DataError(f"{where} holds no rows of {title}")
    notify(f"{where}: {f'{len(chunks):,} files' if total is None else f'{total:,} rows'} of {title}", "source")
    if companion := companion_file(job.source):
        notify(f"found {companion} next to it; pass {where},{companion} to use both", "hint")
    if job.allow_urls:
        notify(f"images by URL, only from {', '.join(job.allow_urls)}", "download")
    if before is not None:
        same = _identity(job, chunks[: before.source["num_chunks"]])
        if not same.items() <= before.source.items():  # otherwise it is that source, possibly with rows appended
            if (name := before.source["name"]) != (other := job.source.display_name):
                raise UsageError(f"{job.out} holds the set made from {name}: choose another folder for {other}")
            before = None
    done, over = _pack(job, chunks, total, settings, progress, retry)
    if total is None:
        total = sum(num_record_rows(record) for _, record in assemble.records(out, done))
    if not total:
        raise DataError(f"{where} holds no rows of {title}")
    progress(Progress("deduplicate", total, total))
    dedup = assemble.find_duplicates(out, done, settings.duplicates)
    leakage: dict[str, Any] = {}
    if contamination.is_enabled(settings) and not over:
        images, on_rows = job.source.address if job.index_only else "", partial(Progress, "hash")
        leaked, leakage = contamination.check_contamination(
            out, done, images, dedup, settings, lambda rows, of: progress(on_rows(rows, of)), notify
        )
        dedup = replace(dedup, leaked=leaked) if settings.drop_overlap else dedup
    rows = assemble.write_quarantine(out, done, dedup)
    num_rows, num_bad = sum(shard.num_live for shard in rows.shards), rows.reasons.total()
    assemble.check_budget(where, out, num_rows + num_bad, total, rows, settings.max_bad_fraction)
    progress(Progress("tokenize", num_rows + num_bad, total, num_bad))
    # A set that grew keeps its tokenizer, because models were trained with it.
    has_tokenizer = bool(before and before.tokenizer and before.settings["vocab_size"] == settings.vocab_size)
    has_tokenizer = has_tokenizer or assemble.write_tokenizer(out, rows.shards, settings.vocab_size)
    shards = [shard for shard in rows.shards if shard.num_live]
    if any(shard.split for shard in shards):  # rows without a split are training rows if others have one
        shards = [replace(shard, split=shard.split or "train") for shard in shards]
    splits: Counter[str] = Counter()
    for shard in shards:
        splits.update({shard.split: shard.num_live} if shard.split else {})
    manifest = Manifest(
        num_rows=num_rows,
        num_read=num_rows + num_bad,
        num_quarantined=num_bad,
        reasons=dict(rows.reasons.most_common()),
        num_leaks=dedup.num_leaks,
        splits=dict(splits),
        fingerprint=fingerprint(shards),
        tokenizer=TOKENIZER if has_tokenizer else None,
        source=_identity(job, chunks)
        | {"format": job.source.format, "folder": job.source.address, "file": job.source.name},
        settings=settings.model_dump(mode="json"),
        shards=tuple(shards),
        num_same_text=dedup.num_same_text,
        leakage=leakage,
        box_names=label_names(job.source),
        class_names=class_names(job.source),
        languages=dict(sorted(rows.languages.items())),
    )
    out.write(MANIFEST, manifest.to_json())
    # Leftovers of killed tasks and earlier settings. The shards come from this process, not from the records, because
    # another writer may have replaced one on a store.
    wanted = {shard.file for shard in rows.shards} | {record_path(index) for index in range(len(chunks))}
    _remove_files(out, lambda name: name not in wanted, (SHARDS, PARTS))
    return manifest


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


def _pack(
    job: PrepareJob, chunks: list[SourceChunk], total: int | None, settings: Prepare, progress: OnProgress, retry: bool
) -> tuple[list[int], bool]:
    """Pack the chunks that are not done; return the indices of the done ones, and whether too many rows are bad.

    Stops early in that case, if the number of rows is known in advance.
    """
    out, max_bad = Storage(job.out), None if total is None else assemble.max_bad_rows(settings.max_bad_fraction, total)
    done: list[int] = []
    todo: list[SourceChunk] = []
    rows = bad = kept = 0

    def report() -> bool:
        """Report progress, with an estimate of an unknown total; return whether too many rows are bad."""
        of = total if total is not None else round(rows * len(chunks) / max(1, len(done)))
        progress(Progress("pack", rows, of, bad, kept))
        return max_bad is not None and bad > max_bad

    for chunk in chunks:
        record = read_record(out, chunk.index)
        if (
            record is None
            or not is_current(record, job, chunk)
            or (retry and any(fault["stage"] in ("read", "decode") for fault in record["faults"]))
        ):
            todo.append(chunk)
        else:
            done.append(chunk.index)
            rows, bad = rows + num_record_rows(record), bad + len(record["faults"])
    kept = rows
    over = report()
    with closing(pack_chunks(job, [] if over else todo)) as results:  # an error in `progress` also stops the job
        for index, num_rows, num_bad in results:
            done.append(index)
            rows, bad = rows + num_rows, bad + num_bad
            if over := report():
                break
    return sorted(done), over


def pack_chunks(job: PrepareJob, chunks: list[SourceChunk]) -> Generator[tuple[int, int, int], None, None]:
    """Yield (index, rows, bad rows) of each chunk, in order of completion."""
    with closing(map_tasks(partial(_pack_task, job=job), [asdict(chunk) for chunk in chunks])) as results:
        for result in results:
            index, num_rows, num_bad = result["chunk"]
            yield index, num_rows, num_bad


def _pack_task(item: dict[str, Any], job: PrepareJob) -> Result:
    """Ray task: pack one chunk. Ray retries it if its worker dies; the retry decodes images in a child process."""
    chunk = SourceChunk(**item)
    name, where = record_path(chunk.index), f"{chunk.file} from row {chunk.first_line}"
    try:
        return {"chunk": contain_crashes(partial(pack_chunk, job, chunk), Storage(job.out), name, where)}
    except SourceChanged as error:
        raise DataError(str(error)) from error
    except SourceUnreadable as error:
        raise ResourceError(f"{error}. {RESUME_HINT}") from error
    except OSError as error:
        raise ResourceError(f"cannot write to {job.out}: {error}. {RESUME_HINT}") from error


def _identity(job: PrepareJob, chunks: list[SourceChunk]) -> dict[str, Any]:
    """Return what identifies a source; with --index-only its address too, because the images stay there."""
    digest = hashlib.sha256("".join(chunk.sha256 for chunk in chunks).encode()).hexdigest()
    size = {"num_chunks": len(chunks), "num_bytes": chunks[-1].stop}
    address = {"address": job.source.address} if job.index_only else {}
    return {"name": job.source.display_name, **size, "sha256": digest, **address}


def create_output_dir(out: Storage) -> None:
    """Create the folder. Raises UsageError if it contains anything else."""
    try:
        names = set(out.listdir()) - {lease.FOLDER}
        if names and not names & {MANIFEST, PARTS}:
            raise UsageError(f"{out.address} is not empty and is not a prepared set: choose another folder")
        out.mkdir(PARTS)
        out.mkdir(SHARDS)
    except OSError as error:
        raise UsageError(f"cannot write to {out.address} ({error}): choose another folder") from None


def exclusive_lock(out: Storage) -> lease.Lease:
    """Return the lease that excludes a second prepare of the folder; acquiring it raises UsageError."""
    return lease.Lease(to_path(out.address), activity="being prepared", advice="choose another folder")


def _remove_files(out: Storage, unwanted: Callable[[str], bool], folders: Iterable[str]) -> None:
    """Delete the unwanted files of these folders; names are relative to `out`."""
    for folder in folders:
        for name in out.listdir(folder):
            if unwanted(path := f"{folder}/{name}".lstrip("/")):
                out.delete(path)
