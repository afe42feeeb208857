"""Raw rows in, a prepared set out: the composer of the first half of the data room, with its Ray Data job.

    scan the source into chunks  ->  pack the chunks that are not done yet (Ray)  ->  assemble  ->  manifest

A chunk is done when its record is there, and stays done: a prepare that was killed goes on, a source that grew is
appended to, and a larger error budget costs nothing. Nothing counts before manifest.json, which is written last.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import ray.data

from mmray.data import assemble
from mmray.data.manifest import MANIFEST, PARTS, SHARDS, TOKENIZER, Manifest, read_manifest
from mmray.data.pack import Job, is_current, pack_chunk, read_record
from mmray.data.place import UNFINISHED, Place
from mmray.data.sources import Chunk, SourceChanged, check_jsonl, scan
from mmray.data.target import make, one_writer, sweep, sweep_unfinished
from mmray.errors import DataError, ResourceError, UsageError

if TYPE_CHECKING:
    from mmray.config import Prepare

MAX_BLOCKS = 2000  # a Ray task each; a larger source gets several chunks a task
MAX_RETRIES = 3  # left alone, Ray starts a task again for ever whose worker dies (of a hostile file, say)


@dataclass(frozen=True)
class Progress:
    """How far a prepare is."""

    stage: str  # scan, pack, assemble or tokenizer
    done_rows: int
    total_rows: int  # 0 while the source is being scanned
    bad_rows: int = 0
    kept_rows: int = 0  # of the done ones: were done before this prepare


Report = Callable[[Progress], None]


def prepare(source: str, out: str, settings: Prepare, progress: Report | None = None) -> Manifest:
    """Check, clean and pack a JSONL file of image-text rows into the folder `out`; Ray must be initialised.

    Returns the manifest that is then in the folder. Raises DataError (a fault of the whole source, or more bad rows
    than `settings.max_bad_fraction`), UsageError (a folder that cannot be meant), ResourceError (what failed may pass).
    """
    place, name = Place.split(source)
    target, report = Place(out), progress or (lambda _: None)
    job = Job(
        source=place.address,
        name=name,
        out=target.address,
        image_side=settings.image_side,
        max_pixels=settings.max_pixels,
        holdout=settings.holdout,
        rows_per_shard=settings.rows_per_shard,
    )
    check_jsonl(place, name)
    make(target)
    with one_writer(target):
        try:
            return _prepare(job, settings, report)
        except OSError as error:
            raise ResourceError(f"prepare stopped: {error}; put it right, and the same command goes on") from error


def _prepare(job: Job, settings: Prepare, report: Report) -> Manifest:
    out = Place(job.out)
    sweep_unfinished(out)
    before = read_manifest(out)
    chunks = _scan(job, report)
    total = sum(chunk.num_rows for chunk in chunks)
    if not total:
        raise DataError(f"{job.source}/{job.name} holds no rows: it must hold one JSON object a line")
    if before is not None and not _is_continued(before, chunks):
        if before.source["name"] != job.name:
            raise UsageError(
                f"{job.out} holds the set made from {before.source['name']}: choose another folder for {job.name}"
            )
        before = None
    done = _pack(job, chunks, assemble.most_bad(settings.max_bad_fraction, total), report)
    report(Progress("assemble", total, total))
    findings = assemble.find(out, done, settings.duplicates)
    shards, reasons = assemble.write_quarantine(out, job.name, done, findings)
    num_read = findings.num_rows + reasons.total() - findings.num_dropped
    where = f"{job.source}/{job.name}"
    assemble.check_budget(where, out, num_read, total, reasons, settings.max_bad_fraction)
    report(Progress("tokenizer", num_read, total, reasons.total()))
    has_tokenizer = _write_tokenizer(out, shards, settings, before)
    manifest = assemble.make_manifest(
        settings, _identity(job.name, chunks), shards, reasons, findings.num_leaks, has_tokenizer
    )
    out.write(MANIFEST, manifest.to_json())
    sweep(out, len(chunks))
    return manifest


def _scan(job: Job, report: Report) -> list[Chunk]:
    """The chunks of the source, with the ends that an earlier prepare under the same settings gave them."""
    out, digest = Place(job.out), job.digest()
    records = (read_record(out, index) for index in range(len(out.names(PARTS))))
    stops = {record["chunk"]["stop"] for record in records if record and record["job"] == digest}
    chunks, rows = [], 0
    for chunk in scan(Place(job.source), job.name, job.rows_per_shard, stops):
        chunks.append(chunk)
        rows += chunk.num_rows
        report(Progress("scan", rows, 0))
    return chunks


def _pack(job: Job, chunks: list[Chunk], most_bad: int, report: Report) -> list[int]:
    """Pack what is not done; the indices of the chunks that are. Ends early once more than `most_bad` rows are bad."""
    out, total = Place(job.out), sum(chunk.num_rows for chunk in chunks)
    done: list[int] = []
    todo: list[Chunk] = []
    rows = bad = 0
    for chunk in chunks:
        record = read_record(out, chunk.index)
        if record is None or not is_current(record, job, chunk):
            todo.append(chunk)
            continue
        done.append(chunk.index)
        rows, bad = rows + chunk.num_rows, bad + len(record["faults"])
    kept = rows
    report(Progress("pack", rows, total, bad, kept))
    results = _run(job, todo) if bad <= most_bad else iter(())
    for index, num_rows, num_bad in results:
        done.append(index)
        rows, bad = rows + num_rows, bad + num_bad
        report(Progress("pack", rows, total, bad, kept))
        if bad > most_bad:
            break
    return sorted(done)


def _run(job: Job, chunks: list[Chunk]) -> Iterator[tuple[int, int, int]]:
    """The Ray Data job: (index, rows, bad rows) of each chunk, as it is done."""
    if not chunks:
        return
    items = [{"chunk": orjson.dumps(asdict(chunk)).decode()} for chunk in chunks]
    dataset = ray.data.from_items(items, override_num_blocks=min(len(items), MAX_BLOCKS))
    with warnings.catch_warnings():  # Ray 2.60 has no other way to say max_retries, and means to drop this one
        warnings.simplefilter("ignore")
        results = dataset.map_batches(
            partial(_pack_batch, job=job), batch_size=1, batch_format="numpy", max_retries=MAX_RETRIES
        )
    try:
        for row in results.iter_rows():
            if row["fault"]:
                raise (DataError if row["changed"] else ResourceError)(row["fault"])
            yield int(row["index"]), int(row["num_rows"]), int(row["num_bad"])
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"the prepare job ended, while at {_unfinished(job, chunks)}: {error}\nThe same command goes on where "
            "it was; if it ends there again, an image of these lines kills the decoder: take it out"
        ) from error


def _unfinished(job: Job, chunks: list[Chunk]) -> str:
    """The lines that were being packed when a worker died: those whose shards lie about unfinished."""
    names = Place(job.out).names(SHARDS)
    at = {int(name.partition("-")[0]) for name in names if name.endswith(UNFINISHED)}
    lines = [f"{chunk.first_line}-{chunk.first_line + chunk.num_rows - 1}" for chunk in chunks if chunk.index in at]
    return f"lines {', '.join(lines[:16])} of {job.name}" if lines else job.name


def _pack_batch(batch: dict[str, np.ndarray], job: Job) -> dict[str, np.ndarray]:
    """The Ray task: one chunk. What is expected to fail comes back as a value, so that Ray does not try it again."""
    chunk = Chunk(**orjson.loads(batch["chunk"][0]))
    answer: dict[str, Any] = {"index": chunk.index, "num_rows": 0, "num_bad": 0, "fault": "", "changed": False}
    try:
        packed = pack_chunk(job, chunk)
        answer |= {"num_rows": packed.num_rows, "num_bad": packed.num_bad}
    except SourceChanged as error:
        answer |= {"fault": str(error), "changed": True}
    except OSError as error:
        answer |= {"fault": f"cannot write to {job.out}: {error}; the same command goes on once that is put right"}
    return {name: np.array([value]) for name, value in answer.items()}


def _is_continued(before: Manifest, chunks: list[Chunk]) -> bool:
    """Whether the source is the one of this manifest, with or without further rows."""
    return before.source == _identity(before.source["name"], chunks[: before.source["num_chunks"]])


def _identity(name: str, chunks: list[Chunk]) -> dict[str, Any]:
    digest = hashlib.sha256("".join(chunk.sha256 for chunk in chunks).encode()).hexdigest()
    return {"name": name, "num_chunks": len(chunks), "num_bytes": chunks[-1].stop, "sha256": digest}


def _write_tokenizer(out: Place, shards: list[assemble.Shard], settings: Prepare, before: Manifest | None) -> bool:
    """Train the tokenizer, but keep that of a set that grew: models were trained with it."""
    if before is not None and before.tokenizer and before.settings["vocab_size"] == settings.vocab_size:
        return True
    text = assemble.tokenizer_for(out, shards, settings.vocab_size)
    if text is not None:
        out.write(TOKENIZER, text.encode())
    return text is not None
