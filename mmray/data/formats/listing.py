"""Sources whose rows the driver lists once: class folders, image-text pairs, COCO documents.

The list is written as JSON lines to the folder of the prepared set; each task reads its part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import PurePosixPath
from typing import Any, ClassVar

import orjson

from mmray.data.formats.rows import BadRow, is_safe_path, is_valid_name, rename_columns
from mmray.data.formats.source import SourceChunk, SourceItem
from mmray.data.formats.text_lines import parse_json, read_lines, scan_lines
from mmray.data.images.read import quarantine_os_errors, read_file
from mmray.errors import DataError
from mmray.storage.storage import Storage

LISTING = "listing.jsonl"
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
SPLITS = ("train", "test", "val", "valid", "validation", "dev")
# items of a COCO document -> (the id that an item needs, the text that it needs)
_COCO_ITEMS = {"images": ("id", "file_name"), "annotations": ("image_id", None), "categories": ("id", "name")}
Rows = Iterator[dict[str, Any]]


class ListingSource:
    """Rows produced by `rows`; `out` is the folder of the listing."""

    title: ClassVar[str] = "a listing"

    def __init__(
        self, place: Storage, out: Storage, columns: dict[str, str], title: str, rows: Callable[[], Rows]
    ) -> None:
        self.place, self.out, self.columns, self.rows = place, out, columns, rows
        self.title = title  # type: ignore[misc]  # depends on the rows

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        count = 0
        with self.out.open_output(LISTING) as file:
            for row in self.rows():
                count += 1
                file.write(json.dumps(row).encode() + b"\n")  # in ASCII, because names may contain lone surrogates
        if not count:
            raise DataError(f"{self.place.address} holds no rows of {self.title}")
        yield from scan_lines(self.out, LISTING, rows_per_chunk, stops)

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        for line, data in read_lines(self.out, chunk):
            origin = f"{LISTING}:{line}"
            try:
                values = parse_json(data)
                origin = values.pop("origin")
                if "text_file" in values:
                    values["texts"] = self._read_captions(values.pop("text_file"))
                yield SourceItem(line, origin, rename_columns(values, self.columns))
            except BadRow as bad:
                yield SourceItem(line, origin, bad)

    def _read_captions(self, name: str) -> list[str]:
        """Return the non-blank lines of a caption file. Raises BadRow."""
        if not is_valid_name(name):
            raise BadRow("columns", "path", f"{name!r} is not plain UTF-8: rename the file")
        try:
            with quarantine_os_errors(name):
                text = read_file(self.place, name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRow("parse", "encoding", f"{name} is not UTF-8 at byte {error.start}") from None
        return [line for line in text.splitlines() if line.strip()] or [""]


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES)


def class_rows(place: Storage, template: str) -> Rows:
    """Yield rows of FOLDER/CLASS/image or FOLDER/SPLIT/CLASS/image, with a caption and the class as label."""
    names, labels, depth = _class_folders(place)
    for name in names:
        parts = PurePosixPath(name).parts
        row: dict[str, Any] = {"origin": name, "id": name, "image": name} | ({"split": parts[0]} if depth else {})
        if len(parts) > depth + 1:  # an image outside the class folders has no caption, so it is quarantined
            row |= {"text": template.replace("{}", _humanize(parts[depth])), "label": labels[parts[depth]]}
        yield row


def class_names(place: Storage) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ... of `class_rows`, as valid UTF-8."""
    return tuple(_humanize(name).encode(errors="backslashreplace").decode() for name in _class_folders(place)[1])


def _class_folders(place: Storage) -> tuple[list[str], dict[str, int], int]:
    """Return (images, label of each class, index of the class in the parts of a path)."""
    names = [name for name in place.list_files() if is_image(name)]
    has_splits = all(name.count("/") > 1 and name.partition("/")[0] in SPLITS for name in names)
    depth = int(bool(names) and has_splits)
    parts = [PurePosixPath(name).parts for name in names]
    classes = sorted({part[depth] for part in parts if len(part) > depth + 1})
    return names, {name: label for label, name in enumerate(classes)}, depth


def _humanize(name: str) -> str:
    return name.replace("_", " ")


def pair_rows(place: Storage) -> Rows:
    """Pair a/b.jpg with a/b.txt; an image or a text without its counterpart is an incomplete row."""
    images: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name in place.list_files():
        stem = str(PurePosixPath(name).with_suffix(""))
        if is_image(name):
            images.setdefault(stem, []).append(name)
        elif name.lower().endswith(".txt"):
            texts[stem] = name
    for stem in sorted(images.keys() | texts.keys()):
        row = {"text_file": texts[stem]} if stem in texts else {}
        for name in images.get(stem, []):
            yield {"origin": name, "id": name, "image": name} | row
        if stem not in images:
            yield {"origin": texts[stem], "id": texts[stem]} | row


def coco_rows(place: Storage, name: str, template: str) -> Rows:
    """Yield one row for each image of `name`, or of several documents (`captions_X.json,instances_X.json`).

    Documents are joined by image id; one is loaded at a time, because segmentations take most of the memory. An image
    without captions gets `template` with its category names as caption. Boxes keep COCO's [x, y, width, height]. Raises
    DataError if a document is not COCO or describes other images than the rest.
    """
    names = _document_names(name)
    images: list[tuple[str, Any, str]] = []  # document, id, file
    files: dict[Any, str] = {}
    captions: dict[Any, list[Any]] = {}
    boxes: dict[Any, list[tuple[Any, Any]]] = {}  # id: (box, category)
    categories: dict[Any, str] = {}
    for document_name in names:
        document, known = _load_document(place, document_name), dict(files)
        for image in document["images"]:
            number, file = image["id"], image["file_name"]
            before = known.get(number, file)
            if PurePosixPath(before).name != PurePosixPath(file).name:
                detail = f"{number} is {before} in {names[0]} and {file} in {document_name}"
                raise DataError(f"{place.address}: these are of different images: {detail}")
            if number not in known:
                images.append((document_name, number, file))
            files[number] = file
        if known and not any(image["id"] in known for image in document["images"]):
            raise DataError(f"{place.address}: {names[0]} and {document_name} have no image in common")
        for item in document.get("categories", []):
            before = categories.setdefault(item["id"], item["name"])
            if before != item["name"]:
                detail = f"{document_name} calls category {item['id']} {item['name']}, before it is {before}"
                raise DataError(f"{place.address}: {detail}")
        for note in document["annotations"]:
            if "caption" in note:
                captions.setdefault(note["image_id"], []).append(note["caption"])
            if "bbox" in note:  # a missing category is an error of this row
                boxes.setdefault(note["image_id"], []).append((note["bbox"], note.get("category_id")))
    folder = _images_folder(place, names[0], [file for _, _, file in images[:16]])
    for document_name, number, file in images:
        row = {"origin": f"{document_name}:image {number}", "id": number, "image": f"{folder}{file}"}
        labels = [label for _, label in boxes.get(number, [])]
        if labels:
            row |= {"boxes": [box for box, _ in boxes[number]], "box_labels": labels}
        if number in captions:
            row["texts"] = captions[number]
        elif shown := list(
            dict.fromkeys(categories[label] for label in labels if _is_id(label) and label in categories)
        ):
            row["texts"] = [template.replace("{}", ", ".join(shown))]
        yield row


def label_names(place: Storage, name: str) -> dict[str, str]:
    """Return the category names by id; ids are strings because JSON keys are. Raises DataError."""
    items = [item for each in _document_names(name) for item in _load_document(place, each).get("categories", [])]
    names = {item["id"]: item["name"] for item in items if isinstance(item["id"], int)}
    return {str(number): names[number] for number in sorted(names)}


def companion_file(place: Storage, name: str) -> str | None:
    """Return the other COCO document (instances or captions) if `name` is a single one and the other is next to it."""
    folder, slash, base = name.rpartition("/")
    for mine, other in (("captions_", "instances_"), ("instances_", "captions_")):
        companion = f"{other}{base.removeprefix(mine)}"
        if base.startswith(mine) and "," not in base and place.size(f"{folder}{slash}{companion}") is not None:
            return companion
    return None


def _document_names(name: str) -> list[str]:
    """Split `folder/a.json,b.json` into the paths of both documents."""
    folder, slash, bases = name.rpartition("/")
    return [f"{folder}{slash}{base}" for base in bases.split(",")]


def _images_folder(place: Storage, name: str, files: list[str]) -> str:
    """Find the folder of the images: next to the document, in `images/`, or named by the suffix (val2017/)."""
    folder, slash, base = name.rpartition("/")
    ending = base.removesuffix(".json").rpartition("_")[2]
    for candidate in (f"{ending}/", "images/", f"images/{ending}/", f"{folder}{slash}images/"):
        paths = [f"{candidate}{file}" for file in files]
        if any(is_safe_path(path) and place.size(path) is not None for path in paths):
            return candidate
    return f"{folder}{slash}"


def _load_document(place: Storage, name: str) -> dict[str, Any]:
    where = f"{place.address}/{name}"
    try:
        document = orjson.loads(place.read(name))
        if not isinstance(document, dict):
            raise DataError(f"{where} is not COCO's JSON, an object with `images` and `annotations`: it is a list")
        for items, (number, text) in _COCO_ITEMS.items():
            for index, item in enumerate(document.get(items, []) if items == "categories" else document[items]):
                if not (_is_id(item.get(number)) and (text is None or isinstance(item.get(text), str))):
                    needs = f"`{number}`" + (f" and `{text}`" if text else "")
                    raise DataError(f"{where}: {items}[{index}] needs {needs}, is {str(item)[:200]}")
        return document
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is not COCO's JSON ({error}): it needs `images` and `annotations`") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)
