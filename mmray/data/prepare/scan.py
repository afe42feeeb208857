"""Scan the source of a set, and store the scan in the folder of the set, so that the next prepare
only scans what has changed.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from mmray.data.formats.source import Scan, Source, SourceChunk
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.preview import describe_source, find_class_names, understand
from mmray.data.store.manifest import SCAN
from mmray.storage.paths import write_atomic


def scan_source(
    job: PrepareJob, on_rows: Callable[[int], None], log: Callable[[str, str], None]
) -> tuple[Source, list[SourceChunk]]:
    """Return a source with the names of its classes, and its chunks.

    Args:
        on_rows: Called with the number of rows that were scanned so far.
        log: Called with (message, heading) of what `prepare` understood.

    Raises:
        DataError: The source is invalid.
        UsageError: The settings do not fit the source.
    """
    source, scan, first_rows = understand(job, _read_scan(job), on_rows)
    scan = find_class_names(job, source, scan, first_rows)
    if scan != source.earlier:
        data = orjson.dumps(vars(scan) | {"job": job.digest})
        write_atomic(job.out / SCAN, data)
    for text, heading in describe_source(job, source, scan.chunks, first_rows):
        log(text, heading)
    return source, scan.chunks


def _read_scan(job: PrepareJob) -> Scan:
    """Return the scan of an earlier prepare with the same settings; an empty one without it."""
    try:
        values = orjson.loads((job.out / SCAN).read_bytes())
        if values.pop("job") != job.digest:
            return Scan()
        chunks = [SourceChunk(**chunk) for chunk in values["chunks"]]
        names = tuple(values["class_names"])
        return Scan(**values | {"chunks": chunks, "class_names": names})
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # or damaged
        return Scan()
