"""The scan of a source in the folder of its set, from which the next prepare takes what has not
changed.
"""

from __future__ import annotations

import orjson

from mmray.data.formats.source import Scan, SourceChunk
from mmray.data.prepare.job import PrepareJob
from mmray.data.store.manifest import SCAN
from mmray.storage.paths import write_atomic


def read_scan(job: PrepareJob) -> Scan:
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


def write_scan(job: PrepareJob, scan: Scan) -> None:
    """Write the scan of a source, before its chunks are packed."""
    write_atomic(job.out / SCAN, orjson.dumps(vars(scan) | {"job": job.digest}))
