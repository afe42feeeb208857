"""Sources whose rows the driver lists once: class folders, image-text pairs, COCO documents.

The list is written as JSON lines to the folder of the prepared set; each task reads its part.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import unicodedata
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import orjson

from mmray.data.formats.source import (
    RawRow,
    Record,
    Source,
    SourceChunk,
    is_about_the_data,
    read_head,
)
from mmray.data.formats.splits import split_and_class_of, splits_of_files
from mmray.data.formats.text_lines import (
    BOM,
    MAX_LINE_BYTES,
    JsonlSource,
    decode_text,
    unique_pairs,
)
from mmray.data.images.formats import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from mmray.data.images.read import os_error_as_bad_row, read_file, stat_signature
from mmray.data.labels import order_classes
from mmray.data.media.formats import LANGUAGE, SUBTITLE_SUFFIXES, media_kind
from mmray.data.media.subtitles import parse_subtitles
from mmray.data.rows import (
    MORE_TEXTS,
    NOTICES,
    BadRow,
    Values,
    is_safe_path,
    is_valid_name,
)
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, RemotePath, open_output, open_sequential
from mmray.storage.requests import iter_parallel

# Suffixes of a caption file next to each image.
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".cap")
_BAD_ROW = "bad row"  # (stage, reason, detail) of a row that cannot be parsed
_PIECE_BYTES = 1 << 20  # bytes of a JSON array that are read at a time
_BETWEEN_ITEMS = re.compile(r"[\s,]*")
_OBJECTS = "objects (boxes, categories) of the document are not used"
Rows = Iterator[tuple[str, Values]]  # location of a row, and its columns


class ListingSource(Source):
    """Base of the sources whose rows the driver lists once in a file, from which tasks read them.

    Each subclass implements `list_rows` for one layout of files: it yields the location of a row,
    for messages, and a dict of the columns that it has: `id`, `image`, `audio` and `video` (paths
    relative to the folder of the source), `text`, `texts`, `label` and `split`.

    Attributes:
        listing: Name of the file with the listed rows, in the folder of the prepared set.
    """

    listing: ClassVar[str] = "listing.jsonl"  # file in the folder of the prepared set

    @abstractmethod
    def list_rows(self) -> Rows:
        """Yield the rows of the source in order; they are written to a file, from which tasks read
        them.

        Yields:
            The location of the row, for messages, and a dict of the columns that the row has: `id`;
            `image`, `audio` or `video`, a path relative to the folder of the source; `text` or
            `texts`; `label`, the name of a class; `split`; or, instead of texts, `text_file`, the
            path of a file with the captions. A JSON array gives the columns of its objects.

        Raises:
            DataError: The source cannot be listed.
        """

    def names(self) -> list[str]:
        return []  # the rows are listed at each scan

    def scan(self, rows_per_chunk: int) -> Iterator[SourceChunk]:
        with open_output(self.prepared_folder / self.listing) as file:
            for location, row in self.list_rows():
                if split := row.get("split"):
                    self.split_rows[split] += 1
                file.write(format_line(location, row))
        rows = JsonlSource(self.prepared_folder, self.listing, {})
        rows.grows = self.grows
        rows.earlier = self.earlier
        for index, chunk in enumerate(rows.scan_file(self.listing, rows_per_chunk, 0)):
            yield replace(chunk, index=index)

    def records(self, chunk: SourceChunk) -> Iterator[Record]:
        return read_listing(self.prepared_folder, chunk)

    def parse(self, record: Values) -> Values:
        return record


def read_listing(folder: AnyPath, chunk: SourceChunk) -> Iterator[Record]:
    """Yield the rows of a chunk of a listing in a folder: location and columns."""
    for _, data in JsonlSource(folder, chunk.file, {}).records(chunk):
        location, values = json.loads(data)
        is_bad = values.keys() == {_BAD_ROW}
        yield location, BadRow(*values[_BAD_ROW]) if is_bad else values


def format_line(location: str, row: Values) -> bytes:
    """Return the line of a row in a listing: ASCII, because names may contain lone surrogates."""
    return json.dumps([location, row]).encode() + b"\n"


def listed_bad_row(bad: BadRow) -> Values:
    """Return the values of a bad row in a listing."""
    return {_BAD_ROW: (bad.stage, bad.reason, bad.detail)}


def is_image(name: str) -> bool:
    """Return whether a file name has the suffix of an image format, also of one that mmray cannot
    decode, such as `.svg`.
    """
    return name.lower().endswith((*IMAGE_SUFFIXES, *UNREAD_SUFFIXES))


def _stem(name: str) -> str:
    """Return a path without its suffix, in composed Unicode (NFC), so that names are compared."""
    root, suffix = posixpath.splitext(name)  # a fifth of the time of PurePosixPath
    return unicodedata.normalize("NFC", root if suffix != "." else name)


def _split_language(name: str) -> tuple[str, str]:
    """Return the stem of subtitles without their language, and the language: `a` and `en` of
    `a.en.srt`; the whole stem and "" without one.
    """
    stem = _stem(name)
    if name.lower().endswith(SUBTITLE_SUFFIXES):
        base, _, language = stem.rpartition(".")
        if base and LANGUAGE.fullmatch(language):
            return base, language
    return stem, ""


class ClassFolders(ListingSource):
    """Rows of FOLDER/CLASS/image or FOLDER/SPLIT/CLASS/image.

    The label is the name of the class, which `normalize_values` numbers and gives a caption. An
    image outside the folders of classes has neither, so it is an incomplete row.

    The values are `id`, `image`, `text`, `label` and `split`.
    """

    title = "a folder for each class"
    row_needs = "the layout CLASS/image or SPLIT/CLASS/image"
    reads_file = False
    reads_folder = True

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        return any("/" in name for name in filter(is_image, names))

    def list_rows(self) -> Rows:
        files = self.visible_files()
        names = [name for name in files if is_image(name)]
        self.ignored.update(PurePosixPath(name).suffix for name in files if not is_image(name))
        folders = split_and_class_of(names)
        if all(each is None for _, each in folders):  # the user sets this format, so it has classes
            folders = [(None, name.split("/")[0] if "/" in name else None) for name in names]
        self.class_names = order_classes(each for _, each in folders if each is not None)
        for name, (split, class_folder) in zip(names, folders, strict=True):
            row = {"id": name, "image": name}
            row |= {"split": split} if split else {}
            # an image outside the class folders has no caption, so it is quarantined
            row |= {"label": class_folder} if class_folder is not None else {}
            yield name, row


def _is_medium(name: str) -> bool:
    return is_image(name) or media_kind(name) is not None


class ImageTextPairs(ListingSource):
    """Rows of a/b.jpg, or a clip a/b.mp4, with captions in a/b.txt or a/b.jpg.txt, one a line, or
    subtitles a/b.srt, whose texts have times; a file without its counterpart is an incomplete row.

    The values are `id`, `image`, `audio` or `video`, `texts` and `split`.
    """

    title = "media and text pairs"
    row_needs = "a file with its text next to it, such as a/0.jpg and a/0.txt"
    reads_file = False
    reads_folder = True

    @classmethod
    def matches_folder(cls, names: list[str]) -> bool:
        media = set(filter(_is_medium, names))
        stems = media | {_stem(name) for name in media}
        return any(
            not {_stem(name), _split_language(name)[0]}.isdisjoint(stems)
            for name in names
            if name.lower().endswith((*CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES))
        )

    def list_rows(self) -> Rows:
        media: dict[str, list[str]] = defaultdict(list)
        texts: dict[str, list[str]] = defaultdict(list)
        suffixes = (*CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES)
        for name in self.visible_files():
            stem = _stem(name)
            if _is_medium(name):
                media[stem].append(name)
            elif name.lower().endswith(suffixes) and not is_about_the_data(name):
                texts[_stem(stem) if _is_medium(stem) else stem].append(name)
            else:
                self.ignored[PurePosixPath(name).suffix] += 1
        for stem in sorted(texts.keys() - media.keys()):  # a.en.srt of a.mp4, as yt-dlp writes it
            base, language = _split_language(texts[stem][0])
            if language and base in media:
                texts[base] = [*texts.pop(stem), *texts[base]]
        # Folders only: photos of trains may be named train-12.jpg.
        stems = sorted(media.keys() | texts.keys())
        splits = splits_of_files([f"{stem.rpartition('/')[0]}/" for stem in stems])
        for stem in stems:
            *others, text = texts.get(stem, [""])
            row: Values = {
                "text_file": text or None,
                "language": _split_language(text)[1] or None,
                NOTICES: [MORE_TEXTS] if others else None,
                "split": splits[f"{stem.rpartition('/')[0]}/"],
            }
            row = {column: value for column, value in row.items() if value is not None}
            for name in media.get(stem, []):
                yield name, {"id": name, media_kind(name) or "image": name} | row
            if stem not in media:
                yield text, {"id": text} | row

    def parse(self, record: Values) -> Values:
        name = record.pop("text_file", None)
        if name is None:
            return record
        if not is_valid_name(name):
            raise BadRow("columns", "path", f"{name!r} is not plain UTF-8: rename the file")
        with os_error_as_bad_row(name):
            data = read_file(self.folder, name, self.roots)
        if name.lower().endswith(SUBTITLE_SUFFIXES):
            notices: list[str] = []
            texts = parse_subtitles(decode_text(data, name), name, notices)
            return record | {"texts": texts, NOTICES: [*record.get(NOTICES, ()), *notices]}
        lines = decode_text(data, name).splitlines()
        return record | {"texts": [line for line in lines if line.strip()] or [""]}

    def parse_item(self, item: Record) -> RawRow:
        text = item[1].get("text_file")
        has_file = text is not None and isinstance(self.folder, Path)
        files = (stat_signature(self.folder, text),) if has_file else ()
        return super().parse_item(item)._replace(files=files)

    def read(self, chunk: SourceChunk) -> Iterator[RawRow]:
        if isinstance(self.folder, RemotePath):
            return iter_parallel(self.parse_item, self.records(chunk))
        return super().read(chunk)


class JsonArraySource(ListingSource):
    """The objects of a JSON array, over any number of lines; images are paths relative to the file.

    The array is read one object at a time. Each object is a row: values by column name.

    """

    title = "JSON array"
    suffixes = (".json", ".jsonl", ".ndjson")

    @classmethod
    def matches_file(cls, folder: AnyPath, name: str) -> bool:
        head = read_head(folder, name).removeprefix(BOM).lstrip()
        is_json = name.lower().endswith(".json")
        return head.startswith(b"[") and (is_json or head[1:].lstrip().startswith(b"{"))

    def list_rows(self) -> Rows:
        for number, item in enumerate(self._items(), 1):
            detail = f"must be an object {{...}} (got {type(item).__name__})"
            bad = item if isinstance(item, BadRow) else BadRow("parse", "json", detail)
            row = item if isinstance(item, dict) else listed_bad_row(bad)
            yield f"{self.name}:item {number}", row

    def _items(self) -> Iterator[Any]:
        """Yield the items of the array; a BadRow for one that repeats a name. Raises DataError."""
        repeated: list[str] = []

        def join_pairs(pairs: list[tuple[str, Any]]) -> Values:
            try:
                return unique_pairs(pairs)
            except ValueError as error:
                repeated.append(str(error))
                return {}

        decoder = json.JSONDecoder(object_pairs_hook=join_pairs)
        path = self.folder / self.name
        text = ""
        position = count = 0
        try:
            with open_sequential(path) as raw, io.TextIOWrapper(raw, "utf-8-sig") as file:
                text = file.read(_PIECE_BYTES).lstrip().removeprefix("[")
                while True:
                    position = _BETWEEN_ITEMS.match(text, position).end()  # type: ignore[union-attr]
                    if text.startswith("]", position):
                        return
                    repeated.clear()
                    try:
                        item, position = decoder.raw_decode(text, position)
                    except ValueError as error:
                        piece = file.read(_PIECE_BYTES)
                        if not piece or len(text) - position > MAX_LINE_BYTES:
                            raise DataError(
                                f"{path}: item {count + 1} of the array is not JSON: {error}"
                            ) from None
                        text = text[position:] + piece
                        position = 0
                        continue
                    count += 1
                    yield BadRow("parse", "json", f"not JSON: {repeated[0]}") if repeated else item
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 after item {count}: {error}") from None


class CocoSource(ListingSource):
    """One row for each image of a document of COCO's captions, or of Karpathy.

    The values are `id`, `image`, `texts` and `split`, as far as the document defines them. `scan`
    raises DataError if it is not COCO.
    """

    title = "COCO"
    num_without_image = 0  # captions, known after `scan`
    row_needs = "an image and a caption; objects of a document (boxes, categories) are not used"
    suffixes = (".json",)

    @classmethod
    def matches_file(cls, folder: AnyPath, name: str) -> bool:
        text = read_head(folder, name, MAX_LINE_BYTES).removeprefix(BOM).lstrip()
        try:
            first = orjson.loads(text.partition(b"\n")[0])
        except ValueError:
            # a document over several lines, or one line that is longer than a row may be
            return not text.startswith(b"[")
        if not isinstance(first, dict):
            return False
        return {"images", "annotations"} <= first.keys() or _has_sentences(first.get("images"))

    def list_rows(self) -> Rows:
        path = self.folder / self.name
        files: dict[str, str] = {}
        captions: dict[str, list[Any]] = defaultdict(list)
        with_objects: set[str] = set()
        try:
            document = orjson.loads(path.read_bytes().removeprefix(BOM))
            if "annotations" not in document and _has_sentences(document["images"]):
                yield from self._list_split_rows(document["images"])
                return
            for image in document["images"]:
                name = str(image["file_name"])
                file = files.setdefault(_id_text(image["id"]), name)
                if file != name:
                    raise DataError(f"{path}: {file} and {name} have the id {image['id']}")
            for annotation in document["annotations"]:
                image_id = _id_text(annotation["image_id"])
                if "caption" in annotation:
                    captions[image_id].append(annotation["caption"])
                else:
                    with_objects.add(image_id)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not COCO's JSON ({error}): it needs `images` with `id` and "
                "`file_name`, and `annotations` with `image_id`"
            ) from None
        self.num_without_image = sum(len(captions[each]) for each in captions.keys() - files)
        folder = self._images_folder([*files.values()][:16])
        for image_id, file in files.items():
            row: Values = {"id": image_id, "image": f"{folder}{file}"}
            if image_id in captions:
                row["texts"] = captions[image_id]
            if image_id in with_objects:
                row[NOTICES] = [_OBJECTS]
            yield f"{self.name}:image {image_id}", row

    def describe(self) -> str:
        if not self.num_without_image:
            return self.title
        return f"{self.title} ({self.num_without_image:,} captions are of images that it lacks)"

    def _list_split_rows(self, images: list[dict[str, Any]]) -> Rows:
        """Yield the rows of a document of Karpathy: images with sentences and a split."""
        files = [
            "/".join(filter(None, (image.get("filepath"), image["filename"]))) for image in images
        ]
        folder = self._images_folder(files[:16])
        for number, (image, file) in enumerate(zip(images, files, strict=True)):
            split = str(image.get("split") or "train")
            row = {
                "id": image.get("imgid", image.get("cocoid", number)),
                "image": f"{folder}{file}",
                "texts": [sentence["raw"] for sentence in image["sentences"]],
                "split": "train" if split == "restval" else split,
            }
            yield f"{self.name}:image {number}", row

    def _images_folder(self, files: list[str]) -> str:
        """Find the folder of the images: next to the document, in `images/`, or named by the suffix
        (val2017/).
        """
        folder, slash, base = self.name.rpartition("/")
        ending = base.removesuffix(".json").rpartition("_")[2]
        for candidate in (f"{ending}/", "images/", f"images/{ending}/", f"{folder}{slash}images/"):
            paths = [f"{candidate}{file}" for file in files]
            if any(is_safe_path(path) and (self.folder / path).is_file() for path in paths):
                return candidate
        return f"{folder}{slash}"


def _has_sentences(images: object) -> bool:
    """Return whether these are the images of a document of Karpathy."""
    first = images[0] if isinstance(images, list) and images else None
    return isinstance(first, dict) and {"sentences", "filename"} <= first.keys()


def _id_text(value: object) -> str:
    """Return the ID of an image in one form: 9, "9" and "0009" are the same."""
    text = str(value)
    return str(int(text)) if text.isascii() and text.isdigit() else text
