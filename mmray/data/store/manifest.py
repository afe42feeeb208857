"""What a prepared set says about itself: manifest.json, written last, and without which nothing counts.

Other programs read it too: `num_rows`, `num_read`, `num_quarantined`, `splits` and `fingerprint` keep their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from mmray.errors import DataError
from mmray.storage.storage import Storage

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
QUARANTINE = "quarantine.jsonl"
SHARDS = "shards"
PARTS = "parts"
SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Shard:
    """One file of rows of one split; `dropped` are the row numbers in it that do not count (duplicates)."""

    file: str
    split: str | None
    num_rows: int
    num_bytes: int
    sha256: str  # of the rows, in order
    dropped: tuple[int, ...] = ()
    batches: str = ""  # byte at which each record batch begins, and at which the last ends; none in older sets

    @property
    def num_live(self) -> int:
        return self.num_rows - len(self.dropped)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Shard:
        return cls(**{**values, "dropped": tuple(values.get("dropped", ()))})

    @property
    def offsets(self) -> np.ndarray:
        """`batches` as numbers, int64 [record batches + 1]; record batch b is bytes offsets[b]..offsets[b + 1]."""
        return _numbers(self.batches)


@lru_cache(maxsize=4096)
def _numbers(text: str) -> np.ndarray:
    return np.array(text.split(), np.int64)


@dataclass(frozen=True)
class Manifest:
    """num_rows + num_quarantined = num_read, always."""

    num_rows: int
    num_read: int
    num_quarantined: int
    reasons: dict[str, int]  # why rows were quarantined -> how many
    num_leaks: int  # rows whose images are also in a row of another split
    splits: dict[str, int]  # rows of each split; empty where no row has one
    fingerprint: str  # of the rows: the same rows in the same order have the same
    tokenizer: str | None  # file name
    source: dict[str, Any]
    settings: dict[str, Any]
    shards: tuple[Shard, ...] = field(repr=False)
    schema_version: int = SCHEMA_VERSION
    num_same_text: int = 0  # rows whose captions an earlier row has too; they are kept
    leakage: dict[str, Any] = field(default_factory=dict)  # what was found in other sets and across splits, if asked
    box_names: dict[str, str] = field(default_factory=dict)  # names of box labels, where the source says them
    class_names: tuple[str, ...] = ()  # names of the labels 0, 1, ... of rows, where the source says them
    languages: dict[str, int] = field(default_factory=dict)  # rows of each language; rows without one are in none

    @property
    def is_decoded(self) -> bool:
        """Whether each image was decoded whole, and killed nobody, when the set was prepared."""
        return self.settings.get("check", "full") == "full" or bool(self.settings.get("image_side"))

    def to_json(self) -> bytes:
        values = asdict(self) | {"format": "mmray prepared set"}
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def fingerprint(shards: Iterable[Shard]) -> str:
    """Hex digest of the rows that count, in order."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.sha256} {shard.split} {shard.dropped}\n".encode())
    return digest.hexdigest()


def read_manifest(storage: Storage) -> Manifest | None:
    """The manifest of a prepared set; None where there is none. Raises DataError where it cannot be read."""
    if storage.size(MANIFEST) is None:
        return None
    try:
        values = orjson.loads(storage.read(MANIFEST))
        if values["schema_version"] != SCHEMA_VERSION:
            raise DataError(
                f"{storage.address} has schema version {values['schema_version']}, this mmray reads {SCHEMA_VERSION}: "
                "prepare the source again into another folder"
            )
        del values["format"]
        values["shards"] = tuple(Shard.from_json(item) for item in values["shards"])
        return Manifest(**{**values, "class_names": tuple(values.get("class_names", ()))})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{storage.address}/{MANIFEST} is damaged ({error}): delete it and run the same `mmray prepare` again"
        ) from None
