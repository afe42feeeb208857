"""What identifies the source of a set, so that a rerun knows whether it has the same or more."""

from __future__ import annotations

import hashlib
from typing import Any

from mmray.data.formats.source import SourceChunk
from mmray.data.prepare.job import PrepareJob
from mmray.data.prepare.records import PackedRows
from mmray.data.store.manifest import Manifest
from mmray.errors import UsageError


def is_continued(before: Manifest, job: PrepareJob, chunks: list[SourceChunk]) -> bool:
    """Return whether the chunks are those of an earlier set, maybe with appended ones.

    Raises UsageError if that set was made from another source.
    """
    identity = _source_identity(job, chunks[: before.source["num_chunks"]])
    if identity.items() <= before.source.items():
        return True
    name = before.source["name"]
    other = job.source.display_name
    if name != other:
        raise UsageError(
            f"{job.out} holds the set made from {name}: choose another folder for {other}"
        )
    return False


def _source_identity(job: PrepareJob, chunks: list[SourceChunk]) -> dict[str, Any]:
    """Return what identifies a source; with --index-only its address too, because the images stay
    there.
    """
    digest = hashlib.sha256("".join(chunk.signature for chunk in chunks).encode()).hexdigest()
    address = {"address": job.source.address} if job.settings.index_only else {}
    return {"name": job.source.display_name, "num_chunks": len(chunks), "sha256": digest, **address}


def source_fields(job: PrepareJob, chunks: list[SourceChunk], packed: PackedRows) -> dict[str, Any]:
    """Return the manifest's entry of the source; `packed` shows which files its chunks are in."""
    names = "".join(shard.file for shard in packed.shards)
    return _source_identity(job, chunks) | {
        "format": job.source.format,
        "folder": job.source.address,
        "file": job.source.name,
        "packed": hashlib.sha256(names.encode()).hexdigest(),
    }
