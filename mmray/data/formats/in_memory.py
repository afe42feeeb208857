"""Rows that a program holds, stored as Parquet files, which `prepare` reads like any other source.

They may be a `ray.data.Dataset`, a pandas or pyarrow table, a Hugging Face `Dataset` or
`DatasetDict`, or an iterable of dicts. Ray writes its blocks on the nodes that hold them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageFile, ImageOps

from mmray.builtin import CHAT_COLUMNS, COLUMNS
from mmray.data.formats.columns import Columns
from mmray.data.messages import MEDIA_FIELDS
from mmray.data.rows import (
    IMAGE_COLUMNS,
    MEDIA_COLUMNS,
    MESSAGE_COLUMNS,
    BadRow,
    Values,
    is_missing,
    parse_image,
)
from mmray.errors import DataError, UsageError
from mmray.storage.address import is_url
from mmray.storage.paths import (
    AnyPath,
    RemotePath,
    list_files,
    move_tree,
    open_sequential,
    remove_tree,
    to_path,
)

_ROWS_PER_FILE = 2000
_HASH_BYTES = 1 << 20
_MAX_PATH = 4096
# Rows, and the metadata of their Arrow schema.
Part = tuple[Iterator[Mapping[str, Any]], dict[bytes, bytes] | None]
# Modes of Pillow that are stored as PNG in another mode.
_PNG_MODES = dict.fromkeys(("PA", "La", "RGBa"), "RGBA") | dict.fromkeys(
    ("CMYK", "YCbCr", "HSV", "LAB", "RGBX"), "RGB"
)
_PANDAS_MISSING = ("NAType", "NaTType")  # types of missing values besides NaN


def store_rows(
    dataset: object, folder: str | Path, columns: dict[str, str], keep: Sequence[str] = ()
) -> str:
    """Store a dataset as Parquet files, with the bytes of its images.

    Equal rows are stored once: the folder is named after the content of its files.

    Args:
        dataset: A ray.data.Dataset, a pandas or pyarrow table, a Hugging Face Dataset or
            DatasetDict, or an iterable of dicts, with the columns of a source, at least of images
            (or audio or video) and texts. An image may also be a PIL image, an array of uint8 [H,
            W] or [H, W, C], or a path, relative to the working directory.
        columns: Names in the dataset by mmray's column names, such as {"text": "title"}; a column
            without an entry has mmray's name.
        keep: Names of other columns to store, or ("all",); `prepare.keep`.

    Raises:
        UsageError: The object is none of these kinds.
        DataError: It has no rows, no column of images or texts, or values of mixed types.
    """
    parent = to_path(str(folder))
    staging = parent / f".rows-{uuid.uuid4().hex}"
    try:
        source = Columns(columns, keep)
        if _package(dataset) == "ray":
            _write_ray_dataset(dataset, staging, source)
        else:
            staging.mkdir(parents=True, exist_ok=True)
            for number, table in enumerate(_tables(dataset, source)):
                buffer = io.BytesIO()
                pq.write_table(table, buffer)
                (staging / f"{number:06}.parquet").write_bytes(buffer.getvalue())
        return str(_move_to_digest(staging, parent))
    finally:
        remove_tree(staging)


def is_dataset(value: object) -> bool:
    """Return whether a value is a dataset in memory, not the address or the settings of one.

    Args:
        value: Anything. True for a dataset of Ray Data, pandas, pyarrow or Hugging Face, a list, a
            generator or another iterable; False for text, a Path, another mapping, or None.
    """
    return not isinstance(value, (str, Path, type(None))) and (
        _package(value) in ("datasets", "pandas", "pyarrow", "ray")
        or (isinstance(value, Iterable) and not isinstance(value, Mapping))
    )


def encode_row(row: Mapping[str, Any], columns: Columns) -> Values:
    """Return the columns of a row with values that Parquet can store, and None for those that are
    not used, so that `prepare` counts them.

    An image, audio or video becomes {"path": text or None, "bytes": encoded bytes, or None if they
    cannot be read}, and a conversation a JSON text. Raises DataError if no column has images, or
    none has texts.
    """
    names = [*map(str, row)]
    columns.check_kinds(names, "the dataset")
    columns.check_named(names, "the dataset")
    ours = {theirs: name for name in (*COLUMNS, *CHAT_COLUMNS) for theirs in columns.of(name)}
    encoded = {}
    for name, value in row.items():
        is_used = name in ours or columns.keeps(name)
        encoded[str(name)] = _encode_value(ours.get(name, name), value) if is_used else None
    return encoded


def _encode_value(column: str, value: Any) -> Any:
    if _is_missing(value):
        return None
    if column in ("images", "audios", "videos") and not isinstance(value, (str, bytes)):
        return [_encode_image(image) for image in value]
    if column in (*IMAGE_COLUMNS, *MEDIA_COLUMNS):
        return _encode_image(value)
    if column in MESSAGE_COLUMNS and not isinstance(value, str):
        return json.dumps([*map(_with_own_media, value)], default=_json_value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _is_missing(value: object) -> bool:
    return is_missing(value) or type(value).__name__ in _PANDAS_MISSING


def _encode_image(value: object) -> dict[str, Any] | None:
    """Return the path and the encoded bytes of an image; no bytes if it cannot be read here, for
    the quarantine of its row.
    """
    if value is None or isinstance(value, float):  # NaN: pandas has no other missing value
        return None
    if isinstance(value, Mapping):
        data = value.get("bytes")
        path = value.get("path", value.get("url"))
        fields = [str(name) for name, each in value.items() if each is not None]
        if data is None and path is None and fields:
            raise DataError(
                f"an image, audio or video is an object with {', '.join(fields)[:80]}; give it as "
                "encoded bytes, as a path or as an object with bytes or path"
            )
        return {"path": path, "bytes": data} if data is not None else _encode_image(path)
    if isinstance(value, (bytes, bytearray)):
        return {"path": None, "bytes": bytes(value)}
    if isinstance(value, (np.ndarray, list)):
        value = _image_of_array(np.asarray(value))
    if isinstance(value, Image.Image):
        return {"path": None, "bytes": _to_png(value)}
    path = str(value)
    data = None
    with suppress(BadRow):  # the text of an image, in base64 or as a data URI
        data = parse_image(path).data
    if data is None and not is_url(path):
        with suppress(OSError, UsageError):
            data = to_path(path).read_bytes()
    return {"path": path if len(path) < _MAX_PATH else None, "bytes": data}


def _to_png(image: Image.Image) -> bytes:
    """Return an image as PNG, upright if it is as it was opened: copies have their own pixels."""
    if isinstance(image, ImageFile.ImageFile):
        image = ImageOps.exif_transpose(image)
    if image.mode in _PNG_MODES:
        image = image.convert(_PNG_MODES[image.mode])
    if image.mode in ("I", "I;16B", "I;16L"):
        values = np.asarray(image)
        if not 0 <= values.min() <= values.max() < 1 << 16:
            raise DataError(
                f"an image of mode {image.mode} has values from {values.min()} to {values.max()}; "
                "give 0 to 65,535, or convert it to mode L"
            )
        image = Image.fromarray(values.astype(np.uint16))
    buffer = io.BytesIO()
    try:
        image.save(buffer, "PNG")
    except OSError as error:
        raise DataError(f"an image of mode {image.mode}: {error}; convert it to RGB") from None
    return buffer.getvalue()


def _image_of_array(array: np.ndarray) -> Image.Image:
    if np.issubdtype(array.dtype, np.integer) and array.size:
        array = array.astype(np.uint8) if 0 <= array.min() <= array.max() <= 255 else array
    is_shape = array.ndim == 2 or (array.ndim == 3 and 1 <= array.shape[2] <= 4)
    if array.dtype != np.uint8 or not is_shape:
        raise DataError(
            f"an image is an array of {array.dtype} and shape {array.shape}; give uint8 of shape "
            "[H, W] or [H, W, C] with up to 4 channels, a PIL image, encoded bytes or a path"
        )
    return Image.fromarray(array.squeeze(-1) if array.shape[2:] == (1,) else array)


def _with_own_media(message: object) -> Any:
    """Return a message with the files of its parts as data URIs, because paths are relative to the
    working directory.
    """
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if not isinstance(content, (list, tuple, np.ndarray)):
        return message
    return {**message, "content": [_with_own_medium(part) for part in content]}


def _with_own_medium(part: object) -> Any:
    if not isinstance(part, Mapping):
        return part
    own = dict(part)
    for name in MEDIA_FIELDS:
        value = own.get(name)
        value = value.get("url") if isinstance(value, Mapping) else value
        image = _encode_image(value) if isinstance(value, str) else None
        if image is not None and image["bytes"] is not None:
            own[name] = _json_value(image["bytes"])
    return own


def _json_value(value: object) -> Any:
    """Return an array as a list, and an image in a message as a data URI."""
    if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) < 2:
        return value.tolist()
    encoded = _encode_image(value)
    data = b"" if encoded is None else encoded["bytes"]
    if data is None:
        raise DataError(
            f"a message has a value of type {type(value).__name__} ({str(value)[:40]}); give text, "
            "numbers, lists, dicts, or an image, audio or video"
        )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _write_ray_dataset(dataset: Any, staging: AnyPath, columns: Columns) -> None:
    from ray.data.datasource import FilenameProvider

    class TaskNumber(FilenameProvider):
        """Names without Ray's random number, because rows without an id have them in their key."""

        def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
            return f"{task_index:06}"

    if isinstance(staging, RemotePath):
        options = {"path": staging.fs_path, "filesystem": staging.filesystem}
    else:
        options = {"path": str(staging.absolute())}
    rows = dataset.map(encode_row, fn_args=(columns,))
    # An append needs the random number.
    rows.write_parquet(**options, filename_provider=TaskNumber(), mode="overwrite")
    staging.mkdir(parents=True, exist_ok=True)  # Ray creates none for an empty dataset


def _tables(dataset: object, columns: Columns) -> Iterator[pa.Table]:
    """Yield tables of encoded rows, in order; each with the features of Hugging Face `datasets`."""
    first = 0
    for rows, metadata in _parts_of(dataset):
        while part := list(islice(rows, _ROWS_PER_FILE)):
            try:
                encoded = [encode_row(row, columns) for row in part]
                names = dict.fromkeys(chain.from_iterable(encoded))  # the first row may lack some
                table = pa.Table.from_pylist([dict.fromkeys(names) | row for row in encoded])
            except (pa.ArrowException, AttributeError) as error:
                location = f"rows {first} to {first + len(part) - 1} of the dataset"
                raise DataError(f"{location} have values of different types: {error}") from None
            yield table.replace_schema_metadata(metadata)
            first += len(part)


def _parts_of(dataset: object) -> Iterator[Part]:
    """Yield the rows of a dataset, or those of each of its splits, which are read in turn."""
    if _package(dataset) == "datasets" and isinstance(dataset, Mapping):
        for split, part in dataset.items():
            rows, metadata = _rows_of(part)
            yield ({"split": split, **row} for row in rows), metadata
    else:
        yield _rows_of(dataset)


def _rows_of(dataset: Any) -> Part:
    package = _package(dataset)
    if package == "pandas" and type(dataset).__name__ == "DataFrame":
        # An index without a name is the number of the row.
        index = [name for name in dataset.index.names if name not in (None, *dataset.columns)]
        dataset = dataset.reset_index(index) if index else dataset
        _check_unique(dataset.columns)
        starts = range(0, len(dataset), _ROWS_PER_FILE)
        parts = (dataset.iloc[start : start + _ROWS_PER_FILE] for start in starts)
        return (row for part in parts for row in part.to_dict("records")), None
    if package == "datasets" and not isinstance(dataset, Mapping):
        if type(dataset).__name__ == "Dataset" and dataset.format["type"] == "custom":
            raise DataError(
                "the dataset has a transform (`with_transform`), which prepare would not apply: "
                "use `dataset.map`, or `with_format(None)` to prepare the rows without it"
            )
        dataset = dataset.with_format("arrow")
        tables = dataset.iter(batch_size=_ROWS_PER_FILE)
        metadata = dataset.features.arrow_schema.metadata if dataset.features else None
        return (row for table in tables for row in table.to_pylist()), metadata
    if isinstance(dataset, pa.Table):
        _check_unique(dataset.column_names)
        batches = dataset.to_batches(max_chunksize=_ROWS_PER_FILE)
        return (row for batch in batches for row in batch.to_pylist()), dataset.schema.metadata
    if isinstance(dataset, Iterable) and not isinstance(dataset, Mapping):
        return iter(dataset), None
    raise UsageError(
        f"cannot read rows from {type(dataset).__name__}: give a path, a ray.data.Dataset, a "
        "pandas or pyarrow table, a Hugging Face Dataset, or an iterable of dicts"
    )


def _check_unique(names: Iterable[object]) -> None:
    """Raise DataError if several columns have one name, of which a dict would have the last."""
    repeated = [name for name, count in Counter(map(str, names)).items() if count > 1]
    if repeated:
        raise DataError(
            f"the dataset has several columns {', '.join(repeated)}; rename or drop one"
        )


def _move_to_digest(staging: AnyPath, parent: AnyPath) -> AnyPath:
    """Move the files to a folder that is named after their content, unless it exists."""
    names = sorted(list_files(staging))
    if not names:
        raise DataError("the dataset has no rows")
    digest = hashlib.sha256()
    for name in names:
        with open_sequential(staging / name) as file:
            while piece := file.read(_HASH_BYTES):
                digest.update(piece)
    target = parent / f"rows-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    move_tree(staging, target)
    return target
