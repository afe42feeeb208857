"""All source formats: same rows, detection of the format, and quarantined rows with file and
line.
"""

import csv
import io
import json
import os
import tarfile
import unicodedata
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmray.config import Prepare
from mmray.data.formats.detect import detect_source
from mmray.data.formats.listing import ImageTextPairs
from mmray.data.messages import message_text
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from mmray.storage.paths import list_files
from tests.data.prepare.test_pipeline import color_image, quarantine

pytestmark = pytest.mark.usefixtures("in_process")
LAX = Prepare(max_bad_fraction=1.0, rows_per_shard=3, vocab_size=0)
COUNT = 7
LATIN = os.fsdecode(b"caf\xe9")


def prepared(source, out, log=None, **settings):
    """(manifest, rows, {source: reason} of the quarantine) of a source."""
    manifest = prepare(str(source), str(out), LAX.model_copy(update=settings), log=log)
    rows = PreparedSet.open(str(out)).read(np.arange(manifest.num_rows))
    faults = {fault["source"]: fault["reason"] for fault in quarantine(out)}
    assert manifest.num_read == manifest.num_rows + len(faults)
    return manifest, rows, faults


def text(number):
    return f"color, {number}"


def images(folder, count=COUNT):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(color_image(number))
    return folder


def csv_source(folder, delimiter=","):
    images(folder)
    source = folder / ("rows.csv" if delimiter == "," else "rows.tsv")
    with source.open("w", newline="") as file:
        writer = (
            csv.writer(file)
            if delimiter == ","
            else csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        )
        writer.writerow(["image", "text", "label"])
        writer.writerows([f"{number}.png", text(number), number] for number in range(COUNT))
    return source


def parquet_paths(folder):
    images(folder)
    columns = {"image": [f"{n}.png" for n in range(COUNT)], "text": [text(n) for n in range(COUNT)]}
    pq.write_table(
        pa.table(columns | {"label": range(COUNT), "url": ["u"] * COUNT}),
        folder / "rows.parquet",
        2,
    )
    return folder / "rows.parquet"


def parquet_bytes(folder):
    folder.mkdir(parents=True)
    pictures = [{"bytes": color_image(n), "path": f"{n}.png"} for n in range(COUNT)]
    columns = {"image": pictures, "text": [text(n) for n in range(COUNT)], "label": range(COUNT)}
    pq.write_table(pa.table(columns).slice(0, 4), folder / "a.parquet", 2)
    pq.write_table(pa.table(columns).slice(4), folder / "b.parquet", 2)
    return folder


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def tars(folder, count=COUNT):
    """Tars in img2dataset's layout: png, txt and json per key, and a Parquet and a JSON of
    statistics per tar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * 4, min(count, shard * 4 + 4)):
                stated = {
                    "caption": "of the json",
                    "label": number,
                    "url": "http://x",
                    "status": "success",
                }
                add(tar, f"{number:09d}.png", color_image(number))
                add(tar, f"{number:09d}.txt", text(number).encode())
                add(tar, f"{number:09d}.json", json.dumps(stated).encode())
        pq.write_table(
            pa.table({"url": ["http://x"], "caption": ["x"]}), folder / f"{shard:05d}.parquet"
        )
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def coco_captions(folder):
    images(folder / "val2017")
    (folder / "annotations").mkdir()
    notes = [{"image_id": n, "caption": c} for n in range(COUNT) for c in (text(n), "another")]
    notes += [{"image_id": n, "bbox": [3, 2, 6, 4], "category_id": n} for n in range(COUNT)]
    document = {
        "images": [{"id": n, "file_name": f"{n}.png"} for n in range(COUNT)],
        "annotations": notes,
    }
    (folder / "annotations" / "captions_val2017.json").write_text(json.dumps(document))
    return folder / "annotations" / "captions_val2017.json"


def pairs(folder):
    images(folder / "some")
    for number in range(COUNT):
        (folder / "some" / f"{number}.txt").write_text(f"{text(number)}\n")
    return folder


def saved(folder):
    """A dataset in the layout of `datasets.Dataset.save_to_disk`: an Arrow stream and its
    state.json.
    """
    folder.mkdir(parents=True)
    pictures = [{"bytes": color_image(n), "path": None} for n in range(COUNT)]
    table = pa.table(
        {"image": pictures, "text": [text(n) for n in range(COUNT)], "label": range(COUNT)}
    )
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


SOURCES = {
    "CSV": csv_source,
    "TSV": partial(csv_source, delimiter="\t"),
    "Parquet": parquet_paths,
    "Parquet of bytes": parquet_bytes,
    "WebDataset": tars,
    "COCO": coco_captions,
    "media and text pairs": pairs,
    "Hugging Face datasets": saved,
}


@pytest.mark.parametrize("title", SOURCES)
def test_every_format_is_detected_and_gives_the_same_rows(tmp_path, title, in_process):
    source, notes = SOURCES[title](tmp_path / "raw"), []
    manifest = prepare(
        str(source), str(tmp_path / "out"), LAX, log=lambda line, label: notes.append(line)
    )
    amount = "2 files" if title == "WebDataset" else "7 rows"
    assert (f": {amount} of {title.removesuffix(' of bytes')}") in notes[0] and str(
        tmp_path
    ) in notes[0]
    assert len(in_process) > 1
    rows = PreparedSet.open(str(tmp_path / "out")).read(np.arange(COUNT))
    assert (manifest.num_rows, manifest.num_read) == (COUNT, COUNT)
    assert [row.image for row in rows] == [color_image(number) for number in range(COUNT)]
    assert [row.texts[0] for row in rows] == [text(number) for number in range(COUNT)]
    assert all(row.checksum_ok for row in rows)
    assert len({row.key for row in rows}) == len({row.source for row in rows}) == COUNT
    if title not in ("COCO", "media and text pairs"):
        assert [row.label for row in rows] == list(range(COUNT))
    in_process.clear()
    assert prepare(str(source), str(tmp_path / "out"), LAX) == manifest
    assert in_process == []


def test_class_folders_give_labels(tmp_path):
    for name in ("red_fox", "cat"):
        images(tmp_path / "raw" / name, 2)
    (tmp_path / "raw" / "cat" / "1.png").write_bytes(b"<html>")
    (tmp_path / "raw" / "stray.png").write_bytes(color_image(9))
    manifest, rows, faults = prepared(
        tmp_path / "raw", tmp_path / "out", caption="the {}!", duplicates="keep"
    )
    assert [(row.key, row.texts, row.label) for row in rows] == [
        ("cat/0.png", ["the cat!"], 0),
        ("red_fox/0.png", ["the red fox!"], 1),
        ("red_fox/1.png", ["the red fox!"], 1),
    ]
    assert faults == {"cat/1.png": "format", "stray.png": "no-text"}
    assert (
        manifest.class_names
        == PreparedSet.open(str(tmp_path / "out")).manifest.class_names
        == ("cat", "red fox")
    )


def test_split_folders_may_contain_class_folders(tmp_path):
    for folder in ("train/cat", "eval/cat", "eval/dog"):
        images(tmp_path / "raw" / folder, 1)
    manifest, rows, _ = prepared(tmp_path / "raw", tmp_path / "out", duplicates="keep")
    assert manifest.splits == {"train": 1, "eval": 2}
    assert [row.label for row in rows] == [0, 1, 0] and manifest.class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("train", "test"),
    [("images/train", "images/test"), ("seg_train/seg_train", "seg_test/seg_test")],
)
def test_split_folders_may_be_in_another_folder_or_repeated(tmp_path, train, test):
    for folder in (f"{train}/cat", f"{train}/dog", f"{test}/cat"):
        images(tmp_path / "raw" / folder, 1)
    manifest, _, _ = prepared(tmp_path / "raw", tmp_path / "out", duplicates="keep")
    assert (manifest.splits, manifest.class_names) == ({"test": 1, "train": 2}, ("cat", "dog"))


def test_format_folders_makes_classes_of_folders_named_like_splits(tmp_path):
    for folder in ("car", "train", "test"):
        images(tmp_path / "raw" / folder, 1)
    settings = {"format": "folders", "duplicates": "keep"}
    manifest, _, _ = prepared(tmp_path / "raw", tmp_path / "out", **settings)
    assert manifest.class_names == ("car", "test", "train") and manifest.splits == {}


def test_stray_images_do_not_turn_splits_into_classes(tmp_path):
    hidden = ("__MACOSX/train/cat", ".cache/x", "train/cat/.thumbnails")
    for folder in ("Training/cat", "test/dog", "more", *hidden):
        images(tmp_path / "raw" / folder, 1)
    for stray in ("preview.png", "test/preview.png", "test/dog/._0.png"):
        (tmp_path / "raw" / stray).write_bytes(color_image(9))
    manifest, rows, faults = prepared(tmp_path / "raw", tmp_path / "out", duplicates="keep")
    assert [(row.key, row.split, row.label) for row in rows] == [
        ("Training/cat/0.png", "train", 0), ("test/dog/0.png", "test", 1)
    ]  # fmt: skip
    assert manifest.class_names == ("cat", "dog")
    assert faults == dict.fromkeys(("more/0.png", "preview.png", "test/preview.png"), "no-text")


@pytest.mark.parametrize(
    ("folders", "file", "message"),
    [
        (("Images",), "captions.txt", r"may have their captions \(captions\.txt\)"),
        (
            ("train2017", "val2017"),
            "annotations/captions_val2017.json",
            r"\(annotations/captions_val2017\.json\)",
        ),
        (("train/cat", "train/dog"), "train/metadata.jsonl", r"\(train/metadata\.jsonl\)"),
        (("cat", "dog"), "rows.CSV", r"\(rows\.CSV\).*--format folders"),
        (("Images",), "readme.txt", r"two classes \('Images'\), and no captions.*--format folders"),
        (("train", "test"), "LICENSE", r"\(none in the layout CLASS/image or SPLIT/CLASS/image\)"),
    ],
)
def test_folders_that_may_not_be_classes_are_refused(tmp_path, folders, file, message):
    for folder in folders:
        images(tmp_path / folder, 1)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("x")
    with pytest.raises(DataError, match=message):
        detect_source(str(tmp_path))
    assert detect_source(str(tmp_path), "folders").format == "folders"


def test_incomplete_pairs_and_non_utf8_captions_are_quarantined(tmp_path):
    source = pairs(tmp_path / "raw")
    (source / "some" / "1.txt").unlink()
    (source / "some" / "2.png").unlink()
    for name, data in (("3.txt", b"caf\xe9"), ("4.txt", b" \n"), ("5.txt", b"one\n\ntwo\n")):
        (source / "some" / name).write_bytes(data)
    (source / "some" / "Thumbs.db").write_bytes(b"x")
    _, rows, faults = prepared(source, tmp_path / "out")
    assert faults == {
        "some/1.png": "no-text", "some/2.txt": "no-image", "some/3.png": "encoding",
        "some/4.png": "blank"
    }  # fmt: skip
    assert [row.texts for row in rows] == [[text(0)], ["one", "two"], [text(6)]]
    (source / "some" / "3.txt").write_text("fixed")
    (source / "some" / "6.txt").write_text("edited")
    _, rows, faults = prepared(source, tmp_path / "out")
    assert [row.texts for row in rows][1:] == [["fixed"], ["one", "two"], ["edited"]]
    assert "some/3.png" not in faults


def test_csv_keeps_quoted_fields_and_reports_bad_lines(tmp_path):
    folder = images(tmp_path / "raw")
    (folder / "a.csv").write_bytes(
        b'\xef\xbb\xbfimage,text,label\r\n\r\n0.png,"two\r\nlines, ""quoted""",3\r\n'
        b"1.png\r\n2.png,caf\xe9,1\r\n"
        b'3.png,x,-1\r\n4.png,"open,1\r\n5.png,y,\r\n'
    )
    _, rows, faults = prepared(folder / "a.csv", tmp_path / "out")
    assert (rows[0].texts, rows[0].label, rows[0].source) == (['two lines, "quoted"'], 3, "a.csv:3")
    assert faults == {
        "a.csv:5": "columns",
        "a.csv:6": "encoding",
        "a.csv:8": "csv",
    }
    assert [(row.label, row.source) for row in rows[1:]] == [(-1, "a.csv:7"), (None, "a.csv:9")]


def test_csv_list_is_one_json_value(tmp_path):
    folder = images(tmp_path / "raw")
    texts = ('["a", "b"]', '["a"], "x": 1', '["a"] "b"', '{"a": 1}')
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["image", "texts"], *([f"{number}.png", text] for number, text in enumerate(texts))]
        )
    _, rows, faults = prepared(folder / "a.csv", tmp_path / "out")
    assert [row.texts for row in rows] == [["a", "b"]]
    assert faults == {"a.csv:3": "json", "a.csv:4": "json", "a.csv:5": "type"}


def test_csv_drops_its_header_only_once(tmp_path):
    folder = images(tmp_path / "raw")
    # rows_per_shard is 3
    (folder / "a.csv").write_bytes(b"\n\n\n\nimage,text\n0.png,x\nimage,text\n")
    _, rows, faults = prepared(folder / "a.csv", tmp_path / "out")
    assert [row.source for row in rows] == ["a.csv:6"] and faults == {"a.csv:7": "missing-image"}


def test_only_an_appended_tar_is_packed(tmp_path, in_process):
    source = tars(tmp_path / "raw")
    prepared(source, tmp_path / "out")
    in_process.clear()
    tar_of(source / "00002.tar", "new")
    manifest, rows, _ = prepared(source, tmp_path / "out")
    assert (manifest.num_rows, len(in_process), rows[-1].key) == (COUNT + 1, 1, "00002.tar/new")


def test_columns_can_be_renamed(tmp_path):
    folder = images(tmp_path / "raw")
    table = {
        "path": [f"{n}.png" for n in range(COUNT)],
        "caption": [text(n) for n in range(COUNT)],
        "text": ["no"] * 7,
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    with pytest.raises(
        DataError, match=r"columns path, caption, text: none is `image`.*--columns image=path"
    ):
        prepared(folder / "rows.parquet", tmp_path / "out")
    _, rows, _ = prepared(
        folder / "rows.parquet", tmp_path / "b", columns=("image=path", "text=caption")
    )
    assert [row.texts for row in rows] == [[text(n)] for n in range(COUNT)]


def test_bad_parquet_rows_are_quarantined(tmp_path):
    (tmp_path / "raw").mkdir()
    texts = pa.array([b"a", b"caf\xe9", b" ", b"b"], pa.binary()).view(pa.string())
    table = pa.table(
        {"image": [color_image(0), color_image(1), color_image(2), b""], "text": texts}
    )
    pq.write_table(table, tmp_path / "raw" / "rows.parquet")
    _, rows, faults = prepared(tmp_path / "raw" / "rows.parquet", tmp_path / "out")
    assert [row.source for row in rows] == ["rows.parquet:1"]
    assert faults == {
        "rows.parquet:2": "encoding",
        "rows.parquet:3": "blank",
        "rows.parquet:4": "empty",
    }


def test_parquet_next_to_pairs_is_ignored_only_in_the_layout_of_img2dataset(tmp_path):
    source = pairs(tmp_path / "raw")
    (source / "some" / "0.json").write_text('{"caption": "of the json"}')
    pq.write_table(
        pa.table({"url": ["http://x"], "caption": ["x"], "key": ["0"]}), source / "some.parquet"
    )
    _, rows, _ = prepared(source, tmp_path / "out")
    assert [(row.key, row.texts) for row in rows] == [
        (f"some/{n}.png", [text(n)]) for n in range(COUNT)
    ]
    images(source)  # these have no Parquet with the name of their folder
    assert (
        detect_source(str(source)).format == "parquet"
        and detect_source(str(source), "pairs").format == "pairs"
    )


def test_cls_member_is_the_label(tmp_path):
    members = [("a.webp", color_image(30, "WEBP")), ("a.txt", b"one"), ("a.cls", b"3")]
    members += [("b.webp", color_image(60, "WEBP")), ("b.txt", b"two"), ("b.cls", b" 11\n")]
    members += [("b.json", b'{"label": 5, "caption": "no", "text": "two", "url": null, "x": 1}')]
    members += [("b.mask.png", b"x"), ("b.npy", b"x")]
    source = folder_of_tar(tmp_path / "raw", members)
    manifest, rows, faults = prepared(source, tmp_path / "out")
    assert [(row.key, row.texts, row.label) for row in rows] == [
        ("A.TAR/a", ["one"], 3),
        ("A.TAR/b", ["two"], 11),
    ]
    assert rows[1].image == color_image(60, "WEBP") and not faults
    assert manifest.notice_lines == [
        "1 rows: columns `label`, `caption`, `x` are not used (for example A.TAR/b)",
        "1 rows: the member `.mask.png` of a sample is not used (for example A.TAR/b)",
        "1 rows: the member `.npy` of a sample is not used (for example A.TAR/b)",
    ]


def test_damaged_parquet_page_quarantines_only_its_rows(tmp_path):
    source = parquet_bytes(tmp_path / "raw") / "a.parquet"
    data = bytearray(source.read_bytes())
    at = pq.ParquetFile(source).metadata.row_group(1).column(0).data_page_offset
    data[at : at + 40] = b"\xff" * 40
    source.write_bytes(data)
    _, rows, faults = prepared(source, tmp_path / "out")
    assert [row.source for row in rows] == ["a.parquet:1", "a.parquet:2"]
    assert faults == {"a.parquet:3": "damaged", "a.parquet:4": "damaged"}


def test_saved_datasets_with_splits_or_indices_are_read(tmp_path):
    (tmp_path / "raw").mkdir()
    saved(tmp_path / "raw" / "train")
    (tmp_path / "raw" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert prepared(tmp_path / "raw", tmp_path / "out")[0].splits == {"train": COUNT}
    state = json.loads((tmp_path / "raw" / "train" / "state.json").read_text())
    (tmp_path / "raw" / "train" / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": ["x"]})
    )
    with pytest.raises(DataError, match="flatten_indices"):
        prepared(tmp_path / "raw", tmp_path / "b")


def folder_of_tar(folder, members):
    folder.mkdir()
    with tarfile.open(folder / "A.TAR", "w") as tar:
        for member, data in members:
            add(tar, member, data)
    return folder


def test_bad_tar_members_reject_their_rows_only(tmp_path):
    """More kinds than the table of bad inputs has."""
    photo = color_image(0)
    members = [("/abs.png", photo), ("latin.png", photo), ("latin.txt", b"caf\xe9")]
    members += [("latin-class.png", photo), ("latin-class.cls", b"\xe9")]
    members += [("cls.png", color_image(1)), ("cls.cls", b"cat"), ("cls.txt", b"x")]
    members += [("only.txt", b"no image"), ("only.depth.png", photo)]
    members += [("json.png", photo), ("json.json", b'{"caption": NaN}')]
    members += [("good.PNG", photo), ("good.json", b'{"caption": "from the json"}')]
    _, rows, faults = prepared(folder_of_tar(tmp_path / "raw", members), tmp_path / "out")
    assert [(row.key, row.texts, row.source) for row in rows] == [
        ("A.TAR/cls", ["x"], "A.TAR/cls"),
        ("A.TAR/good", ["from the json"], "A.TAR/good"),
    ]
    assert faults == {
        "A.TAR/abs": "path", "A.TAR/latin": "encoding", "A.TAR/latin-class": "encoding",
        "A.TAR/only": "no-image", "A.TAR/json": "no-text",
    }  # fmt: skip
    quarantined = quarantine(tmp_path / "out")
    assert all(entry["key"] == entry["source"] for entry in quarantined)
    details = {entry["source"]: entry["detail"] for entry in quarantined}
    assert (
        "it has depth.png" in details["A.TAR/only"]
        and ("the txt is not UTF-8") in details["A.TAR/latin"]
    )
    assert "the cls is not UTF-8" in details["A.TAR/latin-class"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\xef\xbb\xbf{"image": "a.png", "text": "x"}\n', "jsonl"),
        (b'{"image": "a.png", "text": "' + b"x" * 100_000 + b'"}\n{}\n', "jsonl"),
        (b'\xef\xbb\xbf{"images": [], "annotations": []}', "coco"),
        (b'{"images": [], "annotations": [' + b"0," * 100_000 + b"0]}", "coco"),
        (b'{\n"images": [], "annotations": []}', "coco"),
    ],
    ids=["rows with a BOM", "long row", "COCO with a BOM", "long COCO", "COCO over lines"],
)
def test_json_file_is_rows_or_coco(tmp_path, content, expected):
    (tmp_path / "a.json").write_bytes(content)
    assert detect_source(str(tmp_path / "a.json")).format == expected


def test_unsupported_sources_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        detect_source(str(tmp_path / "none.csv"))
    (tmp_path / "rows.csv").write_text("image,text\n")
    with pytest.raises(DataError, match=r"give the path of one of its files \(rows\.csv\)"):
        detect_source(str(tmp_path))
    with pytest.raises(UsageError, match="is a folder, and coco is a file"):
        detect_source(str(tmp_path), "coco")
    assert detect_source(str(tmp_path / "rows.csv"), "tsv").format == "tsv"
    with pytest.raises(DataError, match=r"has no rows \(it was read as CSV"):
        prepared(tmp_path / "rows.csv", tmp_path / "out")


def test_prepared_set_is_no_source(tmp_path):
    prepared(csv_source(tmp_path / "raw"), tmp_path / "out")
    with pytest.raises(
        DataError,
        match=r"/out is already prepared: use it as it is: mmray train --data\.train /.*/out",
    ):
        detect_source(str(tmp_path / "out"))


def tar_of(path, *stems, **options):
    with tarfile.open(path, "w", **options) as tar:
        for stem in stems:
            add(tar, f"{stem}.png", color_image(ord(stem[0])))
            add(tar, f"{stem}.txt", b"x")
    return path


def test_tar_member_with_non_utf8_name_is_quarantined(tmp_path):
    tar_of(tmp_path / "a.tar", "a", "caf\xe9", "z", format=tarfile.GNU_FORMAT, encoding="latin-1")
    manifest, _, faults = prepared(tmp_path / "a.tar", tmp_path / "out")
    assert (manifest.num_rows, faults) == (2, {"a.tar/caf\\udce9": "path"})


def test_files_with_non_utf8_names_are_quarantined(tmp_path):
    folder = tmp_path / "raw"
    for number, name in enumerate(("cat", "dog", LATIN)):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(color_image(number))
    (folder / "dog" / f"{LATIN}.png").write_bytes(color_image(9))
    manifest, _, faults = prepared(folder, tmp_path / "out")
    assert (manifest.num_rows, faults) == (
        2,
        {"caf\\udce9/1.png": "key", "dog/caf\\udce9.png": "key"},
    )


def test_json_extension_is_json_lines_or_an_array(tmp_path):
    (tmp_path / "a.png").write_bytes(color_image(1))
    row = json.dumps({"image": "a.png", "text": "x"})
    (tmp_path / "two.json").write_text(f"{row}\n{row}\n")
    assert prepared(tmp_path / "two.json", tmp_path / "out", duplicates="keep")[0].num_rows == 2
    (tmp_path / "llava.json").write_text(f"[{row}]")
    assert prepared(tmp_path / "llava.json", tmp_path / "array")[0].num_rows == 1


def test_joined_tars_are_read(tmp_path):
    first, second = (tar_of(tmp_path / f"{stem}.tar", stem).read_bytes() for stem in "ab")
    (tmp_path / "both.tar").write_bytes(first + second)
    manifest, _, faults = prepared(tmp_path / "both.tar", tmp_path / "out")
    assert (manifest.num_rows, faults) == (2, {})


def test_csv_may_hold_messages(tmp_path):
    (tmp_path / "a.png").write_bytes(color_image(1))
    said = json.dumps(
        [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A color."}]
    )
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "messages"], ["a.png", said]])
    _, rows, _ = prepared(tmp_path / "a.csv", tmp_path / "out")
    assert [message_text(turn) for turn in rows[0].messages] == ["What?", "A color."]


def test_folder_walk_follows_links_without_cycles(tmp_path):
    for name in ("a/1.txt", "b/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "other").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert list_files(tmp_path) == ["a/1.txt", "a/other/2.txt", "b/2.txt", "b/back/1.txt"]
    assert list_files(tmp_path / "a")[:2] == ["1.txt", "other/2.txt"]
    with pytest.raises(FileNotFoundError):
        list_files(tmp_path / "none")


def test_files_of_samples_that_are_not_adjacent_are_refused_with_the_fix(tmp_path):
    members = [(f"{stem}.png", color_image(n)) for n, stem in enumerate("abc")]
    members += [(f"{stem}.txt", b"x") for stem in "abc"]
    with pytest.raises(DataError, match=r"sample a are not adjacent \(\.png .* \.txt\).*--sort"):
        prepared(folder_of_tar(tmp_path / "raw", members), tmp_path / "out")


def test_tars_take_their_class_names_from_a_file(tmp_path):
    members = [("a.png", color_image(0)), ("a.cls", b"1"), ("b.png", color_image(1))]
    source = folder_of_tar(tmp_path / "raw", [*members, ("b.cls", b"0")])
    (source / "classnames.txt").write_text("cat\nred_fox\n")
    for number, path in enumerate((source, source / "A.TAR")):
        manifest, rows, _ = prepared(path, tmp_path / f"out{number}", caption="the {}")
        assert manifest.class_names == ("cat", "red fox")
        assert [row.texts for row in rows] == [["the red fox"], ["the cat"]]


def test_compressed_tars_name_the_command_that_unpacks_them(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(DataError, match=r"gunzip a\.tar\.gz"):
        prepared(tmp_path, tmp_path / "out")


def test_caption_files_of_other_encodings_are_read(tmp_path):
    for number, encoding in enumerate(("utf-8-sig", "utf-16", "utf-8")):
        (tmp_path / f"{number}é.png").write_bytes(color_image(number))
        name = unicodedata.normalize("NFD", f"{number}é.txt")  # as macOS writes it
        (tmp_path / name).write_bytes("Zoë".encode(encoding))
    _, rows, faults = prepared(tmp_path, tmp_path / "out")
    assert [row.texts for row in rows] == [["Zoë"]] * 3 and not faults


@pytest.mark.parametrize("caption", ["{}.caption", "{}.png.txt", "{}.cap", "{}.txt"])
def test_caption_files_of_other_names_are_read(tmp_path, caption):
    for number, folder in enumerate(("10_cat", "5_dog")):
        images(tmp_path / "raw" / folder, 0)
        image = f"{folder}/{number}"
        (tmp_path / "raw" / f"{image}.png").write_bytes(color_image(number))
        (tmp_path / "raw" / caption.format(image)).write_text(f"caption {number}")
    (tmp_path / "raw" / "README.txt").write_text("about")
    logs = []
    _, rows, faults = prepared(
        tmp_path / "raw", tmp_path / "out", log=lambda *line: logs.append(line)
    )
    assert [row.texts for row in rows] == [["caption 0"], ["caption 1"]] and not faults
    assert ("1 files by suffix: .txt 1", "ignored") in logs


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_files_of_other_formats_in_a_folder_are_counted(tmp_path, kind):
    for name in ("b.tar.zst", "c.tar.zst", "d.CSV", "e.parquet.bak", "classnames.txt", "LICENSE"):
        (tmp_path / name).write_text("x")
    source = tar_of(tmp_path / "a.tar", "a") if kind == "tar" else parquet_paths(tmp_path)
    logs = []
    prepared(source.parent, tmp_path / "out", log=lambda *line: logs.append(line))
    assert ("3 files by suffix: .zst 2, .CSV 1", "ignored") in logs


@pytest.mark.parametrize("stem", ["license_plate_1", "readme-2", "licences"])
def test_rows_with_names_like_licenses_are_read(tmp_path, stem):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tars = tmp_path / "raw"
    tars.mkdir()
    with tarfile.open(tars / "a.tar", "w") as tar:
        for name, data in (
            ("LICENSE-MIT", b"about"),
            ("README_zh.md", b"about"),
            (f"{stem}.json", json.dumps({"messages": turns}).encode()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    _, rows, faults = prepared(tars, tmp_path / "out")
    assert [row.key for row in rows] == [f"a.tar/{stem}"] and not faults


def test_other_files_named_like_images_may_be_captions(tmp_path):
    for folder in ("cat", "dog"):
        images(tmp_path / folder, 1)
        (tmp_path / folder / "0.xml").write_text("<x/>")
    with pytest.raises(
        DataError, match=r"their captions \(cat/0\.xml, dog/0\.xml\): .* from \.txt, \.caption"
    ):
        detect_source(str(tmp_path))


def test_images_that_are_not_read_are_bad_rows_and_other_files_are_counted(tmp_path):
    for number, folder in enumerate(("cat", "dog")):
        images(tmp_path / "raw" / folder, 0)
        (tmp_path / "raw" / folder / "a.png").write_bytes(color_image(number))
        (tmp_path / "raw" / folder / "b.cr2").write_bytes(encode_tiff())
        (tmp_path / "raw" / folder / "c.mp4").write_bytes(b"x")
    logs = {}
    manifest, _, faults = prepared(
        tmp_path / "raw", tmp_path / "out", log=lambda text, heading: logs.update({heading: text})
    )
    assert faults == {"cat/b.cr2": "format", "dog/b.cr2": "format"} and manifest.num_rows == 2
    assert ".cr2 is not read" in quarantine(tmp_path / "out")[0]["detail"]
    assert logs["ignored"] == "2 files by suffix: .mp4 2"


def encode_tiff():
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "TIFF")
    return out.getvalue()


def test_of_subtitles_in_several_languages_one_is_used_for_all_files(tmp_path):
    for number in range(8):
        for suffix in ("mp4", "en.srt", "de.srt"):
            (tmp_path / f"{number}.{suffix}").touch()
    rows = ImageTextPairs(tmp_path, "", {}).list_rows()
    assert [row["language"] for _, row in rows] == ["de"] * 8
