"""Raw rows in, a prepared set out: the composer of the first half of the data room, with its Ray Data job.

    scan the source into chunks  ->  pack the chunks that are not done yet (Ray)  ->  assemble  ->  manifest

A chunk is done when its record is there, and stays done: a prepare that was killed goes on, a source that grew is
appended to, and a larger error budget costs nothing. Nothing counts before manifest.json, which is written last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from mmray.data.formats.detect import class_names, companion_file, detect_source, label_names
from mmray.data.formats.source import SourceChanged, SourceChunk, SourceUnreadable
from mmray.data.prepare import assemble, contamination, sample
from mmray.data.prepare.error_budget import BadRuns, Fault, check_budget, check_run, max_bad_rows
from mmray.data.prepare.output_dir import create_output_dir, exclusive_lock, remove_stale_files, remove_temp_files
from mmray.data.prepare.pack import PrepareJob, has_retryable, is_current, pack_chunk, read_record
from mmray.data.prepare.tasks import MAX_RETRIES, MAX_RETRIES_SANDBOXED, decode_item, encode_result, map_tasks
from mmray.data.store.manifest import MANIFEST, PARTS, QUARANTINE, SHARDS, TOKENIZER, Manifest, read_manifest
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage.paths import AnyPath, RemotePath, to_path
from mmray.storage.storage import TEMP_SUFFIX, Storage

if TYPE_CHECKING:
    from mmray.config import Prepare


@dataclass(frozen=True)
class Progress:
    """How far a prepare is."""

    stage: str  # scan, pack, deduplicate, hash or tokenize
    done_rows: int
    total_rows: int  # 0 while the source is being scanned
    bad_rows: int = 0
    kept_rows: int = 0  # of the done ones: were done before this prepare


OnProgress = Callable[[Progress], None]
Notify = Callable[[str, str], None]  # a line and its label


def prepare(
    source: str,
    out: str,
    settings: Prepare,
    progress: OnProgress | None = None,
    notify: Notify | None = None,
    retry: bool = False,
) -> Manifest:
    """Check, clean and pack the image-text rows of a source into the folder `out`; Ray must be initialised.

    `retry` tries again what an earlier prepare set aside because it could not be read or decoded. Returns the manifest
    that is then in the folder. Raises DataError (a fault of the whole source, or more bad rows
    than `settings` allow), UsageError (a folder that cannot be meant), ResourceError (what failed may pass).
    """
    contamination.validate(settings, out)
    job = make_job(source, out, settings)
    target, report = Storage(job.out), progress or (lambda _: None)
    create_output_dir(target)
    with exclusive_lock(target):
        try:
            return _prepare(job, settings, report, notify or (lambda _, __: None), retry)
        except OSError as error:
            raise ResourceError(f"prepare stopped: {error}; put it right, and the same command goes on") from error


def make_job(source: str, out: str, settings: Prepare) -> PrepareJob:
    """What of these settings decides how a chunk is packed. Raises DataError and UsageError as `choose` does."""
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
    )


def _prepare(job: PrepareJob, settings: Prepare, report: OnProgress, notify: Notify, retry: bool) -> Manifest:
    out = Storage(job.out)
    remove_temp_files(out)
    before = read_manifest(out)
    chunks = _scan(job, report)
    total, called = _total_rows(chunks), job.source.display_name
    if not chunks or total == 0:
        raise DataError(f"{_source_uri(job)} holds no rows of {job.open().title}")
    amount = f"{len(chunks):,} files" if total is None else f"{total:,} rows"
    notify(f"{amount} of {job.open().title} from {_source_uri(job)}", "reading")
    if beside := companion_file(job.source):
        notify(f"{beside} lies beside it and is not read: {_source_uri(job)},{beside} reads both", "beside")
    if job.allow_urls:
        notify(f"images named by addresses, from {', '.join(job.allow_urls)} and nowhere else", "fetching")
    if before is not None and not _is_continued(before, job, chunks):
        if before.source["name"] != called:
            raise UsageError(
                f"{job.out} holds the set made from {before.source['name']}: choose another folder for {called}"
            )
        before = None
    done, run, over = _pack(job, chunks, total, settings, report, retry)
    total = sum(_record_rows(read_record(out, index)) for index in done) if total is None else total
    if not total:
        raise DataError(f"{_source_uri(job)} holds no rows of {job.open().title}")
    report(Progress("deduplicate", total, total))
    findings = assemble.find_duplicates(out, done, settings.duplicates)
    findings, leakage = (
        (findings, {}) if run or over else _check_contamination(job, settings, done, findings, report, notify)
    )
    shards, reasons, languages = assemble.write_quarantine(out, done, findings)
    num_read = findings.num_rows + reasons.total() - findings.num_dropped
    check_run(_source_uri(job), out, run, settings.max_bad_run)
    check_budget(_source_uri(job), out, num_read, total, reasons, settings.max_bad_fraction)
    report(Progress("tokenize", num_read, total, reasons.total()))
    has_tokenizer = _write_tokenizer(out, shards, settings, before)
    manifest = assemble.make_manifest(
        settings,
        _identity(job, chunks) | _source_location(job),
        shards,
        reasons,
        languages,
        findings,
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
    findings: assemble.DedupResult,
    report: OnProgress,
    notify: Notify,
) -> tuple[assemble.DedupResult, dict[str, Any]]:
    """Leaks into other sets and across splits, where they are asked for: findings with those to set aside, summary."""
    if not contamination.is_enabled(settings):
        return findings, {}
    source = job.source.address if job.index_only else ""

    def on_rows(rows: int, total: int) -> None:
        report(Progress("hash", rows, total))

    told, summary = contamination.check_contamination(
        Storage(job.out), done, source, findings, settings, on_rows, notify
    )
    return replace(findings, leaked=told) if settings.drop_overlap else findings, summary


def _scan(job: PrepareJob, report: OnProgress) -> list[SourceChunk]:
    """The chunks of the source, with the ends that an earlier prepare under the same settings gave them."""
    out, digest = Storage(job.out), job.digest()
    records = (read_record(out, index) for index in range(len(out.listdir(PARTS))))
    stops = {record["chunk"]["stop"] for record in records if record and record["job"] == digest}
    chunks, rows = [], 0
    for chunk in job.open().scan(job.rows_per_shard, stops):
        chunks.append(chunk)
        rows += chunk.num_rows or 0
        report(Progress("scan", rows, 0))
    return chunks


def _source_uri(job: PrepareJob) -> str:
    return f"{job.source.address}/{job.source.name}".rstrip("/")


def _total_rows(chunks: list[SourceChunk]) -> int | None:
    """Rows of these chunks; None where some are only counted as they are read."""
    counts = [chunk.num_rows for chunk in chunks if chunk.num_rows is not None]
    return sum(counts) if len(counts) == len(chunks) else None


def _record_rows(record: dict[str, Any] | None) -> int:
    """Rows that a record accounts for."""
    return len(record["rows"]["key"]) + len(record["faults"]) if record else 0


def _pack(
    job: PrepareJob, chunks: list[SourceChunk], total: int | None, settings: Prepare, report: OnProgress, retry: bool
) -> tuple[list[int], list[Fault] | None, bool]:
    """Pack what is not done; the indices of the chunks that are, a run of bad rows that is too long, and whether more
    rows are bad than may be.

    Ends early with such a run, or once more rows are bad than the budget allows, where it is known beforehand how many
    there are.
    """
    out, most = Storage(job.out), None if total is None else max_bad_rows(settings.max_bad_fraction, total)
    runs, run = BadRuns(settings.max_bad_run), None
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
        run = run or runs.add(chunk.index, record)
    kept = rows
    report(Progress("pack", rows, _estimate_total(total, rows, done, chunks), bad, kept))
    within = run is None and (most is None or bad <= most)
    with closing(_run_with_fallback(job, todo if within else [])) as results:  # an error of `report` ends the job too
        for index, num_rows, num_bad in results:
            done.append(index)
            rows, bad = rows + num_rows, bad + num_bad
            report(Progress("pack", rows, _estimate_total(total, rows, done, chunks), bad, kept))
            record = read_record(out, index) if settings.max_bad_run else None
            run = runs.add(index, record) if record else None
            if run or (most is not None and bad > most):
                break
    return sorted(done), run, most is not None and bad > most


def _estimate_total(total: int | None, rows: int, done: list[int], chunks: list[SourceChunk]) -> int:
    """Rows in all; where they are not known, as many in each file as in those that were read."""
    return total if total is not None else round(rows * len(chunks) / max(1, len(done)))


def _run_with_fallback(job: PrepareJob, chunks: list[SourceChunk]) -> Generator[tuple[int, int, int], None, None]:
    """(index, rows, bad rows) of each chunk, as it is done; after a worker's death the rest with decoders apart."""
    done: set[int] = set()
    try:
        for answer in _ray_job(job, chunks, MAX_RETRIES):
            done.add(answer[0])
            yield answer
        return
    except ray.exceptions.RayError:
        rest = [chunk for chunk in chunks if chunk.index not in done]
    try:
        yield from _ray_job(replace(job, sandboxed=True), rest, MAX_RETRIES_SANDBOXED)
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"prepare workers died while packing {_in_flight_chunks(job, rest)}: {error}\nImages were decoded in a "
            "separate process, so they are not the cause; the node may have run out of memory. Lower "
            "--rows-per-shard and rerun the same command; finished shards are kept."
        ) from error


def _ray_job(job: PrepareJob, chunks: list[SourceChunk], retries: int) -> Iterator[tuple[int, int, int]]:
    """The Ray Data job itself. Raises RayError once a chunk has killed its worker `retries` times more."""
    for row in map_tasks(partial(_pack_batch, job=job), [asdict(chunk) for chunk in chunks], retries):
        if row["fault"]:
            raise (DataError if row["changed"] else ResourceError)(row["fault"])
        yield int(row["index"]), int(row["num_rows"]), int(row["num_bad"])


def _in_flight_chunks(job: PrepareJob, chunks: list[SourceChunk]) -> str:
    """What was being packed when a worker died: those whose shards lie about unfinished."""
    names = Storage(job.out).listdir(SHARDS)
    at = {int(name.partition("-")[0]) for name in names if name.endswith(TEMP_SUFFIX)}
    parts = [f"{chunk.file} from row {chunk.first_line}" for chunk in chunks if chunk.index in at]
    return ", ".join(parts[:16]) or job.source.display_name


def _pack_batch(batch: dict[str, np.ndarray], job: PrepareJob) -> dict[str, np.ndarray]:
    """The Ray task: one chunk. What is expected to fail comes back as a value, so that Ray does not try it again."""
    chunk = SourceChunk(**decode_item(batch))
    answer: dict[str, Any] = {"index": chunk.index, "num_rows": 0, "num_bad": 0, "fault": "", "changed": False}
    try:
        packed = pack_chunk(job, chunk)
        answer |= {"num_rows": packed.num_rows, "num_bad": packed.num_bad}
    except SourceChanged as error:
        answer |= {"fault": str(error), "changed": True}
    except SourceUnreadable as error:
        answer |= {"fault": f"{error}; the same command goes on once that is put right"}
    except OSError as error:
        answer |= {"fault": f"cannot write to {job.out}: {error}; the same command goes on once that is put right"}
    return encode_result(answer)


def _is_continued(before: Manifest, job: PrepareJob, chunks: list[SourceChunk]) -> bool:
    """Whether the source is the one of this manifest, with or without further rows."""
    same = _identity(job, chunks[: before.source["num_chunks"]])
    return same.items() <= before.source.items()


def _identity(job: PrepareJob, chunks: list[SourceChunk]) -> dict[str, Any]:
    """What says that a source is the same; where the images stay in it, its address too."""
    digest = hashlib.sha256("".join(chunk.sha256 for chunk in chunks).encode()).hexdigest()
    identity = {
        "name": job.source.display_name,
        "num_chunks": len(chunks),
        "num_bytes": chunks[-1].stop,
        "sha256": digest,
    }
    return identity | ({"address": job.source.address} if job.index_only else {})


def _source_location(job: PrepareJob) -> dict[str, str]:
    """Where the source was, for a report that shows what was set aside; it may have moved since."""
    return {"format": job.source.format, "folder": job.source.address, "file": job.source.name}


def _write_tokenizer(out: Storage, shards: list[assemble.Shard], settings: Prepare, before: Manifest | None) -> bool:
    """Train the tokenizer, but keep that of a set that grew: models were trained with it."""
    if before is not None and before.tokenizer and before.settings["vocab_size"] == settings.vocab_size:
        return True
    text = assemble.fit_tokenizer(out, shards, settings.vocab_size)
    if text is not None:
        out.write(TOKENIZER, text.encode())
    return text is not None


# From what a user names to a prepared set: one is opened, a raw source is prepared into the cache first.
NOT_IN_CACHE_KEY = {"max_bad_fraction", "max_bad_run"}  # a prepare with another goes on with what is done
_NO_NAME = re.compile(r"[^\w.-]+")


def ensure_prepared(
    source: str, cache: str, settings: Prepare, notify: Callable[[str, str], None], progress: Callable[[Progress], None]
) -> AnyPath:
    """Folder of the prepared set that `source` names; Ray must be there. Raises DataError.

    A raw source goes to CACHE/NAME-HASH, where the hash is of its place and of all settings but the error budgets: the
    second run finds it, rows that were added since are appended, and one with another budget goes on with what is done.
    """
    if source == "sample":
        if isinstance(to_path(cache), RemotePath):
            raise UsageError(
                f"the sample set is drawn onto a disk, and data.cache is {cache}: set data.cache to a folder, or "
                "data.train to data of your own"
            )
        source = str(sample.draw(Path(cache) / "sample-drawn"))
    place = to_path(source)
    if (place / MANIFEST).exists():
        return place
    if not place.exists() and "," not in place.name:
        raise DataError(f"there is no data at {place}: give a prepared set, a source of rows, or `sample`")
    name = hashlib.sha256(f"{place}\n{settings.model_dump_json(exclude=NOT_IN_CACHE_KEY)}".encode()).hexdigest()[:8]
    out = to_path(cache) / f"{_NO_NAME.sub('_', place.stem)}-{name}"
    manifest = prepare(str(place), str(out), settings, progress, notify)
    aside = f"{manifest.num_quarantined:,} set aside (reasons in its {QUARANTINE})"
    notify(f"{out}: {manifest.num_rows:,} rows of {place.name}, {aside}", "prepared")
    return out
