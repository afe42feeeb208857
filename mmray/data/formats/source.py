"""Interface of a source format: chunks are planned on the driver and read in the tasks that pack
them.

Each class of this package reads one format. `scan` splits the source into chunks without decoding,
and `read` yields the rows of a chunk as named values with their location. A row that cannot be
parsed is a BadRow.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from mmray.builtin import CHAT_COLUMNS
from mmray.data.formats.columns import Columns
from mmray.data.formats.splits import splits_of_files
from mmray.data.formats.values import normalize_values
from mmray.data.images.formats import IMAGE_SUFFIXES
from mmray.data.labels import Labels
from mmray.data.rows import (
    KEPT_COLUMNS,
    NOTICES,
    TEXT_COLUMNS,
    BadRow,
    Values,
    format_unused,
    has_any,
    is_missing,
    is_valid_name,
)
from mmray.errors import DataError
from mmray.storage.paths import (
    AnyPath,
    RemotePath,
    list_files,
    list_stats,
    open_sequential,
    opened_stat,
)
from mmray.storage.requests import iter_parallel

# With `Source.grows`, chunks are larger than `rows_per_chunk` after so many of them: 100 million
# rows are 10,000 chunks.
MAX_SMALL_CHUNKS = 1000
MAX_CHUNK_ROWS = 16_384

# Texts that programs write for a missing value.
_MARKS = {"NA", "N/A", "n/a", "#N/A", "NaN", "nan", "<NA>", "null", "NULL", "None"}
_MARK = "a text or label such as `NA` or `None` is used as it is; leave it empty if it is missing"
# Files and folders that macOS, Windows and network disks add.
_SYSTEM_FILES = {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"}

_ABOUT = re.compile(r"(readme|licen[sc]e)(\..*|[^.]*(\.(md|rst|html|pdf))?)")
# Files that may have rows.
_ROWS_FILE = re.compile(r"\.(tar|tgz|parquet|jsonl|ndjson|csv|tsv|gz|bz2|xz|zst|zip|7z|rar)$", re.I)

Record = tuple[str, Any]  # location (`file:line`) and unparsed row


@dataclass(frozen=True)
class SourceChunk:
    """A part of one file of a source, which one task reads.

    Attributes:
        index: Number of the chunk in the source, from 0.
        file: Path of the file, relative to the folder of the source; of rows that the driver has
            listed that of the listing, in the folder of the prepared set.
        start: First byte of a text file, or first row of a Parquet or Arrow file, from 0; of a tar
            the byte from which its samples start.
        stop: The byte or row after the last.
        first_line: Number of its first line or row in the file, from 1, for messages; 1 if their
            number is not known before.
        num_rows: Number of rows; None: only known after reading, as of a tar.
        signature: Hex digest that shows whether the source changed: of the bytes of a text file,
            otherwise of name, size and time.
        split: Split of its rows without one, by the name of the file or its folder; None: none.
    """

    index: int
    file: str
    start: int
    stop: int
    first_line: int
    num_rows: int | None
    signature: str
    split: str | None = None

    def __str__(self) -> str:
        place = f"byte {self.start}" if self.num_rows is None else f"row {self.first_line}"
        return f"{self.file} from {place}"


@dataclass(frozen=True)
class Scan:
    """A scan of a source, from which the next one takes what has not changed.

    Attributes:
        files: `Source.files`.
        class_names: `Source.class_names` after the scan.
        labels: Labels of each chunk; empty if they were not read to find the names of classes.
    """

    files: dict[str, str] = field(default_factory=dict)
    chunks: list[SourceChunk] = field(default_factory=list)
    class_names: tuple[str, ...] = ()
    labels: list[Labels] = field(default_factory=list)

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None if it is only known after they are read."""
        counts = [chunk.num_rows for chunk in self.chunks]
        return None if None in counts else sum(filter(None, counts))


class RawRow(NamedTuple):
    """A parsed row of a source before validation.

    Attributes:
        location: `file:line`, for messages.
        values: A BadRow if the row could not be parsed, otherwise a dict of the columns that it
            has: `id` or `key`, `image`, `images` or `image_path`, `text` or `texts`, `label`,
            `split`, `messages` or `conversations`, `audio` or `audios`, `video` or `videos`, `t0_s`
            and `t1_s`, in the forms that `parse_row` takes. `kept columns` is a dict of those that
            `prepare.keep` names. Others are ignored.
        files: Signatures (`stat_signature`) of the local files that have its texts and media.
    """

    location: str
    values: Values | BadRow
    files: tuple[tuple[str, int | None, int | None], ...] = ()


class Source(ABC):
    """Rows of one source format, such as CSV; cheap to construct in each task.

    A subclass implements `scan_file`, `records` and `parse`, and sets the class attributes; a
    user's own subclass is named as `--format package.module:Class`.

    `scan(rows_per_chunk)` yields the chunks on the driver, each a SourceChunk: a part of one file
    that one task reads. It calls `scan_file` with each of `names()` that changed. In a task
    `read(chunk)` yields its rows as RawRow (location, values by mmray's column names or a BadRow).
    It calls `records(chunk)`, which yields (location, unparsed record), and `parse(record)`, which
    returns the values by the column names of the source or raises BadRow.

    Args:
        name: Path of its file in the folder; empty: the whole folder.
        columns: Names in the source by mmray's column names, such as {"text": "title"}; a column
            without an entry has mmray's name. mmray's columns are those of RawRow.
        keep: `prepare.keep`, names of columns to keep, or ("all",).
        prepared_folder: Folder where listings are stored; None: `folder`.
        caption_template: Caption of a class, with `{}` for its name.
        files: Visible files of the folder, if it was listed to detect its format.

    Attributes:
        class_names: Names of the labels 0, 1, ..., a tuple. `scan` sets it and the next three
            while it is iterated; each stays empty if the source does not define it.
        split_rows: Counter of the rows by the split that the layout of the files defines.
        ignored: Counter of the files that are no part of a row, by suffix; of a folder of one
            format those that may have rows in another one.
        unread: Columns of the file that `records` reads that neither mmray nor `keep` needs.
        columns: The columns of the source, as Columns.
        grows: Whether chunks grow with the number of rows before them, so that a large source has
            few; False until the caller sets it.
        earlier: The Scan before with the same settings; empty until the caller sets it. Its chunks
            of unchanged files stay. A format whose files grow at the end ends chunks where these
            end, so that they stay, too.
        roots: `prepare.root`, further folders in which files may be; () until the caller sets it.
        title: Name of the format in messages.
        reads_file: Whether a source of this format may be a single file.
        reads_folder: Whether it may be a folder.
        magic: Bytes at `magic_offset` by which a file of this format is detected. A file without
            them is detected by its suffix and `matches_file`. Empty: there are no such bytes.
        magic_offset: Index of the first of these bytes in the file.
        suffixes: Suffixes of the files, such as `.csv`.
        row_needs: What a row needs, for the message if rows lack an image or a text.
        has_types: Whether its values have types; the fields of a CSV are texts.
    """

    title: ClassVar[str]
    row_needs: ClassVar[str] = (
        "an image (a path relative to the file of the rows) and a text; --columns image=NAME "
        "text=NAME names columns of other names"
    )
    reads_file: ClassVar[bool] = True
    reads_folder: ClassVar[bool] = False
    magic: ClassVar[bytes] = b""
    magic_offset: ClassVar[int] = 0
    suffixes: ClassVar[tuple[str, ...]] = ()
    has_types: bool = True

    def __init__(
        self,
        folder: AnyPath,
        name: str,
        columns: dict[str, str],
        prepared_folder: AnyPath | None = None,
        caption_template: str = "",
        files: Iterable[str] = (),
        keep: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.name = name
        self.columns = Columns(columns, keep)
        self.caption_template = caption_template
        self.prepared_folder = prepared_folder or folder
        self._files = files
        self.class_names: tuple[str, ...] = ()
        self.roots: tuple[str, ...] = ()  # `prepare.root`
        self.grows = False
        self.earlier = Scan()
        self.split_rows: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.unread: list[str] = []

    @classmethod
    def matches_file(cls, folder: AnyPath, name: str) -> bool:
        """Return whether a file with one of the suffixes has this format; True by default.

        Args:
            name: Path of the file in it.
        """
        return True

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        """Return whether a folder has this format; False by default. Formats are tried in a fixed
        order, and the first that matches is used.

        Args:
            names: Visible files of the folder, as relative paths.
        """
        return False

    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        """Split the source into chunks, and yield them in order.

        Rows are not decoded, and files that did not change since `earlier` are not read.

        Args:
            rows_per_chunk: Number of rows of a chunk, if the format allows the choice.

        Raises:
            DataError: A file cannot be read or has another format.
        """
        earlier = self.earlier
        unchanged = dict(self.files.items() & earlier.files.items())
        kept: dict[str, list[SourceChunk]] = {name: [] for name in self.stats}
        for chunk in earlier.chunks:
            if chunk.file in unchanged:
                kept[chunk.file].append(chunk)
        if any(kept.values()):
            self.class_names = earlier.class_names
        splits = self.splits(list(kept))
        new = [name for name, chunks in kept.items() if not chunks]
        # A list, because a source that refers to the threads would stop them in garbage collection.
        checked = list(iter_parallel(self.check, new))
        self._checked = dict(zip(new, checked, strict=True))
        index = 0
        rows = 0
        for name, chunks in kept.items():
            for chunk in chunks or self.scan_file(name, rows_per_chunk, rows):
                yield replace(chunk, index=index, split=splits[name])
                index += 1
                rows += chunk.num_rows or 0

    def check(self, name: str) -> Any:
        """Check a file before it is scanned, in a thread, and return what `cut` needs.

        Raises:
            DataError: The file is missing, or clearly of another format.
        """
        return

    def scan_file(self, name: str, rows_per_chunk: int, rows_before: int) -> Iterator[SourceChunk]:
        """Yield the chunks of a file; `scan` sets their index and split.

        Args:
            rows_before: Number of rows in the files before it.
        """
        raise NotImplementedError

    def chunk_rows(self, rows_per_chunk: int, rows_before: int) -> int:
        """Return the number of rows of a chunk.

        Args:
            rows_before: Number of rows in the chunks before it.
        """
        grown = min(rows_before // MAX_SMALL_CHUNKS, MAX_CHUNK_ROWS) if self.grows else 0
        return max(rows_per_chunk, grown)

    def visible_files(self) -> list[str]:
        """Return the sorted paths of the files in the folder and its subfolders, without hidden
        ones.
        """
        return list(self._files) or list_visible_files(self.folder)

    def describe(self) -> str:
        """Return the name of the format for a message; a subclass may add what it detected."""
        return self.title

    def files_with_suffix(self, suffix: str | tuple[str, ...]) -> list[str]:
        """Return the sorted paths of the files with some suffixes in lower case; of a source that
        is a single file only this one. Raises DataError if a name is not plain UTF-8.
        """
        visible = [self.name] if self.name else self.visible_files()
        names = [file for file in visible if self.name or file.lower().endswith(suffix)]
        others = map(_ROWS_FILE.search, {*visible}.difference(names))
        self.ignored = Counter(match[0] for match in others if match)
        # pyarrow cannot open them
        if invalid := [each for each in names if not is_valid_name(each)]:
            raise DataError(
                f"{self.folder}: the name {invalid[0]!r} is not plain UTF-8: rename the file"
            )
        return names

    def names(self) -> list[str]:
        """Return the sorted paths of the files of the source, relative to its folder."""
        return self.files_with_suffix(self.suffixes)

    @cached_property
    def stats(self) -> dict[str, Any]:
        """`stat()` of each file of the source by name, on a store from a listing."""
        names = self.names()
        listed = {}
        if names and isinstance(self.folder, RemotePath) and not self.name:
            listed = list_stats(self.folder)
        return {name: listed.get(name) or opened_stat(self.folder / name) for name in names}

    @cached_property
    def files(self) -> dict[str, str]:
        """Size and times of each file of the source by name, as text, which differ after a change;
        empty if a store has no times.
        """
        names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
        states = {
            file: [getattr(stat, name) for name in names if hasattr(stat, name)]
            for file, stat in self.stats.items()
        }
        is_known = all(None not in state for state in states.values())
        return {file: repr(state) for file, state in states.items()} if is_known else {}

    def splits(self, names: list[str]) -> dict[str, str | None]:
        """Return the split of each file by the names of files and folders.

        Returns:
            Split by path, such as {"val/0.parquet": "val"}; None for files without a split, and
            for a source that is a single file.
        """
        return dict.fromkeys(names) if self.name else splits_of_files(names)

    @abstractmethod
    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        """Yield the unparsed rows of a chunk that `scan` yielded.

        Yields:
            (location, record): `file:line` for messages, and a value that `parse` accepts, or a
            BadRow.

        Raises:
            DataError: The chunk differs from the scanned one.
        """

    def labels(self, chunk: SourceChunk) -> Iterator[Any]:
        """Yield the labels of the rows that have one: class numbers, or names of classes."""
        for row in self.read(chunk):
            if isinstance(row.values, dict) and "label" in row.values:
                yield row.values["label"]

    @abstractmethod
    def parse(self, record: Any) -> Values:
        """Return the values of a row by the column names of the source.

        Args:
            record: The unparsed row in the form of the format, such as the bytes of a line.

        Returns:
            Values by the column names of the source, such as {"image": "a.jpg", "caption": "a
            dog"}; missing ones may be None or absent.

        Raises:
            BadRow: The row is invalid.
        """

    def read(self, chunk: SourceChunk) -> Iterator[RawRow]:
        """Yield the rows of a chunk, parsed and with mmray's column names.

        A row without a split gets the split of the chunk, which file names define.

        Raises:
            DataError: The chunk differs from the scanned one.
        """
        for row in map(self.parse_item, self.records(chunk)):
            if chunk.split and not isinstance(row.values, BadRow):
                row.values["split"] = row.values.get("split") or chunk.split
            yield row

    def parse_item(self, item: Record) -> RawRow:
        """Parse one row, or a BadRow in its place, and rename its columns."""
        location, record = item
        if isinstance(record, BadRow):
            return RawRow(location, record)
        try:
            parsed = self.parse(record)
            values = normalize_values(
                self.columns.rename(parsed), self.class_names, self.caption_template
            )
        except BadRow as bad:
            return RawRow(location, bad)
        if self.columns.keep:
            kept = {name: value for name, value in parsed.items() if self.columns.keeps(name)}
            values[KEPT_COLUMNS] = kept
        if notices := self.notices(parsed, values):
            values[NOTICES] = [*values.get(NOTICES, ()), *notices]
        return RawRow(location, values)

    def notices(self, parsed: Values, values: Values) -> list[str]:
        """Return the notices of columns that are not used, and of texts such as `NA`.

        Args:
            parsed: Values of a row by the columns of the source.
            values: Those by mmray's columns.
        """
        columns = self.columns
        unused = self.unread + [
            name for name, value in parsed.items() if value is not None and columns.drops(name)
        ]
        has_both = "texts" in values and not is_missing(parsed.get("text"))
        unused += ["text"] * (has_both and not columns.drops("text"))
        if has_any(values, CHAT_COLUMNS):
            unjoined = columns.of(*(name for name in CHAT_COLUMNS if name in values))
            unused += [name for name in unjoined if not columns.keeps(name)]
        notices = [format_unused(name) for name in unused]
        for name in self._texts:
            if isinstance(parsed.get(name), str) and parsed[name] in _MARKS:
                notices.append(_MARK)
        return notices

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        """The columns of texts and labels."""
        return self.columns.of(*TEXT_COLUMNS, "label")


def changed_error(file: str) -> DataError:
    """Return the error for a file of the source that changed between scanning and reading."""
    return DataError(f"{file} changed while it was read: run the same command again")


def read_head(folder: AnyPath, name: str, size: int = 64) -> bytes:
    """Return the first bytes of a file, at most `size`. Raises DataError."""
    path = folder / name
    try:
        with open_sequential(path) as file:
            return bytes(file.read(size))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: give the path of a source") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def list_visible_files(folder: AnyPath) -> list[str]:
    """Return the files in a folder and its subfolders as sorted paths, relative to the folder.

    Those for which `is_hidden` is true are left out: hidden ones, and those of operating systems.
    """
    return [name for name in list_files(folder) if not is_hidden(name)]


def is_hidden(path: str) -> bool:
    """Return whether a part of a path starts with a dot (`._0.jpg`), or is a file or folder that an
    operating system adds, such as `__MACOSX` and `Thumbs.db`.
    """
    return any(
        (part.startswith(".") and part not in (".", "..")) or part.lower() in _SYSTEM_FILES
        for part in path.split("/")
    )


def is_about_the_data(path: str) -> bool:
    """Return whether a path is a readme or a license: `README.txt` and `LICENSE-MIT`, but no image
    and no file of a row, such as `license_plate_1.txt`.
    """
    name = path.rpartition("/")[2].lower()
    return _ABOUT.fullmatch(name) is not None and not name.endswith(IMAGE_SUFFIXES)
