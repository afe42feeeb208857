"""The work of one prepare task: a chunk of the source becomes shard files and a record of what was done.

Each row is parsed, its images read, decoded whole and hashed, its captions cleaned; what fails goes into the record
with stage and reason. The record (parts/chunk-N.json) is written last: with it the chunk counts as done, and a prepare
that was killed, or whose source has grown, does not do it again. No Ray here: a test calls `pack_chunk` as it is.
"""

from __future__ import annotations

import hashlib
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from mmray.data.image import BadImage, decode, shrink
from mmray.data.jsonl import BadRow, RawRow, parse_line
from mmray.data.manifest import PARTS, SHARDS, Shard
from mmray.data.place import Place
from mmray.data.sources import Chunk, read_image, read_lines, stamp
from mmray.data.store import Row, ShardWriter, images_sha256
from mmray.data.text import BadText, clean

_RECORD_VERSION = 1


@dataclass(frozen=True)
class Job:
    """What decides how a chunk is packed: another job packs it again."""

    source: str
    name: str
    out: str
    image_side: int
    max_pixels: int
    holdout: float
    rows_per_shard: int

    def digest(self) -> str:
        """Of the settings alone: a set may be moved together with its source."""
        settings = (_RECORD_VERSION, self.image_side, self.max_pixels, self.holdout, self.rows_per_shard)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Packed:
    """What a task tells the driver."""

    index: int
    num_rows: int
    num_bad: int


def part_name(index: int) -> str:
    return f"{PARTS}/chunk-{index:05d}.json"


def pack_chunk(job: Job, chunk: Chunk) -> Packed:
    """Pack one chunk. Raises SourceChanged, or OSError where the set cannot be written."""
    task = _Task(job, chunk)
    with ExitStack() as files:
        for line, data in read_lines(task.source, job.name, chunk):
            task.pack(line, data, files)
    record = task.record()
    Place(job.out).write(part_name(chunk.index), orjson.dumps(record))
    return Packed(chunk.index, len(record["rows"]["key"]) + len(record["faults"]), len(record["faults"]))


def read_record(out: Place, index: int) -> dict[str, Any] | None:
    """The record of a chunk that was done; None where there is none that can be read."""
    try:
        record = orjson.loads(out.read(part_name(index)))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_current(record: dict[str, Any], job: Job, chunk: Chunk) -> bool:
    """Whether this record stands for this chunk as it would be packed now: same lines, settings and image files."""
    source, out = Place(job.source), Place(job.out)
    return (
        record["job"] == job.digest()
        and record["chunk"] == asdict(chunk)
        and not record["retry"]
        and all(out.size(shard["file"]) == shard["num_bytes"] for shard in record["shards"])
        and all(tuple(file) == stamp(source, file[0]) for file in record["files"])
    )


class _Task:
    """The state of one chunk while it is packed."""

    def __init__(self, job: Job, chunk: Chunk) -> None:
        self.job, self.chunk = job, chunk
        self.source, self.out = Place(job.source), Place(job.out)
        self.writers: dict[str | None, ShardWriter] = {}
        self.rows: dict[str, list[Any]] = {"line": [], "key": [], "image": [], "row": [], "shard": []}
        self.faults: list[dict[str, Any]] = []
        self.files: list[tuple[str, int | None, int | None]] = []
        self.retry = False
        self.token = uuid.uuid4().hex[:8]  # never over a file that an earlier manifest may name

    def pack(self, line: int, data: bytes, files: ExitStack) -> None:
        where = f"{self.job.name}:{line}"
        key = where
        try:
            raw = parse_line(data, where)
            key = raw.key
            row, original = self._check(raw, where)
        except BadRow as bad:
            # "unreadable" may pass (a network file system), so such a chunk is tried again by the next prepare.
            self.retry = self.retry or bad.reason == "unreadable"
            self.faults.append(
                {"line": line, "key": bad.key or key, "stage": bad.stage, "reason": bad.reason, "detail": bad.detail}
            )
            return
        self._writer(row.split, files).append(row)
        texts = hashlib.sha256(orjson.dumps([original, *row.texts])).hexdigest()
        entry = (line, row.key, original[:32], texts[:32], list(self.writers).index(row.split))
        for column, value in zip(self.rows.values(), entry, strict=True):
            column.append(value)

    def record(self) -> dict[str, Any]:
        """What was done, as JSON; call it when the shard files are closed."""
        return {
            "job": self.job.digest(),
            "chunk": asdict(self.chunk),
            "retry": self.retry,
            "shards": [asdict(writer.entry()) for writer in self.writers.values()],
            "rows": self.rows,
            "faults": self.faults,
            "files": self.files,
        }

    def _check(self, raw: RawRow, where: str) -> tuple[Row, str]:
        """The row to keep, and the digest of its images as they came. Raises BadRow."""
        try:
            texts = [clean(text) for text in raw.texts]
        except BadText as bad:
            raise BadRow("text", bad.reason, bad.detail) from None
        images = [self._read(name) for name in raw.images]
        original = images_sha256(images)
        kept = [self._decode(name, data) for name, data in zip(raw.images, images, strict=True)]
        row = Row(raw.key, kept, texts, raw.label, raw.split, raw.language, where, images_sha256(kept))
        if row.split is None and self.job.holdout > 0:
            # By content, so that twins are on one side and a row stays where it is when the set grows.
            row.split = "test" if int(original[:16], 16) / 2**64 < self.job.holdout else "train"
        return row, original

    def _read(self, name: str) -> bytes:
        self.files.append(stamp(self.source, name))
        return read_image(self.source, name)

    def _decode(self, name: str, data: bytes) -> bytes:
        """The bytes to keep of an image that decodes to its end."""
        try:
            image = decode(data, self.job.max_pixels)
            return shrink(image, data, self.job.image_side) if self.job.image_side else data
        except BadImage as bad:
            raise BadRow("decode", bad.reason, f"{name}: {bad.detail}") from None

    def _writer(self, split: str | None, files: ExitStack) -> ShardWriter:
        if split not in self.writers:
            name = f"{SHARDS}/{self.chunk.index:05d}-{split or 'rows'}-{self.token}.arrow"
            self.writers[split] = files.enter_context(ShardWriter(self.out, name, split))
        return self.writers[split]


def shards_of(record: dict[str, Any]) -> list[Shard]:
    """The shard files of a finished chunk."""
    return [Shard.from_json(values) for values in record["shards"]]
