"""Read and check the media of rows, and convert them to stored rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from mmray.data.formats.source import RawRow
from mmray.data.images.decode import BadImage, decode, header_size, verify_image
from mmray.data.images.pages import image_notices, split_pages
from mmray.data.images.read import os_error_as_bad_row, read_image, stat_signature
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import reencode
from mmray.data.media.decode import MediaInfo, read_header, verify_media
from mmray.data.media.encode import reencode_audio
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.kept_columns import compute_columns
from mmray.data.rows import MAX_OVERHANG_S, BadRow, ImageRef
from mmray.data.source_row import SourceRow
from mmray.data.store.stored_row import Media
from mmray.data.text.tokenizer import clean_caption
from mmray.storage.paths import RemotePath
from mmray.storage.requests import iter_parallel

READ_THREADS = 16  # of a task, for images on an object store
NUM_FIRST_ROWS = 8  # of a chunk, which show whether images are files
# Ratio of the sides of an image in a conversation; the processors of Qwen-VL refuse a larger one.
MAX_ASPECT_RATIO = 200


class RowBuilder:
    """Reads and checks the media of rows, and converts them to stored rows.

    `build(row)` takes a SourceRow, adds its media to it, and returns a digest by which duplicates
    are found; it raises BadRow for a row to quarantine.

    Args:
        job: Source, output folder and settings.
        subprocess_decoder: Decodes each image and clip first, in a child process; None: they are
            decoded in this process only.
    """

    def __init__(self, job: PrepareJob, subprocess_decoder: SubprocessDecoder | None) -> None:
        self._settings = job.settings
        self._compute = job.compute
        self._subprocess_decoder = subprocess_decoder
        self._read = partial(_read_image, job)

    def build(self, row: SourceRow) -> str:
        """Complete a validated row of the source with its media, and return their digest.

        Args:
            row: The row, of which `media` is filled, `texts` are cleaned, `split` is set by
                `prepare.split` and `prepare.holdout`, `spans` are cut to the file, and `columns`
                have the values of `prepare.compute`.

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
        if settings.pages == "images" and row.messages:
            self._split_pages(row)
        for image in row.images:
            digest, size = self._add_media(row, image)
            if row.messages:
                _check_aspect_ratio(image.name, size)
            digests.append(digest)
        image_digest = digests[0] if len(digests) == 1 else sha256("".join(digests).encode())
        if not digests:
            image_digest = sha256(orjson.dumps(row.messages))
        if row.split is None and settings.holdout > 0:
            # By content hash, so that duplicates share a split and a row keeps its split when the
            # set grows.
            row.split = "test" if int(image_digest[:16], 16) / 2**64 < settings.holdout else "train"
        if any(span and span[1] == math.inf for span in row.spans or ()):
            detail = "a text has no end, and that of its medium is not known: use --check full"
            raise BadRow("columns", "span", detail)
        if row.spans:
            # Rows of one recording with other spans are no duplicates.
            image_digest = sha256(orjson.dumps([image_digest, row.spans]))
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
                    pages, notices = split_pages(data, max_pixels)
                    row.notices += notices
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
        read. Raises BadRow.
        """
        settings = self._settings
        ref = self._reference(image)
        data = self._read(image)
        media = Media(image.kind, data, ref, sha256(data))
        try:
            if image.kind == "image":
                size = self._check_image(media)
                row.notices += image_notices(data, settings.max_pixels)
            else:
                self._check_clip(media, row, image.name)
                size = (media.width, media.height)
        except BadImage as bad:
            raise BadRow("decode", bad.reason, f"{image.name}: {bad.detail}") from None
        digest = media.sha256
        if media.data is not data:
            media.sha256 = sha256(media.data)
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
        if settings.image_side:
            if decoder is not None:
                decoder.check(data, settings.max_pixels)
            rgb = decode(data, settings.max_pixels)
            media.data, (media.width, media.height) = reencode(rgb, data, settings.image_side)
            return rgb.shape[1], rgb.shape[0]
        if settings.check == "full":
            check = verify_image if decoder is None else decoder.check
            size = check(data, settings.max_pixels)
        else:
            size = header_size(data, settings.max_pixels)
        media.width, media.height = size
        return size

    def _check_clip(self, media: Media, row: SourceRow, name: str) -> None:
        """Check audio or video and the spans of the row, and store audio at `audio_rate`.

        Raises BadImage, or BadRow for a span.
        """
        settings = self._settings
        rate = settings.audio_rate if media.kind == "audio" else 0
        header_only = settings.check == "header" and not rate
        if self._subprocess_decoder is not None:
            info = self._subprocess_decoder.check_media(
                media.data, media.kind, settings.max_pixels, header_only
            )
        else:
            read = read_header if header_only else verify_media
            info = read(media.data, media.kind, settings.max_pixels)
        if info.duration_s:
            _check_spans(row, name, info)
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


def _check_spans(row: SourceRow, name: str, info: MediaInfo) -> None:
    """Check that the spans of a row are in its audio or video, and cut small overhangs and spans
    without an end (infinity).

    Args:
        row: The row, whose `spans`, [start, end] in seconds on the time axis of the file or None
            for each text, are changed in place.
        name: Name of the file, for the error.
        info: The MediaInfo of the file: its audio or video is from `start_s` to `end_s`, in
            seconds.

    Raises:
        BadRow: Nothing of a span is in it, or more than MAX_OVERHANG_S (0.5 s) of it is outside.
    """
    for number, span in enumerate(row.spans or []):
        if span is None:
            continue
        start = max(span[0], info.start_s)
        end = min(span[1], info.end_s)
        overhang = max(start - span[0], span[1] - end if span[1] < math.inf else 0.0)
        if overhang > MAX_OVERHANG_S or start >= end:
            raise BadRow(
                "columns",
                "span",
                f"text {number + 1} is at {span[0]:.2f} to {span[1]:.2f} s, and {name} has "
                f"{info.start_s:.2f} to {info.end_s:.2f} s",
            )
        span[:] = [start, end]


def _check_aspect_ratio(name: str, size: tuple[int, int]) -> None:
    """Raise BadRow if a side of an image is more than MAX_ASPECT_RATIO times the other."""
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise BadRow(
            "decode",
            "aspect-ratio",
            f"{name} has {size[0]} x {size[1]} pixels; vision-language models accept a ratio of "
            f"up to {MAX_ASPECT_RATIO}",
        )


def read_rows(
    job: PrepareJob, items: Iterable[RawRow]
) -> Iterator[tuple[RawRow, SourceRow | BadRow]]:
    """Validate rows, and yield them in order, with the signatures of their local media. Image files
    on a store are read ahead by threads.
    """
    parsed = (_parse_row(job, item) for item in items)
    first = list(islice(parsed, NUM_FIRST_ROWS))
    rows = chain(first, parsed)
    images = [each for _, row in first if isinstance(row, SourceRow) for each in row.images]
    if isinstance(job.folder, RemotePath) and any(image.data is None for image in images):
        return iter_parallel(partial(_read_images, job), rows, READ_THREADS)
    return rows


def _parse_row(job: PrepareJob, item: RawRow) -> tuple[RawRow, SourceRow | BadRow]:
    try:
        row = job.parse_row(item)
    except BadRow as bad:
        return item, bad
    if isinstance(job.folder, Path):
        media = [image for image in row.images if image.data is None and image.file is not None]
        signatures = [stat_signature(job.folder, image.path) for image in media]
        item = item._replace(files=(*item.files, *signatures))
    return item, row


def _read_images(
    job: PrepareJob, item: tuple[RawRow, SourceRow | BadRow]
) -> tuple[RawRow, SourceRow | BadRow]:
    """Read the images of a row; not its videos, because those of many rows may exceed memory."""
    row = item[1]
    if isinstance(row, SourceRow):
        with suppress(BadRow):  # `RowBuilder` reads the image again, and raises it
            row.images = [
                replace(image, data=_read_image(job, image)) if image.kind == "image" else image
                for image in row.images
            ]
    return item


def _read_image(job: PrepareJob, image: ImageRef) -> bytes:
    with os_error_as_bad_row(image.name):
        return read_image(job.folder, image, job.settings.root)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
