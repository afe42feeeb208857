"""What `prepare` understood of a source before it packs it: format, splits, columns, an example."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence

from mmray.builtin import CHAT_COLUMNS, COLUMNS
from mmray.data.formats.columns import Columns
from mmray.data.formats.listing import JsonArraySource
from mmray.data.formats.source import RawRow, Scan, Source, SourceChunk
from mmray.data.formats.text_lines import JsonlSource
from mmray.data.labels import label_number
from mmray.data.prepare.job import PrepareJob
from mmray.data.rows import (
    FOLDER,
    KEPT_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    NOTICES,
    TEXT_COLUMNS,
    ImageRef,
    has_any,
    join_unused,
)

_NUM_SHOWN_CLASSES = 12
_SPLIT_HINTS = {
    "auto": "(by the names of files and folders; --split none ignores them)",
    "none": "are ignored (--split none)",
}
_OTHER_SPLIT_HINT = "are replaced (--split)"


class _ExampleRepr(reprlib.Repr):
    """Short texts for the values of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = 2
        self.maxstring = 80

    def repr_ImageRef(self, image: ImageRef, level: int) -> str:
        return image.name

    def repr_bytes(self, data: bytes, level: int) -> str:
        return f"({len(data):,} bytes)"


def check_columns(job: PrepareJob, source: Source, first_rows: Sequence[RawRow]) -> None:
    """Check the columns of the first rows, as formats with a header check theirs.

    Raises DataError if JSON rows have no column of images or media, or none of texts, and
    UsageError for a column of `prepare.keep` that no row has.
    """
    rows = [row.values for row in first_rows if isinstance(row.values, dict)]
    if not rows or not source.has_types:  # an empty field of a CSV is no value; it has a header
        return
    file = f"{source.folder / source.name} ({source.describe()})"
    names = list(
        dict.fromkeys(
            name for row in rows for name in row if name not in (FOLDER, KEPT_COLUMNS, NOTICES)
        )
    )
    if type(source) in (JsonlSource, JsonArraySource):
        # rename_columns has dropped what a mapped column replaces
        mapped = source.columns.names.items()
        Columns({ours: name for ours, name in mapped if ours not in names}).check_kinds(names, file)
    names += _kept_names(first_rows)
    file += f", in its first {len(first_rows)} rows,"
    Columns(source.columns.names, job.settings.keep).check_named(names, file)


def _kept_names(first_rows: Sequence[RawRow]) -> list[str]:
    """Return the names of the columns that `prepare.keep` stores."""
    rows = [row.values for row in first_rows if isinstance(row.values, dict)]
    return list(dict.fromkeys(name for row in rows for name in row.get(KEPT_COLUMNS, {})))


def describe_source(
    job: PrepareJob, source: Source, scan: Scan, first_rows: Sequence[RawRow]
) -> Iterator[tuple[str, str]]:
    """Yield lines for the user that describe how `prepare` understands a source.

    Args:
        job: Location of the source, and the `prepare` settings.
        source: The source, with the names of its classes.
        first_rows: The first rows, parsed: values by column, or a BadRow.

    Yields:
        (line, heading), such as ("a.csv: 120 rows of CSV with the delimiter comma", "source"). The
        other headings, each at most once, are `splits`, `ignored` (files), `columns`, `repeats`
        (of images), `classes`, `kept` (columns of `prepare.keep`) and `example` (values of a row).
    """
    total = scan.num_rows
    num_files = len({chunk.file for chunk in scan.chunks})
    size = f"{num_files:,} files" if total is None else f"{total:,} rows"
    yield f"{source.folder / source.name}: {size} of {source.describe()}", "source"
    if layout := _format_layout_splits(source, scan.chunks):
        yield f"{layout} {_SPLIT_HINTS.get(job.settings.split, _OTHER_SPLIT_HINT)}", "splits"
    if source.ignored:
        counts = [f"{name or 'none'} {n:,}" for name, n in source.ignored.most_common(10)]
        yield f"{source.ignored.total():,} files by suffix: {', '.join(counts)}", "ignored"
    if columns := _format_columns(source, first_rows):
        yield columns, "columns"
    if repeats := _format_repeats(job, first_rows):
        yield repeats, "repeats"
    if names := source.class_names:
        more = ", ..." if len(names) > _NUM_SHOWN_CLASSES else ""
        others = [name for name in names if label_number(name) is None]
        if 0 < len(others) < len(names):
            more += f" (all are names, because `{others[0][:40]}` is no integer)"
        yield f"{len(names):,}: {', '.join(names[:_NUM_SHOWN_CLASSES])[:200]}{more}", "classes"
    if kept := _kept_names(first_rows):
        yield ", ".join(kept), "kept"
    for row in first_rows:
        if isinstance(row.values, dict):
            yield _format_example(row), "example"
            break


def _format_layout_splits(source: Source, chunks: Sequence[SourceChunk]) -> str:
    """Return the splits that file and folder names define, with their numbers of rows or files."""
    rows = Counter(source.split_rows)
    files: Counter[str] = Counter()
    for chunk in chunks:
        if chunk.split and chunk.num_rows is None:
            files[chunk.split] += chunk.start == 0
        elif chunk.split:
            rows[chunk.split] += chunk.num_rows or 0
    counts = [f"{name} {count:,} rows" for name, count in sorted(rows.items())]
    counts += [f"{name} {count:,} files" for name, count in sorted(files.items())]
    return ", ".join(counts)


def _format_columns(source: Source, first_rows: Sequence[RawRow]) -> str:
    """Return the columns that are used, with their names in the source, and the notices."""
    rows = [row.values for row in first_rows if isinstance(row.values, dict)]
    mapped = source.columns.names
    used = {name: None for values in rows for name in values if name in COLUMNS}
    # A row without these is quarantined, and its reason names its columns.
    needed = (*TEXT_COLUMNS, *MESSAGE_COLUMNS, *MEDIA_COLUMNS, "label")
    kept = [values for values in rows if has_any(values, needed)]
    notices = join_unused(text for values in kept for text in values.get(NOTICES, ()))
    notices += [
        f"no row of the first {len(rows)} has `{theirs}`"
        for ours, theirs in mapped.items()
        if ours not in used and ours not in CHAT_COLUMNS  # which are joined
    ]
    text = ", ".join(f"{name}={mapped[name]}" if name in mapped else name for name in used)
    return f"{text} ({'; '.join(notices)})" if notices else text


def _format_repeats(job: PrepareJob, first_rows: Sequence[RawRow]) -> str:
    """Return what happens to first rows that repeat the image file of another; "" for none."""
    captioned = [
        row.values
        for row in first_rows
        if isinstance(row.values, dict) and not row.values.keys().isdisjoint(TEXT_COLUMNS)
    ]
    values = [row[name] for row in captioned for name in ("image_path", "image") if name in row]
    paths = [value for value in values if isinstance(value, str)]
    repeats = len(paths) - len(set(paths))
    if not repeats or job.settings.duplicates not in ("image", "text"):
        return ""
    return (
        f"{repeats} of the first {len(first_rows)} rows have the image of an earlier one and will "
        "be quarantined as duplicates: --group image joins the captions of an image, --duplicates "
        "row keeps such rows"
    )


def _format_example(row: RawRow) -> str:
    """Return the values of a row in one short line."""
    values = row.values if isinstance(row.values, dict) else {}
    texts = {name: _ExampleRepr().repr(value) for name, value in values.items() if name in COLUMNS}
    return f"{row.location}: " + ", ".join(f"{name} {value}" for name, value in texts.items())
