"""The work of one prepare task: convert a chunk of the source to shard files and a record.

Each row is parsed, its image is read, decoded completely and hashed, and its captions are cleaned.
Failures go into the record with stage and reason. The record (records.py) is written last and
marks the chunk as done. So a killed prepare resumes, and a source that grew is appended to.
Does not import Ray.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import orjson
import pyarrow as pa

from mmray.data.formats.source import RawRow, SourceChunk
from mmray.data.images.read import stat_signature
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.labels import renumber
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.kept_columns import KeptColumns
from mmray.data.prepare.records import (
    SCHEMA,
    Record,
    open_records,
    record_path,
    write_records,
)
from mmray.data.prepare.row_builder import RowBuilder, read_rows, sha256
from mmray.data.prepare.tasks import RESUME_HINT, run_with_crash_limit
from mmray.data.rows import BadRow, to_utf8
from mmray.data.source_row import SourceRow
from mmray.data.store.manifest import SHARDS, text_columns
from mmray.data.store.row_columns import KEPT, caption_flag
from mmray.data.store.row_values import COLUMNS_DIR
from mmray.data.store.shard_writer import ShardWriter, open_shard
from mmray.errors import ResourceError
from mmray.storage.paths import retry_if_remote

RETRYABLE_STAGES = ("read", "decode")  # stages whose rows --retry-quarantined packs again
_NO_COLUMN = ""  # column of the caption of a class, in a set with columns of captions
_MAX_NOTICES = 200  # of a chunk, whose rows may have a column each
_MORE_NOTICES = "further columns are not used"


def pack_task(chunk: SourceChunk, job: PrepareJob) -> Record:
    """Ray task: pack one chunk.

    Ray retries it if its worker dies; the retry decodes images in a child process.
    """

    def pack(decoder: SubprocessDecoder | None) -> Record:
        # An upload that failed cannot be resumed, so the chunk is packed again.
        return retry_if_remote(job.out, partial(pack_chunk, job, chunk, decoder))

    try:
        return run_with_crash_limit(pack, job.out, record_path(chunk.index), str(chunk))
    except OSError as error:
        raise ResourceError(f"prepare failed at {chunk}: {error}. {RESUME_HINT}") from error


def pack_chunk(
    job: PrepareJob, chunk: SourceChunk, subprocess_decoder: SubprocessDecoder | None
) -> Record:
    """Pack one chunk: write its rows to shards, and then its record, which marks it as done.

    Args:
        subprocess_decoder: Decodes each image and clip first, in a child process, to name the one
            that crashes the decoder; None: they are decoded in this process only.

    Raises:
        DataError: The source changed.
        OSError: The source cannot be read, or the set cannot be written.
    """
    file = record_path(chunk.index)
    source = job.open()
    with ExitStack() as shard_files:
        builder = RowBuilder(job, subprocess_decoder)
        packer = _ChunkPacker(job, chunk, builder, source.has_types, shard_files)
        for item, row in read_rows(job, source.read(chunk)):
            packer.pack(item, row)
    # The shard files are closed now.
    record = packer.record(file)
    write_records(job.out, file, [record], [pa.RecordBatch.from_pylist(packer.rows, SCHEMA)])
    return record


def is_current(
    record: Record, job: PrepareJob, chunk: SourceChunk, sizes: Mapping[str, int]
) -> bool:
    """Return whether packing a chunk again would give the same result, if its media did not change.

    That is so if its lines, the settings and the files of shards are unchanged; classes may have
    other numbers. False also if a row could not be read for a reason that may be temporary (a
    network file system); with `job.retry` if any row could not be read or decoded.

    Args:
        chunk: The chunk as it was scanned now.
        sizes: Size in bytes of the files of the set.
    """
    retried_stages = RETRYABLE_STAGES if job.retry else ()
    columns = f"{COLUMNS_DIR}/{KEPT}/{record.columns_file}"
    return (
        record.job == job.digest
        and renumber(tuple(record.class_names), job.class_names) is not None
        and record.chunk == chunk
        and "unreadable" not in record.reasons
        and not set(retried_stages) & set(record.stages)
        and all(sizes.get(shard.file) == shard.num_bytes for shard in record.shards)
        and (record.columns_file is None or columns in sizes)
    )


def changed_chunks(records: Sequence[Record], job: PrepareJob) -> list[int]:
    """Task: return the chunks of a file of records that have media that changed since."""
    folder = job.folder
    changed = []
    with open_records(job.out, records[0].file, ["files"]) as reader:
        for record in records:
            texts = reader.get_batch(record.batch).column(0).drop_null().to_pylist()
            files = (tuple(file) for text in texts for file in orjson.loads(text))
            if any(file != stat_signature(folder, file[0]) for file in files):
                changed.append(record.chunk.index)
    return changed


class _ChunkPacker:
    """State of one chunk while it is packed.

    Attributes:
        rows: Columns of the record of each row.
    """

    def __init__(
        self,
        job: PrepareJob,
        chunk: SourceChunk,
        builder: RowBuilder,
        has_types: bool,
        shard_files: ExitStack,
    ) -> None:
        self.job = job
        self.chunk = chunk
        self.builder = builder
        self.shard_files = shard_files
        self.writers: dict[str | None, ShardWriter] = {}
        self.num_stored: Counter[int] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.columns = KeptColumns(has_types)
        self.text_columns = text_columns(job.settings.columns)
        self.keeps_columns = bool(job.settings.keep or self.text_columns or job.settings.compute)
        self.notices: dict[str, tuple[int, str]] = {}
        # The same work gives the same files, but never those that an earlier manifest names.
        inputs = repr((job.base, job.digest, job.class_names, chunk))
        self.file_suffix = hashlib.sha256(inputs.encode()).hexdigest()[:8]

    def pack(self, item: RawRow, row: SourceRow | BadRow) -> None:
        location = to_utf8(item.location)
        try:
            if isinstance(row, BadRow):
                raise row
            image_digest = self.builder.build(row)
        except BadRow as bad:
            values: dict[str, Any] = {
                "key": to_utf8(row.key or location),
                "stage": bad.stage,
                "reason": bad.reason,
                "detail": to_utf8(bad.detail),
            }
        else:
            values = self._store(location, row, image_digest)
        if item.files:
            values["files"] = orjson.dumps(item.files).decode()
        self.rows.append({"location": location} | values)

    def _store(self, location: str, row: SourceRow, image_digest: str) -> dict[str, Any]:
        """Add a good row to its shard, and return the columns of its record."""
        if self.text_columns and row.text_columns is None and row.messages is None and row.texts:
            row.text_columns = [_NO_COLUMN] * len(row.texts)
        if row.split not in self.writers:
            name = f"{SHARDS}/{self.chunk.index:05d}-{row.split or 'rows'}-{self.file_suffix}.arrow"
            file = open_shard(self.job.out, name, row.split)
            self.writers[row.split] = self.shard_files.enter_context(file)
        self.writers[row.split].append(row)
        # A conversation, whose texts are of no column, has what each of them asks for.
        flags = {
            caption_flag(name): row.text_columns is None or name in row.text_columns
            for name in self.text_columns
        }
        if self.keeps_columns:
            self.columns.append(row.split, row.columns | flags, location)
        for notice in dict.fromkeys(row.notices):
            if notice not in self.notices and len(self.notices) >= _MAX_NOTICES:
                notice = _MORE_NOTICES
            count, first = self.notices.get(notice, (0, location))
            self.notices[notice] = (count + 1, first)
        # Pairs of audio and video without captions do not repeat the captions of one another.
        captions = [*row.texts, *(row.messages or [])] or [image_digest]
        row_digest = sha256(orjson.dumps([image_digest, *captions]))
        # Rows without a split become training rows if others have one.
        key_digest = hashlib.blake2b(f"{row.split or 'train'}/{row.key}".encode(), digest_size=16)
        shard = list(self.writers).index(row.split)
        self.num_stored[shard] += 1
        return {
            "key": row.key,
            "shard": shard,
            "position": self.num_stored[shard] - 1,
            "kinds": row.media_kinds,
            "key_digest": key_digest.digest(),
            # Conversations about one image are different rows unless they are equal, too.
            "image_digest": bytes.fromhex(row_digest if row.messages else image_digest)[:16],
            "row_digest": bytes.fromhex(row_digest)[:16],
            "text_digest": hashlib.sha256(orjson.dumps(captions)).digest()[:16],
        }

    def record(self, file: str) -> Record:
        shards = [writer.entry() for writer in self.writers.values()]
        has_columns = self.keeps_columns and bool(shards)
        bad = [row for row in self.rows if "reason" in row]
        counts = Counter((row["shard"], row["kinds"]) for row in self.rows if "shard" in row)
        return Record(
            job=self.job.digest,
            chunk=self.chunk,
            class_names=list(self.job.class_names),
            shards=shards,
            num_rows=len(self.rows),
            reasons=Counter(row["reason"] for row in bad),
            stages=sorted({row["stage"] for row in bad}),
            counts=[(*kind, number) for kind, number in counts.items()],
            columns=self.columns.types,
            columns_file=self.columns.write(self.job.out, shards) if has_columns else None,
            notices=self.notices,
            has_files=any("files" in row for row in self.rows),
            file=file,
        )
