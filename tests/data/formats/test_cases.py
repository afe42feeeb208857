"""The outcome of each input as people have it; see the table in the folder of cases."""

import re

import pytest

from mmray.errors import DataError
from tests.data.formats.test_formats import prepared

pytestmark = pytest.mark.usefixtures("in_process")
TITLES = ("image=filepath", "text=title")
KEPT = {
    "class-folders/bmp": (120, {}, {}),
    "class-folders/onlybmp": (30, {}, {}),
    "class-folders/case": (48, {"train": 30, "test": 9, "valid": 9}, {}),
    "class-folders/deep": (39, {"train": 30, "val": 9}, {}),
    "class-folders/hidden": (30, {}, {}),
    "class-folders/vehicles": (30, {}, {}),
    "csv-labels/ids.csv": (40, {}, {"keep": ("post",)}),
    "csv-spreadsheets/bom.csv": (30, {}, {}),
    "csv-spreadsheets/index.csv": (30, {}, {}),
    "csv-spreadsheets/jsonlist.csv": (30, {}, {}),
    "csv-spreadsheets/reprlist.csv": (30, {}, {}),
    "csv-spreadsheets/semi.csv": (30, {}, {}),
    "csv-spreadsheets/sep.csv": (30, {}, {}),
    "csv-spreadsheets/space.csv": (30, {}, {}),
    "csv-tab/tab.csv": (30, {}, {"columns": TITLES}),
    "csv-named-txt/captions.txt": (50, {}, {"columns": ("text=caption",), "duplicates": "row"}),
    "llava-json/mix.json": (33, {}, {"duplicates": "keep"}),
    "llava-json/mix1.json": (33, {}, {"duplicates": "keep"}),
    "llava-json/mix.jsonl": (33, {}, {"duplicates": "keep"}),
    "parquet-types/b64_image.parquet": (30, {}, {}),
    "parquet-types/bool_label.parquet": (30, {}, {}),
    "parquet-types/bytes_id.parquet": (30, {}, {}),
    "parquet-types/caption_and_text.parquet": (30, {}, {}),
    "parquet-types/cauldron.parquet": (30, {}, {}),
    "parquet-types/conv_json.parquet": (30, {}, {}),
    "parquet-types/float_id.parquet": (30, {}, {}),
    "parquet-types/float_label.parquet": (30, {}, {}),
    "parquet-types/image_and_path.parquet": (30, {}, {"columns": ("image=image",)}),
    "parquet-types/null_in_list.parquet": (30, {}, {}),
    "parquet-types/str_label.parquet": (30, {}, {}),
    "parquet-splits/hub": (30, {"train": 20, "test": 5, "validation": 5}, {}),
    "parquet-splits/hive": (30, {"train": 20, "test": 10}, {}),
    "parquet-splits/dirs": (30, {"train": 20, "test": 10}, {}),
    "parquet-splits/pairs": (30, {"train": 20, "test": 10}, {}),
    "saved-splits-repeat-ids/ids": (30, {"train": 20, "test": 10}, {}),
    "saved-splits-repeat-ids/labels": (30, {"train": 20, "test": 10}, {}),
    "saved-splits-repeat-ids/noids": (30, {"train": 20, "validation": 10}, {}),
    "tar-appledouble/set": (30, {}, {}),
    "tar-bom/json": (30, {}, {}),
    "tar-bom/plain": (30, {}, {}),
    "tar-bom/set": (30, {}, {}),
    "tar-split-folders/set": (30, {"train": 20, "val": 10}, {}),
    "recall-repeated-images/rows.csv": (200, {}, {"duplicates": "row"}),
    "recall-repeated-images/texts.jsonl": (40, {}, {}),
    "zero-shot-classes/classes": (48, {}, {}),
}
REFUSED = {
    "class-folders/splitlike": ("fewer than two classes", {}),
    "csv-spreadsheets/backslash.csv": ("not with a backslash", {}),
    "csv-spreadsheets/cp1252.csv": ("iconv -f CP1252", {}),
    "csv-quotes/two.csv": (r"two\.csv:7: .* lines after a quote opens in this line", {}),
    "csv-spreadsheets/cr.csv": ("carriage return only", {}),
    "csv-spreadsheets/quotes.csv": ("write a quote twice", {}),
    "csv-spreadsheets/unescaped.csv": ("comma, needs quotes", {}),
    "csv-spreadsheets/utf16.csv": ("iconv -f UTF-16 ", {}),
    "csv-spreadsheets/utf16nobom.csv": ("UTF-16LE", {}),
    "csv-tab/win.csv": (r"backslashes, and photos/000\.jpg exists", {"columns": TITLES}),
    "csv-named-txt/captions.txt": ("--columns text=caption", {}),
    "tsv-without-header/Train_GCC-training.tsv": ("--columns image=2 text=1", {}),
    "parquet-types/array_image.parquet": ("array of numbers", {}),
    "parquet-types/no_text_label.parquet": ("the name of a class", {}),
    "parquet-types/nullable_image.parquet": ("none of the columns image_path", {}),
    "parquet-types/struct_text.parquet": ("an object with en, de", {}),
    "tar-interleaved/set": ("not adjacent", {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_input_is_read(shared_cases, tmp_path, case):
    rows, splits, settings = KEPT[case]
    settings = {"max_bad_fraction": 0.0} | settings
    manifest, read, _ = prepared(shared_cases / case, tmp_path / "out", **settings)
    assert (manifest.num_rows, manifest.splits) == (rows, splits)
    assert not any("\ufeff" in text for row in read for text in row.texts)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("csv-labels/words.csv", ("3.7", "infinity", "naan", "nan")),
        ("csv-labels/zeros.csv", ("0", "00", "01", "1")),
        ("folders-numbered/set", tuple(map(str, range(12)))),
    ],
)
def test_classes_keep_their_names_and_order(shared_cases, tmp_path, case, names):
    manifest, rows, faults = prepared(shared_cases / case, tmp_path / "out", duplicates="keep")
    assert (manifest.class_names, faults) == (names, {})
    assert {row.label for row in rows} == set(range(len(names)))


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_what_was_found(shared_cases, tmp_path, case):
    message, settings = REFUSED[case]
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        prepared(shared_cases / case, tmp_path / "out", **{"max_bad_fraction": 0.01} | settings)
    # no advice about columns where they are right
    if "none of the columns" not in str(caught.value):
        assert not re.search("Map other column names", str(caught.value))


def parts_of(message):
    """Texts and kinds of media of a message."""
    return [part["text"] or part["type"] for part in message["content"]]


def test_tags_in_answers_stay_text_and_pictures_in_questions(shared_cases, tmp_path):
    source = shared_cases / "chat-doors/marks-in-answers.jsonl"
    manifest, rows, _ = prepared(source, tmp_path / "out", duplicates="keep")
    said = {row.key: [*map(parts_of, row.messages)] for row in rows}
    assert said == {
        f"a{number}": [
            ["image", f"Which tag marks picture {number}?"],
            [f"    Use <image> in file {number}."],
        ]
        for number in range(4)
    } | {
        "b": [["List tags."], ["<audio>, <image>, <video>"]],
        "c": [["image", "What does the tag <image> mean?"], ["A picture."]],
    }
    assert [notice["num_rows"] for notice in manifest.notices.values()] == [5]


def test_columns_of_peers_become_conversations(shared_cases, tmp_path):
    source = shared_cases / "chat-doors/peer-columns.jsonl"
    manifest, rows, _ = prepared(source, tmp_path / "out")
    assert {row.key: [*map(parts_of, row.messages)] for row in rows} == {
        "p": [["image", "Name it."], ["A square."]],
        "q": [["image", "Name it."], ["A square."]],
        "s": [["Answer briefly."], ["image", "Name it."], ["Square."]],
        "v": [["image", "What color?"], ["Red."]],
    }
    assert not manifest.notices
