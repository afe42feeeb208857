"""The work of one prepare task: convert a chunk of the source to shard files and a record.

Each row is parsed, its images are read, decoded completely and hashed, and its captions are cleaned. Failures go into
the record with stage and reason. The record (parts/chunk-N.json) is written last and marks the chunk as done. So a
killed prepare resumes, and a source that grew is appended to. Does not import Ray.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow as pa

from mmray.data.formats.detect import SourceSpec, open_source
from mmray.data.formats.rows import BadRow, ImageRef, SourceRow
from mmray.data.formats.source import Source, SourceChunk, SourceItem, SourceUnreadable
from mmray.data.images.decode import BadImage, decode, header_size, verify_image
from mmray.data.images.read import file_stamp, quarantine_os_errors, read_image
from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.images.transform import reencode
from mmray.data.prepare.fetch import prefetch_rows
from mmray.data.store.manifest import PARTS, SHARDS, Shard
from mmray.data.store.prepared_set import BATCH_ROWS, SCHEMA, Row
from mmray.data.store.shards import first_batch_offset
from mmray.data.text.tokenizer import BadText, clean_caption
from mmray.storage.storage import Storage

if TYPE_CHECKING:
    from mmray.data.prepare.fetch import Fetcher


class ShardWriter:
    """Writes a shard row by row. The file appears when the `with` block ends without an error."""

    def __init__(self, storage: Storage, name: str, split: str | None = None) -> None:
        self._storage, self._name, self._split = storage, name, split
        self._digest, self.num_rows = hashlib.sha256(), 0
        self._batch: list[Row] = []
        self._offsets = [first_batch_offset(SCHEMA)]

    def __enter__(self) -> ShardWriter:
        with ExitStack() as files:
            self._stream = files.enter_context(self._storage.open_output(self._name))
            self._writer = files.enter_context(pa.ipc.new_file(self._stream, SCHEMA))
            self._files = files.pop_all()
        return self

    def append(self, row: Row) -> None:
        """Append a row; memory holds at most one record batch."""
        self._batch.append(row)
        self.num_rows += 1
        self._digest.update(
            orjson.dumps(
                [
                    row.key,
                    row.texts,
                    row.label,
                    row.split,
                    row.language,
                    row.sha256,
                    row.boxes,
                    row.box_labels,
                    row.ref,
                    *([row.messages] if row.messages else []),
                ]
            )
        )
        if len(self._batch) == BATCH_ROWS:
            self._flush()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._batch:
            self._flush()
        self._files.__exit__(*error)

    def entry(self) -> Shard:
        """Return the manifest entry of the finished file."""
        size = self._storage.size(self._name) or 0
        batches = " ".join(str(offset) for offset in self._offsets)
        return Shard(self._name, self._split, self.num_rows, size, self._digest.hexdigest(), batches=batches)

    def _flush(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist([vars(row) for row in self._batch], schema=SCHEMA))
        self._offsets.append(self._stream.tell())
        self._batch.clear()


def write_shard(rows: Iterable[Row], storage: Storage, name: str, split: str | None = None) -> Shard:
    """Write rows as the file `name` in `storage` and return its manifest entry."""
    with ShardWriter(storage, name, split) as shard:
        for row in rows:
            shard.append(row)
    return shard.entry()


_RECORD_VERSION = 5
_BOX_SLACK = 0.01  # tolerated fraction outside the image, because annotations may exceed the edge by a pixel


@dataclass(frozen=True)
class PrepareJob:
    """Settings that determine how a chunk is packed. A chunk is packed again if their digest changes."""

    source: SourceSpec
    out: str
    columns: tuple[tuple[str, str], ...]  # (our name, name in the source)
    template: str
    check: str
    index_only: bool
    image_side: int
    max_pixels: int
    holdout: float
    rows_per_shard: int
    allow_urls: tuple[str, ...] = ()
    run_id: str = ""  # of this prepare: a retried task skips the chunks that it finished before its worker died

    def digest(self) -> str:
        """Return a hash of the settings without addresses, so that a set can be moved together with its source."""
        settings: list[object] = [_RECORD_VERSION, self.image_side, self.max_pixels, self.holdout, self.rows_per_shard]
        settings += [self.source.format, self.columns, self.template, self.check, self.index_only]
        settings += (
            [self.allow_urls] if self.allow_urls else []
        )  # keep the digest of sets prepared before this option existed
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

    def open(self) -> Source:
        """Open the source, on the driver or in a task."""
        return open_source(self.source, Storage(self.out), dict(self.columns), self.template)


@dataclass(frozen=True)
class ChunkResult:
    """Result of a task."""

    index: int
    num_rows: int
    num_bad: int


class RecordRow(NamedTuple):
    """Columns of the rows in a record."""

    line: int
    origin: str
    key: str
    image: str  # digest of the original image
    row: str  # digest of image and texts
    text: str  # digest of its texts
    shard: int
    language: str | None


def record_path(index: int) -> str:
    return f"{PARTS}/chunk-{index:05d}.json"


def pack_chunk(
    job: PrepareJob,
    chunk: SourceChunk,
    fetcher: Callable[[tuple[str, ...]], Fetcher] | None = None,
    sandboxed: bool = False,
) -> ChunkResult:
    """Pack one chunk. `sandboxed` decodes images in a child process; `fetcher` makes the client for images by URL.

    Raises SourceChanged, SourceUnreadable, and OSError if the set cannot be written.
    """
    record = read_record(Storage(job.out), chunk.index) if job.run_id else None
    if record is None or record.get("run_id") != job.run_id:
        record = _pack(job, chunk, fetcher, sandboxed)
    return ChunkResult(chunk.index, len(record["rows"]["key"]) + len(record["faults"]), len(record["faults"]))


def _pack(job: PrepareJob, chunk: SourceChunk, fetcher: Any, sandboxed: bool) -> dict[str, Any]:
    packer, fetch = _ChunkPacker(job, chunk, sandboxed), None
    with ExitStack() as files:
        files.callback(packer.sandbox.close)
        if job.allow_urls and not job.index_only:
            from mmray.data.prepare.fetch import Fetcher  # only tasks with URLs need an HTTP client

            fetch = files.enter_context((fetcher or Fetcher)(job.allow_urls)).fetch
        for item, raw in prefetch_rows(_items(job, chunk), job.allow_urls, fetch):
            packer.pack(item, raw, files)
    record = packer.record()
    Storage(job.out).write(record_path(chunk.index), orjson.dumps(record))
    return record


def _items(job: PrepareJob, chunk: SourceChunk) -> Iterator[SourceItem]:
    """Yield the rows of a chunk; convert an OSError of the source to SourceUnreadable."""
    try:
        yield from job.open().read(chunk)
    except OSError as error:
        raise SourceUnreadable(f"{job.source.address}/{chunk.file} cannot be read: {error}") from error


def read_record(out: Storage, index: int) -> dict[str, Any] | None:
    """Return the record of a finished chunk, or None if it is missing or unreadable."""
    try:
        record = orjson.loads(out.read(record_path(index)))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_current(record: dict[str, Any], job: PrepareJob, chunk: SourceChunk) -> bool:
    """Return whether packing the chunk again would give this record: same lines, settings and image files."""
    source, out = Storage(job.source.address), Storage(job.out)
    return (
        record["job"] == job.digest()
        and record["chunk"] == asdict(chunk)
        and not record["retry"]
        and all(out.size(shard["file"]) == shard["num_bytes"] for shard in record["shards"])
        and all(tuple(file) == file_stamp(source, file[0]) for file in record["files"])
    )


def has_retryable(record: dict[str, Any]) -> bool:
    """Return whether quarantined rows of the chunk may succeed later, because their files did not open or decode."""
    return any(fault["stage"] in ("read", "decode") for fault in record["faults"])


class _ChunkPacker:
    """State of one chunk while it is packed."""

    def __init__(self, job: PrepareJob, chunk: SourceChunk, sandboxed: bool) -> None:
        self.job, self.chunk, self.sandboxed = job, chunk, sandboxed
        self.source, self.out = Storage(job.source.address), Storage(job.out)
        self.writers: dict[str | None, ShardWriter] = {}
        self.rows: list[RecordRow] = []
        self.faults: list[dict[str, Any]] = []
        self.files: list[tuple[str, int | None, int | None]] = []
        self.retry = False
        self.sandbox = SandboxedDecoder()
        self.token = uuid.uuid4().hex[:8]  # never overwrite a file that an earlier manifest names

    def pack(self, item: SourceItem, raw: SourceRow | BadRow, files: ExitStack) -> None:
        where, key = _to_utf8(item.origin), _to_utf8(raw.key or item.origin)
        try:
            if isinstance(raw, BadRow):
                raise raw
            row, original = self._check(raw, where)
        except BadRow as bad:
            # The cause may be temporary (a network file system), so the next prepare packs the chunk again.
            self.retry = self.retry or bad.reason == "unreadable"
            fault = {"stage": bad.stage, "reason": bad.reason, "detail": _to_utf8(bad.detail)}
            self.faults.append({"line": item.line, "key": key, "source": where} | fault)
            return
        self._writer(row.split, files).append(row)
        captions = [*row.texts, *(row.messages or [])]
        text, whole = (hashlib.sha256(orjson.dumps(values)).hexdigest() for values in (captions, [original, *captions]))
        self.rows.append(
            RecordRow(
                line=item.line,
                origin=where,
                key=row.key,
                image=original[:32],
                row=whole[:32],
                text=text[:32],
                shard=list(self.writers).index(row.split),
                language=row.language,
            )
        )

    def record(self) -> dict[str, Any]:
        """Return the JSON of the finished chunk; call it after the shard files are closed."""
        return {
            "job": self.job.digest(),
            "run_id": self.job.run_id,
            "chunk": asdict(self.chunk),
            "retry": self.retry,
            "shards": [asdict(writer.entry()) for writer in self.writers.values()],
            "rows": {name: [getattr(row, name) for row in self.rows] for name in RecordRow._fields},
            "faults": self.faults,
            "files": self.files,
        }

    def _check(self, raw: SourceRow, where: str) -> tuple[Row, str]:
        """Return the validated row and the digest of its original image. Raises BadRow."""
        try:
            texts = [clean_caption(text) for text in raw.texts]
        except BadText as bad:
            raise BadRow("text", bad.reason, bad.detail) from None
        if self.job.index_only and raw.image.url:
            raise BadRow("read", "no-reference", "the image is a URL: prepare without --index-only")
        if self.job.index_only and raw.image.file is None:
            raise BadRow("read", "no-reference", "the image is inside the row: prepare without --index-only")
        if self.job.index_only and self.job.check == "none":
            self._stamp(raw.image)
            return self._unchecked_row(raw, texts, where)
        data = self._read(raw.image)
        original = hashlib.sha256(data).hexdigest()
        kept, size = self._decode(raw.image.name, data)
        sha256 = original if kept is data else hashlib.sha256(kept).hexdigest()
        row = Row(raw.key, kept, texts, raw.label, raw.split, raw.language, where, sha256)
        row.messages = list(raw.messages) or None
        if raw.boxes:
            row.boxes, row.box_labels = _relative_boxes(raw, size), list(raw.box_labels)
        if self.job.index_only:
            row.image, row.ref = b"", _ref(raw)
        return self._assign_split(row, original), original

    def _unchecked_row(self, raw: SourceRow, texts: list[str], where: str) -> tuple[Row, str]:
        """Return a row without reading its image: it has no checksum, and only the same file is its duplicate."""
        ref = _ref(raw)
        original = hashlib.sha256(orjson.dumps(ref)).hexdigest()
        row = Row(raw.key, b"", texts, raw.label, raw.split, raw.language, where, ref=ref)
        row.messages = list(raw.messages) or None
        if raw.boxes:
            row.boxes, row.box_labels = _relative_boxes(raw, (0, 0)), list(raw.box_labels)
        return self._assign_split(row, original), original

    def _assign_split(self, row: Row, original: str) -> Row:
        """Assign a row without a split to `train` or the held-out `test`."""
        if row.split is None and self.job.holdout > 0:
            # By content hash, so that duplicates share a split and a row keeps its split when the set grows.
            row.split = "test" if int(original[:16], 16) / 2**64 < self.job.holdout else "train"
        return row

    def _stamp(self, image: ImageRef) -> None:
        if image.data is None:
            self.files.append(file_stamp(self.source, str(image.file)))

    def _read(self, image: ImageRef) -> bytes:
        self._stamp(image)
        with quarantine_os_errors(image.name):
            return read_image(self.source, image)

    def _decode(self, name: str, data: bytes) -> tuple[bytes, tuple[int, int]]:
        """Return the bytes to store for an image and its size; `check` sets how completely it is decoded."""
        try:
            if self.job.image_side:
                if self.sandboxed:
                    self.sandbox.check(data, self.job.max_pixels)
                rgb = decode(data, self.job.max_pixels)
                return reencode(rgb, data, self.job.image_side), (rgb.shape[1], rgb.shape[0])
            if self.job.check != "full":
                return data, header_size(data, self.job.max_pixels) if self.job.check == "header" else (0, 0)
            check = self.sandbox.check if self.sandboxed else verify_image
            return data, check(data, self.job.max_pixels)
        except BadImage as bad:
            raise BadRow("decode", bad.reason, f"{name}: {bad.detail}") from None

    def _writer(self, split: str | None, files: ExitStack) -> ShardWriter:
        if split not in self.writers:
            name = f"{SHARDS}/{self.chunk.index:05d}-{split or 'rows'}-{self.token}.arrow"
            self.writers[split] = files.enter_context(ShardWriter(self.out, name, split))
        return self.writers[split]


def shards_of(record: dict[str, Any]) -> list[Shard]:
    """Return the shards of a finished chunk."""
    return [Shard.from_json(values) for values in record["shards"]]


def _to_utf8(text: str) -> str:
    """Escape what UTF-8 cannot encode, because file names and JSON may contain lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _ref(raw: SourceRow) -> dict[str, Any]:
    """Return file, offset and length of a row's image, as stored in a shard."""
    return {"file": raw.image.file, "offset": raw.image.offset, "length": raw.image.length}


def _relative_boxes(raw: SourceRow, size: tuple[int, int]) -> list[list[float]]:
    """Convert boxes to (left, top, right, bottom) in fractions of the image size. Raises BadRow."""
    width, height = size
    if not width:
        raise BadRow("columns", "boxes", "boxes need the image size: prepare with --check full or header")
    out = [[x / width, y / height, (x + w) / width, (y + h) / height] for x, y, w, h in raw.boxes]
    if any(min(box) < -_BOX_SLACK or max(box) > 1 + _BOX_SLACK for box in out):
        raise BadRow("columns", "boxes", f"a box exceeds the image of {width} x {height} pixels")
    return [[min(1.0, max(0.0, number)) for number in box] for box in out]
