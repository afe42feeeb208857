"""CSV as spreadsheets and other programs write it, and folders of text files with splits."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.data.formats import listing
from mmray.data.formats.detect import detect_source
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from tests.data.formats.test_formats import prepared
from tests.data.prepare.test_pipeline import color_image

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def write(tmp_path):
    """Write a file next to two images."""
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(color_image(number))

    def write(data, name="rows.csv"):
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("data", "delimiter"),
    [
        ("image\ttext\n0.png\tone, two\n1.png\tthree\n", "tab"),
        ("image;text\r\n0.png;one, two\r\n1.png;three\r\n", "semicolon"),
        ("image|text\n0.png|one, two\n1.png|three\n", "bar"),
        ("sep=;\r\nimage;text\r\n0.png;one, two\r\n1.png;three\r\n", "semicolon"),
        ('"sep=|"\nimage|text\n0.png|one, two\n1.png|three\n', "bar"),
        ('image, text\n0.png, "one, two"\n1.png, three\n', "comma"),
        ('\ufeffimage,text\n0.png,"one, two"\n1.png,three\n', "comma"),
        ("sep=\\t\nimage\ttext\n0.png\tone, two\n1.png\tthree\n", "tab"),
        ('image,text\n0.png,"one, two"\n1.png,three\n,\n', "comma"),
        ('image,text\n0.png,"one, two",\n1.png,three,,\n', "comma"),
        ('image,text,,\n0.png,"one, two",,\n1.png,three,,\n', "comma"),
        # the delimiter with the known names, not the one with most fields
        ("image;text;a,b,c,d\n0.png;one, two;x\n1.png;three;x\n", "semicolon"),
    ],
)
def test_delimiter_is_found_and_logged(write, tmp_path, data, delimiter):
    source = write(data)
    logs = []
    _, rows, faults = prepared(source, tmp_path / "out", log=lambda text, _: logs.append(text))
    assert [row.texts for row in rows] == [["one, two"], ["three"]] and faults == {}
    assert f"2 rows of CSV with the delimiter {delimiter}" in logs[0]


def test_csv_with_another_suffix_is_read(write, tmp_path):
    source = write("image,caption\n0.png,one\n1.png,two\n", "captions.txt")
    with pytest.raises(DataError, match=r"none is `text`; name one with --columns text=caption"):
        prepared(source, tmp_path / "none")
    manifest, _, _ = prepared(source, tmp_path / "out", columns=("text=caption",))
    assert manifest.num_rows == 2
    rows = write('{"image": "0.png", "text": "x"}\n', "rows.txt")
    assert detect_source(str(rows)).format == "jsonl"


def test_file_without_names_of_columns_is_refused_until_they_are_numbered(write, tmp_path):
    source = write("one\t0.png\ntwo\t1.png\n", "rows.tsv")
    with pytest.raises(DataError, match=r"no names.*row \(one, 0\.png\).*image=2 text=1"):
        prepared(source, tmp_path / "none")
    _, rows, _ = prepared(source, tmp_path / "out", columns=("image=2", "text=1"))
    assert [(row.texts, row.source) for row in rows] == [
        (["one"], "rows.tsv:1"),
        (["two"], "rows.tsv:2"),
    ]
    numbered = write("0,0.png,one\n1,1.png,two\n", "numbered.csv")
    with pytest.raises(DataError, match=r"image=2 text=3"):
        prepared(numbered, tmp_path / "numbered")
    flickr = write("0.png#0\tone\n1.png#1\ttwo\n", "token.txt")
    with pytest.raises(DataError, match=r"image=1 text=2"):
        prepared(flickr, tmp_path / "flickr")
    _, rows, _ = prepared(flickr, tmp_path / "numbers", columns=("image=1", "text=2"))
    assert [row.image for row in rows] == [color_image(0), color_image(1)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("image,text\n0.png,x\n".encode("utf-16"), "is UTF-16: convert it with `iconv"),
        ("image,text\n0.png,x\n".encode("utf-16-le"), "zero bytes.*iconv -f UTF-16LE"),
        ("image,text\n0.png,x\n".encode("utf-16-be"), "zero bytes.*iconv -f UTF-16BE"),
        (bytes(64), "is no text"),
        (b"\xd0\xcf\x11\xe0" + bytes(64), "is a workbook: save the sheet as CSV"),
        (b"\xfd7zXZ" + bytes(64), "is xz: unpack it with `unxz rows.csv`"),
        (color_image(0), r"is an image \(PNG\): give a file of rows"),
        (b"a,b\n0,x\n", "if its first line is a row, number them: --columns image=1 text=2"),
        (b"image_name,comment1\n0.png,x\n", "--columns image=image_name text=comment1"),
        (b"image,text\r0.png,x\r1.png,y\r", "carriage return only"),
        (b"file_name,title\n0.png,x\n", r"--columns image=file_name text=title"),
        (b"path;x\n0.png;y\n", r"\(CSV with the delimiter semicolon\) has the columns path, x"),
        (b"image,text\n0.png,caf\xe9\n", "iconv -f CP1252"),
        (b"image,text\n0.png,one, two\n", "the delimiter, comma, needs quotes"),
        (b'image,text\n0.png,"a \\"big\\" one"\n', "not with a backslash"),
    ],
)
def test_refusal_names_what_was_found_and_the_fix(write, tmp_path, data, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepared(write(data), tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("photos/A.PNG", "photos/a.png exists: write its name exactly so"),
        ("photos/a", "photos/a.png exists"),
        (" photos/a.png", "photos/a.png exists"),
        ("a.png", "photos/a.png exists: --root .*/photos also reads files there"),
        ("/data/photos/a.png", "photos/a.png exists: write it relative to"),
        ("/data/photos/b.png", "--root /data/photos reads files of that folder"),
    ],
)
def test_missing_image_names_the_file_that_exists(write, tmp_path, path, hint):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(color_image(0))
    with pytest.raises(DataError, match=hint):
        prepared(write(f"image,text\n{path},x\n"), tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"file_name": "0.png", "caption": "x"}, "--columns image=file_name text=caption"),
        ({"image": "0.png", "question": "x"}, "columns image, question: none is `text`"),
        (
            {"data": [{"image": "0.png"}]},
            "has the columns data: none is `image` and none is `text`",
        ),
    ],
)
def test_json_without_known_columns_is_refused_before_packing(write, tmp_path, value, message):
    with pytest.raises(DataError, match=message):
        prepared(write(json.dumps(value), "rows.json"), tmp_path / "out")


def test_quotes_of_tsv_and_columns_without_a_name_are_counted(write, tmp_path):
    source = write('image\ttext\t\n0.png\t"a ""big"" dog"\t1\n1.png\tx\t\n', "rows.tsv")
    manifest, rows, _ = prepared(source, tmp_path / "out")
    assert [row.texts for row in rows] == [['"a ""big"" dog"'], ["x"]]
    counts = {text: notice["num_rows"] for text, notice in manifest.notices.items()}
    assert counts.pop("column `3` is not used") == 1
    ((text, num_rows),) = counts.items()
    assert "name the file .csv" in text and num_rows == 1


@pytest.mark.parametrize(
    ("data", "names", "unused"),
    [
        ('{"image": "0.png", "text": "x", "texts": ["y"]}\n', (), ["text"]),
        ('{"image": "0.png", "title": "y", "texts": ["x"]}\n', ("text=title",), ["texts"]),
        ('{"image": "0.png", "title": "y", "text": "x"}\n', ("text=title",), ["text"]),
    ],
)
def test_texts_that_others_replace_are_counted(write, tmp_path, data, names, unused):
    manifest, rows, _ = prepared(write(data, "rows.jsonl"), tmp_path / "out", columns=names)
    assert rows[0].texts == ["y"]
    assert [*manifest.notices] == [f"column `{name}` is not used" for name in unused]


def test_notices_do_not_grow_with_the_rows(write, tmp_path):
    lines = [{"image": "0.png", "text": f"{n}", f"c{n}": 1, f"d{n % 9}": 1} for n in range(300)]
    source = write("".join(json.dumps(line) + "\n" for line in lines), "rows.jsonl")
    manifest, _, _ = prepared(
        source, tmp_path / "out", duplicates="keep", rows_per_shard=300, keep=("d0",)
    )
    assert len(manifest.notices) == 201
    assert manifest.notices["further columns are not used"]["num_rows"] == 300 - 192
    assert any(line.startswith("33 rows: column `d3`") for line in manifest.notice_lines)


def test_known_splits_have_one_spelling(write, tmp_path):
    source = write("image,text,split\n0.png,a,TRAIN\n1.png,b,Test\n0.png,c,testA\n")
    manifest, _, _ = prepared(source, tmp_path / "out", duplicates="keep")
    assert manifest.splits == {"train": 1, "test": 1, "testA": 1}


def test_mapped_column_that_does_not_exist_is_named(write, tmp_path):
    row = {"meta": {"width": 9}, "image": "0.png", "text": "x"}
    assert prepared(write(json.dumps(row), "one.jsonl"), tmp_path / "one")[0].num_rows == 1
    source = write(json.dumps({"image": "0.png", "title": "x"}), "rows.jsonl")
    with pytest.raises(DataError, match=r"no column `titel`, .* did you mean `title`"):
        prepared(source, tmp_path / "out", columns=("text=titel",))
    columns = ("text=title", "label=klass")
    rows = write("image,title\n0.png,x\n", "rows.csv")
    with pytest.raises(UsageError, match=r"--columns label: .* no column `klass`"):
        prepared(rows, tmp_path / "out", columns=columns)
    pq.write_table(pa.table({"image": ["0.png"], "title": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match=r"--columns label: .* no column `klass`"):
        prepared(tmp_path / "rows.parquet", tmp_path / "out", columns=columns)
    lines = write('{"image": "0.png", "title": "x"}\n', "rows.jsonl")
    logs = []
    prepared(lines, tmp_path / "lines", lambda *line: logs.append(line), columns=columns)
    line = "image, text=title (no row of the first 1 has `klass`)"
    assert (line, "columns") in logs


def test_python_lists_in_a_field_are_captions(write, tmp_path):
    # The last one is written by numpy.
    lists = ["['one', 'two']", "['it''s', x]", "['one'\n 'two']"]
    source = write("image,texts\n" + "".join(f'0.png,"{each}"\n' for each in lists))
    _, rows, faults = prepared(source, tmp_path / "out")
    assert rows[0].texts == ["one", "two"]
    assert faults == {"rows.csv:3": "json", "rows.csv:4": "json"}


def test_json_array_is_streamed(write, tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "_PIECE_BYTES", 7)
    items = [
        {"image": f"{n}.png", "text": "café [x], {y}", "text_file": ["/etc/passwd"]}
        for n in range(2)
    ]
    for number, text in enumerate(
        (json.dumps(items, ensure_ascii=False), json.dumps(items, indent=1))
    ):
        source = write(f"\ufeff {text}\n", f"{number}.json")
        _, rows, faults = prepared(source, tmp_path / f"out{number}")
        assert [row.texts for row in rows] == [["café [x], {y}"]] * 2 and not faults
        assert rows[1].source == f"{number}.json:item 2"
    assert prepared(write(text, "lines.jsonl"), tmp_path / "lines")[0].num_rows == 2
    with pytest.raises(DataError, match="item 3 of the array is not JSON"):
        prepared(write(text[:-2] + ", {broken", "bad.json"), tmp_path / "bad")


def test_items_of_a_json_array_that_are_no_rows_are_named(write, tmp_path):
    row = '{"image": "0.png", "text": "x"}'
    twice = '{"image": "1.png", "text": "x", "meta": {"a": 1, "a": 2}}'
    source = write(f"[{row}, {twice}, 5]", "rows.json")
    with pytest.raises(DataError, match="'a' is given twice"):
        prepared(source, tmp_path / "out", max_bad_fraction=0.1)
    _, _, faults = prepared(source, tmp_path / "out")
    assert faults == {"rows.json:item 2": "json", "rows.json:item 3": "json"}


@pytest.mark.parametrize("settings", [{}, {"group": "image"}])
def test_listed_rows_keep_a_column_origin(write, tmp_path, settings):
    """The location of a listed row is stored next to its columns, not as one of them."""
    items = [{"image": f"{n}.png", "text": "x", "origin": f"laion {n}"} for n in range(2)]
    source = write(json.dumps(items), "rows.json")
    _, rows, _ = prepared(source, tmp_path / "out", keep=("all",), **settings)
    columns = PreparedSet.open(str(tmp_path / "out")).columns(np.arange(2))
    assert [row["origin"] for row in columns] == ["laion 0", "laion 1"]
    assert [row.source for row in rows] == ["rows.json:item 1", "rows.json:item 2"]


def test_folder_of_text_files_with_splits_is_one_source(tmp_path):
    for split, numbers in (("train", range(3)), ("val", range(3, 5))):
        folder = tmp_path / "raw" / split
        folder.mkdir(parents=True)
        lines = []
        for number in numbers:
            (folder / f"{number}.png").write_bytes(color_image(number))
            lines.append(json.dumps({"image": f"{number}.png", "text": f"color {number}"}))
        (folder / "metadata.jsonl").write_text("\n".join(lines))
    manifest, rows, _ = prepared(tmp_path / "raw", tmp_path / "out")
    assert manifest.splits == {"train": 3, "val": 2}
    assert rows[0].source == "train/metadata.jsonl:1"
    assert detect_source(str(tmp_path / "raw")).format == "jsonl"
