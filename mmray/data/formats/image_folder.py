"""Rows that a file tree states: a folder for each class, images beside texts of the same stem, two parallel lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from mmray.errors import DataError
from mmray.storage.storage import Place

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
SPLITS = ("train", "test", "val", "valid", "validation", "dev")


def class_rows(place: Place, template: str) -> Iterator[dict[str, Any]]:
    """FOLDER/CLASS/image, or FOLDER/SPLIT/CLASS/image: a caption from `template`, a label in the order of the names."""
    names = [name for name in place.tree() if is_image(name)]
    at = _at(names)
    labels = {name: label for label, name in enumerate(_classes(names))}
    for name in names:
        parts = PurePosixPath(name).parts
        row: dict[str, Any] = {"origin": name, "id": name, "image": name}
        if len(parts) > at + 1:  # an image above the classes has no caption, and is set aside as that
            row |= {"text": template.replace("{}", spoken(parts[at])), "label": labels[parts[at]]}
        yield row | ({"split": parts[0]} if at else {})


def class_names(place: Place) -> tuple[str, ...]:
    """Names of the labels 0, 1, ... that `class_rows` gives, as words; the manifest holds them, so as UTF-8."""
    classes = _classes([name for name in place.tree() if is_image(name)])
    return tuple(spoken(name).encode(errors="backslashreplace").decode() for name in classes)


def _classes(images: list[str]) -> list[str]:
    """Folders of the classes, in order."""
    at = _at(images)
    return sorted({PurePosixPath(name).parts[at] for name in images if len(PurePosixPath(name).parts) > at + 1})


def _at(images: list[str]) -> int:
    """Which part of a path is the class: the second below folders of splits."""
    return int(has_split_folders(images))


def pair_rows(place: Place) -> Iterator[dict[str, Any]]:
    """a/b.jpg with a/b.txt; an image without a text, or a text without an image, is a row that lacks it."""
    images: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name in place.tree():
        stem, suffix = str(PurePosixPath(name).with_suffix("")), PurePosixPath(name).suffix.lower()
        if suffix in IMAGES:
            images.setdefault(stem, []).append(name)
        elif suffix == ".txt":
            texts[stem] = name
    for stem in sorted(images.keys() | texts.keys()):
        row = {"text_file": texts[stem]} if stem in texts else {}
        for name in images.get(stem, []):
            yield {"origin": name, "id": name, "image": name} | row
        if stem not in images:
            yield {"origin": texts[stem], "id": texts[stem]} | row


def list_rows(place: Place, images: str, captions: str) -> Iterator[dict[str, Any]]:
    """Line n of one file is the image, line n of the other its caption. Raises DataError where one is longer."""
    paths, texts = _lines(place, images), _lines(place, captions)
    if len(paths) != len(texts):
        raise DataError(
            f"{place.address}: {images} has {len(paths):,} lines, {captions} {len(texts):,}: make them equal"
        )
    for number, (path, text) in enumerate(zip(paths, texts, strict=True), 1):
        yield {"origin": f"{images}:{number}", "image": path, "text": text}


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES)


def has_split_folders(names: list[str]) -> bool:
    """Whether every image is below a folder that is named as a split, with a folder of its class between."""
    return bool(names) and all(len(name.split("/")) > 2 and name.split("/")[0] in SPLITS for name in names)


def spoken(name: str) -> str:
    """A folder's name as words."""
    return name.replace("_", " ")


def _lines(place: Place, name: str) -> list[str]:
    """Lines of a text; bytes that are not UTF-8 become what a row is then set aside for."""
    try:
        text = place.read(name).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise DataError(f"{place.address}/{name} cannot be read: {error}") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
