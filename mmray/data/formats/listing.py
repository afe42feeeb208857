"""Sources whose rows the driver lists once: class folders, image-text pairs, COCO documents.

The list is written as JSON lines to the folder of the prepared set; each task reads its part.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any

import orjson

from mmray.data.formats.rows import BadRow, is_safe_path, is_valid_name, rename_columns
from mmray.data.formats.source import IMAGE_SUFFIXES, Source, SourceChunk, SourceItem
from mmray.data.formats.text_lines import BOM, parse_json, read_lines, scan_lines
from mmray.data.images.read import quarantine_os_errors, read_file
from mmray.errors import DataError
from mmray.storage.storage import Storage

LISTING = "listing.jsonl"
SPLITS = ("train", "test", "val", "valid", "validation", "dev")
# items of a COCO document -> (the id that an item needs, the text that it needs)
_COCO_ITEMS = {"images": ("id", "file_name"), "annotations": ("image_id", None), "categories": ("id", "name")}
Rows = Iterator[dict[str, Any]]


class ListingSource(Source):
    """Rows that `iter_rows` produces; subclasses name a layout. `out` is the folder of the listing."""

    def __init__(self, storage: Storage, name: str, columns: dict[str, str], out: Storage, template: str) -> None:
        super().__init__(storage, name, columns)
        self.out, self.template = out, template

    def iter_rows(self) -> Rows:
        """Yield the rows of the source, as values with their location `origin`. Raises DataError."""
        raise NotImplementedError

    def scan(self, rows_per_chunk: int, stops: Collection[int]) -> Iterator[SourceChunk]:
        count = 0
        with self.out.open_output(LISTING) as file:
            for row in self.iter_rows():
                count += 1
                file.write(json.dumps(row).encode() + b"\n")  # in ASCII, because names may contain lone surrogates
        if not count:
            raise DataError(f"{self.storage.address} holds no rows of {self.title}")
        yield from scan_lines(self.out, LISTING, rows_per_chunk, stops)

    def read(self, chunk: SourceChunk) -> Iterator[SourceItem]:
        for line, data in read_lines(self.out, chunk):
            location = f"{LISTING}:{line}"
            try:
                values = parse_json(data)
                location = values.pop("origin")
                if "text_file" in values:
                    values["texts"] = self._read_captions(values.pop("text_file"))
                yield SourceItem(line, location, rename_columns(values, self.columns))
            except BadRow as bad:
                yield SourceItem(line, location, bad)

    def _read_captions(self, name: str) -> list[str]:
        """Return the non-blank lines of a caption file. Raises BadRow."""
        if not is_valid_name(name):
            raise BadRow("columns", "path", f"{name!r} is not plain UTF-8: rename the file")
        try:
            with quarantine_os_errors(name):
                text = read_file(self.storage, name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRow("parse", "encoding", f"{name} is not UTF-8 at byte {error.start}") from None
        return [line for line in text.splitlines() if line.strip()] or [""]


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


class ClassFolders(ListingSource):
    """Rows of FOLDER/CLASS/image or FOLDER/SPLIT/CLASS/image, with a caption and the class as label."""

    title = "a folder for each class"

    def iter_rows(self) -> Rows:
        names = [name for name in self.storage.list_files() if is_image(name)]
        has_splits = all(name.count("/") > 1 and name.partition("/")[0] in SPLITS for name in names)
        depth = int(bool(names) and has_splits)  # index of the class in the parts of a path
        paths = [PurePosixPath(name).parts for name in names]
        classes = sorted({path[depth] for path in paths if len(path) > depth + 1})
        self.class_names = tuple(_humanize(name).encode(errors="backslashreplace").decode() for name in classes)
        labels = {name: label for label, name in enumerate(classes)}
        for name, path in zip(names, paths, strict=True):
            row: dict[str, Any] = {"origin": name, "id": name, "image": name} | ({"split": path[0]} if depth else {})
            if len(path) > depth + 1:  # an image outside the class folders has no caption, so it is quarantined
                row |= {"text": self.template.replace("{}", _humanize(path[depth])), "label": labels[path[depth]]}
            yield row


def _humanize(name: str) -> str:
    return name.replace("_", " ")


class ImageTextPairs(ListingSource):
    """Rows of a/b.jpg with a/b.txt; an image or a text without its counterpart is an incomplete row."""

    title = "image and text pairs"

    def iter_rows(self) -> Rows:
        images: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        for name in self.storage.list_files():
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


class CocoSource(ListingSource):
    """One row for each image of the document `name`, or of several (`captions_X.json,instances_X.json`).

    Documents are joined by image id; one is loaded at a time, because segmentations take most of the memory. An image
    without captions gets the template with its category names as caption. Boxes keep COCO's [x, y, width, height].
    Raises DataError if a document is not COCO or describes other images than the rest.
    """

    title = "COCO"

    def iter_rows(self) -> Rows:
        storage = self.storage
        parent, slash, bases = self.name.rpartition("/")  # folder/a.json,b.json: two documents
        names = [f"{parent}{slash}{base}" for base in bases.split(",")]
        images: list[tuple[str, Any, str]] = []  # document, id, file
        files: dict[Any, str] = {}
        captions: dict[Any, list[Any]] = {}
        boxes: dict[Any, list[tuple[Any, Any]]] = {}  # id: (box, category)
        categories: dict[Any, str] = {}
        for document_name in names:
            document, known = _load_document(storage, document_name), dict(files)
            for image in document["images"]:
                number, file = image["id"], image["file_name"]
                known_file = known.get(number, file)
                if PurePosixPath(known_file).name != PurePosixPath(file).name:
                    detail = f"{number} is {known_file} in {names[0]} and {file} in {document_name}"
                    raise DataError(f"{storage.address}: the documents disagree on image ids: {detail}")
                if number not in known:
                    images.append((document_name, number, file))
                files[number] = file
            if known and not any(image["id"] in known for image in document["images"]):
                raise DataError(f"{storage.address}: {names[0]} and {document_name} have no image in common")
            for item in document.get("categories", []):
                known_name = categories.setdefault(item["id"], item["name"])
                if known_name != item["name"]:
                    detail = f"{document_name} calls category {item['id']} {item['name']}, before it is {known_name}"
                    raise DataError(f"{storage.address}: {detail}")
            for annotation in document["annotations"]:
                if "caption" in annotation:
                    captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
                if "bbox" in annotation:  # a missing category is an error of this row
                    box = annotation["bbox"], annotation.get("category_id")
                    boxes.setdefault(annotation["image_id"], []).append(box)
        ids = sorted(number for number in categories if isinstance(number, int))
        self.box_names = {str(number): categories[number] for number in ids}  # ids are strings because JSON keys are
        folder = _images_folder(storage, names[0], [file for _, _, file in images[:16]])
        for document_name, number, file in images:
            row = {"origin": f"{document_name}:image {number}", "id": number, "image": f"{folder}{file}"}
            labels = [label for _, label in boxes.get(number, [])]
            if labels:
                row |= {"boxes": [box for box, _ in boxes[number]], "box_labels": labels}
            if number in captions:
                row["texts"] = captions[number]
            elif category_names := [categories[label] for label in labels if _is_id(label) and label in categories]:
                row["texts"] = [self.template.replace("{}", ", ".join(dict.fromkeys(category_names)))]
            yield row


def companion_file(storage: Storage, name: str) -> str | None:
    """Return the other COCO document (instances or captions) if `name` is a single one and the other is next to it."""
    folder, slash, base = name.rpartition("/")
    for mine, other in (("captions_", "instances_"), ("instances_", "captions_")):
        companion = f"{other}{base.removeprefix(mine)}"
        if base.startswith(mine) and "," not in base and storage.size(f"{folder}{slash}{companion}") is not None:
            return companion
    return None


def _images_folder(storage: Storage, name: str, files: list[str]) -> str:
    """Find the folder of the images: next to the document, in `images/`, or named by the suffix (val2017/)."""
    folder, slash, base = name.rpartition("/")
    ending = base.removesuffix(".json").rpartition("_")[2]
    for candidate in (f"{ending}/", "images/", f"images/{ending}/", f"{folder}{slash}images/"):
        paths = [f"{candidate}{file}" for file in files]
        if any(is_safe_path(path) and storage.size(path) is not None for path in paths):
            return candidate
    return f"{folder}{slash}"


def _load_document(storage: Storage, name: str) -> dict[str, Any]:
    path = f"{storage.address}/{name}"
    try:
        document = orjson.loads(storage.read(name).removeprefix(BOM))
        if not isinstance(document, dict):
            raise DataError(f"{path} is not COCO's JSON, an object with `images` and `annotations`: it is a list")
        for items, (number, text) in _COCO_ITEMS.items():
            for index, item in enumerate(document.get(items, []) if items == "categories" else document[items]):
                if not (_is_id(item.get(number)) and (text is None or isinstance(item.get(text), str))):
                    needs = f"`{number}`" + (f" and `{text}`" if text else "")
                    raise DataError(f"{path}: {items}[{index}] needs {needs}, is {str(item)[:200]}")
        return document
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not COCO's JSON ({error}): it needs `images` and `annotations`") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)
