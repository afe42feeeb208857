"""manifest.json of a prepared set, written last: a folder without it is not a prepared set.

Other programs read `num_rows`, `num_read`, `num_quarantined`, `splits` and `fingerprint`; do not
rename them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

import orjson

from mmray.data.rows import TEXT_COLUMNS, is_safe_path, join_unused, split_names
from mmray.data.store.row_columns import Columns
from mmray.data.store.shard_table import MappedFile, Shard, ShardTable
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, write_atomic

MANIFEST = "manifest.json"
FORMAT = "mmray prepared set"  # value of `format` in the manifest
TOKENIZER = "tokenizer.json"
QUARANTINE = "quarantine.jsonl"
# List of a rerun that failed, next to the list of the older set.
REJECTED_QUARANTINE = "quarantine.rejected.jsonl"
SCAN = "scan.json"
SHARDS = "shards"  # folder
CHUNK_RECORDS = "parts"  # folder
SCHEMA_VERSION = 8
# few enough to read one random row, enough to keep the index of a shard short
RECORD_BATCH_ROWS = 8


class Notice(TypedDict):
    """Rows of a source that have something that the set does not have.

    Attributes:
        example: Location of the first of them, such as `chats.jsonl:3`.
    """

    num_rows: int
    example: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json of a prepared set: numbers of rows, splits, source and shards.

    num_rows + num_quarantined = num_read.

    Attributes:
        num_rows: Number of rows of the set.
        num_read: Number of rows of the source.
        num_quarantined: Number of rows that were left out: bad, duplicate or contaminated ones.
        reasons: Number of quarantined rows by reason, such as {"truncated": 3}.
        splits: Number of rows by split, such as {"train": 900, "val": 100}; empty if rows have no
            splits.
        fingerprint: Hex digest that is equal for the same rows in the same shards.
        tokenizer: File name of the tokenizer; None: none was trained.
        source: The source: `name` (of its file or folder), `format` (such as `jsonl`), `folder`
            (path or URI), `file` (name in the folder; empty: all of it), `num_chunks` (parts in
            which it was read) and `sha256` (hex digest of the bytes of text files, and of names,
            sizes and times of others); of an index-only set (which refers to the images in its
            source) also `address`, the folder.
        settings: The `prepare` section as JSON values, {field: value}.
        shards: The shards; a table if the manifest was read from a file.
        schema_version: Version of the schema of the shards.
        num_same_text: Number of rows whose captions occur in an earlier row; they are kept.
        same_text_share: Share of the pairs of rows of a split that have the same captions; of a
            set without splits under "". `mmray select` does not count them again.
        leakage: Summary of the contamination check (rows that are also in another set or split):
            `exact` and `near` (numbers of rows), `phash_distance`, `dropped` (whether they were
            dropped) and `found_in` (number of rows by set); {} without a check.
        class_names: Names of the labels 0, 1, ..., if the source has them.
        num_images: Number of rows by number of images (as text), for each split; the split is "" if
            rows have none.
        media_kinds: Number of rows with audio or video by the kinds of their media (`audio`,
            `video`, `audio video`, ...), for each split in the same way.
        columns: Type of each column of the rows by its name, by folder in `columns/`: those that
            `prepare.keep` stores, and scores. An example is {"kept": {"width": "int64"}}.
        notices: Rows by what they have in the source and not in the set (`SourceRow.notices`).
    """

    num_rows: int
    num_read: int
    num_quarantined: int
    reasons: dict[str, int]
    splits: dict[str, int]
    fingerprint: str
    tokenizer: str | None
    source: dict[str, Any]
    settings: dict[str, Any]
    shards: ShardTable | tuple[Shard, ...] = field(repr=False)
    schema_version: int = SCHEMA_VERSION
    num_same_text: int = 0
    same_text_share: dict[str, float] = field(default_factory=dict)
    leakage: dict[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    num_images: dict[str, dict[str, int]] = field(default_factory=dict)
    media_kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    columns: Columns = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)

    @property
    def notice_lines(self) -> list[str]:
        """A line for the notices of the same rows, most rows first."""
        by_rows: dict[tuple[int, str], list[str]] = {}
        for text, notice in self.notices.items():
            by_rows.setdefault((notice["num_rows"], notice["example"]), []).append(text)
        return [
            f"{num_rows:,} rows: {text} (for example {example})"
            for (num_rows, example), texts in sorted(by_rows.items(), key=lambda each: -each[0][0])
            for text in join_unused(texts)
        ]

    @property
    def images_verified(self) -> bool:
        """Whether every image was decoded completely when the set was prepared."""
        return self.settings.get("check", "full") == "full" or bool(self.settings.get("image_side"))

    @property
    def max_pixels(self) -> int:
        """Maximum width x height of its images when they were validated; 0: not recorded."""
        return int(self.settings.get("max_pixels", 0))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns of the source whose texts the rows have, if `prepare.columns` names several, such
        as (`alt`, `synthetic`); otherwise ().
        """
        return text_columns(self.settings.get("columns", ()))

    @property
    def is_index_only(self) -> bool:
        """Whether the set refers to images in its source instead of storing them."""
        return bool(self.settings.get("index_only"))


def text_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the source that have texts, if they are several; otherwise ()."""
    pairs = [column.partition("=") for column in columns]
    several = [theirs for ours, _, theirs in pairs if ours in TEXT_COLUMNS and "," in theirs]
    return split_names(several[0]) if several else ()


def media_fields(counts: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the fields `num_images` and `media_kinds` of a manifest.

    Args:
        counts: Number of rows by split ("" if rows have none) and kinds of their media.
    """
    num_images: dict[str, Counter[str]] = {}
    media_kinds: dict[str, Counter[str]] = {}
    for (split, kinds), count in sorted(counts.items()):
        images = kinds.split().count("image")
        num_images.setdefault(split, Counter())[str(images)] += count
        if "audio" in kinds or "video" in kinds:
            media_kinds.setdefault(split, Counter())[kinds] += count
    return {
        "num_images": {split: dict(of_split) for split, of_split in num_images.items()},
        "media_kinds": {split: dict(of_split) for split, of_split in media_kinds.items()},
    }


def shard_fields(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the fields of a manifest that follow from the shards of the set.

    Args:
        shards: The shards, in order; rows that are dropped from the set do not count.

    Returns:
        `num_rows` (int), `splits` (number of rows by split), `fingerprint` (hex digest of the rows)
        and `shards` (the table of them).
    """
    table = ShardTable.from_shards(shards)
    splits: Counter[str] = Counter()
    for shard in shards:
        splits.update({shard.split: shard.num_kept} if shard.split else {})
    return {
        "num_rows": sum(shard.num_kept for shard in shards),
        "splits": dict(splits),
        "fingerprint": table.fingerprint(table.of_split(None)),
        "shards": table,
    }


def write_manifest(folder: AnyPath, manifest: Manifest) -> None:
    """Write the table of the shards of a set and then its manifest.json.

    The table's name has its digest, because readers of a set that grew still read the older one.
    """
    shards = manifest.shards
    table = shards if isinstance(shards, ShardTable) else ShardTable.from_shards(shards)
    file = table.write(folder)
    entry = {"file": file.name, "sha256": file.sha256, "num_bytes": file.num_bytes}
    values = asdict(replace(manifest, shards=())) | {"shards": entry, "format": FORMAT}
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(folder / MANIFEST, orjson.dumps(values, option=options))


def _open_table(folder: AnyPath, entry: Mapping[str, Any]) -> ShardTable:
    """Open the table of a manifest. Raises DataError, ValueError or LookupError."""
    name = str(entry["file"])
    if not is_safe_path(name):
        raise ValueError(f"the file of the shards, {name!r}, is outside the folder of the set")
    file = MappedFile(folder, name, str(entry["sha256"]), int(entry["num_bytes"]))
    table = ShardTable.open(file)
    if hashlib.sha256(table.data).hexdigest() != file.sha256:
        raise ValueError(f"{name} has another sha256")
    return table


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a prepared set.

    Args:
        folder: Local folder or folder on an object store.

    Returns:
        The Manifest of the set, with `num_rows`, `splits`, `fingerprint`, `shards` (its table
        opened) and others; None if the folder has no manifest.json.

    Raises:
        DataError: The manifest is damaged, or has a schema version that cannot be read.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        values = orjson.loads(data)
        if values["schema_version"] != SCHEMA_VERSION:
            raise DataError(
                f"{folder} has schema version {values['schema_version']}, this version of "
                f"mmray reads {SCHEMA_VERSION}. Prepare the source again into another folder."
            )
        values = {
            name: value for name, value in values.items() if name in Manifest.__dataclass_fields__
        }
        values["shards"] = _open_table(folder, values["shards"])
        values["shards"].validate()
        if not isinstance(values["source"], dict):
            raise TypeError(f"its source is {values['source']!r}")
        return Manifest(**values | {"class_names": tuple(values["class_names"])})
    except (ValueError, TypeError, LookupError, FileNotFoundError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged, or of another version of mmray ({error}). Use that "
            "version, or delete the file and rerun the same `mmray prepare` command."
        ) from None
