"""Detect the format of a source, and open the source on the driver and in tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import orjson

from mmray.data.formats import coco, image_folder
from mmray.data.formats.csv import CsvSource, TsvSource
from mmray.data.formats.image_folder import ListingSource, class_rows, is_image, list_rows, pair_rows
from mmray.data.formats.jsonl import JsonlSource
from mmray.data.formats.parquet import HFSavedSource, ParquetSource
from mmray.data.formats.rows import is_valid_name
from mmray.data.formats.source import Source, read_head
from mmray.data.formats.webdataset import WebDatasetSource
from mmray.errors import DataError, UsageError
from mmray.storage.storage import Storage

_FILE_FORMATS: dict[str, Callable[[Storage, str, dict[str, str]], Source]] = {
    "jsonl": JsonlSource, "csv": CsvSource, "tsv": TsvSource, "parquet": ParquetSource, "webdataset": WebDatasetSource,
    "saved": HFSavedSource,
}  # fmt: skip
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".tar": "webdataset",
    ".json": "coco",
}  # fmt: skip

_LINE_BYTES = 64 << 10  # of the first line of a file, to distinguish rows from a document


@dataclass(frozen=True)
class SourceSpec:
    """Format, folder that paths are relative to, and file name of a source; an empty name is the full folder."""

    format: str
    address: str
    name: str

    @property
    def display_name(self) -> str:
        return self.name or PurePosixPath(self.address.partition("?")[0]).name


def detect_source(address: str, forced: str = "auto") -> SourceSpec:
    """Detect the source at `address`. Raises DataError if it does not exist or its format is unknown."""
    if not is_valid_name(address):
        raise UsageError(f"{address!r} is not plain UTF-8: rename the file")
    place, name = Storage.split(address.rstrip("/") if len(address) > 1 else address)
    whole = Storage(address)
    is_folder = whole.is_dir()
    if "," in name and forced in ("auto", "lists", "coco") and not is_folder and place.size(name) is None:
        return _multi_file_source(place, name, forced)
    if is_folder:
        kind = forced if forced != "auto" else _detect_folder_format(whole)
        if kind in ("jsonl", "csv", "tsv", "coco", "lists"):
            raise UsageError(f"{address} is a folder, and {kind} is a file: give the path of the file")
        return SourceSpec(kind, whole.address, "")
    found = _detect_file_format(place, name)
    kind = found if forced == "auto" else forced
    if kind in ("saved", "folders", "pairs"):
        raise UsageError(f"{address} is a file, and {kind} is a folder: give the path of the folder")
    if kind == "lists":
        raise UsageError(f"{address}: two parallel lists are given as images.txt,captions.txt (one folder, a comma)")
    return _coco(place, name) if kind == "coco" else SourceSpec(kind, place.address, name)


def open_source(chosen: SourceSpec, out: Storage, columns: dict[str, str], template: str) -> Source:
    """Open the source without reading it. `out` is the folder of the prepared set, which stores listings."""
    place, name = Storage(chosen.address), chosen.name
    if chosen.format in _FILE_FORMATS:
        return _FILE_FORMATS[chosen.format](place, name, columns)
    if chosen.format == "lists":
        images, _, captions = name.partition(",")
        return ListingSource(place, out, columns, "two parallel lists", partial(list_rows, place, images, captions))
    if chosen.format == "folders":
        return ListingSource(place, out, columns, "a folder for each class", partial(class_rows, place, template))
    if chosen.format == "pairs":
        return ListingSource(place, out, columns, "image and text pairs", partial(pair_rows, place))
    return ListingSource(place, out, columns, "COCO", partial(coco.coco_rows, place, name, template))


def label_names(chosen: SourceSpec) -> dict[str, str]:
    """Return the names of the box labels; empty if the format has none."""
    return coco.label_names(Storage(chosen.address), chosen.name) if chosen.format == "coco" else {}


def class_names(chosen: SourceSpec) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ...; empty if the format has none."""
    return image_folder.class_names(Storage(chosen.address)) if chosen.format == "folders" else ()


def companion_file(chosen: SourceSpec) -> str | None:
    """Return the name of a file next to the source that describes the same images but is not read."""
    return coco.companion_file(Storage(chosen.address), chosen.name) if chosen.format == "coco" else None


def _multi_file_source(place: Storage, name: str, forced: str) -> SourceSpec:
    """Combine files of one folder into one source: COCO documents, or a list of images and a list of captions."""
    names = name.split(",")
    if forced == "lists" or (forced == "auto" and not all(each.lower().endswith(".json") for each in names)):
        return SourceSpec("lists", place.address, name)
    for each in names:
        read_head(place, each)
    return _coco(place, name)


def _coco(place: Storage, name: str) -> SourceSpec:
    if PurePosixPath(place.address).name == "annotations":  # COCO has its images next to this folder
        place, folder = Storage.split(place.address)
        name = f"{folder}/{name}"
    return SourceSpec("coco", place.address, name)


def _detect_file_format(place: Storage, name: str) -> str:
    """Detect the format by magic number, otherwise by suffix; the default is JSON lines."""
    head = read_head(place, name, 512)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "webdataset"
    kind = _SUFFIXES.get(PurePosixPath(name).suffix.lower(), "jsonl")
    return "jsonl" if kind == "coco" and _holds_rows(read_head(place, name, _LINE_BYTES)) else kind


def _holds_rows(head: bytes) -> bool:
    """Return whether JSON that starts with these bytes holds rows (lines or an array) and not a COCO document."""
    if head.lstrip().startswith(b"["):
        return True
    try:
        first = orjson.loads(head.lstrip().partition(b"\n")[0])
    except ValueError:  # a document over several lines, or a truncated line
        return False
    return isinstance(first, dict) and not {"images", "annotations"} <= first.keys()


def _detect_folder_format(place: Storage) -> str:
    names = place.list_files()
    bases = {name.rpartition("/")[2] for name in names}
    suffixes = {PurePosixPath(name).suffix.lower() for name in names}
    if "state.json" in bases and ".arrow" in suffixes:
        return "saved"
    if ".tar" in suffixes:  # img2dataset writes a .parquet next to each tar
        return "webdataset"
    images = [name for name in names if is_image(name)]
    paired = bool(images) and bool({str(PurePosixPath(name).with_suffix(".txt")) for name in images} & set(names))
    if ".parquet" in suffixes and not (paired and _is_img2dataset_layout(names, images)):
        return "parquet"
    if paired:
        return "pairs"
    if images and any("/" in name for name in images):
        return "folders"
    lines = [name for name in names if "/" not in name and PurePosixPath(name).suffix.lower() in _SUFFIXES]
    named = f": give the path of one of its files ({', '.join(lines[:5])})" if lines else ""
    raise DataError(
        f"{place.address} holds no source that is known{named or ' (no tars, no Parquet, no folders of images)'}"
    )


def _is_img2dataset_layout(names: list[str], images: list[str]) -> bool:
    """Return whether the Parquet files are img2dataset metadata: FOLDER.parquet next to each image folder FOLDER."""
    return {f"{PurePosixPath(name).parent}.parquet" for name in images} <= set(names)
