"""Source, output folder and settings of a prepare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mmray.data.formats.detect import SourceSpec, open_source
from mmray.data.formats.grouped import GroupedSource
from mmray.data.formats.source import RawRow, Source
from mmray.data.images.read import locate_file
from mmray.data.prepare.kept_columns import Compute
from mmray.data.prepare.records import map_rows
from mmray.data.rows import BadRow
from mmray.data.source_row import SourceRow, parse_row
from mmray.plugins import load_class, source_digest
from mmray.storage.paths import AnyPath, to_path

if TYPE_CHECKING:
    from mmray.config import Prepare

_RECORD_VERSION = 20
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

    @cached_property
    def digest(self) -> str:
        """A hash, 16 hex digits, of what determines how rows are packed: the source format,
        settings, and the code of `prepare.compute`.

        It does not cover addresses, so that a set can be moved.
        """
        settings = [
            _RECORD_VERSION,
            self.source.format,
            *(dict(self.settings)[name] for name in _PACK_SETTINGS),
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
            self.source,
            self.out,
            self.settings.column_names,
            self.settings.caption,
            self.settings.keep,
        )
        source.roots = self.settings.root
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
