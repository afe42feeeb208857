"""Prepare: every row is accounted for; killed runs, and appended, changed and invalid sources.

Most tests pack in this process, without Ray; the last ones run the Ray Data job.
"""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from mmray.config import Prepare
from mmray.data.formats.text_lines import JsonlSource
from mmray.data.images.decode import decode
from mmray.data.prepare import assemble, records
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.prepare import scan as scan_module
from mmray.data.prepare.pack import pack_chunk
from mmray.data.prepare.pipeline import ensure_prepared, prepare
from mmray.data.prepare.tasks import MAX_ATTEMPTS
from mmray.data.store.prepared_set import UNKNOWN_CLASS, PreparedSet
from mmray.errors import DataError, MmrayError, ResourceError, TrainingError, UsageError
from tests.made import encode, row, write_set

LAX = Prepare(max_bad_fraction=1.0, rows_per_shard=4, vocab_size=100)


def run_here(work, items):
    yield from map(work, items)


@pytest.fixture
def run(tmp_path):
    """Prepare raw/rows.jsonl into `out` with settings that differ from LAX."""

    def run(name="out", progress=None, retry=False, log=None, **settings):
        source, out = str(tmp_path / "raw" / "rows.jsonl"), str(tmp_path / name)
        return prepare(source, out, LAX.model_copy(update=settings), progress, log, retry=retry)

    return run


def color_image(number, kind="PNG", size=(12, 8)):
    return encode(Image.new("RGB", size, (number % 256, number // 256, 77)), kind)


def make_source(folder, count, start=0, **columns):
    """Append `count` rows with one image each to a JSONL."""
    folder.mkdir(exist_ok=True)
    for number in range(start, start + count):
        (folder / f"{number}.png").write_bytes(color_image(number))
        row = {"id": f"k{number}", "image": f"{number}.png", "text": f"color {number}"} | columns
        add(folder / "rows.jsonl", row)
    return folder / "rows.jsonl"


def add(source, *rows):
    with source.open("ab") as file:
        for row in rows:
            file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")


def quarantine(out):
    return [json.loads(line) for line in (Path(out) / "quarantine.jsonl").read_text().splitlines()]


def keys(out, split=None):
    return PreparedSet.open(str(out), split).keys()


def raw_images():
    """Encoded images that a re-encoding would change, each with its pixels as Pillow reads them."""
    rgb = Image.effect_mandelbrot((64, 48), (-2, -1.5, 1, 1.5), 60).convert("RGB")
    turned = rgb.getexif()
    turned[0x0112] = 6
    gray_of_16_bits = Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257)
    palette = rgb.quantize(16)
    files = {
        "turned": encode(rgb, "JPEG", exif=turned),
        "cmyk": encode(rgb.convert("CMYK"), "JPEG"),
        "progressive": encode(rgb, "JPEG", quality=97, progressive=True),
        "palette": encode(palette, "PNG"),
        "animation": encode(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]),
        "16_bits": encode(gray_of_16_bits, "PNG"),
    }
    images = {name: Image.open(io.BytesIO(data)) for name, data in files.items()}
    images["turned"] = ImageOps.exif_transpose(images["turned"])
    images["16_bits"] = rgb.convert("L")  # Pillow would clip it to white
    return {name: (files[name], np.asarray(images[name].convert("RGB"))) for name in files}


def numbered(count):
    return [f"k{number}" for number in range(count)]


def test_bytes_of_images_are_stored_as_they_are(tmp_path, in_process, run):
    images = raw_images()
    source = tmp_path / "raw" / "rows.jsonl"
    source.parent.mkdir()
    for name, (data, _) in images.items():
        (source.parent / name).write_bytes(data)
        add(source, {"id": name, "image": name, "text": name})
    manifest = run()
    rows = PreparedSet.open(str(tmp_path / "out")).read(np.arange(len(images)))
    assert {each.key: each.image for each in rows} == {name: images[name][0] for name in images}
    for each in rows:
        np.testing.assert_array_equal(decode(each.image), images[each.key][1], each.key)
    [(text, notice)] = manifest.notices.items()
    assert "frames after the first" in text and notice["num_rows"] == 1


def test_every_row_is_kept_or_quarantined(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 10), tmp_path / "out"
    (source.parent / "half.png").write_bytes(color_image(900)[:50])
    (source.parent / "new.png").write_bytes(color_image(901))
    add(
        source,
        {"id": "a", "image": "gone.png", "text": "x"},
        {"id": "b", "image": "half.png", "text": "x"},
        b"{broken",
        b"",
        {"id": "e", "image": "3.png", "text": "the same image again"},
        {"id": "k4", "image": "half.png", "text": "bad before its id counts"},
        {"id": "k5", "image": "new.png", "text": "an id again"},
    )
    manifest, faults = run(), quarantine(out)
    assert (manifest.num_rows, manifest.num_quarantined, manifest.num_read) == (10, 6, 16)
    assert [
        (fault["key"], fault["source"], fault["stage"], fault["reason"]) for fault in faults
    ] == [
        ("a", "rows.jsonl:11", "read", "missing-image"),
        ("b", "rows.jsonl:12", "decode", "truncated"),
        ("rows.jsonl:13", "rows.jsonl:13", "parse", "json"),
        ("e", "rows.jsonl:15", "duplicates", "duplicate"),
        ("k4", "rows.jsonl:16", "decode", "truncated"),
        ("k5", "rows.jsonl:17", "duplicates", "duplicate-key"),
    ]
    assert (
        manifest.reasons == Counter(fault["reason"] for fault in faults)
        and "k3" in faults[3]["detail"]
    )
    prepared = PreparedSet.open(str(out))
    rows = prepared.read(np.arange(10))
    assert [row.key for row in rows] == numbered(10)
    assert all(
        row.checksum_ok and row.image == color_image(number) for number, row in enumerate(rows)
    )
    assert rows[7].source == "rows.jsonl:8" and prepared.tokenizer_json
    assert json.loads((out / "manifest.json").read_text())["num_rows"] == 10


def test_all_columns_are_kept(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 1), str(tmp_path / "out")
    make_source(tmp_path / "raw", 2, start=1, split="train", label=3)
    add(source, {"image_path": "0.png", "texts": ["one", " two "], "split": "test"})
    manifest = run(duplicates="keep")
    # rows without a split are training rows if others have one
    assert manifest.splits == {"train": 3, "test": 1}
    [test] = PreparedSet.open(out, "test").read(np.array([0]))
    assert (test.key, test.texts, test.split, test.label) == (
        "rows.jsonl:4",
        ["one", "two"],
        "test",
        None,
    )
    train = PreparedSet.open(out, "train").read(np.arange(3))
    assert [row.label for row in train] == [None, 3, 3]


@pytest.mark.parametrize(
    ("rule", "kept", "num_same_text"),
    [
        ("image", ["k0", "k1", "c", "d"], 1),
        ("row", ["k0", "k1", "b", "c", "d"], 2),
        ("keep", ["k0", "k1", "a", "b", "c", "d"], 3),
    ],
)
def test_duplicate_rules(tmp_path, in_process, run, rule, kept, num_same_text):
    source = make_source(tmp_path / "raw", 2)
    add(
        source,
        {"id": "a", "image": "0.png", "text": "color 0"},
        {"id": "b", "image": "0.png", "text": "other"},
    )
    # b was dropped for its image, not its caption
    for number, text in ((5, "color 1"), (6, "other")):
        (tmp_path / "raw" / f"{number}.png").write_bytes(color_image(number))
        add(source, {"id": "cd"[number - 5], "image": f"{number}.png", "text": text})
    manifest = run(duplicates=rule)
    assert keys(tmp_path / "out") == kept and manifest.num_same_text == num_same_text
    assert manifest.num_rows + manifest.num_quarantined == manifest.num_read == 6


def test_duplicates_across_chunks_and_splits(tmp_path, in_process, run):
    source = make_source(tmp_path / "raw", 9, split="train")
    add(
        source,
        {"id": "t", "image": "2.png", "text": "x", "split": "test"},
        {"id": "u", "image": "2.png", "text": "x"},
    )
    manifest = run()
    assert len(in_process) == 3
    faults = [(fault["key"], fault["detail"]) for fault in quarantine(tmp_path / "out")]
    # held-out rows stay held out
    assert faults == [(key, "duplicate of row t (in split test)") for key in ("k2", "u")]
    assert manifest.splits == {"train": 8, "test": 1}
    with pytest.raises(
        DataError, match=r"(?s)2 duplicate, for example rows\.jsonl:3: .* keep duplicates with"
    ):
        run(max_bad_fraction=0.01)


def test_ids_may_restart_in_each_split(tmp_path, in_process, run):
    source = make_source(tmp_path / "raw", 6, split="train")
    for number in range(10, 13):
        (tmp_path / "raw" / f"{number}.png").write_bytes(color_image(number))
        split = {"split": "test"} if number < 12 else {}
        add(source, {"id": f"k{number - 10}", "image": f"{number}.png", "text": "x"} | split)
    assert run().splits == {"train": 6, "test": 2}
    assert keys(tmp_path / "out", "test") == ["k0", "k1"]
    # a row without a split is a training row
    [fault] = quarantine(tmp_path / "out")
    assert (fault["source"], fault["reason"]) == ("rows.jsonl:9", "duplicate-key")
    assert fault["detail"] == "another row has this id"


def test_holdout_is_by_content_and_stable(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 60), tmp_path / "out"
    add(
        source,
        *({"id": f"twin{number}", "image": f"{number}.png", "text": "y"} for number in range(60)),
    )
    manifest, before = run(holdout=0.3, duplicates="keep"), keys(out, "test")
    assert 20 < manifest.splits["test"] < 55
    assert {key.replace("twin", "k") for key in before} == {
        key for key in before if key.startswith("k")
    }
    make_source(tmp_path / "raw", 10, start=100)
    run(holdout=0.3, duplicates="keep")
    assert keys(out, "test")[: len(before)] == before


def test_second_prepare_packs_only_new_rows(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 10)
    first, out = run(), tmp_path / "out"
    shards = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    tokenizer = (out / "tokenizer.json").read_text()
    in_process.clear()
    [index] = (out / "parts").iterdir()  # one file for all chunks
    manifest = (out / "manifest.json").stat().st_mtime_ns
    assert run() == first and in_process == []
    assert list((out / "parts").iterdir()) == [index]
    assert (out / "manifest.json").stat().st_mtime_ns == manifest
    make_source(tmp_path / "raw", 7, start=10, text="words never seen before")
    grown = run()
    assert in_process == [3, 4] and grown.num_rows == 17 and keys(out) == numbered(17)
    assert all(path.stat().st_mtime_ns == time for path, time in shards.items())
    assert (
        out / "tokenizer.json"
    ).read_text() == tokenizer and grown.fingerprint != first.fingerprint


def test_records_with_a_field_of_an_earlier_version_are_read(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 8)
    manifest = run()
    [file] = (tmp_path / "out" / "parts").iterdir()
    name = f"parts/{file.name}"
    with records.open_records(tmp_path / "out", name) as reader:
        batches = [reader.get_batch(number) for number in range(2)]
    earlier = make_dataclass("Earlier", [("labels", object, None)], bases=(records.Record,))
    summaries = records.read_summaries(tmp_path / "out", name)
    old = [earlier(**vars(summary)) for summary in summaries]
    records.write_records(tmp_path / "out", name, old, batches)
    in_process.clear()
    assert run() == manifest and in_process == []


def test_large_files_of_records_stay_when_a_source_grows(tmp_path, in_process, run, monkeypatch):
    monkeypatch.setattr(records, "FOLD_BYTES", 1)
    make_source(tmp_path / "raw", 8)
    run()
    files = set((tmp_path / "out" / "parts").iterdir())
    make_source(tmp_path / "raw", 4, start=8)
    grown = run()
    assert grown.num_rows == 12 and files < set((tmp_path / "out" / "parts").iterdir())
    in_process.clear()
    assert run() == grown and in_process == []


def test_labels_of_packed_chunks_are_not_read_again(tmp_path, in_process, run, monkeypatch):
    seen, read_labels = [], scan_module._read_chunk_labels
    monkeypatch.setattr(
        scan_module,
        "_read_chunk_labels",
        lambda chunk, job: seen.append(chunk.index) or read_labels(chunk, job),
    )
    make_source(tmp_path / "raw", 4, label="cat")
    make_source(tmp_path / "raw", 4, start=4, label="dog")
    assert run().class_names == ("cat", "dog") and seen == [0, 1]
    make_source(tmp_path / "raw", 2, start=8, label="cat")
    assert run().class_names == ("cat", "dog") and seen[2:] == [2] == in_process[2:]
    make_source(tmp_path / "raw", 2, start=10, label="ant")  # changes the numbers of all
    grown = run()
    assert grown.class_names == ("ant", "cat", "dog") and in_process[3:] == [3]
    prepared = PreparedSet.open(str(tmp_path / "out"))
    expected = [1] * 4 + [2] * 4 + [1] * 2 + [0] * 2
    pickled = pickle.loads(pickle.dumps(prepared))
    for each in (prepared, prepared.with_shards(prepared.shards), pickled):
        assert [row.label for row in each.read(np.arange(12))] == expected
    of_run = prepared.with_label_numbers({0: 7, 1: 8})
    assert [row.label for row in of_run.read(np.array([0, 5, 11]))] == [8, UNKNOWN_CLASS, 7]
    as_stored = prepared.with_shards(tuple(replace(each, labels=()) for each in prepared.shards))
    assert as_stored.fingerprint != prepared.fingerprint


def test_interrupted_prepare_gives_the_same_files(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 16, label="cat", split="train")
    run("undisturbed", keep=("label",))

    def interrupt(progress):
        if progress.stage == "pack" and progress.done_rows == 8:
            raise KeyboardInterrupt

    for resumed in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(progress=interrupt, keep=("label",))
        if resumed:
            (tmp_path / "out" / "parts" / "chunk-00001.arrow").unlink()
    assert run(keep=("label",)).num_rows == 16
    files = {}
    for name in ("undisturbed", "out"):
        folder = tmp_path / name
        paths = [path for path in folder.rglob("*") if path.is_file() and "lease" not in path.parts]
        files[name] = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert files["out"] == files["undisturbed"]
    assert len(files["out"]) > 8


@pytest.fixture
def scans(monkeypatch):
    """Names of the files of lines that were scanned, without listings of groups."""
    names = []
    scan_file = JsonlSource.scan_file

    def record(source, name, *args):
        names.extend([] if name.startswith("grouped") else [name])
        return scan_file(source, name, *args)

    monkeypatch.setattr(JsonlSource, "scan_file", record)
    return names


@pytest.mark.parametrize("group", ["none", "image"])
def test_rerun_scans_only_files_that_changed(tmp_path, in_process, run, scans, group):
    source, out = make_source(tmp_path / "raw", 10), tmp_path / "out"
    manifest = run(group=group)
    assert len(scans) == 1 and manifest.num_rows == 10
    assert run(group=group) == manifest and len(scans) == 1
    assert run(group=group, duplicates="keep").num_rows == 10 and len(scans) == 1
    info = source.stat()
    data = source.read_bytes()
    with source.open("r+b") as file:  # of the same size, time and inode
        file.write(data.replace(b"color 4", b"other 4"))
    os.utime(source, ns=(info.st_atime_ns, info.st_mtime_ns))
    run(group=group)
    assert len(scans) == 2
    assert PreparedSet.open(str(out)).read(np.array([4]))[0].texts == ["other 4"]
    for listing in out.glob("grouped-*.jsonl"):
        listing.unlink()
    assert run(group=group).num_rows == 10 and len(scans) == (3 if group == "image" else 2)
    make_source(tmp_path / "raw", 2, start=10)
    assert run(group=group).num_rows == 12


def test_only_a_file_that_changed_is_scanned_of_a_folder(tmp_path, in_process, scans):
    source = make_source(tmp_path / "raw", 12)
    for split, rows in (("train", 8), ("val", 4)):
        (source.parent / f"{split}.jsonl").write_text("".join(source.open().readlines()[:rows]))
    source.unlink()
    settings = LAX.model_copy(update={"duplicates": "keep"})
    prepare(str(source.parent), str(tmp_path / "out"), settings)
    with (source.parent / "train.jsonl").open("a") as file:
        file.write((source.parent / "val.jsonl").read_text())
    in_process.clear()
    scans.clear()
    grown = prepare(str(source.parent), str(tmp_path / "out"), settings)
    assert scans == ["train.jsonl"]
    assert in_process == [2, 3]  # the number of the chunk of the other file changed
    assert grown.splits == {"train": 12, "val": 4}
    fresh = prepare(str(source.parent), str(tmp_path / "fresh"), settings)
    assert fresh.fingerprint == grown.fingerprint


def test_scan_of_an_interrupted_prepare_is_not_repeated(tmp_path, in_process, run, scans):
    make_source(tmp_path / "raw", 8, label="cat")

    def interrupt(progress):
        if progress.stage == "pack" and progress.done_rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupt)
    assert run().class_names == ("cat",) and scans == ["rows.jsonl"]
    (tmp_path / "out" / "scan.json").write_text("{")
    assert run().num_rows == 8 and len(scans) == 2 and in_process == [0, 1]
    assert run().num_rows == 8 and len(scans) == 2


def test_changed_settings_of_a_set_are_logged(tmp_path, in_process, run):
    """Also of an option that was left out: rows that were held out would be trained on."""
    make_source(tmp_path / "raw", 8)
    lines = []

    def log(message, label):
        lines.extend([message] if label == "changed" else [])

    run(log=log, holdout=0.5)
    run(log=log, holdout=0.5)
    assert not lines
    run(log=log)
    assert lines == [f"{tmp_path / 'out'} had other settings: holdout 0.5 -> 0.0"]


def test_changed_chunks_are_packed_again(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 12), tmp_path / "out"
    first = run()
    for change, packed in [
        (lambda: (source.parent / "5.png").write_bytes(color_image(505)), [1]),
        (lambda: (source.parent / "9.png").unlink(), [2]),
        (lambda: source.write_text(source.read_text().replace("color 2", "color X")), [0]),
        (lambda: next((out / "shards").glob("00001*")).write_bytes(b"cut"), [1]),
        (lambda: next((out / "parts").iterdir()).write_bytes(b"{"), [0, 1, 2]),
        (lambda: next((out / "parts").iterdir()).unlink(), [0, 1, 2]),
    ]:
        in_process.clear()
        change()
        run()
        assert in_process == packed
    prepared = PreparedSet.open(str(out))
    assert prepared.num_rows == 11 and prepared.read(np.array([5]))[0].image == color_image(505)
    in_process.clear()
    (source.parent / "9.png").write_bytes(color_image(9))
    assert run().num_rows == 12 and run(image_side=4).fingerprint != first.fingerprint
    assert in_process == [2, 0, 1, 2] and len(list((out / "shards").iterdir())) == 3


def test_exceeded_budget_is_a_data_error_and_a_larger_one_resumes(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 16), tmp_path / "out"
    (source.parent / "15.png").unlink()
    (source.parent / "14.png").write_bytes(b"GIF")
    with pytest.raises(DataError) as caught:
        run(max_bad_fraction=0.1)
    assert caught.value.exit_code == 5
    for part in (
        "2 of 16 rows are bad (12.5 %)",
        "rows.jsonl:16: there is no file",
        "--max-bad-fraction 0.125",
    ):
        assert part in str(caught.value)
    assert len(quarantine(out)) == 2
    with pytest.raises(DataError, match="is not complete"):
        PreparedSet.open(str(out))
    in_process.clear()
    assert run(max_bad_fraction=0.125).num_rows == 14 and in_process == []
    # though 0.29 * 100 < 29
    assert all(assemble.max_bad_rows(bad / 100, 100) == bad for bad in range(101))


def test_rejected_rerun_keeps_the_quarantine_of_the_set(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 8), tmp_path / "out"
    (source.parent / "2.png").unlink()
    manifest, rejected = run(), out / "quarantine.rejected.jsonl"
    (source.parent / "5.png").unlink()
    add(source, {"id": "twin", "image": "3.png", "text": "x"})
    with pytest.raises(DataError, match=r"All of them are in .*/quarantine\.rejected\.jsonl"):
        run(max_bad_fraction=0.3)
    assert [row["key"] for row in quarantine(out)] == ["k2"] and len(
        rejected.read_text().splitlines()
    ) == 3
    assert PreparedSet.open(str(out)).fingerprint == manifest.fingerprint
    assert keys(out) == [f"k{n}" for n in (0, 1, 3, 4, 5, 6, 7)]
    run()
    assert [row["key"] for row in quarantine(out)] == ["k2", "k5", "twin"] and not rejected.exists()


def test_source_over_budget_ends_early(tmp_path, in_process, run):
    source, seen = make_source(tmp_path / "raw", 40), []
    for number in range(2, 8):
        (source.parent / f"{number}.png").unlink()
    with pytest.raises(DataError, match=r"6 of 8 rows are bad .* of 40 rows \(stopped early\)"):
        run(progress=seen.append, max_bad_fraction=0.1)
    assert max(progress.done_rows for progress in seen if progress.stage == "pack") == 8


def test_total_is_reported_as_soon_as_the_source_is_scanned(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 10)
    seen = []
    run(
        progress=lambda progress: seen.append(
            (progress.stage, progress.done_rows, progress.total_rows)
        )
    )
    scan = [("scan", rows, 0) for rows in (0, 4, 8, 10)]
    assert seen[:8] == [*scan, *(("pack", rows, 10) for rows in (0, 4, 8, 10))]


def test_total_of_tars_is_an_estimate_until_the_last_is_read(tmp_path, in_process):
    (tmp_path / "tars").mkdir()
    for name, numbers in (("a", (0,)), ("b", (1, 2, 3))):
        with tarfile.open(tmp_path / "tars" / f"{name}.tar", "w") as tar:
            for number in numbers:
                for suffix, data in (("png", color_image(number)), ("txt", b"caption %d" % number)):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    seen = []
    prepare(str(tmp_path / "tars"), str(tmp_path / "out"), LAX, seen.append)
    packed = [
        (each.done_rows, each.total_rows, each.is_estimate) for each in seen if each.stage == "pack"
    ]
    assert packed == [(0, 0, True), (1, 2, True), (4, 4, False)]


def test_retry_packs_only_chunks_with_unread_rows(tmp_path, in_process, monkeypatch, run):
    source, out = make_source(tmp_path / "raw", 16), tmp_path / "out"
    whole = run("whole")
    add(source, {"image": "0.png", "text": " "})
    # a file system without modification times, like an object store
    for module in ("prepare.pack", "prepare.row_builder"):
        monkeypatch.setattr(
            f"mmray.data.{module}.stat_signature", lambda storage, name: (name, None, None)
        )
    for number in (5, 9, 10):
        (source.parent / f"{number}.png").unlink()
    assert run().reasons == {"missing-image": 3, "blank": 1}
    kept = {
        path.name for path in (out / "shards").iterdir() if path.name.startswith(("00000", "00003"))
    }
    for number in (5, 9, 10):
        (source.parent / f"{number}.png").write_bytes(color_image(number))
    in_process.clear()
    assert run().num_rows == 13 and in_process == []
    manifest = run(retry=True)
    assert in_process == [1, 2]  # a blank caption is not retried
    assert run(retry=True) == manifest and in_process == [1, 2]
    assert (manifest.fingerprint, manifest.reasons) == (whole.fingerprint, {"blank": 1})
    assert kept < {path.name for path in (out / "shards").iterdir()}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"caption": "x", "url": "y"}] * 3,
            r"has the columns caption, url: .* --columns image=url text=caption",
        ),
        ([{"image": "gone.png", "text": "x"}], r"there is no file gone\.png"),
        ([b"\n", b"  "], "has no rows"),
        ([b"id,image,text", b"1,a.png,x"], "not JSON"),
    ],
)
def test_source_without_good_rows_is_a_data_error(tmp_path, in_process, run, rows, message):
    (tmp_path / "raw").mkdir()
    add(tmp_path / "raw" / "rows.jsonl", *rows)
    with pytest.raises(DataError, match="(?s)" + message):
        run()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_missing_source_and_invalid_output_folders_are_refused(tmp_path, in_process, run):
    with pytest.raises(DataError, match="there is no file"):
        run()
    assert not (tmp_path / "out").exists()
    make_source(tmp_path / "raw", 2)
    (tmp_path / "file").write_text("x")
    for out, message in (
        ("raw", "is not empty and is not a prepared set"),
        ("file", "cannot write to"),
    ):
        with pytest.raises(UsageError, match=message):
            run(out)


def test_another_source_does_not_replace_a_set(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 2)
    run()
    other = make_source(tmp_path / "other", 3, start=50)
    other = other.rename(other.with_name("others.jsonl"))
    with pytest.raises(UsageError, match=r"holds the set made from rows\.jsonl"):
        prepare(str(other), str(tmp_path / "out"), LAX)
    assert keys(tmp_path / "out") == numbered(2)


def test_concurrent_prepare_is_refused(tmp_path, in_process, monkeypatch, run):
    make_source(tmp_path / "raw", 8)

    def meanwhile(work, items):
        with pytest.raises(UsageError, match=f"being prepared by process {os.getpid()} on"):
            run()
        return run_here(work, items)

    monkeypatch.setattr(prepare_module, "map_tasks", meanwhile)
    assert run().num_rows == 8


def test_prepare_writes_no_manifest_after_another_took_over(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 8)
    with pytest.raises(TrainingError, match="taken over"):
        run(progress=lambda _: (tmp_path / "out" / "lease" / "2").touch())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_tokenizer_is_trained_on_training_captions_if_there_are_any(tmp_path, in_process, run):
    make_source(tmp_path / "raw", 4, split="test", text="qqqq")
    assert run("a").tokenizer is None
    make_source(tmp_path / "raw", 4, start=4, split="train", text="seen words")
    assert run("b", vocab_size=0).tokenizer is None and run("c").tokenizer == "tokenizer.json"
    tokenizer = tmp_path / "c" / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    assert "words" in vocabulary and not any("q" in piece for piece in vocabulary)
    tokenizer.write_text("old")
    assert run("c").tokenizer and tokenizer.read_text() == "old"
    # may select other captions
    assert run("c", duplicates="keep").tokenizer and tokenizer.read_text() != "old"


@pytest.mark.parametrize(
    ("limits", "num_rows", "gap"),
    [
        ({}, 160, 0),
        ({"MAX_TRAINING_TEXTS": 24}, 24, 160 // 3 - 8),
        ({"MAX_TRAINING_TEXTS": 48, "MAX_RUNS": 2}, 48, 160 // 2 - 24),
        ({"MAX_SAMPLED_BYTES": 1}, 1, 0),
    ],
)
def test_captions_of_the_tokenizer_are_sampled_evenly(
    memory, store_requests, monkeypatch, limits, num_rows, gap
):
    shards = [
        ([row(n, texts=[f"{n} a", f"{n} b"]) for n in range(first, first + 41)], None, (40,))
        for first in (0, 40, 80, 120)
    ]
    prepared = PreparedSet.open(write_set(memory, shards))
    for name, value in limits.items():
        monkeypatch.setattr(assemble, name, value)
    store_requests.clear()
    captions = list(assemble.sample_captions(prepared))
    assert store_requests.count("read") <= 4  # one for each shard
    assert captions == list(assemble.sample_captions(prepared))
    if not limits:
        assert captions == [f"{n} {letter}" for n in range(160) for letter in "ab"]
    numbers = sorted({int(caption.split()[0]) for caption in captions})
    assert len(numbers) == num_rows and len(captions) <= limits.get("MAX_TRAINING_TEXTS", 320)
    assert max(np.diff(numbers), default=1) <= gap + 2


def test_cache_name_ignores_the_error_budget(tmp_path, monkeypatch):
    """A larger error budget, as exit code 5 suggests, reuses finished chunks; other settings give
    another set.
    """
    source, outs = tmp_path / "my rows é.jsonl", []
    source.write_text("{}")
    manifest = SimpleNamespace(num_rows=0, num_quarantined=0)
    monkeypatch.setattr(
        prepare_module, "prepare", lambda source, out, *_: outs.append(out) or manifest
    )
    for settings in ({}, {"max_bad_fraction": 0.5}, {"duplicates": "keep"}, {"image_side": 8}):
        ensure_prepared(
            str(source),
            str(tmp_path / "cache"),
            Prepare(**settings),
            lambda *_: None,
            lambda _: None,
        )
    assert [outs.index(out) for out in outs] == [0, 0, 2, 3]
    assert outs[0].startswith(f"{tmp_path}/cache/my_rows_é-")
    with pytest.raises(
        UsageError, match=r"the sample set needs a local disk, and data\.cache is s3://b/cache"
    ):
        ensure_prepared("sample", "s3://b/cache", Prepare(), lambda *_: None, lambda _: None)


def test_run_that_prepares_a_source_names_the_command_whose_flags_it_advises(tmp_path, in_process):
    source = tmp_path / "rows.csv"
    source.write_text("path,title\n0.png,x\n")
    with pytest.raises(DataError) as caught:
        ensure_prepared(
            str(source), str(tmp_path / "cache"), Prepare(), lambda *_: None, lambda _: None
        )
    assert "--columns image=path text=title" in str(caught.value)
    assert f"flags of `mmray prepare {source} SET`" in str(caught.value)


def test_ray_job_equals_in_process_prepare(tmp_path, in_process, monkeypatch, local_ray, run):
    source, seen = make_source(tmp_path / "raw", 30), []
    add(source, {"image": "gone.png", "text": "x"}, {"image": "3.png", "text": "twin"})
    here = run("here")
    monkeypatch.undo()
    manifest = run(progress=seen.append)
    assert (manifest.fingerprint, manifest.reasons) == (here.fingerprint, here.reasons)
    assert quarantine(tmp_path / "out") == quarantine(tmp_path / "here")
    packed = [progress.done_rows for progress in seen if progress.stage == "pack"]
    assert packed == sorted(packed) and packed[-1] == 32 and len(packed) > 3


def test_task_that_cannot_write_is_a_resource_error(tmp_path, local_ray, run):
    make_source(tmp_path / "raw", 3)

    def take_away(progress):
        if progress.stage == "pack":
            (tmp_path / "out" / "shards").rmdir()

    with pytest.raises(
        ResourceError, match=r"prepare failed at .*rerun the same command to resume"
    ):
        run(progress=take_away)
    assert run().num_rows == 3


_pack_task = prepare_module.pack_task


def task_with(pack, item, job):
    """The prepare task with another `pack_chunk`, on its worker."""
    with mock.patch("mmray.data.prepare.pack.pack_chunk", pack):
        return _pack_task(item, job)


def dies_at_1(job, chunk, *rest):
    if chunk.index == 1:
        with Path(job.out, "deaths").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return pack_chunk(job, chunk, *rest)


@pytest.mark.cluster
def test_chunk_that_keeps_killing_workers_is_named_and_others_are_kept(
    tmp_path, monkeypatch, local_ray, run
):
    make_source(tmp_path / "raw", 12)
    monkeypatch.setattr(prepare_module, "pack_task", partial(task_with, dies_at_1))
    with pytest.raises(
        ResourceError, match=r"died 3 times at rows\.jsonl from row 5\..*rerun the same"
    ):
        run()
    assert (tmp_path / "out" / "deaths").stat().st_size == MAX_ATTEMPTS
    assert not list(tmp_path.glob("out/parts/*.attempt"))


def has_a_bug(job, *_):
    with Path(job.out, "calls").open("a") as file:
        file.write("x")
    return {}["absent"]


@pytest.mark.cluster
def test_python_exception_in_a_task_is_raised_at_once(tmp_path, monkeypatch, local_ray, run):
    """Not retried, and not attributed to images or memory."""
    make_source(tmp_path / "raw", 4)
    monkeypatch.setattr(prepare_module, "pack_task", partial(task_with, has_a_bug))
    with pytest.raises(
        MmrayError, match=r"(?s)KeyError: 'absent'.*test_pipeline\.py.*in has_a_bug"
    ):
        run()
    assert (tmp_path / "out" / "calls").read_text() == "x"


KILLED_AT = """
import os, random, signal, sys
from pathlib import Path
from mmray.config import Prepare
from mmray.data.prepare import pipeline, records

def run_here(work, items):
    yield from map(work, items)

def attempt(out, last=None):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    count = 0

    def counted(operation):
        def run(*args, **kwargs):
            nonlocal count
            for call in (lambda: None, lambda: operation(*args, **kwargs)):
                result = call()
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in ("unlink", "replace", "write_bytes", "mkdir"):
        setattr(Path, name, counted(getattr(Path, name)))
    settings = Prepare(group=sys.argv[4], rows_per_shard=4, vocab_size=100, holdout=0.2)
    pipeline.prepare(sys.argv[1], out, settings)
    Path(sys.argv[2], "count").write_text(str(count))
    os._exit(0)

pipeline.map_tasks = records.map_tasks = run_here
assert attempt(sys.argv[2]) == 0
count = int(Path(sys.argv[2], "count").read_text())
points = random.Random(0)
kills = [attempt(sys.argv[3], points.randint(count // 4, count)) for _ in range(5)]
assert kills[0] == signal.SIGKILL and set(kills) <= {0, signal.SIGKILL}, kills
assert attempt(sys.argv[3]) == 0
"""


@pytest.mark.parametrize(("file", "group"), [("rows.jsonl", "image"), ("rows.parquet", "none")])
def test_prepare_killed_five_times_writes_the_same_files(tmp_path, file, group):
    source = make_source(tmp_path / "raw", 40)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    add(source, *({"image": row["image"], "text": f"again {row['text']}"} for row in rows[::9]))
    images = [color_image(number) for number in range(40)]
    pq.write_table(pa.table({"image": images, "text": [*map(str, images)]}), tmp_path / file, 4)
    path = source if group == "image" else tmp_path / file
    folders = [tmp_path / name for name in ("whole", "killed")]
    command = [sys.executable, "-c", KILLED_AT, *map(str, (path, *folders)), group]
    subprocess.run(command, check=True)
    (folders[0] / "count").unlink()
    contents = []
    for folder in folders:
        files = [each for each in folder.rglob("*") if each.is_file()]
        names = {each: str(each.relative_to(folder)) for each in files}
        of_set = {each for each in files if not names[each].startswith(("parts/", "lease/"))}
        contents.append({names[each]: each.read_bytes() for each in of_set})
    assert contents[0] == contents[1]


KILLED = """
import sys, ray, ray.data
from mmray.config import Prepare
from mmray.data.prepare.pipeline import prepare
options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
ray.init(address="local", num_cpus=2, **options)
prepare(sys.argv[1], sys.argv[2], Prepare(rows_per_shard=4, vocab_size=100))
"""


@pytest.mark.cluster
def test_prepare_resumes_after_the_driver_was_killed(tmp_path, in_process, run):
    source, out = make_source(tmp_path / "raw", 400), tmp_path / "out"
    whole = run("whole")
    in_process.clear()
    driver = subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(out)])
    deadline = time.monotonic() + 180
    while len(list((out / "parts").glob("chunk-*.arrow"))) < 5:
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = 0
    while done != (done := len(list((out / "parts").glob("chunk-*.arrow")))):
        time.sleep(2)  # its workers exit by themselves
    with pytest.raises(DataError, match="is not complete"):
        PreparedSet.open(str(out))
    (out / "shards" / "00099-rows-y.arrow").write_bytes(b"whole, but its record was never written")
    manifest = run()
    assert len(in_process) == 100 - done < 96
    assert manifest.fingerprint == whole.fingerprint and keys(out) == numbered(400)
    assert {f"shards/{path.name}" for path in (out / "shards").iterdir()} == {
        shard.file for shard in manifest.shards
    }
