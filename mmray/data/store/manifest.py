"""manifest.json of a prepared set, written last: a folder without it is not a prepared set.

Other programs read `num_rows`, `num_read`, `num_quarantined`, `splits` and `fingerprint`; do not
rename them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from mmray.data.rows import is_safe_path
from mmray.errors import DataError
from mmray.storage.paths import AnyPath

MANIFEST = "manifest.json"
FORMAT = "mmray prepared set"  # value of `format` in the manifest
TOKENIZER = "tokenizer.json"
QUARANTINE = "quarantine.jsonl"
# List of a rerun that failed, next to the list of the older set.
REJECTED_QUARANTINE = "quarantine.rejected.jsonl"
SHARDS = "shards"  # folder
CHUNK_RECORDS = "parts"  # folder
SCHEMA_VERSION = 4
# older versions whose rows can be read (store/version3.py)
READABLE_VERSIONS = (3, SCHEMA_VERSION)
# few enough to read one random row, enough to keep the index of a shard short
RECORD_BATCH_ROWS = 8


@dataclass(frozen=True)
class Shard:
    """A file with rows of one split;

    `dropped` are row numbers in it that are not part of the set (duplicates).
    """

    file: str
    split: str | None
    num_rows: int
    num_bytes: int
    sha256: str  # digest of the rows, in order
    dropped: tuple[int, ...] = ()
    batches: str = ""  # byte offset of each record batch, and of the end of the last one

    @property
    def num_kept(self) -> int:
        return self.num_rows - len(self.dropped)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Shard:
        return cls(**values | {"dropped": tuple(values["dropped"])})

    @property
    def batch_offsets(self) -> list[int]:
        """`batches` as numbers; record batch b is bytes batch_offsets[b]..batch_offsets[b + 1]."""
        return [int(offset) for offset in self.batches.split()]


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared set; num_rows + num_quarantined = num_read."""

    num_rows: int
    num_read: int
    num_quarantined: int
    reasons: dict[str, int]  # rows by quarantine reason
    splits: dict[str, int]  # rows by split; empty if rows have no splits
    fingerprint: str  # equal for the same rows in the same shards
    tokenizer: str | None  # file name
    # name, num_chunks, sha256, format, folder, file; index-only: also address, the folder
    source: dict[str, Any]
    settings: dict[str, Any]
    shards: tuple[Shard, ...] = field(repr=False)
    schema_version: int = SCHEMA_VERSION
    num_same_text: int = 0  # rows whose captions occur in an earlier row; kept
    leakage: dict[str, Any] = field(default_factory=dict)  # summary of the contamination check
    # names of box labels, if the source has them
    box_names: dict[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()  # names of labels 0, 1, ..., if the source has them
    # rows by language; rows without one are not counted
    languages: dict[str, int] = field(default_factory=dict)
    # rows by number of images, for each split (`""` if rows have no splits)
    num_images: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def images_verified(self) -> bool:
        """Whether every image was decoded completely when the set was prepared."""
        return self.settings.get("check", "full") == "full" or bool(self.settings.get("image_side"))

    @property
    def max_pixels(self) -> int:
        """Maximum pixels of its images when they were validated; 0: not recorded."""
        return int(self.settings.get("max_pixels", 0))

    @property
    def is_index_only(self) -> bool:
        """Whether the set refers to images in its source instead of storing them."""
        return bool(self.settings.get("index_only"))

    @property
    def has_image_checksums(self) -> bool:
        """Whether the digests of the shards cover the bytes of the images."""
        return not self.is_index_only or self.settings.get("check", "full") != "none"

    def to_json(self) -> bytes:
        values = asdict(self) | {"format": FORMAT}
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def fingerprint(shards: Iterable[Shard]) -> str:
    """Return a hex digest of the rows of these shards, in order."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.sha256} {shard.split} {shard.dropped}\n".encode())
    return digest.hexdigest()


def is_prepared(folder: AnyPath) -> bool:
    """Whether the folder has a manifest.json of mmray, of any schema version."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        values = orjson.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a prepared set;

    None if there is none. Raises DataError if it is damaged or outdated.
    """
    if not (folder / MANIFEST).is_file():
        return None
    try:
        values = orjson.loads((folder / MANIFEST).read_bytes())
        if values["schema_version"] not in READABLE_VERSIONS:
            raise DataError(
                f"{folder} has schema version {values['schema_version']}, this version of "
                "mmray reads "
                f"{' and '.join(map(str, READABLE_VERSIONS))}. Prepare the source again into "
                "another folder."
            )
        values = {
            name: value for name, value in values.items() if name in Manifest.__dataclass_fields__
        }
        values["shards"] = tuple(Shard.from_json(item) for item in values["shards"])
        for shard in values["shards"]:
            rows = range(shard.num_rows)
            if not is_safe_path(shard.file):
                raise ValueError(f"the shard {shard.file!r} is outside the folder of the set")
            if not all(row in rows for row in shard.dropped):
                raise ValueError(f"the shard {shard.file!r} drops rows that it does not have")
        if not isinstance(values["source"], dict):
            raise TypeError(f"its source is {values['source']!r}")
        return Manifest(**values | {"class_names": tuple(values["class_names"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged ({error}). Delete it and rerun the same "
            "`mmray prepare` command."
        ) from None
