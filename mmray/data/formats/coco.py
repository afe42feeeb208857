"""COCO JSON: captions (several for each image) and instances (boxes with category names)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import orjson

from mmray.data.formats.rows import is_safe_path
from mmray.errors import DataError
from mmray.storage.storage import Storage

_NEEDED = (("images", "id", "file_name"), ("annotations", "image_id", None), ("categories", "id", "name"))


@dataclass
class _Annotations:
    """Merged content of the documents, by image id."""

    images: list[tuple[str, dict[str, Any]]]  # with the name of the document
    captions: dict[Any, list[Any]]
    boxes: dict[Any, list[dict[str, Any]]]
    categories: dict[Any, str]


def coco_rows(place: Storage, name: str, template: str) -> Iterator[dict[str, Any]]:
    """Yield one row for each image of `name`, or of several documents (`captions_X.json,instances_X.json`).

    Documents are joined by image id. Image files are searched in the usual folders of COCO. An image without captions
    gets `template` with its category names as caption. Boxes keep COCO's [x, y, width, height]. Raises DataError if a
    document is not COCO or describes other images than the rest.
    """
    notes = _join_documents(place, document_names(name))
    folder = _images_folder(place, document_names(name)[0], [image for _, image in notes.images[:16]])
    for document, image in notes.images:
        row = {"origin": f"{document}:image {image['id']}", "id": image["id"], "image": f"{folder}{image['file_name']}"}
        found = notes.boxes.get(image["id"], [])
        if found:
            labels = [note["category_id"] for note in found]  # a missing id is an error of this row
            row |= {"boxes": [note["bbox"] for note in found], "box_labels": labels}
        texts = notes.captions.get(image["id"]) or _category_caption(found, notes.categories, template)
        yield row | ({"texts": texts} if texts else {})


def label_names(place: Storage, name: str) -> dict[str, str]:
    """Return the category names by id; ids are strings because JSON keys are. Raises DataError."""
    items = [item for each in document_names(name) for item in _load_document(place, each).get("categories", [])]
    named = {item["id"]: item["name"] for item in items if isinstance(item["id"], int)}
    return {str(number): named[number] for number in sorted(named)}


def document_names(name: str) -> list[str]:
    """Split `folder/a.json,b.json` into the paths of both documents."""
    folder, mark, bases = name.rpartition("/")
    return [f"{folder}{mark}{base}" for base in bases.split(",")]


def companion_file(place: Storage, name: str) -> str | None:
    """Return the other COCO document (instances or captions) if `name` is a single one and the other is next to it."""
    folder, mark, base = name.rpartition("/")
    for mine, other in (("captions_", "instances_"), ("instances_", "captions_")):
        found = f"{other}{base.removeprefix(mine)}"
        if base.startswith(mine) and "," not in base and place.size(f"{folder}{mark}{found}") is not None:
            return found
    return None


def _join_documents(place: Storage, names: list[str]) -> _Annotations:
    """Merge the needed fields of the documents; loads one at a time, because segmentations take most of the memory."""
    notes = _Annotations([], {}, {}, {})
    files: dict[Any, str] = {}
    for name in names:
        document, before = _load_document(place, name), dict(files)
        for image in document["images"]:
            base = PurePosixPath(image["file_name"]).name
            if before.get(image["id"], base) != base:
                told = f"{image['id']} is {before[image['id']]} in {names[0]} and {base} in {name}"
                raise DataError(f"{place.address}: these are of different images: {told}")
            if image["id"] not in before:
                notes.images.append((name, image))
            files[image["id"]] = base
        if before and not any(image["id"] in before for image in document["images"]):
            raise DataError(f"{place.address}: {names[0]} and {name} have no image in common")
        for item in document.get("categories", []):
            known = notes.categories.get(item["id"], item["name"])
            if before and known != item["name"]:
                raise DataError(
                    f"{place.address}: {name} calls category {item['id']} {item['name']}, before it is {known}"
                )
            notes.categories[item["id"]] = item["name"]
        for note in document["annotations"]:
            if "caption" in note:
                notes.captions.setdefault(note["image_id"], []).append(note["caption"])
            if "bbox" in note:
                box = {"bbox": note["bbox"], "category_id": note.get("category_id")}
                notes.boxes.setdefault(note["image_id"], []).append(box)
    return notes


def _category_caption(found: list[dict[str, Any]], categories: dict[Any, str], template: str) -> list[str]:
    labels = [note["category_id"] for note in found]
    names = list(dict.fromkeys(categories[label] for label in labels if _is_id(label) and label in categories))
    return [template.replace("{}", ", ".join(names))] if names else []


def _images_folder(place: Storage, name: str, images: list[dict[str, Any]]) -> str:
    """Find the folder of the images: next to the document, in `images/`, or named by the suffix (val2017/)."""
    folder, _, base = name.rpartition("/")
    beside = f"{folder}/" if folder else ""
    ending = base.removesuffix(".json").rpartition("_")[2]
    for candidate in (f"{ending}/", "images/", f"images/{ending}/", f"{beside}images/", beside):
        if any(_exists(place, f"{candidate}{image['file_name']}") for image in images):
            return candidate
    return beside


def _exists(place: Storage, name: str) -> bool:
    return is_safe_path(name) and place.size(name) is not None


def _load_document(place: Storage, name: str) -> dict[str, Any]:
    where = f"{place.address}/{name}"
    try:
        document = orjson.loads(place.read(name))
        if not isinstance(document, dict):
            raise DataError(f"{where} is not COCO's JSON, an object with `images` and `annotations`: it is a list")
        for items, id_of, text in _NEEDED:
            given = document.get(items, []) if items == "categories" else document[items]
            for number, item in enumerate(given):
                if not (_is_id(item.get(id_of)) and (text is None or isinstance(item.get(text), str))):
                    needs = f"`{id_of}`" + (f" and `{text}`" if text else "")
                    raise DataError(f"{where}: {items}[{number}] needs {needs}, is {str(item)[:200]}")
        return dict(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is not COCO's JSON ({error}): it needs `images` and `annotations`") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)
