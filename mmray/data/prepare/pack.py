"""The work of one prepare task: convert a chunk of the source to shard files and a record.

Each row is parsed, its image is read, decoded completely and hashed, and its captions are cleaned.
Failures go into the record with stage and reason. The record (records.py) is written last and
marks the chunk as done. So a killed prepare resumes, and a source that grew is appended to.
Does not import Ray.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
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


@dataclass(frozen=True)
class PrepareJob:
    """Source, output folder and settings of a prepare.

    `open()` returns the Source, and `digest()` a hash of the settings that determine how rows are
    packed.

    Attributes:
        source: Format and location of the source, from `detect_source`.
        out: Folder of the set.
        settings: The `prepare` section, whose `rows_per_shard` is a number, not `auto`.
        retry: Whether to pack chunks again in which rows could not be read or decoded.
        class_names: Names of the labels 0, 1, ..., known after the source was scanned.
        grows: Whether shards grow with the number of rows before them (Source.grows).
        base: Digest of the manifest of the existing set, whose shards are not overwritten.
    """

    source: SourceSpec
    out: AnyPath
    settings: Prepare
    retry: bool = False
    class_names: tuple[str, ...] = ()
    grows: bool = False
    base: str = ""

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
            self.source, self.out, self.settings.column_names, self.settings.caption
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


def pack_task(item: tuple[SourceChunk, Labels | None], job: PrepareJob) -> Result:
    """Ray task: pack one chunk, with its labels for the record.

    Ray retries it if its worker dies; the retry decodes images in a child process.
    """
    chunk, labels = item
    item_name = f"{chunk.file} from row {chunk.first_line}"

    def pack(decoder: SubprocessDecoder | None) -> Record:
        # An upload that failed cannot be resumed, so the chunk is packed again.
        return retry_if_remote(job.out, partial(pack_chunk, job, chunk, decoder, labels))

    try:
        record = run_with_crash_limit(pack, job.out, record_path(chunk.index), item_name)
    except OSError as error:
        raise ResourceError(f"prepare failed at {item_name}: {error}. {RESUME_HINT}") from error
    return {"record": record}


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
    file = record_path(chunk.index)
    for record in read_summaries(job.out, file):
        if is_current(record, job, chunk, lambda name: file_size(job.out / name)):
            return record
    source = job.open()
    with closing(ImageReader(job)) as reader, ExitStack() as shard_files:
        builder = RowBuilder(job, subprocess_decoder, reader.read)
        packer = _ChunkPacker(job, chunk, builder, source.has_types, shard_files)
        for item, row in reader.read_ahead(source.read(chunk)):
            packer.pack(to_utf8(item.location), row)
    # The shard files are closed now.
    record = packer.record(file, labels)
    write_records(job.out, file, [record], [pa.RecordBatch.from_pylist(packer.rows, SCHEMA)])
    return record


class ImageReader:
    """Reads the images of a source; those of a store in threads, ahead of the row that is packed.

    Up to PREFETCH_ROWS (32) images are requested ahead, fewer if the last one was large.
    """

    def __init__(self, job: PrepareJob) -> None:
        self._job = job
        is_read = not (job.settings.index_only and job.settings.check == "none")
        is_remote = isinstance(job.folder, RemotePath)
        self._pool = ThreadPoolExecutor(READ_THREADS, "read") if is_read and is_remote else None
        self._requests: dict[ImageRef, Future[bytes]] = {}  # of the row that is packed
        self._max_requests = MIN_PREFETCH_ROWS

    def read_ahead(self, items: Iterable[RawRow]) -> Iterator[tuple[RawRow, SourceRow | BadRow]]:
        """Validate rows, request their images, and yield them in order."""
        pending: deque[tuple[RawRow, SourceRow | BadRow, dict[ImageRef, Future[bytes]]]] = deque()
        num_requests = 0  # of the pending rows
        for item in chain(items, [None]):
            if item is not None:
                row: SourceRow | BadRow
                try:
                    row = self._job.parse_row(item)
                except BadRow as bad:
                    row = bad
                requests = self._request(row)
                num_requests += len(requests)
                pending.append((item, row, requests))
            while pending and (
                item is None or num_requests > self._max_requests or not pending[0][2]
            ):
                first, row, self._requests = pending.popleft()
                num_requests -= len(self._requests)
                yield first, row

    def _request(self, row: SourceRow | BadRow) -> dict[ImageRef, Future[bytes]]:
        requests: dict[ImageRef, Future[bytes]] = {}
        if self._pool is not None and isinstance(row, SourceRow):
            for image in row.images:
                if image.data is None and image not in requests:
                    requests[image] = self._pool.submit(_read_image, self._job, image)
        return requests

    def read(self, image: ImageRef) -> bytes:
        """Return the bytes of an image. Raises BadRow."""
        if image not in self._requests:
            return _read_image(self._job, image)
        data = self._requests[image].result()
        num_images = PREFETCH_BYTES // (len(data) or 1)
        self._max_requests = min(PREFETCH_ROWS, max(MIN_PREFETCH_ROWS, num_images))
        return data

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _read_image(job: PrepareJob, image: ImageRef) -> bytes:
    with os_error_as_bad_row(image.name):
        return read_image(job.folder, image, job.settings.root)


def _first_image(row: SourceRow | BadRow) -> str | None:
    """Return what locates the first image of a bad row in the source; None if it has none there.

    `mmray show` reads it.
    """
    images = row.images if isinstance(row, SourceRow) else ()
    first = next((image for image in images if image.kind == "image"), None)
    if first is None or first.file is None:
        return None
    place = {"file": first.path, "offset": first.offset, "length": first.length}
    return orjson.dumps(place).decode()


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
    with open_records(job.out, records[0].file, ["files"]) as reader:
        for record in records:
            texts = reader.get_batch(record.batch).column(0).drop_null().to_pylist()
            files = (tuple(file) for text in texts for file in orjson.loads(text))
            if any(file != stat_signature(folder, file[0]) for file in files):
                changed.append(record.chunk.index)
    return {"chunks": changed}


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
        inputs = repr((job.base, job.digest(), job.class_names, chunk))
        self.file_suffix = hashlib.sha256(inputs.encode()).hexdigest()[:8]

    def pack(self, location: str, row: SourceRow | BadRow) -> None:
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
                "image": _first_image(row),
            }
        else:
            values = self._store(location, row, image_digest)
        if files := self.builder.signatures:
            values["files"] = orjson.dumps(files).decode()
            files.clear()
        self.rows.append({"location": location} | values)

    def _store(self, location: str, row: SourceRow, image_digest: str) -> dict[str, Any]:
        """Add a good row to its shard, and return the columns of its record."""
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
        row_digest = _sha256(orjson.dumps([image_digest, *captions]))
        # Rows without a split become training rows if others have one.
        key_digest = hashlib.blake2b(f"{row.split or 'train'}/{row.key}".encode(), digest_size=16)
        shard = list(self.writers).index(row.split)
        self.num_stored[shard] += 1
        return {
            "key": row.key,
            "shard": shard,
            "position": self.num_stored[shard] - 1,
            "language": row.language,
            "kinds": row.media_kinds,
            "key_digest": key_digest.digest(),
            # Conversations about one image are different rows unless they are equal, too.
            "image_digest": bytes.fromhex(row_digest if row.messages else image_digest)[:16],
            "row_digest": bytes.fromhex(row_digest)[:16],
            "text_digest": hashlib.sha256(orjson.dumps(captions)).digest()[:16],
        }

    def record(self, file: str, labels: Labels | None) -> Record:
        shards = [writer.entry() for writer in self.writers.values()]
        has_columns = self.keeps_columns and bool(shards)
        bad = [row for row in self.rows if "reason" in row]
        counts = Counter(
            (row["shard"], row["language"], row["kinds"]) for row in self.rows if "shard" in row
        )
        return Record(
            job=self.job.digest(),
            chunk=self.chunk,
            class_names=list(self.job.class_names),
            labels=labels,
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


class RowBuilder:
    """Reads and checks the media of rows, and converts them to stored rows.

    `build(row)` takes a SourceRow, adds its media to it, and returns a digest by which duplicates
    are found; it raises BadRow for a row to quarantine.

    Args:
        job: Source, output folder and settings.
        subprocess_decoder: Decodes each image and clip first, in a child process; None: they are
            decoded in this process only.
        read: Returns the bytes of an image, audio or video; raises BadRow.

    Attributes:
        signatures: List of (name, size in bytes, modification time in ns) of the local files of
            images, audio and video since the caller cleared it.
    """

    def __init__(
        self,
        job: PrepareJob,
        subprocess_decoder: SubprocessDecoder | None,
        read: Callable[[ImageRef], bytes],
    ) -> None:
        self.signatures: list[tuple[str, int | None, int | None]] = []
        self._settings = job.settings
        self._compute = job.compute
        self._source = job.folder
        self._subprocess_decoder = subprocess_decoder
        self._read = read

    def build(self, row: SourceRow) -> str:
        """Complete a validated row of the source with its media, and return their digest.

        Args:
            row: The row, of which `media` is filled, `texts` are cleaned, `split` is set by
                `prepare.split` and `prepare.holdout`, `boxes` become (left, top, right, bottom) in
                fractions of the image, `spans` are cut to the file, and `columns` have the values
                of `prepare.compute`.

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
        for image in row.images:
            if image.data is None and image.file is not None and isinstance(self._source, Path):
                self.signatures.append(stat_signature(self._source, image.path))
        if settings.pages == "images" and row.messages and not row.boxes:
            self._split_pages(row)
        for image in row.images:
            digest, size = self._add_media(row, image)
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

    def _split_pages(self, row: SourceRow) -> None:
        """Replace each image of a conversation that is a TIFF with pages by its pages. Raises
        BadRow.
        """
        max_pixels = self._settings.max_pixels
        images: list[list[ImageRef]] = []
        for image in row.images:
            data = self._read(image)
            pages: list[bytes] = []
            if image.kind == "image":
                try:
                    if self._subprocess_decoder is not None:
                        self._subprocess_decoder.check_pages(data, max_pixels)
                    pages = split_pages(data, max_pixels)
                    if pages:
                        row.notices += image_notices(data, max_pixels, True)
                except BadImage as bad:
                    raise BadRow("decode", bad.reason, f"{image.name}: {bad.detail}") from None
            of_image = [
                replace(image, name=f"{image.name} page {number}", data=page)
                for number, page in enumerate(pages, 1)
            ]
            images.append(of_image or [replace(image, data=data)])
        counts = map(len, images)
        messages = []
        for message in row.messages or []:
            content = []
            for part in message["content"]:
                content += [part] if part["type"] == "text" else [part] * next(counts)
            messages.append(message | {"content": content})
        row.messages = messages
        row.images = list(chain.from_iterable(images))

    def _add_media(self, row: SourceRow, image: ImageRef) -> tuple[str, tuple[int, int]]:
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
        data = self._read(image)
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
        """Return the reference to store with `--index-only`, else None. Raises BadRow."""
        if not self._settings.index_only:
            return None
        if image.file is None:
            raise BadRow(
                "read",
                "no-reference",
                f"the {image.kind} is inside the row: prepare without --index-only",
            )
        return {"file": image.file, "offset": image.offset, "length": image.length}

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
