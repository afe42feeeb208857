"""The work of one prepare task: convert a chunk of the source to shard files and a record.

Each row is parsed, its image is read, decoded completely and hashed, and its captions are cleaned.
Failures go into the record with stage and reason. The record (records.py) is written last and
marks the chunk as done. So a killed prepare resumes, and a source that grew is appended to.
Does not import Ray.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from mmray.data.formats.detect import SourceSpec, open_source
from mmray.data.formats.grouped import GroupedSource
from mmray.data.formats.source import RawRow, Source, SourceChunk
from mmray.data.images.decode import (
    BadImage,
    decode,
    exif_orientation,
    header_size,
    image_notices,
    split_pages,
    verify_image,
)
from mmray.data.images.read import (
    Roots,
    locate_file,
    os_error_as_bad_row,
    read_image,
    stat_signature,
)
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import reencode
from mmray.data.media.decode import MediaInfo, read_header, verify_media
from mmray.data.media.encode import reencode_audio
from mmray.data.prepare.kept_columns import Compute, KeptColumns, compute_columns
from mmray.data.prepare.records import (
    SCHEMA,
    Labels,
    Record,
    map_rows,
    open_records,
    read_summaries,
    record_path,
    write_records,
)
from mmray.data.prepare.row_checks import check_aspect_ratio, check_spans, relative_boxes
from mmray.data.prepare.tasks import RESUME_HINT, Result, run_with_crash_limit
from mmray.data.rows import BadRow, ImageRef, SourceRow, parse_row, to_utf8
from mmray.data.store.manifest import SHARDS, text_columns
from mmray.data.store.row_columns import KEPT, caption_flag
from mmray.data.store.row_values import COLUMNS_DIR
from mmray.data.store.shard_writer import ShardWriter, open_shard
from mmray.data.store.stored_row import Media
from mmray.data.text.tokenizer import clean_caption
from mmray.errors import ResourceError
from mmray.plugins import load_class, source_digest
from mmray.storage.paths import AnyPath, RemotePath, file_size, retry_if_remote, to_path

if TYPE_CHECKING:
    from mmray.config import Prepare

RETRYABLE_STAGES = ("read", "decode")  # stages whose rows --retry-quarantined packs again
# images by URL or on an object store that are requested, and rows that wait for them
PREFETCH_ROWS = 32
PREFETCH_BYTES = 64 << 20  # size of these images, if they are more than MIN_PREFETCH_ROWS
MIN_PREFETCH_ROWS = 8
READ_THREADS = 16
_RECORD_VERSION = 18
_PACK_SETTINGS = (
    "image_side",
    "audio_rate",
    "max_pixels",
    "pages",
    "holdout",
    "split",
    "rows_per_shard",
    "columns",
    "keep",
    "caption",
    "group",
    "check",
    "repair_text",
    "index_only",
    "root",
)


Requests = list[Future[bytes] | None]  # reads of the images of a row
Fetch = Callable[[ImageRef], Future[bytes] | None]


@dataclass(frozen=True)
class PrepareJob:
    """Source, output folder and settings of a prepare.

    `open()` returns the Source, and `digest()` a hash of the settings that determine how rows are
    packed.

    Attributes:
        source: Format and location of the source, from `detect_source`.
        out: Folder or URI of the set.
        settings: The `prepare` section, whose `rows_per_shard` is a number, not `auto`.
        retry: Whether to pack chunks again in which rows could not be read or decoded.
        class_names: Names of the labels 0, 1, ..., known after the source was scanned.
        grows: Whether shards grow with the number of rows before them (Source.grows).
    """

    source: SourceSpec
    out: str
    settings: Prepare
    retry: bool = False
    class_names: tuple[str, ...] = ()
    grows: bool = False

    @property
    def rows_per_shard(self) -> int:
        """Largest number of rows of a shard, `prepare.rows_per_shard`."""
        assert self.settings.rows_per_shard != "auto", "the pipeline chooses a number first"
        return self.settings.rows_per_shard

    @property
    def compute(self) -> Compute | None:
        """The function that `prepare.compute` names."""
        name = self.settings.compute
        return None if name is None else load_class(name, "prepare.compute")

    def digest(self) -> str:
        """Return a hash, 16 hex digits, of what determines how rows are packed: the source format,
        settings, and the code of `prepare.compute`.

        It does not cover addresses, so that a set can be moved.
        """
        settings = [
            _RECORD_VERSION,
            self.source.format,
            *(getattr(self.settings, name) for name in _PACK_SETTINGS),
        ]
        if self.compute is not None:
            settings += [self.settings.compute, source_digest(self.compute)]
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

    def open(self) -> Source:
        """Create the object that reads the source: its `scan` yields chunks, its `read` the rows of
        a chunk. With `prepare.group` = image it is a GroupedSource.

        It can be created on the driver or in a task, and reads nothing before `scan` or `read` is
        called.
        """
        source = open_source(
            self.source, to_path(self.out), self.settings.column_names, self.settings.caption
        )
        source.roots = self.settings.root
        source.keep = self.settings.keep
        if self.settings.group == "image":
            source = GroupedSource(source, map_rows)
        source.class_names = self.class_names
        source.grows = self.grows
        return source

    @cached_property
    def folder(self) -> AnyPath:
        """Folder of the source, which paths of media are relative to."""
        return to_path(self.source.address)

    def parse_row(self, item: RawRow) -> SourceRow:
        """Validate the values of a row of the source, and where its files are. Raises BadRow."""
        row = parse_row(item.values, item.location)
        try:
            row.images = [
                locate_file(self.folder, image, self.settings.root) for image in row.images
            ]
        except BadRow as bad:
            bad.key = row.key
            raise
        return row


def pack_task(item: dict[str, Any], job: PrepareJob) -> Result:
    """Ray task: pack one chunk.

    Ray retries it if its worker dies; the retry decodes images in a child process.
    """
    chunk = SourceChunk(**{name: item[name] for name in SourceChunk.__dataclass_fields__})
    out = to_path(job.out)
    name = record_path(chunk.index)
    item_name = f"{chunk.file} from row {chunk.first_line}"

    def pack(decoder: SubprocessDecoder | None) -> Record:
        # An upload that failed cannot be resumed, so the chunk is packed again.
        return retry_if_remote(out, partial(pack_chunk, job, chunk, decoder, item["labels"]))

    try:
        return {"record": run_with_crash_limit(pack, out, name, item_name)}
    except OSError as error:
        raise ResourceError(f"prepare failed at {item_name}: {error}. {RESUME_HINT}") from error


_MAX_NOTICES = 200  # of a chunk, whose rows may have a column each
_MORE_NOTICES = "further columns are not used"


def pack_chunk(
    job: PrepareJob,
    chunk: SourceChunk,
    subprocess_decoder: SubprocessDecoder | None,
    labels: Labels | None = None,
) -> Record:
    """Pack one chunk: write its rows to shards, and then its record, which marks it as done.

    Does nothing if a current record exists, because an interrupted task has packed the chunk.

    Args:
        subprocess_decoder: Decodes each image and clip first, in a child process, to name the one
            that crashes the decoder; None: they are decoded in this process only.
        labels: The labels of the chunk, for the record.

    Raises:
        DataError: The source changed.
        OSError: The source cannot be read, or the set cannot be written.
    """
    out = to_path(job.out)
    file = record_path(chunk.index)
    for record in read_summaries(out, file):
        if is_current(record, job, chunk, lambda name: file_size(out / name)):
            return record
    source = job.open()
    packer = _ChunkPacker(job, chunk, subprocess_decoder, source.has_types)
    items = source.read(chunk)
    with ExitStack() as exit_stack:
        fetch = _open_fetch(job, exit_stack)
        for item, row, images in prefetch_rows(items, job.parse_row, fetch):
            packer.pack(item, row, images, exit_stack)
    # The shard files are closed now.
    record = packer.record(file, labels)
    write_records(out, file, [record], [pa.RecordBatch.from_pydict(packer.rows, SCHEMA)])
    return record


def _open_fetch(job: PrepareJob, exit_stack: ExitStack) -> Fetch:
    """Return a function that starts to read an image on an object store; for others None."""
    settings = job.settings
    folder = to_path(job.source.address)
    pool = None
    is_read = not (settings.index_only and settings.check == "none")
    if is_read and isinstance(folder, RemotePath):
        pool = ThreadPoolExecutor(READ_THREADS, "read")
        exit_stack.callback(pool.shutdown, cancel_futures=True)

    def fetch(image: ImageRef) -> Future[bytes] | None:
        if pool and image.data is None:
            return pool.submit(_read, folder, image, settings.root)
        return None

    return fetch


def prefetch_rows(
    items: Iterable[RawRow], parse: Callable[[RawRow], SourceRow], fetch: Fetch
) -> Iterator[tuple[RawRow, SourceRow | BadRow, Requests]]:
    """Validate rows and request their images ahead, and yield them in order.

    Up to PREFETCH_ROWS (32) images are requested ahead, fewer if the last one was large.

    Args:
        items: Parsed rows of the source, in order.
        parse: Called with an item, returns its SourceRow; raises BadRow.
        fetch: Called with an ImageRef (bytes or file of an image, audio or video); starts to
            read it and returns a concurrent.futures.Future of its bytes, or None if it is not
            requested ahead, such as one on a local disk.

    Yields:
        For each item (item, row, requests): the item; its SourceRow, or the BadRow of an invalid
        row; and a list of what `fetch` returned for each of `row.images`, empty for a BadRow.
    """
    pending: deque[tuple[RawRow, SourceRow | BadRow, Requests]] = deque()
    num_requested = 0  # images of the pending rows
    ahead = MIN_PREFETCH_ROWS
    for item in chain(items, [None]):
        if item is not None:
            row: SourceRow | BadRow
            try:
                row = parse(item)
            except BadRow as bad:
                row = bad
            images = [*map(fetch, row.images)] if isinstance(row, SourceRow) else []
            num_requested += len(images)
            pending.append((item, row, images))
        while pending and (item is None or num_requested > ahead or not any(pending[0][2])):
            first, row, images = pending.popleft()
            num_requested -= len(images)
            yield first, row, images
            for image in images:
                if image is not None and image.done() and image.exception() is None:
                    ahead = min(
                        PREFETCH_ROWS,
                        max(MIN_PREFETCH_ROWS, PREFETCH_BYTES // (len(image.result()) or 1)),
                    )


def _read(folder: AnyPath, image: ImageRef, roots: Roots) -> bytes:
    with os_error_as_bad_row(image.name):
        return read_image(folder, image, roots)


def _first_image(row: SourceRow | BadRow) -> dict[str, Any]:
    """Return what locates the first image of a bad row in the source; empty if it has none there.

    `mmray show` reads it.
    """
    images = row.images if isinstance(row, SourceRow) else ()
    first = next((image for image in images if image.kind == "image"), None)
    if first is None or first.file is None:
        return {}
    return {"file": first.path, "offset": first.offset, "length": first.length}


def is_current(
    record: Record, job: PrepareJob, chunk: SourceChunk, size_of: Callable[[str], int | None]
) -> bool:
    """Return whether packing a chunk again would give the same result, if its media did not change.

    That is so if its lines, the settings and the files of shards are unchanged. False also if a row
    could not be read for a reason that may be temporary (a network file system); with `job.retry`
    if any row could not be read or decoded.

    Args:
        chunk: The chunk as it was scanned now.
        size_of: Returns the size of a file of the set in bytes; None: it does not exist.
    """
    retried_stages = RETRYABLE_STAGES if job.retry else ()
    return (
        record.job == job.digest()
        and record.class_names == list(job.class_names)
        and record.chunk == chunk
        and "unreadable" not in record.reasons
        and not set(retried_stages) & set(record.stages)
        and all(size_of(shard.file) == shard.num_bytes for shard in record.shards)
        and not (
            record.columns_file and size_of(f"{COLUMNS_DIR}/{KEPT}/{record.columns_file}") is None
        )
    )


def changed_chunks(records: Sequence[Record], job: PrepareJob) -> dict[str, Any]:
    """Task: return which chunks of a file of records have media that changed since, as `chunks`."""
    folder = job.folder
    changed = []
    with open_records(to_path(job.out), records[0].file, ["files"]) as reader:
        for record in records:
            texts = reader.get_batch(record.batch).column(0).drop_null().to_pylist()
            files = (tuple(file) for text in texts for file in orjson.loads(text))
            if any(file != stat_signature(folder, file[0]) for file in files):
                changed.append(record.chunk.index)
    return {"chunks": changed}


class _ChunkPacker:
    """State of one chunk while it is packed."""

    def __init__(
        self,
        job: PrepareJob,
        chunk: SourceChunk,
        subprocess_decoder: SubprocessDecoder | None,
        has_types: bool,
    ) -> None:
        self.job = job
        self.chunk = chunk
        self.builder = RowBuilder(job, subprocess_decoder)
        self.out = to_path(job.out)
        self.writers: dict[str | None, ShardWriter] = {}
        self.rows: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self.num_stored: Counter[int] = Counter()
        self.counts: Counter[tuple[int, str | None, str]] = Counter()
        self.columns = KeptColumns(has_types)
        self.text_columns = text_columns(job.settings.columns)
        self.keeps_columns = bool(job.settings.keep or self.text_columns or job.settings.compute)
        self.reasons: Counter[str] = Counter()
        self.stages: set[str] = set()
        self.notices: dict[str, tuple[int, str]] = {}
        # never overwrite a file that an earlier manifest names
        self.file_suffix = uuid.uuid4().hex[:8]

    def pack(
        self,
        item: RawRow,
        row: SourceRow | BadRow,
        images: Requests,
        exit_stack: ExitStack,
    ) -> None:
        location = to_utf8(item.location)
        try:
            if isinstance(row, BadRow):
                raise row
            image_digest = self.builder.build(row, images)
        except BadRow as bad:
            self._add_bad_row(bad, row, location)
            return
        if row.split not in self.writers:
            name = f"{SHARDS}/{self.chunk.index:05d}-{row.split or 'rows'}-{self.file_suffix}.arrow"
            self.writers[row.split] = exit_stack.enter_context(
                open_shard(self.out, name, row.split)
            )
        self.writers[row.split].append(row)
        # A conversation, whose texts are of no column, has what each of them asks for.
        flags = {
            caption_flag(name): row.text_columns is None or name in row.text_columns
            for name in self.text_columns
        }
        if self.keeps_columns:
            self.columns.append(row.split, row.columns | flags, location)
        # Pairs of audio and video without captions do not repeat the captions of one another.
        captions = [*row.texts, *(row.messages or [])] or [image_digest]
        text_digest, row_digest = (
            _sha256(orjson.dumps(each))[:32] for each in (captions, [image_digest, *captions])
        )
        shard = list(self.writers).index(row.split)
        # Rows without a split become training rows if others have one.
        key_digest = hashlib.blake2b(f"{row.split or 'train'}/{row.key}".encode(), digest_size=16)
        self.counts[shard, row.language, row.media_kinds] += 1
        self._append(
            location=location,
            key=row.key,
            shard=shard,
            position=self.num_stored[shard],
            language=row.language,
            kinds=row.media_kinds,
            key_digest=key_digest.digest(),
            # Conversations about one image are different rows unless they are equal, too.
            image_digest=bytes.fromhex(row_digest if row.messages else image_digest[:32]),
            row_digest=bytes.fromhex(row_digest),
            text_digest=bytes.fromhex(text_digest),
        )
        self.num_stored[shard] += 1
        for notice in dict.fromkeys(row.notices):
            if notice not in self.notices and len(self.notices) >= _MAX_NOTICES:
                notice = _MORE_NOTICES
            count, first = self.notices.get(notice, (0, location))
            self.notices[notice] = (count + 1, first)

    def _add_bad_row(self, bad: BadRow, row: SourceRow | BadRow, location: str) -> None:
        detail = to_utf8(bad.detail)
        self.stages.add(bad.stage)
        self.reasons[bad.reason] += 1
        key = to_utf8(row.key or location)
        image = _first_image(row)
        self._append(
            location=location,
            key=key,
            stage=bad.stage,
            reason=bad.reason,
            detail=detail,
            image=orjson.dumps(image).decode() if image else None,
        )

    def _append(self, **values: Any) -> None:
        """Add a row of the record, with the files of its media."""
        if files := self.builder.signatures:
            values["files"] = orjson.dumps(files).decode()
            files.clear()
        for name, column in self.rows.items():
            column.append(values.get(name))

    def record(self, file: str, labels: Labels | None) -> Record:
        shards = [writer.entry() for writer in self.writers.values()]
        has_columns = self.keeps_columns and bool(shards)
        return Record(
            job=self.job.digest(),
            chunk=self.chunk,
            class_names=list(self.job.class_names),
            labels=labels,
            shards=shards,
            num_rows=len(self.rows["key"]),
            reasons=self.reasons,
            stages=sorted(self.stages),
            counts=[(*key, number) for key, number in self.counts.items()],
            columns=self.columns.types,
            columns_file=self.columns.write(self.out, shards) if has_columns else None,
            notices=self.notices,
            has_files=any(self.rows["files"]),
            file=file,
        )


class RowBuilder:
    """Reads and checks the media of rows, and converts them to stored rows.

    `build(row)` takes a SourceRow, adds its media to it, and returns a digest by which duplicates
    are found; it raises BadRow for a row to quarantine.

    Args:
        job: Source, output folder and settings.
        subprocess_decoder: Decodes each image and clip first, in a child process; None: they are
            decoded in this process only.

    Attributes:
        signatures: List of (name, size in bytes, modification time in ns) of the local files of
            images, audio and video since the caller cleared it.
    """

    def __init__(self, job: PrepareJob, subprocess_decoder: SubprocessDecoder | None) -> None:
        self.signatures: list[tuple[str, int | None, int | None]] = []
        self._settings = job.settings
        self._compute = job.compute
        self._source = to_path(job.source.address)
        self._subprocess_decoder = subprocess_decoder

    def build(self, row: SourceRow, requested: Requests | None = None) -> str:
        """Complete a validated row of the source with its media, and return their digest.

        Args:
            row: The row, of which `media` is filled, `texts` are cleaned, `split` is set by
                `prepare.split` and `prepare.holdout`, `boxes` become (left, top, right, bottom) in
                fractions of the image, `spans` are cut to the file, and `columns` have the values
                of `prepare.compute`.
            requested: For each of `row.images` the future of its bytes if it was requested earlier,
                otherwise None. None: all are read now.

        Returns:
            A SHA-256 in hex that is equal for rows with equal images, audio and video, and equal
            spans; of a row without media that of the messages.

        Raises:
            BadRow: The row is to be quarantined.
        """
        settings = self._settings
        row.texts = [clean_caption(text, settings.repair_text) for text in row.texts]
        row.split = {"auto": row.split, "none": None}.get(settings.split, settings.split)
        digests = []
        size = (0, 0)
        requested = [None] * len(row.images) if requested is None else requested
        if settings.pages == "images" and row.messages and not row.boxes:
            requested = self._split_pages(row, requested)
        for image, request in zip(row.images, requested, strict=True):
            digest, size = self._add_media(row, image, request)
            if row.messages:
                check_aspect_ratio(image.name, size)
            digests.append(digest)
        image_digest = digests[0] if len(digests) == 1 else _sha256("".join(digests).encode())
        if not digests:
            image_digest = _sha256(orjson.dumps(row.messages))
        if row.boxes:
            orientation = 1
            # The document states the size before the rotation, so its boxes are those before it.
            if row.image_size == size[::-1] != size:
                data = self._read(row.images[0])
                orientation = exif_orientation(data, settings.max_pixels)
            row.boxes = relative_boxes(row.boxes, row.image_size or size, size, orientation)
        if row.split is None and settings.holdout > 0:
            # By content hash, so that duplicates share a split and a row keeps its split when the
            # set grows.
            row.split = "test" if int(image_digest[:16], 16) / 2**64 < settings.holdout else "train"
        if any(span and span[1] == math.inf for span in row.spans or ()):
            detail = "a text has no end, and that of its medium is not known: use --check full"
            raise BadRow("columns", "span", detail)
        if row.spans:
            # Rows of one recording with other spans are no duplicates.
            image_digest = _sha256(orjson.dumps([image_digest, row.spans]))
        if self._compute is not None:
            row.columns = compute_columns(self._compute, row)
        return image_digest

    def _split_pages(self, row: SourceRow, requested: Requests) -> Requests:
        """Make the pages of each TIFF images of a conversation, and return the bytes of its images.
        Raises BadRow.
        """
        images: list[list[ImageRef]] = []
        done: Requests = []
        for image, request in zip(row.images, requested, strict=True):
            data = request.result() if request else self._read(image)
            pages: list[bytes] = []
            if image.kind == "image":
                try:
                    if self._subprocess_decoder is not None:
                        self._subprocess_decoder.check_pages(data, self._settings.max_pixels)
                    pages = split_pages(data, self._settings.max_pixels)
                    if pages:
                        row.notices += image_notices(data, self._settings.max_pixels, True)
                except BadImage as bad:
                    raise BadRow("decode", bad.reason, f"{image.name}: {bad.detail}") from None
            names = [f"{image.name} page {number}" for number in range(1, len(pages) + 1)]
            images.append([replace(image, name=name) for name in names] or [image])
            for each in pages or [data]:
                future: Future[bytes] = Future()
                future.set_result(each)
                done.append(future)
        counts = iter([*map(len, images)])
        row.messages = [
            message
            | {
                "content": [
                    part
                    for part in message["content"]
                    for _ in range(1 if part["type"] == "text" else next(counts))
                ]
            }
            for message in row.messages or []
        ]
        row.images = [*chain.from_iterable(images)]
        return done

    def _add_media(
        self, row: SourceRow, image: ImageRef, request: Future[bytes] | None
    ) -> tuple[str, tuple[int, int]]:
        """Add an image, audio or video to a row; return its digest and size (width, height) as
        read.

        With `--index-only --check none` it is not read: it has no checksum, and only the same file
        is its duplicate. Raises BadRow.
        """
        settings = self._settings
        ref = self._reference(image)
        if settings.index_only and settings.check == "none":
            row.media.append(Media(image.kind, b"", ref))
            return _sha256(orjson.dumps(ref)), (0, 0)
        data = request.result() if request else self._read(image)
        media = Media(image.kind, data, ref, _sha256(data))
        try:
            if image.kind == "image":
                size = self._check_image(media)
                if settings.check != "none":
                    row.notices += image_notices(data, settings.max_pixels)
            else:
                self._check_clip(media, row, image.name)
                size = (media.width, media.height)
        except BadImage as bad:
            raise BadRow("decode", bad.reason, f"{image.name}: {bad.detail}") from None
        digest = media.sha256
        if media.data is not data:
            media.sha256 = _sha256(media.data)
        media.data = b"" if ref else media.data
        row.media.append(media)
        return digest, size

    def _reference(self, image: ImageRef) -> dict[str, Any] | None:
        """Return the reference to store with `--index-only`, else None; note the file. Raises
        BadRow.
        """
        index_only = self._settings.index_only
        if index_only and image.file is None:
            raise BadRow(
                "read",
                "no-reference",
                f"the {image.kind} is inside the row: prepare without --index-only",
            )
        if image.data is None and image.file is not None and isinstance(self._source, Path):
            self.signatures.append(stat_signature(self._source, image.path))
        return (
            {"file": image.file, "offset": image.offset, "length": image.length}
            if index_only
            else None
        )

    def _read(self, image: ImageRef) -> bytes:
        return _read(self._source, image, self._settings.root)

    def _check_image(self, media: Media) -> tuple[int, int]:
        """Check an image as completely as `check` requires, and reduce it to `image_side`; return
        its size (width, height) before. Raises BadImage.
        """
        settings = self._settings
        decoder = self._subprocess_decoder
        data = media.data
        size = (0, 0)
        if settings.image_side:
            if decoder is not None:
                decoder.check(data, settings.max_pixels)
            rgb = decode(data, settings.max_pixels)
            size = (rgb.shape[1], rgb.shape[0])
            media.data = reencode(rgb, data, settings.image_side)
        elif settings.check == "full":
            check = verify_image if decoder is None else decoder.check
            size = check(data, settings.max_pixels)
        elif settings.check == "header":
            size = header_size(data, settings.max_pixels)
        media.width, media.height = size if media.data is data else header_size(media.data)
        return size

    def _check_clip(self, media: Media, row: SourceRow, name: str) -> None:
        """Check audio or video and the spans of the row, and store audio at `audio_rate`.

        Raises BadImage, or BadRow for a span.
        """
        settings = self._settings
        rate = settings.audio_rate if media.kind == "audio" else 0
        if settings.check == "none" and not rate:
            return
        header_only = settings.check == "header" and not rate
        if self._subprocess_decoder is not None:
            info = self._subprocess_decoder.check_media(
                media.data, media.kind, settings.max_pixels, header_only
            )
        else:
            read = read_header if header_only else verify_media
            info = read(media.data, media.kind, settings.max_pixels)
        if info.duration_s:
            check_spans(row, name, info)
        row.notices += info.notices
        if rate:
            media.data = reencode_audio(media.data, info.end_s, rate)
            # Its times stay: what is before the first sample becomes silence.
            info = MediaInfo(0.0, info.end_s, rate, channels=1, stream_s=info.end_s)
        media.duration = info.stream_s or None
        media.rate = info.rate
        media.channels = info.channels
        media.width = info.width
        media.height = info.height


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
