"""How the images of a prepared set look: a file of LOOK records for each of its shards, made once, in tasks.

They are kept in `looks/` of the set that is being prepared, also those of the sets it is held against, which may be
nobody's to write to. A shard is named by the digest of its rows: one that has not changed is not looked at again.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from mmray.data.formats.rows import BadRow
from mmray.data.images.decode import BadImage, decode
from mmray.data.images.sandbox import CRASH, SandboxedDecoder
from mmray.data.prepare.near import LOOK, look_of
from mmray.data.store.manifest import Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet, Row, images_sha256
from mmray.storage.storage import Place

LOOKS = "looks"
_ROWS = 64  # read at a time


def looks_name(shard: Shard, near: bool) -> str:
    return f"{LOOKS}/{shard.sha256[:32]}{'' if near else '-exact'}.npy"


def missing(out: Place, shards: Iterable[Shard], near: bool) -> list[Shard]:
    """Shards that were not looked at yet."""
    there = set(out.names(LOOKS))
    return [shard for shard in shards if looks_name(shard, near).rpartition("/")[2] not in there]


def all_rows(address: str, source: str, shards: Iterable[Shard]) -> PreparedSet:
    """Every row of these shards, also those that do not count; `source` is where a set by reference has its images."""
    whole = tuple(replace(shard, dropped=(), split=None) for shard in shards)
    num_rows = sum(shard.num_rows for shard in whole)
    return PreparedSet(
        Place(address), Manifest(num_rows, num_rows, 0, {}, 0, {}, "", None, {"address": source}, {}, whole)
    )


def look_at(
    out: Place,
    address: str,
    source: str,
    shard: Shard,
    near: bool,
    max_pixels: int,
    sandbox: SandboxedDecoder | None = None,
) -> list[str]:
    """Write the looks of a shard; a row that cannot be read has none, and is like no other. Raises OSError.

    With a `sandbox`, images are tried in its child first; the rows whose image killed it are told, as `key (source)`.
    """
    rows = all_rows(address, source, [shard])
    looks, deadly = np.zeros(shard.num_rows, LOOK), []
    for start in range(0, shard.num_rows, _ROWS):
        for place, row in enumerate(_read(rows, np.arange(start, min(start + _ROWS, shard.num_rows))), start):
            if row is None:
                continue
            looks["sha"][place] = np.frombuffer(bytes.fromhex(images_sha256(row.images)[:32]), "<u8")
            if near:
                try:
                    if sandbox is not None:
                        sandbox.check(row.images[0], max_pixels)
                    looks["hash"][place], looks["colours"][place] = look_of(decode(row.images[0], max_pixels))
                    looks["seen"][place] = True
                except BadImage as bad:  # its content is compared all the same
                    if bad.reason == CRASH:
                        deadly.append(f"{row.key} ({row.source})")
    file = io.BytesIO()
    np.save(file, looks)
    out.write(looks_name(shard, near), file.getvalue())
    return deadly


def _read(rows: PreparedSet, numbers: np.ndarray) -> list[Row | None]:
    """The rows of these numbers; None for one whose image is gone from where a set by reference has it.

    Raises OSError where a shard cannot be read: what nobody saw must not count as seen.
    """
    try:
        return list(rows.read(numbers))
    except BadRow:
        return [None] if len(numbers) == 1 else [row for number in numbers for row in _read(rows, np.array([number]))]
    except ValueError as error:
        raise OSError(str(error)) from error


def read_looks(out: Place, shards: Iterable[Shard], near: bool, live: bool) -> np.ndarray:
    """LOOK records of these shards, of the rows that count (`live`) or of all: 97 bytes a row."""
    parts = [np.zeros(0, LOOK)]
    for shard in shards:
        looks = np.load(io.BytesIO(out.read(looks_name(shard, near))), allow_pickle=False)
        parts.append(np.delete(looks, shard.dropped) if live and shard.dropped else looks)
    return np.concatenate(parts)
