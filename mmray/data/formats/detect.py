"""Detect the format of a source, and open the source on the driver and in tasks.

Formats are classes in the table `FORMATS`; their attributes define how each is detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mmray import plugins
from mmray.builtin import FORMATS
from mmray.data.formats.listing import CAPTION_SUFFIXES, is_image
from mmray.data.formats.source import Source, is_about_the_data, list_visible_files, read_head
from mmray.data.formats.splits import split_and_class_of
from mmray.data.formats.text_lines import BOM
from mmray.data.media.formats import media_kind
from mmray.data.rows import is_valid_name
from mmray.data.store.manifest import MANIFEST
from mmray.errors import DataError, UsageError
from mmray.storage.paths import AnyPath, to_path

_HEAD_BYTES = 512
_COMPRESSED = {".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"}


@dataclass(frozen=True)
class SourceSpec:
    """Format and location of a source, the files that a user passes to `prepare`.

    Args:
        format: `json`, `coco`, `saved` (by Hugging Face `datasets`), `webdataset`, `parquet`,
            `jsonl`, `csv`, `tsv`, `pairs` or `folders`, or a user's `package.module:Class`.
        address: Path or URI of the folder, which paths of images are relative to.
        name: Path of the file in the folder; empty: the whole folder.
        files: Iterator over the visible files of the folder, if it was listed. It yields them once,
            so a large listing is neither repeated nor kept.
    """

    format: str
    address: str
    name: str
    files: Iterable[str] = field(default=(), compare=False, repr=False)

    @property
    def display_name(self) -> str:
        """Name of the file, or of the folder if the source is a whole folder, for the manifest."""
        return self.name or PurePosixPath(self.address.partition("?")[0]).name


def source_class(name: str) -> type[Source]:
    """Return the class that reads a source format, a subclass of Source.

    Raises:
        UsageError: The name is unknown, or its class cannot be imported.
    """
    loaded: type[Source] = plugins.load_part(name, "prepare.format", FORMATS)
    return loaded


def detect_source(address: str, source_format: str = "auto") -> SourceSpec:
    """Return the format and the location of a source.

    Args:
        address: Path or URI of a file or a folder.
        source_format: `auto` to detect it, or `json`, `coco`, `saved`, `webdataset`, `parquet`,
            `jsonl`, `csv`, `tsv`, `pairs`, `folders`, or a user's `package.module:Class`.

    Returns:
        A SourceSpec: `format` (name), `address` (path or URI of the folder), `name` (file in the
        folder; empty: the whole folder) and `files` (iterator over its visible files; empty
        if the folder was not listed).

    Raises:
        DataError: The source does not exist, or its format is unknown.
        UsageError: The address is invalid, or the format does not read a file, or a folder.
    """
    if not is_valid_name(address):
        raise UsageError(f"{address!r} is not plain UTF-8: rename the file")
    path = to_path(address)
    if path.is_dir():
        names = list_visible_files(path) if source_format == "auto" else []
        kind = _detect_folder_format(path, names) if source_format == "auto" else source_format
        if not source_class(kind).reads_folder:
            raise UsageError(
                f"{address} is a folder, and {kind} is a file: give the path of the file"
            )
        return SourceSpec(kind, str(path), "", iter(names))
    folder = path.parent
    name = path.name
    detected = _detect_file_format(folder, name)
    kind = detected if source_format == "auto" else source_format
    if not source_class(kind).reads_file:
        raise UsageError(
            f"{address} is a file, and {kind} is a folder: give the path of the folder"
        )
    if kind == "coco" and folder.name == "annotations":  # the images are next to this folder
        name = f"{folder.name}/{name}"
        folder = folder.parent
    return SourceSpec(kind, str(folder), name)


def open_source(
    spec: SourceSpec,
    prepared_folder: AnyPath,
    columns: dict[str, str],
    caption_template: str,
    keep: tuple[str, ...] = (),
) -> Source:
    """Create the object that reads a source; it reads nothing yet.

    Args:
        columns: Names in the source by mmray's column names, such as {"text": "title"}; a column
            without an entry has mmray's name.
    """
    folder = to_path(spec.address)
    return source_class(spec.format)(
        folder, spec.name, columns, prepared_folder, caption_template, spec.files, keep
    )


def _detect_file_format(folder: AnyPath, name: str) -> str:
    """Detect the format by magic number, otherwise by suffix, otherwise by the first character of
    the text: JSON, or CSV.
    """
    head = read_head(folder, name, _HEAD_BYTES)
    classes = {format_name: source_class(format_name) for format_name in FORMATS}
    for format_name, source in classes.items():
        if source.magic and head[source.magic_offset :].startswith(source.magic):
            return format_name
    suffix = PurePosixPath(name).suffix.lower()
    for format_name, source in classes.items():
        if suffix in source.suffixes and source.matches_file(folder, name):
            return format_name
    start = head.removeprefix(BOM).lstrip()[:1]
    if suffix == ".json" or start == b"{":
        return "jsonl"
    return "json" if start == b"[" else "csv"


def _detect_folder_format(folder: AnyPath, names: list[str]) -> str:
    for format_name in FORMATS:
        if source_class(format_name).matches_folder(names):
            if format_name == "folders":
                _check_class_folders(folder, names)
            return format_name
    if (folder / MANIFEST).is_file():
        raise DataError(
            f"{folder} is already prepared: use it as it is: mmray train --data.train {folder}"
        )
    files = [name for name in names if "/" not in name and name.lower().endswith(_file_suffixes())]
    hint = "it needs tars, Parquet or images"
    if suffixes := Counter(PurePosixPath(name).suffix.lower() or "none" for name in names):
        counts = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes.most_common(5))
        hint = f"it needs tars, Parquet or images; it has {counts} (files by suffix)"
    if any(map(is_image, names)):
        hint += ", and images need captions (0.txt next to 0.jpg) or folders of classes"
    if any(map(media_kind, names)):
        hint += (
            ", and audio and video need texts or subtitles (0.txt or 0.srt next to 0.wav), or a "
            "CSV or JSON lines file that names them"
        )
    if set(suffixes) & _COMPRESSED:
        hint += ": unpack them first"
    if files:
        hint = f"give the path of one of its files ({', '.join(files[:5])})"
    raise DataError(f"no known source format found in {folder}: {hint}")


def _file_suffixes() -> tuple[str, ...]:
    return tuple(suffix for format_name in FORMATS for suffix in source_class(format_name).suffixes)


def _check_class_folders(folder: AnyPath, names: list[str]) -> None:
    """Raise DataError if the folders of the images may not be classes: their names would become the
    captions.
    """
    caption_suffixes = (*CAPTION_SUFFIXES, *_file_suffixes())
    images = list(filter(is_image, names))
    stems = {name.rpartition(".")[0] for name in images}
    captions = [
        name
        for name in names
        if not is_about_the_data(name)
        and (name.lower().endswith(caption_suffixes) or name.rpartition(".")[0] in stems)
        and not is_image(name)
    ]
    force = "to make captions from the names of the folders, use --format folders"
    if captions:
        advice = "give the path of such a file with rows"
        if all(name.rpartition(".")[0] in stems for name in captions):
            advice = (
                f"captions next to images are read from {', '.join(CAPTION_SUFFIXES)} (and .json "
                "in tars): rename them"
            )
        raise DataError(
            f"{folder} has images in folders, and {len(captions):,} files that may have "
            f"their captions ({', '.join(captions[:5])}): {advice}, or {force}"
        )
    classes = {class_name for _, class_name in split_and_class_of(images)} - {None}
    if len(classes) < 2:
        names_found = ", ".join(map(repr, classes)) or (
            "none in the layout CLASS/image or SPLIT/CLASS/image"
        )
        raise DataError(
            f"{folder} has images in folders, but fewer than two classes ({names_found}), "
            "and no captions: "
            f"give the path of a file with captions, or {force}"
        )
