"""Rows in memory: each kind of dataset gives the same prepared set as files."""

import io
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

import mmray
from mmray.config import Prepare
from mmray.data.formats.columns import Columns
from mmray.data.formats.in_memory import encode_row, store_rows
from mmray.data.images.decode import decode
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.errors import DataError, UsageError
from tests.made import CAPTIONS, noisy
from tests.training.runs import Silent

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_process")  # packing has tests of its own
NUM_ROWS = 20
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
TEXTS = [f"{CAPTIONS[number % 3]} {number}" for number in range(NUM_ROWS)]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def content(folder):
    """(text, pixels) of each row of a prepared set."""
    prepared = PreparedSet.open(str(folder))
    rows = prepared.read(np.arange(prepared.num_rows))
    return [(row.texts[0], pixels(row.image)) for row in rows]


def same_rows(folder, texts=TEXTS):
    rows = content(folder)
    assert sorted(text for text, _ in rows) == sorted(texts)
    for text, image in rows:
        assert (image == pixels(noisy(int(text.split()[-1])))).all()


def as_pandas(folder):
    """Paths of files, a missing caption for a row that is added, and a column that is ignored."""
    for number in range(NUM_ROWS):
        (folder / f"{number}.png").write_bytes(noisy(number))
    paths = [folder / f"{number}.png" for number in range(NUM_ROWS)]
    return pd.DataFrame({"image": paths, "text": TEXTS, "other": object()})


def as_arrow(_):
    return pa.table({"image": [noisy(number) for number in range(NUM_ROWS)], "text": TEXTS})


def as_hugging_face(_):
    images = [{"bytes": noisy(number), "path": None} for number in range(NUM_ROWS)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"image": images, "text": TEXTS}, features=features)


def as_dicts(_):
    """PIL images and arrays, from a generator."""
    for number, text in enumerate(TEXTS):
        image = Image.open(io.BytesIO(noisy(number)))
        yield {"image": np.asarray(image) if number % 2 else image, "text": text}


@pytest.mark.parametrize("build", [as_pandas, as_arrow, as_hugging_face, as_dicts])
def test_rows_in_memory_are_prepared(build, tmp_path):
    manifest = mmray.prepare(build(tmp_path), tmp_path / "set", reporter=Silent())
    assert (manifest.num_rows, manifest.num_quarantined) == (NUM_ROWS, 0)
    same_rows(tmp_path / "set")
    assert not (tmp_path / "set.rows").exists()


def test_nullable_integers_of_pandas_keep_their_value(tmp_path):
    frame = as_pandas(tmp_path)[["image", "text"]]
    posts = [1700000000000000001, None] * (NUM_ROWS // 2)
    frame["post"] = pd.array(posts, dtype="Int64")
    frame["time"] = pd.NaT
    out = tmp_path / "set"
    manifest = mmray.prepare(frame, out, keep=("post", "time"), reporter=Silent())
    assert column_types(manifest.columns) == {"post": "int64", "time": "string"}
    prepared = PreparedSet.open(str(out))
    assert [row["post"] for row in prepared.columns(np.arange(NUM_ROWS))] == posts


def test_ray_dataset_is_prepared_and_stored_once(local_ray, tmp_path):
    import ray.data

    rows = [{"image": pixels(noisy(n)), "text": text} for n, text in enumerate(TEXTS)]
    dataset = ray.data.from_items(rows, override_num_blocks=3)
    keys = []
    for name in ("set", "again"):
        mmray.prepare(dataset, tmp_path / name, reporter=Silent())
        keys.append(PreparedSet.open(str(tmp_path / name)).keys())
    assert keys[0] == keys[1]
    same_rows(tmp_path / "set")
    stored = {store_rows(dataset, tmp_path / "rows", {}) for _ in range(2)}
    assert len(stored) == 1
    with pytest.raises(DataError, match="has no rows"):
        store_rows(dataset.limit(0), tmp_path / "rows", {})


def test_splits_and_class_names_of_hugging_face_are_kept(tmp_path):
    labels = datasets.ClassLabel(names=["cat", "small_dog"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    parts = {}
    for split, first in (("train", 0), ("test", 4)):
        images = [{"bytes": noisy(first + number), "path": None} for number in range(4)]
        values = {"image": images, "label": [0, 1, 0, 1]}
        parts[split] = datasets.Dataset.from_dict(values, features=features)
    manifest = mmray.prepare(datasets.DatasetDict(parts), tmp_path / "set", reporter=Silent())
    assert manifest.splits == {"train": 4, "test": 4}
    assert manifest.class_names == ("cat", "small dog")


def test_bad_images_are_quarantined_and_messages_kept(tmp_path):
    turns = [{"role": "user", "content": "<image> what?"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": turns, "images": [Image.new("L", (8, 9), gray)]} for gray in range(3)]
    rows.append({"messages": turns, "images": ["missing.png"]})
    source = store_rows(rows, tmp_path / "rows", {})
    manifest = prepare(source, str(tmp_path / "set"), Prepare(max_bad_fraction=0.5))
    assert (manifest.num_rows, manifest.reasons) == (3, {"missing-image": 1})


def test_paths_in_content_parts_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(noisy(number))
        value = f"{number}.png" if number else {"url": f"{number}.png"}
        part = {"type": "image_url", "image_url": value}
        said = {"role": "assistant", "content": TEXTS[number]}
        rows.append({"messages": [{"role": "user", "content": [part]}, said]})
    source = store_rows(rows, tmp_path / "rows", {})
    prepare(source, str(tmp_path / "set"), Prepare())
    stored = PreparedSet.open(str(tmp_path / "set")).read(np.arange(3))
    assert [row.media[0].data for row in stored] == [noisy(number) for number in range(3)]


@pytest.mark.parametrize("field", ["path", "url"])
def test_image_of_a_conversation_may_be_an_object_with_its_path(field, tmp_path):
    (tmp_path / "0.png").write_bytes(noisy(0))
    rows = [{"image": {field: str(tmp_path / "0.png")}, "messages": CHAT}]
    mmray.prepare(rows, tmp_path / "set", reporter=Silent())
    row = PreparedSet.open(str(tmp_path / "set")).read(np.array([0]))[0]
    assert [medium.data for medium in row.media] == [noisy(0)]


def test_named_index_of_pandas_is_a_column(tmp_path):
    frame = as_pandas(tmp_path)[["image", "text"]]
    frame.index = pd.Index([f"post-{number}" for number in range(NUM_ROWS)], name="id")
    mmray.prepare(frame, tmp_path / "set", reporter=Silent())
    assert PreparedSet.open(str(tmp_path / "set")).keys() == list(frame.index)


COLORS = Image.open(io.BytesIO(noisy(0))).convert("RGB")
GRAYS = np.asarray(COLORS.convert("L"))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLORS.convert("CMYK"), COLORS.convert("CMYK").convert("RGB")),
        (COLORS.convert("YCbCr"), COLORS.convert("YCbCr").convert("RGB")),
        (COLORS.convert("PA"), COLORS.convert("PA").convert("RGB")),
        (Image.fromarray(GRAYS.astype(np.int32) * 257), Image.fromarray(GRAYS).convert("RGB")),
    ],
    ids=["CMYK", "YCbCr", "PA", "I"],
)
def test_images_of_other_modes_have_their_colors(image, expected, tmp_path):
    mmray.prepare([{"image": image, "text": "a"}], tmp_path / "set", reporter=Silent())
    row = PreparedSet.open(str(tmp_path / "set")).read(np.array([0]))[0]
    np.testing.assert_array_equal(decode(row.image), np.asarray(expected))


def test_an_opened_image_is_upright(tmp_path):
    """As the bytes of its file are. A copy, such as one that was rotated, has its own pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    COLORS.resize((32, 16)).save(file, "PNG", exif=exif)
    opened = Image.open(file)
    turned = opened.rotate(-90, expand=True)
    rows = [
        {"image": file.getvalue(), "text": "bytes"},
        {"image": opened, "text": "opened"},
        {"image": turned, "text": "turned"},
    ]
    mmray.prepare(rows, tmp_path / "set", duplicates="keep", reporter=Silent())
    stored = PreparedSet.open(str(tmp_path / "set")).read(np.arange(3))
    expected = np.asarray(turned)
    for row in stored:
        np.testing.assert_array_equal(decode(row.image), expected)


def test_equal_rows_are_stored_once(tmp_path):
    rows = [{"img": noisy(1), "text": "a"}]
    stored = {store_rows(rows, tmp_path, {"image": "img"}) for _ in range(2)}
    assert len(stored) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([], DataError, "has no rows"),
        (7, UsageError, "cannot read rows from int"),
        ([{"picture": b"", "text": "a"}], DataError, "none is `image`"),
        ([{"image": np.zeros((4, 4), np.float32), "text": "a"}], DataError, "array of float32"),
        ([{"image": np.zeros((3, 8, 8), np.uint8), "text": "a"}], DataError, "(3, 8, 8)"),
        ([{"image": [b"a", b"b"], "text": "a"}], DataError, "array of |S1"),
        ([{"image": {"data": b""}, "messages": CHAT}], DataError, "an object with data"),
        ([{"audio": {"array": [0.1], "path": None}, "messages": CHAT}], DataError, "with array"),
        ([{"image": Image.new("I", (8, 8), -1), "text": "a"}], DataError, "mode I has values"),
        ([{"image": Image.new("F", (8, 8)), "text": "a"}], DataError, "mode F"),
        (pa.table([[b""], ["a"], ["b"]], ["image", "text", "text"]), DataError, "several columns"),
        ([{"messages": [{"role": "user", "weight": Decimal(1)}]}], DataError, "type Decimal"),
        (
            datasets.Dataset.from_dict({"image": [b""], "text": ["a"]}).with_transform(dict),
            DataError,
            "the dataset has a transform",
        ),
        ([{"image": b"", "text": "a"}, {"image": b"", "text": 3}], DataError, "different types"),
    ],
)
def test_unusable_rows_are_explained(dataset, error, message, tmp_path):
    with pytest.raises(error, match=message):
        store_rows(dataset, tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_columns_that_are_not_used_are_without_values():
    row = {"image": b"1", "text": "a", "label": np.int64(3), "other": object()}
    assert encode_row(row, Columns({})) == {
        "image": {"path": None, "bytes": b"1"},
        "text": "a",
        "label": 3,
        "other": None,
    }


def test_columns_that_the_first_row_lacks_are_stored_or_counted(tmp_path):
    rows = [
        {"image": noisy(0), "text": "a"},
        {"image": noisy(1), "text": "b", "label": "cat", "width": 7},
        {"image": noisy(2), "text": float("nan")},
    ]
    source = store_rows(rows, tmp_path / "rows", {})
    manifest = prepare(source, str(tmp_path / "set"), Prepare(max_bad_fraction=0.5))
    stored = PreparedSet.open(str(tmp_path / "set")).read(np.arange(2))
    assert [row.label for row in stored] == [None, manifest.class_names.index("cat")]
    assert (manifest.reasons, [*manifest.notices]) == (
        {"no-text": 1},
        ["column `width` is not used"],
    )
