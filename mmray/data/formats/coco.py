"""COCO's JSON: captions (several an image) and instances (boxes and the names of their categories)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from mmray.data.formats.rows import is_inside
from mmray.data.place import Place
from mmray.errors import DataError

_NEEDED = (("images", "id", "file_name"), ("annotations", "image_id", None), ("categories", "id", "name"))


def coco_rows(place: Place, name: str, template: str) -> Iterator[dict[str, Any]]:
    """One row an image of the document `name`; its file is looked for in COCO's usual folders.

    Without captions the caption is `template` of the category names. Boxes keep COCO's [x, y, width, height]. Raises
    DataError for a document that is not COCO's.
    """
    document = _document(place, name)
    images = _images_folder(place, name, document["images"])
    captions: dict[Any, list[Any]] = {}
    boxes: dict[Any, list[dict[str, Any]]] = {}
    for note in document["annotations"]:
        if "caption" in note:
            captions.setdefault(note["image_id"], []).append(note["caption"])
        if "bbox" in note:
            boxes.setdefault(note["image_id"], []).append(note)
    categories = {item["id"]: item["name"] for item in document.get("categories", [])}
    for image in document["images"]:
        row = {"origin": f"{name}:image {image['id']}", "id": image["id"], "image": f"{images}{image['file_name']}"}
        found = boxes.get(image["id"], [])
        if found:
            labels = [note.get("category_id") for note in found]  # one without is a fault of its row
            row |= {"boxes": [note["bbox"] for note in found], "box_labels": labels}
        texts = captions.get(image["id"]) or _named(found, categories, template)
        yield row | ({"texts": texts} if texts else {})


def label_names(place: Place, name: str) -> dict[str, str]:
    """The names of the document's categories by their ids; JSON's keys are texts. Raises DataError."""
    categories = _document(place, name).get("categories", [])
    named = [item for item in categories if isinstance(item["id"], int)]
    return {str(item["id"]): item["name"] for item in sorted(named, key=lambda item: item["id"])}


def _named(found: list[dict[str, Any]], categories: dict[Any, str], template: str) -> list[str]:
    labels = [note.get("category_id") for note in found]
    names = list(dict.fromkeys(categories[label] for label in labels if _is_id(label) and label in categories))
    return [template.replace("{}", ", ".join(names))] if names else []


def _images_folder(place: Place, name: str, images: list[dict[str, Any]]) -> str:
    """Where the images are: beside the document, in `images/`, or in the folder its name ends with (val2017/)."""
    folder, _, base = name.rpartition("/")
    beside = f"{folder}/" if folder else ""
    ending = base.removesuffix(".json").rpartition("_")[2]
    for candidate in (f"{ending}/", "images/", f"images/{ending}/", f"{beside}images/", beside):
        if any(_is_there(place, f"{candidate}{image['file_name']}") for image in images[:16]):
            return candidate
    return beside


def _is_there(place: Place, name: str) -> bool:
    return is_inside(name) and place.size(name) is not None


def _document(place: Place, name: str) -> dict[str, Any]:
    where = f"{place.address}/{name}"
    try:
        document = orjson.loads(place.read(name))
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
