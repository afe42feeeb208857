"""Images of quarantined rows, read again from the source of a prepared set."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from mmray.config import Prepare
from mmray.data.formats.detect import SourceSpec
from mmray.data.formats.source import Source, SourceChunk
from mmray.data.images.read import os_error_as_bad_row, read_image
from mmray.data.prepare.pack import PrepareJob, read_chunk_record, record_path
from mmray.data.rows import BadRow, parse_row
from mmray.data.store.manifest import Manifest
from mmray.errors import MmrayError
from mmray.storage.paths import AnyPath, to_path

MAX_RECORDS = 32


def read_rejected_images(
    folder: AnyPath, manifest: Manifest, locations: Collection[str]
) -> dict[str, bytes]:
    """Read the first images of quarantined rows from the source of a set, as far as it is there.

    A source was packed in parts; only the first MAX_RECORDS (32) parts are searched, so that the
    time is bounded. Images by URL are not downloaded.

    Args:
        folder: Folder of the set, whose records of the parts locate the rows.
        manifest: Manifest of the set.
        locations: Values of `source` in quarantine.jsonl, such as `captions.jsonl:12`.

    Returns:
        Encoded bytes by location. A row is missing if its source has moved or changed, or if the
        row has no image that can be read.
    """
    missing = set(locations)
    images: dict[str, bytes] = {}
    spec = manifest.source
    try:
        job = PrepareJob(
            SourceSpec(spec["format"], spec["folder"], spec["file"]),
            str(folder),
            Prepare.model_validate(manifest.settings),
            class_names=manifest.class_names,
        )
        source = job.open()
    # A set of an earlier version has other settings, and a format may be a class of the user.
    except (KeyError, ValueError, MmrayError):
        return images
    for index in range(min(spec["num_chunks"], MAX_RECORDS)):
        record = read_chunk_record(folder, record_path(index)) if missing else None
        if record is None:
            continue
        in_chunk = {row["source"] for row in record["bad_rows"]} | {*record["rows"]["location"]}
        wanted = missing & in_chunk
        missing -= wanted
        images |= _read_chunk(job, source, SourceChunk(**record["chunk"]), wanted)
    return images


def _read_chunk(
    job: PrepareJob, source: Source, chunk: SourceChunk, wanted: set[str]
) -> dict[str, bytes]:
    """Return the images of the wanted rows of a chunk that can be read."""
    images: dict[str, bytes] = {}
    missing = set(wanted)
    hosts = job.settings.allow_urls
    rows = source.read(chunk) if wanted else iter(())
    try:
        for row in rows:
            if not missing:
                break
            if row.location not in missing:
                continue
            missing.discard(row.location)
            with suppress(BadRow):
                media = parse_row(row.values, row.location, hosts).images
                first = next((each for each in media if each.kind == "image"), None)
                if first is None or first.url:
                    continue
                with os_error_as_bad_row(first.name):
                    images[row.location] = read_image(
                        to_path(job.source.address), first, job.settings.follow_links
                    )
    # The source was changed or deleted after the set was prepared.
    except (OSError, MmrayError):
        return images
    return images
