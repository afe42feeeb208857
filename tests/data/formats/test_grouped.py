"""`--group image`: rows of one image become one row with all captions."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.data.formats import grouped
from mmray.data.formats.text_lines import JsonlSource
from mmray.errors import DataError
from tests.data.formats.test_formats import images, prepared
from tests.data.prepare.test_pipeline import add, color_image

pytestmark = pytest.mark.usefixtures("in_process")


def content(rows):
    return [(row.image, row.texts) for row in rows]


@pytest.mark.parametrize("rows_at_a_time", [1, 100])
def test_captions_of_an_image_are_joined_in_any_order_of_rows(
    tmp_path, monkeypatch, rows_at_a_time
):
    monkeypatch.setattr(grouped, "ROWS_PER_CHUNK", rows_at_a_time)
    monkeypatch.setattr(grouped, "MAX_GROUPED_ROWS", rows_at_a_time)
    monkeypatch.setattr(grouped, "CHUNKS_PER_LISTING", rows_at_a_time)
    folder = images(tmp_path / "raw", 3)
    lines = ["image,caption,label", "0.png,a,5", "1.png,b,6", "0.png,c,5", "1.png,b,6", "2.png,d,7"]
    (folder / "rows.csv").write_text("\n".join(lines))
    settings = {"group": "image", "columns": ("text=caption",)}
    logged = []
    manifest, rows, faults = prepared(
        folder / "rows.csv", tmp_path / "out", lambda text, _: logged.append(text), **settings
    )
    assert not faults and manifest.num_rows == 3
    listings = {"grouped-00000.jsonl"}
    if rows_at_a_time == 1:  # one for each row of the source
        listings = {f"grouped-{number:05d}.jsonl" for number in range(6)}
    assert {path.name for path in (tmp_path / "out").glob("gr*")} == listings
    assert content(rows) == [
        (color_image(0), ["a", "c"]),
        (color_image(1), ["b"]),
        (color_image(2), ["d"]),
    ]
    assert [row.label for row in rows] == [5, 6, 7]
    assert rows[0].source == "rows.csv:2" and "grouped by image" in logged[0]


def test_columns_in_which_rows_of_an_image_differ_are_counted(tmp_path):
    folder = images(tmp_path / "raw", 2)
    lines = ["id,image,text,label,size,x", "0,0.png,a,5,1,", "1,0.png,b,6,1,", "2,1.png,c,6,1,7"]
    (folder / "rows.csv").write_text("\n".join([*lines, "3,0.png,d,5,2,7"]))
    settings = {"group": "image", "keep": ("size",)}
    manifest, rows, _ = prepared(folder / "rows.csv", tmp_path / "out", **settings)
    assert [(row.texts, row.label) for row in rows] == [(["a", "b", "d"], 5), (["c"], 6)]
    assert {text: notice["num_rows"] for text, notice in manifest.notices.items()} == {
        "column `x` is not used": 2,
        "rows of an image differ in `label`, and the first one is used": 1,
        "rows of an image differ in `size`, and the first one is used": 1,
    }


def test_rows_of_other_splits_bad_rows_and_lists_of_images_stay_separate(tmp_path):
    folder = images(tmp_path / "raw", 3)
    source = folder / "rows.jsonl"
    for split, text in (("train", "a"), ("test", "b"), ("train", "c")):
        add(source, {"image": "0.png", "text": text, "split": split})
    add(source, {"images": ["1.png", "2.png"], "texts": ["d", "e"], "split": "train"})
    add(source, {"images": ["1.png", "2.png"], "text": "f", "split": "train"})
    add(source, {"image": "missing.png", "text": "g", "split": "train"})
    with source.open("a") as file:
        file.write("no json\n")
    manifest, rows, faults = prepared(source, tmp_path / "out", group="image", duplicates="keep")
    assert {tuple(row.texts) for row in rows} == {("a", "c"), ("b",), ("d", "e", "f")}
    assert manifest.splits == {"train": 2, "test": 1}
    assert faults == {"rows.jsonl:6": "missing-image", "rows.jsonl:7": "json"}


def test_images_by_path_in_parquet_are_grouped_and_bytes_are_refused(tmp_path):
    folder = images(tmp_path / "raw", 2)
    table = {"image": ["0.png", "1.png", "0.png"], "text": ["a", "b", "c"]}
    pq.write_table(pa.table(table), folder / "paths.parquet")
    _, rows, _ = prepared(folder / "paths.parquet", tmp_path / "out", group="image")
    assert [row.texts for row in rows] == [["a", "c"], ["b"]]
    table["image"] = [color_image(0)] * 3
    pq.write_table(pa.table(table), folder / "bytes.parquet")
    with pytest.raises(DataError, match="--duplicates row"):
        prepared(folder / "bytes.parquet", tmp_path / "other", group="image")


def test_tasks_return_no_rows_and_chunks_continue_over_listings(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped, "ROWS_PER_CHUNK", 40)
    monkeypatch.setattr(grouped, "MAX_GROUPED_ROWS", 100)
    monkeypatch.setattr(grouped, "CHUNKS_PER_LISTING", 2)
    monkeypatch.setattr("mmray.data.formats.source.MAX_SMALL_CHUNKS", 3)
    source = tmp_path / "rows.jsonl"
    captions = [f"caption {number} {'of an image ' * 20}" for number in range(400)]
    source.write_text(
        "".join(
            json.dumps({"image": f"{number * 7 % 200}.png", "text": text}) + "\n"
            for number, text in enumerate(captions)
        )
    )
    num_bytes = []

    def run(work, items, num_rows):
        results = [work(item) for item in items]
        num_bytes.append(len(pickle.dumps(results)))
        return iter(results[::-1])  # tasks end in any order

    (tmp_path / "out").mkdir()
    groups = grouped.GroupedSource(JsonlSource(tmp_path, "rows.jsonl", {}, tmp_path / "out"), run)
    groups.grows = True
    chunks = list(groups.scan(8))
    assert sum(num_bytes) < 6_000 < len("".join(captions)) / 10
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    sizes = {}
    for chunk in chunks:
        sizes.setdefault(chunk.file, []).append(chunk.num_rows)
    assert [sum(each) for each in sizes.values()] == [80, 80, 40]
    assert [each[0] for each in sizes.values()] == [8, 80 // 3, 40]  # they grow with the rows
    rows = [row for chunk in chunks for row in groups.read(chunk)]
    assert [row.values["image"] for row in rows] == [f"{n * 7 % 200}.png" for n in range(200)]
    assert [row.values["texts"] for row in rows] == [
        [captions[number], captions[number + 200]] for number in range(200)
    ]


def test_a_caption_that_is_added_is_packed_again(tmp_path, in_process):
    folder = images(tmp_path / "raw", 4)
    for number in range(4):
        add(folder / "rows.jsonl", {"image": f"{number}.png", "text": f"text {number}"})
    settings = {"group": "image", "rows_per_shard": 2}
    prepared(folder / "rows.jsonl", tmp_path / "out", **settings)
    add(folder / "rows.jsonl", {"image": "3.png", "text": "other"})
    in_process.clear()
    _, rows, _ = prepared(folder / "rows.jsonl", tmp_path / "out", **settings)
    assert in_process == [1] and rows[3].texts == ["text 3", "other"]


def test_both_forms_of_a_case_are_equal(shared_cases, tmp_path):
    folder = shared_cases / "recall-repeated-images"
    _, grouped, _ = prepared(folder / "rows.csv", tmp_path / "rows", group="image")
    _, listed, _ = prepared(folder / "texts.jsonl", tmp_path / "texts")
    assert content(grouped) == content(listed)
    lines = (folder / "texts.jsonl").read_text().splitlines()
    assert [row.texts for row in grouped] == [json.loads(line)["texts"] for line in lines]
