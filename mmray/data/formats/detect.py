"""Detect the format of a source, and open the source on the driver and in tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import orjson

from mmray.data.formats.listing import (
    ClassFolders,
    CocoSource,
    ImageTextPairs,
    is_image,
    split_and_class_of,
)
from mmray.data.formats.parquet import HFSavedSource, ParquetSource
from mmray.data.formats.rows import is_valid_name
from mmray.data.formats.source import Source, list_visible_files, read_head
from mmray.data.formats.text_lines import BOM, MAX_LINE_BYTES, CsvSource, JsonlSource, TsvSource
from mmray.data.formats.webdataset import WebDatasetSource
from mmray.data.store.manifest import is_prepared
from mmray.errors import DataError, UsageError
from mmray.storage.storage import Storage

_SOURCES: dict[str, type[Source]] = {
    "jsonl": JsonlSource, "csv": CsvSource, "tsv": TsvSource, "parquet": ParquetSource, "webdataset": WebDatasetSource,
    "saved": HFSavedSource, "folders": ClassFolders, "pairs": ImageTextPairs, "coco": CocoSource,
}  # fmt: skip
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".tar": "webdataset",
    ".json": "coco",
}  # fmt: skip


@dataclass(frozen=True)
class SourceSpec:
    """Format and location of a source: paths are relative to folder `address`; `name` is empty for
    a full folder.

    `files` yields the visible files of the folder once, if it was listed: a large listing is
    neither repeated nor kept.
    """

    format: str
    address: str
    name: str
    files: Iterable[str] = field(default=(), compare=False, repr=False)

    @property
    def display_name(self) -> str:
        return self.name or PurePosixPath(self.address.partition("?")[0]).name


def detect_source(address: str, source_format: str = "auto") -> SourceSpec:
    """Detect the source at `address`.

    Raises DataError if it does not exist or its format is unknown.
    """
    if not is_valid_name(address):
        raise UsageError(f"{address!r} is not plain UTF-8: rename the file")
    storage, name = Storage.split(address.rstrip("/") if len(address) > 1 else address)
    folder = Storage(address)
    if folder.is_dir():
        names = list_visible_files(folder) if source_format == "auto" else []
        kind = _detect_folder_format(folder, names) if source_format == "auto" else source_format
        if kind in ("jsonl", "csv", "tsv", "coco"):
            raise UsageError(
                f"{address} is a folder, and {kind} is a file: give the path of the file"
            )
        return SourceSpec(kind, folder.address, "", iter(names))
    names = [name]
    if "," in name and source_format in ("auto", "coco") and storage.size(name) is None:
        names, source_format = name.split(","), "coco"
    detected = [_detect_file_format(storage, each) for each in names]
    kind = detected[0] if source_format == "auto" else source_format
    if kind in ("saved", "folders", "pairs"):
        raise UsageError(
            f"{address} is a file, and {kind} is a folder: give the path of the folder"
        )
    parent, folder_name = Storage.split(storage.address)
    if kind == "coco" and folder_name == "annotations":  # the images are next to this folder
        storage, name = parent, f"{folder_name}/{name}"
    return SourceSpec(kind, storage.address, name)


def open_source(
    spec: SourceSpec, prepared_folder: Storage, columns: dict[str, str], caption_template: str
) -> Source:
    """Open the source without reading it. Listings are stored in `prepared_folder`."""
    storage = Storage(spec.address)
    return _SOURCES[spec.format](
        storage, spec.name, columns, prepared_folder, caption_template, spec.files
    )


def _detect_file_format(storage: Storage, name: str) -> str:
    """Detect the format by magic number, otherwise by suffix; the default is JSON lines."""
    head = read_head(storage, name, 512)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "webdataset"
    kind = _SUFFIXES.get(PurePosixPath(name).suffix.lower(), "jsonl")
    if kind != "coco":
        return kind
    text = read_head(storage, name, MAX_LINE_BYTES).removeprefix(BOM).lstrip()
    try:  # a JSON file may hold rows (lines or an array)
        first = orjson.loads(text.partition(b"\n")[0])
    except ValueError:
        # a document over several lines, or one line that is longer than a row may be
        return "jsonl" if text.startswith(b"[") else "coco"
    return (
        "coco" if isinstance(first, dict) and {"images", "annotations"} <= first.keys() else "jsonl"
    )


def _detect_folder_format(storage: Storage, names: list[str]) -> str:
    suffixes = {PurePosixPath(name).suffix.lower() for name in names}
    if ".arrow" in suffixes and any(name.rpartition("/")[2] == "state.json" for name in names):
        return "saved"
    if ".tar" in suffixes:  # img2dataset writes a .parquet next to each tar
        return "webdataset"
    images = [name for name in names if is_image(name)]
    paired = not {str(PurePosixPath(name).with_suffix(".txt")) for name in images}.isdisjoint(names)
    if ".parquet" in suffixes:  # img2dataset writes FOLDER.parquet next to each FOLDER of pairs
        is_img2dataset = {f"{PurePosixPath(name).parent}.parquet" for name in images} <= set(names)
        return "pairs" if paired and is_img2dataset else "parquet"
    if paired:
        return "pairs"
    if any("/" in name for name in images):
        _check_class_folders(storage, names, images)
        return "folders"
    if is_prepared(storage):
        raise DataError(
            f"{storage.address} is already prepared: use it as it is, for example --data.train "
            f"{storage.address}"
        )
    files = [
        name
        for name in names
        if "/" not in name and PurePosixPath(name).suffix.lower() in _SUFFIXES
    ]
    hint = (
        f"give the path of one of its files ({', '.join(files[:5])})"
        if files
        else "it needs tars, Parquet or images"
    )
    raise DataError(f"no known source format found in {storage.address}: {hint}")


def _check_class_folders(storage: Storage, names: list[str], images: list[str]) -> None:
    """Raise DataError if the folders of the images may not be classes: their names would become the
    captions.
    """
    caption_suffixes = (
        ".txt",
        *(suffix for suffix in _SUFFIXES if suffix not in (".parquet", ".tar")),
    )
    captions = [
        name
        for name in names
        if name.lower().endswith(caption_suffixes)
        and not name.rpartition("/")[2].lower().startswith(("readme", "license"))
    ]
    force = "to make captions from the names of the folders, use --format folders"
    if captions:
        raise DataError(
            f"{storage.address} has images in folders, and {len(captions):,} files that may have "
            "their captions "
            f"({', '.join(captions[:5])}): give the path of such a file with rows, or {force}"
        )
    classes = {class_name for _, class_name in split_and_class_of(images)} - {None}
    if len(classes) < 2:
        names_found = ", ".join(map(repr, classes)) or (
            "none in the layout CLASS/image or SPLIT/CLASS/image"
        )
        raise DataError(
            f"{storage.address} has images in folders, but fewer than two classes ({names_found}), "
            "and no captions: "
            f"give the path of a file with captions, or {force}"
        )
