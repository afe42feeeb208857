"""Interface of a source format: chunks are planned on the driver and read in the tasks that pack
them.

Each class of this package reads one format. `scan` splits the source into chunks without decoding,
and `read` yields the rows of a chunk as named values with their location. A row that cannot be
parsed is a BadRow.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from mmray.builtin import ANSWER_COLUMNS, CHAT_COLUMNS, CHOSEN_COLUMN, COLUMNS, KEEP_ALL
from mmray.data.formats.splits import splits_of_files
from mmray.data.formats.values import normalize_values
from mmray.data.images.formats import IMAGE_SUFFIXES
from mmray.data.rows import (
    FOLDER,
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    MEDIA_COLUMNS,
    MEDIA_KINDS,
    MESSAGE_COLUMNS,
    NOTICES,
    TEXT_COLUMNS,
    BadRow,
    format_unused,
    has_any,
    is_missing,
    is_valid_name,
    rename_columns,
    replaced_columns,
    source_columns,
)
from mmray.errors import DataError, UsageError, suggest
from mmray.storage.paths import AnyPath, RemotePath, list_files, list_stats, open_sequential

# With `Source.grows`, chunks are larger than `rows_per_chunk` after so many of them: 100 million
# rows are 10,000 chunks.
MAX_SMALL_CHUNKS = 1000
MAX_CHUNK_ROWS = 16_384

# Common names of columns in public data sets, to suggest one in a message.
_COMMON_NAMES = {
    "image": "image img image_name img_path image_file file_name filename file filepath file_path "
    "path image_url url image_path image_bytes jpg png photo",
    "text": "text comment comments caption captions title sentence sentences description alt "
    "alt_text raw conversation prompt txt label transcription transcript",
}
_NUMBERING = "_0123456789"
_CONVERSATIONS = (*MESSAGE_COLUMNS, *ANSWER_COLUMNS, CHOSEN_COLUMN)
# Texts that programs write for a missing value.
_MARKS = {"NA", "N/A", "n/a", "#N/A", "NaN", "nan", "<NA>", "null", "NULL", "None"}
_MARK = "a text or label such as `NA` or `None` is used as it is; leave it empty if it is missing"
# Files and folders that macOS, Windows and network disks add.
_SYSTEM_FILES = {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"}


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


class RawRow(NamedTuple):
    """A parsed row of a source before validation.

    Attributes:
        line: Number of the row in its file, from 1, which orders the rows of a chunk; of a tar in
            the chunk.
        location: `file:line`, for messages.
        values: A BadRow if the row could not be parsed, otherwise a dict of the columns that it
            has: `id` or `key`, `image`, `images` or `image_path`, `text` or `texts`, `label`,
            `split`, `messages` or `conversations`, `audio` or `audios`, `video` or `videos`, `t0_s`
            and `t1_s`, in the forms that `parse_row` takes. `kept columns` is a dict of those that
            `prepare.keep` names. Others are ignored.
        files: Signatures (`stat_signature`) of the local files that have its texts.
    """

    line: int
    location: str
    values: dict[str, Any] | BadRow
    files: tuple[tuple[str, int | None, int | None], ...] = ()


class Source(ABC):
    """Rows of one source format, such as CSV; cheap to construct in each task.

    A subclass implements `scan`, `records` and `parse`, and sets the class attributes; a user's own
    subclass is named as `--format package.module:Class`.

    `scan(rows_per_chunk)` yields the chunks on the driver, each a SourceChunk: a part of one file
    that one task reads. In a task `read(chunk)` yields its rows as RawRow (line,
    location, values by mmray's column names or a BadRow). It calls `records(chunk)`, which yields
    (line, location, unparsed record), and `parse(record)`, which returns the values by the column
    names of the source or raises BadRow.

    Args:
        name: Path of its file in the folder; empty: the whole folder.
        columns: Names in the source by mmray's column names, such as {"text": "title"}; a column
            without an entry has mmray's name. mmray's columns are those of RawRow.
        prepared_folder: Folder where listings are stored; None: `folder`.
        caption_template: Caption of a class, with `{}` for its name.
        files: Visible files of the folder, if it was listed to detect its format.

    Attributes:
        class_names: Names of the labels 0, 1, ..., a tuple. `scan` sets it and the next three
            while it is iterated; each stays empty if the source does not define it.
        split_rows: Counter of the rows by the split that the layout of the files defines.
        ignored: Counter of the files that are no part of a row, by suffix.
        unread: Columns of the file that `records` reads that neither mmray nor `keep` needs.
        keep: `prepare.keep`, names of columns to keep, or ("all",); () until the caller sets it.
        grows: Whether chunks grow with the number of rows before them, so that a large source has
            few; False until the caller sets it.
        earlier: Chunks of an earlier scan with the same settings; () until the caller sets it. A
            format whose files grow at the end ends chunks where these end, so that they stay.
        num_complete: How many of these, from the first, are all chunks of a scan, not only those
            that were packed before an interruption.
        earlier_class_names: `class_names` of that scan.
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
    ) -> None:
        self.folder = folder
        self.name = name
        self.columns = columns
        self.caption_template = caption_template
        self.prepared_folder = prepared_folder or folder
        self._files = files
        self.class_names: tuple[str, ...] = ()
        self.keep: tuple[str, ...] = ()  # `prepare.keep`
        self.roots: tuple[str, ...] = ()  # `prepare.root`
        self.grows = False
        self.earlier: Sequence[SourceChunk] = ()
        self.num_complete = 0
        self.earlier_class_names: tuple[str, ...] = ()
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

    @abstractmethod
    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        """Split the source into chunks, and yield them in order.

        Rows are not decoded.

        Args:
            rows_per_chunk: Number of rows of a chunk, if the format allows the choice.

        Raises:
            DataError: A file cannot be read or has another format.
        """

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
        names = (
            [self.name]
            if self.name
            else [file for file in self.visible_files() if file.lower().endswith(suffix)]
        )
        # pyarrow cannot open them
        if invalid := [each for each in names if not is_valid_name(each)]:
            raise DataError(
                f"{self.folder}: the name {invalid[0]!r} is not plain UTF-8: rename the file"
            )
        return names

    def names(self) -> list[str]:
        """Return the sorted paths of the files of the source, relative to its folder."""
        return self.files_with_suffix(self.suffixes)

    def signatures(self, names: list[str]) -> dict[str, tuple[int, str]]:
        """Return the size of each file of the source, and a digest of its name, size and
        modification time.
        """
        stats = self.stats(names)
        return {name: (stat.st_size, _signature(name, stat)) for name, stat in stats.items()}

    def stats(self, names: list[str]) -> dict[str, Any]:
        """Return `stat()` of each file of the source by name, from a listing of a store."""
        listed = {}
        if isinstance(self.folder, RemotePath) and not self.name:
            listed = list_stats(self.folder)
        return {name: listed.get(name) or (self.folder / name).stat() for name in names}

    @cached_property
    def files_digest(self) -> str:
        """Digest of sizes and times of the files from which `scan` reads, which shows that none of
        them changed; "" if that needs a scan.
        """
        return ""

    def unchanged_chunks(self, files_digest: str) -> Sequence[SourceChunk]:
        """Return the chunks of the earlier complete scan, of files of this digest, if no file
        changed since; otherwise none.
        """
        is_unchanged = self.files_digest == files_digest != ""
        return self.earlier[: self.num_complete] if is_unchanged else ()

    def earlier_chunks(self, signatures: Mapping[str, tuple[int, str]]) -> dict[str, list[Any]]:
        """Return the chunks of an earlier complete scan of the files that are the same by name."""
        chunks: dict[str, list[SourceChunk]] = {}
        for chunk in self.earlier[: self.num_complete]:
            if signatures.get(chunk.file, (0, ""))[1] == chunk.signature:
                chunks.setdefault(chunk.file, []).append(chunk)
        return chunks

    def splits(self, names: list[str]) -> dict[str, str | None]:
        """Return the split of each file by the names of files and folders.

        Returns:
            Split by path, such as {"val/0.parquet": "val"}; None for files without a split, and
            for a source that is a single file.
        """
        return dict.fromkeys(names) if self.name else splits_of_files(names)

    @abstractmethod
    def records(self, chunk: SourceChunk) -> Iterator[tuple[int, str, Any]]:
        """Yield the unparsed rows of a chunk.

        Args:
            chunk: A part of one file, as `scan` yielded it.

        Yields:
            (line, location, record): number of the row in its file, `file:line` for messages, and a
            value that `parse` accepts, or a BadRow.

        Raises:
            DataError: The chunk differs from the scanned one.
        """

    def labels(self, chunks: Sequence[SourceChunk]) -> Iterator[Any]:
        """Yield the labels of the rows that have one.

        Args:
            chunks: Chunks that `scan` yielded.

        Yields:
            Class numbers, or names of classes as text.
        """
        for chunk in chunks:
            for row in self.read(chunk):
                if isinstance(row.values, dict) and "label" in row.values:
                    yield row.values["label"]

    @abstractmethod
    def parse(self, record: Any) -> dict[str, Any]:
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

        Args:
            chunk: A part of one file, as `scan` yielded it.

        Yields:
            A RawRow: `line`, `location` (`file:line`) and `values` by column name, or a BadRow
            instead of these if the row is invalid.

        Raises:
            DataError: The chunk differs from the scanned one.
        """
        for row in map(self.parse_item, self.records(chunk)):
            if chunk.split and not isinstance(row.values, BadRow):
                row.values["split"] = row.values.get("split") or chunk.split
            yield row

    def parse_item(self, item: tuple[int, str, Any]) -> RawRow:
        """Parse one row, and rename its columns; an invalid row becomes a RawRow with a BadRow as
        `values`.

        Args:
            item: (line, location, record): number of the row in its file, `file:line` for messages,
                and the unparsed row or a BadRow.

        Returns:
            A RawRow: `line` (number), `location` (`file:line`) and `values`, by mmray's column
            names, or a BadRow.
        """
        line, location, record = item
        if isinstance(record, BadRow):
            return RawRow(line, location, record)
        try:
            parsed = self.parse(record)
            values = normalize_values(
                rename_columns(parsed, self.columns), self.class_names, self.caption_template
            )
        except BadRow as bad:
            return RawRow(line, location, bad)
        if self.keep:
            kept = {name: value for name, value in parsed.items() if self.keeps(name)}
            values[KEPT_COLUMNS] = kept
        unused = [name for name, value in parsed.items() if value is not None and self._drops(name)]
        if "texts" in values and "text" in parsed and not is_missing(parsed["text"]):
            unused += ["text"] * (not self._drops("text"))
        if has_any(values, CHAT_COLUMNS):
            unjoined = source_columns(
                self.columns, *(name for name in CHAT_COLUMNS if name in values)
            )
            unused += [name for name in unjoined if not self.keeps(name)]
        notices = [format_unused(name) for name in self.unread + unused]
        for name in self._texts:
            if isinstance(parsed.get(name), str) and parsed[name] in _MARKS:
                notices.append(_MARK)
        if notices:
            values[NOTICES] = [*values.get(NOTICES, ()), *notices]
        return RawRow(line, location, values)

    def _drops(self, name: str) -> bool:
        return name not in self._used and not self.keeps(name)

    def keeps(self, name: str) -> bool:
        """Return whether a column of the source is stored with the set, as a kept column.

        It is if `prepare.keep` (the attribute `keep`) names it, or is `all` and mmray does not read
        the column itself.

        Args:
            name: Name of the column in the source.
        """
        is_stored = name in self._known and name not in CHAT_COLUMNS
        return not is_stored if self.keep == (KEEP_ALL,) else name in self.keep

    @cached_property
    def _known(self) -> set[str]:
        return known_columns(self.columns) | {FOLDER, KEPT_COLUMNS, NOTICES}

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        """The columns of texts and labels."""
        return source_columns(self.columns, *TEXT_COLUMNS, "label")

    @cached_property
    def _used(self) -> set[str]:
        """The known columns that no mapped one replaces."""
        theirs = source_columns(self.columns, *self.columns)
        return self._known - replaced_columns(self.columns).difference(theirs)


def known_columns(columns: Mapping[str, str]) -> set[str]:
    """Return the names of the columns of a source that mmray reads, whether it has them or not."""
    return set(source_columns(columns, *COLUMNS, *CHAT_COLUMNS))


def check_named(
    names: Collection[str],
    keep: Sequence[str],
    columns: Mapping[str, str],
    file: str,
    is_complete: bool = False,
) -> None:
    """Raise UsageError if a column that the user named in `prepare.keep` or `columns` does not
    exist in the source.

    Args:
        keep: Value of `prepare.keep`: names of columns, or ("all",), which names none.
        is_complete: Whether these are the names of all rows. False: only the columns of `keep` and
            those of several texts must be there.
    """
    flag_of = {name: "--keep" for name in keep if name != KEEP_ALL}
    for ours in columns:
        theirs = source_columns(columns, ours)
        is_checked = is_complete or len(theirs) > 1
        flag_of |= dict.fromkeys(theirs if is_checked else (), f"--columns {ours}")
    for name, flag in flag_of.items():
        if name not in names:
            raise UsageError(f"{flag}: {file} has no column `{name}`; {suggest(name, names)}")


def check_columns(
    names: Sequence[str], columns: Mapping[str, str], file: str, no_match: str = ""
) -> None:
    """Raise DataError if no column of a source has images, audio or video, or none has texts.

    A column of conversations counts as both, one of labels as texts. A source with both audio and
    video needs no texts.

    Args:
        names: Names of all columns of the source.
        columns: Names in the source by mmray's column names, such as {"text": "title"}; a column
            without an entry has mmray's name.
        file: The file, for the message.
        no_match: Text that is added to the message if no column resembles one of images or texts.
    """
    advice = []
    missing = []
    has_pairs = all(
        not set(names).isdisjoint(source_columns(columns, *of_kind))
        for of_kind in MEDIA_KINDS.values()
    )
    # The images of a conversation may be in its parts.
    for kind, ours in (
        ("image", (*IMAGE_COLUMNS, *MEDIA_COLUMNS, *_CONVERSATIONS)),
        ("text", (*TEXT_COLUMNS, *_CONVERSATIONS, "label")),
    ):
        if set(names).isdisjoint(source_columns(columns, *ours)) and not (
            kind == "text" and has_pairs
        ):
            common = _COMMON_NAMES[kind].split()
            # Names such as image_1 and Caption2 match, too.
            guess = next(
                (name for name in names if name.lower().rstrip(_NUMBERING) in common), "NAME"
            )
            missing.append(f"none is `{kind}`")
            advice.append(f"{kind}={guess}")
    lacking = [theirs for theirs in columns.values() if theirs not in names]
    if missing and lacking:
        raise DataError(
            f"{file} has no column `{lacking[0]}`, which --columns names; "
            f"{suggest(lacking[0], names)}"
        )
    if missing:
        is_unknown = len(missing) == 2 and all(each.endswith("=NAME") for each in advice)
        # Names of columns do not show what kind of files they name.
        kinds = " (audio=, video= for such files)" if advice[0].startswith("image=") else ""
        raise DataError(
            f"{file} has the columns {', '.join(names)[:300]}: {' and '.join(missing)}; name "
            f"{'one' if len(missing) == 1 else 'them'} with --columns {' '.join(advice)}"
            f"{kinds}{no_match if is_unknown else ''}"
        )


def changed_error(file: str) -> DataError:
    """Return the error for a file of the source that changed between scanning and reading."""
    return DataError(f"{file} changed while it was read: run the same command again")


def _signature(name: str, stat: Any) -> str:
    return hashlib.sha256(repr((name, stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()


def check_unchanged(folder: AnyPath, chunk: SourceChunk) -> None:
    """Raise DataError if the file of a chunk changed after it was scanned."""
    if _signature(chunk.file, (folder / chunk.file).stat()) != chunk.signature:
        raise changed_error(chunk.file)


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
    """Return whether the file name of a path starts with `readme` or `license`.

    Also with `licence`; upper and lower case are the same. False for an image with such a name.
    """
    name = path.rpartition("/")[2].lower()
    return name.startswith(("readme", "license", "licence")) and not name.endswith(IMAGE_SUFFIXES)
