"""All source formats: same rows, detection of the format, errors with file and line."""

import csv
import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.config import Prepare
from mmray.data.formats.detect import detect_source
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.prepare.pack import pack_chunk
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from tests.data.prepare.test_pipeline import colour_image

LAX = Prepare(max_bad_fraction=1.0, rows_per_shard=3, vocab_size=0)
COUNT = 7


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Pack without Ray; the fixture lists the chunks that were packed."""
    packed = []

    def run(job, chunks):
        for chunk in chunks:
            packed.append(chunk.index)
            yield pack_chunk(job, chunk)

    monkeypatch.setattr(prepare_module, "pack_chunks", run)
    return packed


def prepared(source, out, **settings):
    """(manifest, rows, {source: reason} of the quarantine) of a source."""
    manifest = prepare(str(source), str(out), LAX.model_copy(update=settings))
    rows = PreparedSet.open(str(out)).read(np.arange(manifest.num_rows))
    faults = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert manifest.num_read == manifest.num_rows + len(faults)
    return manifest, rows, {fault["source"]: fault["reason"] for fault in faults}


def text(number):
    return f"colour, {number}"


def lossy(number, kind):
    """JPEG of a colour that no other number shares after compression."""
    return colour_image(number * 30, kind)


def images(folder, count=COUNT):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(colour_image(number))
    return folder


def csv_source(folder, delimiter=","):
    images(folder)
    source = folder / ("rows.csv" if delimiter == "," else "rows.tsv")
    with source.open("w", newline="") as file:
        writer = csv.writer(file) if delimiter == "," else csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        writer.writerow(["image", "text", "label"])
        writer.writerows([f"{number}.png", text(number), number] for number in range(COUNT))
    return source


def tsv_source(folder):
    return csv_source(folder, "\t")


def parquet_paths(folder):
    images(folder)
    columns = {"image": [f"{n}.png" for n in range(COUNT)], "text": [text(n) for n in range(COUNT)]}
    pq.write_table(pa.table(columns | {"label": range(COUNT), "url": ["u"] * COUNT}), folder / "rows.parquet", 2)
    return folder / "rows.parquet"


def parquet_bytes(folder):
    folder.mkdir(parents=True)
    pictures = [{"bytes": colour_image(n), "path": f"{n}.png"} for n in range(COUNT)]
    columns = {"image": pictures, "text": [text(n) for n in range(COUNT)], "label": range(COUNT)}
    pq.write_table(pa.table(columns).slice(0, 4), folder / "a.parquet", 2)
    pq.write_table(pa.table(columns).slice(4), folder / "b.parquet", 2)
    return folder


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def tars(folder, count=COUNT):
    """Tars in img2dataset's layout: png, txt and json per key, and a Parquet and a JSON of statistics per tar."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * 4, min(count, shard * 4 + 4)):
                stated = {"caption": "of the json", "label": number, "url": "http://x", "status": "success"}
                add(tar, f"{number:09d}.png", colour_image(number))
                add(tar, f"{number:09d}.txt", text(number).encode())
                add(tar, f"{number:09d}.json", json.dumps(stated).encode())
        pq.write_table(pa.table({"url": ["http://x"], "caption": ["x"]}), folder / f"{shard:05d}.parquet")
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def downloaded(folder):
    """Files in img2dataset's default layout: 00000/000000000.jpg, .txt and .json, and a Parquet of all requested rows
    next to each folder; the last folder has no downloaded row."""
    for shard in range(2):
        images_of = folder / f"{shard:05d}"
        images_of.mkdir(parents=True)
        for number in range(shard * 4, min(COUNT, shard * 4 + 4)):
            stem = images_of / f"{shard * 10**4 + number:09d}"
            stem.with_suffix(".jpg").write_bytes(lossy(number, "JPEG"))
            stem.with_suffix(".txt").write_text(text(number))
            stem.with_suffix(".json").write_text(json.dumps({"caption": "of the json", "url": "http://x"}))
    for shard in range(3):
        columns = {"url": ["http://x"], "caption": ["x"], "key": ["000000000"], "status": ["success"]}
        pq.write_table(pa.table(columns), folder / f"{shard:05d}.parquet")
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def coco_captions(folder):
    images(folder / "val2017")
    (folder / "annotations").mkdir()
    notes = [{"image_id": n, "caption": c} for n in range(COUNT) for c in (text(n), "another")]
    notes += [{"image_id": n, "bbox": [3, 2, 6, 4], "category_id": n} for n in range(COUNT)]
    document = {"images": [{"id": n, "file_name": f"{n}.png"} for n in range(COUNT)], "annotations": notes}
    (folder / "annotations" / "captions_val2017.json").write_text(json.dumps(document))
    return folder / "annotations" / "captions_val2017.json"


def pairs(folder):
    images(folder / "some")
    for number in range(COUNT):
        (folder / "some" / f"{number}.txt").write_text(f"{text(number)}\n")
    return folder


def saved(folder):
    """A dataset in the layout of `datasets.Dataset.save_to_disk`: an Arrow stream and its state.json."""
    folder.mkdir(parents=True)
    pictures = [{"bytes": colour_image(n), "path": None} for n in range(COUNT)]
    table = pa.table({"image": pictures, "text": [text(n) for n in range(COUNT)], "label": range(COUNT)})
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


SOURCES = {
    "CSV": csv_source,
    "TSV": tsv_source,
    "Parquet": parquet_paths,
    "Parquet of bytes": parquet_bytes,
    "WebDataset": tars,
    "COCO": coco_captions,
    "image and text pairs": pairs,
    "Hugging Face datasets": saved,
}


@pytest.mark.parametrize("title", SOURCES)
def test_every_format_is_detected_and_gives_the_same_rows(tmp_path, title, in_process):
    source, said = SOURCES[title](tmp_path / "raw"), []
    manifest = prepare(str(source), str(tmp_path / "out"), LAX, notify=lambda line, label: said.append(line))
    amount = "2 files" if title == "WebDataset" else "7 rows"
    assert f": {amount} of {title.removesuffix(' of bytes')}" in said[0] and str(tmp_path) in said[0]
    assert len(in_process) > 1
    rows = PreparedSet.open(str(tmp_path / "out")).read(np.arange(COUNT))
    assert (manifest.num_rows, manifest.num_read) == (COUNT, COUNT)
    assert [row.image for row in rows] == [colour_image(number) for number in range(COUNT)]
    assert [row.texts[0] for row in rows] == [text(number) for number in range(COUNT)]
    assert all(row.checksum_ok for row in rows)
    assert len({row.key for row in rows}) == len({row.source for row in rows}) == COUNT
    if title not in ("COCO", "image and text pairs"):
        assert [row.label for row in rows] == list(range(COUNT))
    in_process.clear()
    assert prepare(str(source), str(tmp_path / "out"), LAX) == manifest
    assert in_process == []


def test_class_folders_give_labels(tmp_path):
    for name in ("red_fox", "cat"):
        images(tmp_path / "raw" / name, 2)
    (tmp_path / "raw" / "cat" / "1.png").write_bytes(b"<html>")
    (tmp_path / "raw" / "stray.png").write_bytes(colour_image(9))
    manifest, rows, faults = prepared(tmp_path / "raw", tmp_path / "out", caption="the {}!", duplicates="keep")
    assert [(row.key, row.texts, row.label) for row in rows] == [
        ("cat/0.png", ["the cat!"], 0), ("red_fox/0.png", ["the red fox!"], 1), ("red_fox/1.png", ["the red fox!"], 1)
    ]  # fmt: skip
    assert faults == {"cat/1.png": "format", "stray.png": "no-text"}
    assert manifest.class_names == PreparedSet.open(str(tmp_path / "out")).manifest.class_names == ("cat", "red fox")


def test_split_folders_may_contain_class_folders(tmp_path):
    for split, number in (("train", 0), ("val", 1)):
        folder = tmp_path / "raw" / split / "cat"
        folder.mkdir(parents=True)
        (folder / f"{number}.png").write_bytes(colour_image(number))
    manifest, rows, _ = prepared(tmp_path / "raw", tmp_path / "out")
    assert manifest.splits == {"train": 1, "val": 1}
    assert [row.label for row in rows] == [0, 0] and manifest.class_names == ("cat",)


def test_incomplete_pairs_and_non_utf8_captions_are_quarantined(tmp_path):
    source = pairs(tmp_path / "raw")
    (source / "some" / "1.txt").unlink()
    (source / "some" / "2.png").unlink()
    (source / "some" / "3.txt").write_bytes(b"caf\xe9")
    (source / "some" / "4.txt").write_text(" \n")
    (source / "some" / "5.txt").write_text("one\n\ntwo\n")
    _, rows, faults = prepared(source, tmp_path / "out")
    assert faults == {
        "some/1.png": "no-text", "some/2.txt": "no-image", "some/3.png": "encoding", "some/4.png": "blank"
    }  # fmt: skip
    assert [row.texts for row in rows] == [[text(0)], ["one", "two"], [text(6)]]


def test_csv_keeps_quoted_fields_and_reports_bad_lines(tmp_path):
    folder = images(tmp_path / "raw")
    (folder / "a.csv").write_bytes(
        b'\xef\xbb\xbfimage,text,label\r\n\r\n0.png,"two\r\nlines, ""quoted""",3\r\n1.png\r\n2.png,caf\xe9,1\r\n'
        b'3.png,x,cat\r\n4.png,"open,1\r\n5.png,y,\r\n'
    )
    _, rows, faults = prepared(folder / "a.csv", tmp_path / "out")
    assert (rows[0].texts, rows[0].label, rows[0].source) == (['two lines, "quoted"'], 3, "a.csv:3")
    assert faults == {"a.csv:5": "columns", "a.csv:6": "encoding", "a.csv:7": "label", "a.csv:8": "csv"}


def append_to_csv(source):
    (source.parent / "new.png").write_bytes(colour_image(99))
    source.write_bytes(source.read_bytes() + b"new.png,new,\r\n")


def append_tar(source):
    with tarfile.open(source / "00002.tar", "w") as tar:
        add(tar, "new.png", colour_image(99))
        add(tar, "new.txt", b"new")


@pytest.mark.parametrize(("make", "append"), [(csv_source, append_to_csv), (tars, append_tar)])
def test_only_appended_rows_are_packed(tmp_path, in_process, make, append):
    source = make(tmp_path / "raw")
    prepared(source, tmp_path / "out")
    in_process.clear()
    append(source)
    manifest, rows, _ = prepared(source, tmp_path / "out")
    assert (manifest.num_rows, len(in_process), rows[-1].texts) == (COUNT + 1, 1, ["new"])


def test_columns_can_be_renamed(tmp_path):
    folder = images(tmp_path / "raw")
    table = {"path": [f"{n}.png" for n in range(COUNT)], "caption": [text(n) for n in range(COUNT)], "text": ["no"] * 7}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    with pytest.raises(DataError, match=r"columns path, caption, text: none is `image`.*--columns image=NAME"):
        prepared(folder / "rows.parquet", tmp_path / "out")
    _, rows, _ = prepared(folder / "rows.parquet", tmp_path / "b", columns=("image=path", "text=caption"))
    assert [row.texts for row in rows] == [[text(n)] for n in range(COUNT)]
    with pytest.raises(UsageError, match="OURS=THEIRS"):
        Prepare(columns=("picture=x",))


def test_bad_parquet_rows_are_quarantined(tmp_path):
    (tmp_path / "raw").mkdir()
    texts = pa.array([b"a", b"caf\xe9", b" ", b"b"], pa.binary()).view(pa.string())
    table = pa.table({"image": [colour_image(0), colour_image(1), colour_image(2), b""], "text": texts})
    pq.write_table(table, tmp_path / "raw" / "rows.parquet")
    _, rows, faults = prepared(tmp_path / "raw" / "rows.parquet", tmp_path / "out")
    assert [row.source for row in rows] == ["rows.parquet:1"]
    assert faults == {"rows.parquet:2": "encoding", "rows.parquet:3": "blank", "rows.parquet:4": "empty"}


def test_img2dataset_files_are_read_as_image_text_pairs(tmp_path):
    source, said = downloaded(tmp_path / "raw"), []
    manifest = prepare(str(source), str(tmp_path / "out"), LAX, notify=lambda line, label: said.append(line))
    assert ": 7 rows of image and text pairs" in said[0] and manifest.num_read == COUNT
    rows = PreparedSet.open(str(tmp_path / "out")).read(np.arange(COUNT))
    assert [row.key for row in rows][3:5] == ["00000/000000003.jpg", "00001/000010004.jpg"]
    assert [(row.texts, row.image) for row in rows] == [([text(n)], lossy(n, "JPEG")) for n in range(COUNT)]


def test_unrelated_parquet_next_to_pairs_is_the_source(tmp_path):
    source = parquet_paths(tmp_path / "raw").parent
    pairs(source)
    assert detect_source(str(source)).format == "parquet" and detect_source(str(source), "pairs").format == "pairs"
    (source / "some.parquet").write_bytes((source / "rows.parquet").read_bytes())
    assert detect_source(str(source)).format == "parquet"  # images of the top folder have no Parquet of the same name


def test_cls_member_is_the_label(tmp_path):
    members = [("a.webp", lossy(1, "WEBP")), ("a.txt", b"one"), ("a.cls", b"3")]
    members += [("b.webp", lossy(2, "WEBP")), ("b.txt", b"two"), ("b.cls", b" 11\n")]
    members += [("b.json", b'{"label": 5, "caption": "no"}')]
    _, rows, faults = prepared(folder_of_tar(tmp_path / "raw", members), tmp_path / "out")
    assert [(row.key, row.texts, row.label) for row in rows] == [("A/a", ["one"], 3), ("A/b", ["two"], 11)]
    assert rows[1].image == lossy(2, "WEBP") and not faults


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
    (tmp_path / "raw" / "train" / "state.json").write_text(json.dumps(state | {"_indices_data_files": ["x"]}))
    with pytest.raises(DataError, match="flatten_indices"):
        prepared(tmp_path / "raw", tmp_path / "b")


def folder_of_tar(folder, members, name="A.TAR"):
    folder.mkdir()
    with tarfile.open(folder / name, "w") as tar:
        for member, data, *kind in members:
            if kind:
                info = tarfile.TarInfo(member)
                info.type, info.linkname = kind[0], "/etc/passwd"
                tar.addfile(info)
            else:
                add(tar, member, data)
    return folder


def test_bad_tar_members_reject_their_rows_only(tmp_path):
    """More kinds than the table of bad inputs has."""
    picture = colour_image(0)
    members = [("link.png", b"", tarfile.LNKTYPE), ("link.txt", b"x"), ("pipe.png", b"", tarfile.FIFOTYPE)]
    members += [("/abs.png", picture), ("latin.png", picture), ("latin.txt", b"caf\xe9")]
    members += [("cls.png", picture), ("cls.cls", b"cat"), ("only.txt", b"no image"), ("only.depth.png", picture)]
    members += [("json.png", picture), ("json.json", b'{"caption": NaN}')]
    members += [("good.PNG", picture), ("good.json", b'{"caption": "from the json"}')]
    _, rows, faults = prepared(folder_of_tar(tmp_path / "raw", members), tmp_path / "out")
    assert [(row.key, row.texts, row.source) for row in rows] == [("A/good", ["from the json"], "A.TAR/good")]
    assert faults == {
        "A.TAR/link": "not-regular-file", "A.TAR/pipe": "not-regular-file", "A.TAR/abs": "path",
        "A.TAR/latin": "encoding", "A.TAR/cls": "label", "A.TAR/only": "no-image", "A.TAR/json": "json",
    }  # fmt: skip
    assert "it has depth.png" in (tmp_path / "out" / "quarantine.jsonl").read_text()


def test_repeated_tar_member_is_another_row(tmp_path):
    members = [("a.png", colour_image(1)), ("a.txt", b"one"), ("a.png", colour_image(2)), ("a.txt", b"two")]
    manifest, rows, _ = prepared(folder_of_tar(tmp_path / "raw", members), tmp_path / "out")
    assert [(row.key, row.texts) for row in rows] == [("A/a", ["one"])]
    assert (manifest.num_read, manifest.reasons) == (2, {"duplicate-key": 1})


def test_unused_json_fields_do_not_invalidate_a_row(tmp_path):
    stated = (b'{"similarity": NaN, "caption": "c", "x": [{"y": 1, "y": 2}]}', b'{"caption": NaN, "alt": "d"}')
    members = [("a.png", colour_image(1)), ("a.json", stated[0]), ("b.png", colour_image(2)), ("b.json", stated[1])]
    members += [("c.png", colour_image(3)), ("c.txt", b"e"), ("c.json", stated[1])]
    source = folder_of_tar(tmp_path / "raw", members)
    _, rows, faults = prepared(source, tmp_path / "out")
    assert [row.texts for row in rows] == [["c"], ["e"]] and faults == {"A.TAR/b": "json"}
    _, rows, faults = prepared(source, tmp_path / "alt", columns=("text=alt", "image=caption"))
    assert [row.texts for row in rows] == [["d"], ["d"]] and faults == {"A.TAR/a": "no-text"}


@pytest.mark.parametrize("keep", [0.35, 0.5, 0.52, 0.65, 0.75])
def test_truncated_tar_is_reported(tmp_path, keep):
    source = tars(tmp_path / "raw") / "00000.tar"
    data = source.read_bytes()
    with tarfile.open(source) as tar:
        content = tar.getmembers()[-1]
    source.write_bytes(data[: int((content.offset_data + 512) * keep)])
    manifest, rows, faults = prepared(source, tmp_path / "out")
    assert "truncated" in faults.values()
    assert manifest.num_rows < 4
    assert [row.texts for row in rows] == [[text(number)] for number in range(len(rows))]


def test_unsupported_sources_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        detect_source(str(tmp_path / "none.csv"))
    (tmp_path / "rows.csv").write_text("image,text\n")
    with pytest.raises(DataError, match=r"give the path of one of its files \(rows\.csv\)"):
        detect_source(str(tmp_path))
    with pytest.raises(UsageError, match="is a folder, and csv is a file"):
        detect_source(str(tmp_path), "csv")
    with pytest.raises(UsageError, match="is a file, and pairs is a folder"):
        detect_source(str(tmp_path / "rows.csv"), "pairs")
    assert detect_source(str(tmp_path / "rows.csv"), "tsv").format == "tsv"
    with pytest.raises(DataError, match="holds no rows of CSV"):
        prepared(tmp_path / "rows.csv", tmp_path / "out")
