"""A source on an object store has the same chunks, rows, images, errors and prepared set as on a
disk.
"""

import json
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmray.data.formats.detect import detect_source, open_source
from mmray.data.images.read import read_image
from mmray.data.prepare import pipeline, row_builder, scan
from mmray.data.prepare.pipeline import prepare
from mmray.data.rows import BadRow
from mmray.data.source_row import parse_row
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import ResourceError
from mmray.storage import paths, requests
from mmray.storage.paths import copy_file, list_files, list_names, to_path
from mmray.storage.requests import ATTEMPTS
from tests.data.formats.test_formats import COUNT, LAX, SOURCES, color_image, images, tars


def jsonl(folder):
    images(folder)
    rows = [f'{{"image": "{number}.png", "text": "{number}"}}\n' for number in range(7)]
    (folder / "rows.jsonl").write_text("".join([*rows, "{\n"]))
    return folder / "rows.jsonl"


def classes(folder):
    for number, name in enumerate(("cat", "red_fox")):
        images(folder / name, number + 1)
    (folder / "stray.png").write_bytes(color_image(9))
    return folder


ALL = SOURCES | {"JSON lines": jsonl, "a folder for each class": classes}


def read(address, out):
    """(chunks without digests, rows) of a source; a row is its location, its fields and its
    images.
    """
    source = open_source(detect_source(address), to_path(out), {}, "a {}")
    chunks = list(source.scan(3))
    items = [item for chunk in chunks for item in source.read(chunk)]
    return [(one.file, one.first_line, one.num_rows) for one in chunks], [
        (item.location, stated(source.folder, item)) for item in items
    ]


def stated(place, item):
    try:
        if isinstance(item.values, BadRow):
            raise item.values
        row = parse_row(item.values, item.location)
    except BadRow as bad:
        return bad.stage, bad.reason, bad.detail
    return row.key, row.texts, row.label, read_image(place, row.images[0])


@pytest.mark.parametrize("title", ALL)
def test_source_on_a_store_equals_source_on_a_disk(tmp_path, title):
    source, disk = ALL[title](tmp_path / "raw"), tmp_path / "raw"
    store = to_path(f"memory://{tmp_path.name}/raw")
    try:
        for name in list_files(disk):
            copy_file(disk / name, store / name)
        here = read(str(source), str(tmp_path))
        there = read(str(source).replace(str(disk), str(store), 1), f"memory://{tmp_path.name}")
    finally:
        fsspec.filesystem("memory").store.clear()
    if title != "Hugging Face datasets":  # on a store, a chunk is a complete Arrow file
        assert there[0] == here[0]
    assert there[1] == here[1]
    assert len(here[1]) >= 4 and any(isinstance(row[-1], bytes) for *_, row in here[1])


def test_prepare_from_bucket_to_bucket_resumes(s3, tmp_path, in_process):
    raw, here, out = (
        tars(tmp_path / "raw"),
        str(tmp_path / "out"),
        f"{s3.address}/out",
    )
    source = f"{s3.address}/raw"
    for name in list_files(raw):
        copy_file(raw / name, to_path(source) / name)
    there = prepare(source, out, LAX)
    on_disk = prepare(str(raw), here, LAX)
    assert there.fingerprint == on_disk.fingerprint and there.num_rows == COUNT
    rows = np.arange(COUNT)
    assert PreparedSet.open(out).read(rows) == PreparedSet.open(here).read(rows)
    prepare(source, f"{s3.address}/index", LAX.model_copy(update={"index_only": True}))
    indexed = PreparedSet.open(f"{s3.address}/index").read(rows)
    assert [row.image for row in indexed] == [color_image(number) for number in range(COUNT)]
    in_process.clear()
    assert prepare(source, out, LAX) == there and in_process == []


@pytest.mark.parametrize("name", sorted(ALL))
def test_source_is_listed_once(tmp_path, in_process, monkeypatch, name):
    source, listed = ALL[name](tmp_path / "raw"), []

    def count(folder):
        listed.append(folder)
        return list_files(folder)

    monkeypatch.setattr("mmray.data.formats.source.list_files", count)
    auto = prepare(str(source), str(tmp_path / "auto"), LAX)
    assert listed == [source] * source.is_dir()
    forced = LAX.model_copy(update={"format": auto.source["format"]})
    assert prepare(str(source), str(tmp_path / "forced"), forced).fingerprint == auto.fingerprint


@pytest.mark.parametrize("title", ["Parquet of bytes", "WebDataset"])
@pytest.mark.parametrize("store", [None, "memory://grown"])
def test_only_new_files_are_opened_if_a_source_grows(
    tmp_path, memory, in_process, monkeypatch, title, store
):
    monkeypatch.setattr(scan, "NUM_FIRST_ROWS", 2)
    disk, used = ALL[title](tmp_path / "raw"), []
    source = to_path(store or str(disk))
    names = [name for name in list_files(disk) if not name.endswith(".json")]
    for name in names if store else ():
        copy_file(disk / name, source / name)
    prepare(str(source), str(tmp_path / "out"), LAX)
    last = "00001.tar" if title == "WebDataset" else "b.parquet"
    copy_file(disk / last, source / f"new-{last}")

    def record(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda path, *args: used.append(path.name) or call(path, *args)
        )

    record(paths, "open_input")
    record(paths.RemotePath, "_info")
    in_process.clear()
    grown = prepare(str(source), str(tmp_path / "out"), LAX)
    assert f"new-{last}" in used and last not in used
    # Rows of the first file are shown.
    first = "00000.tar" if title == "WebDataset" else "a.parquet"
    assert {name for name in used if name in names} == {first} and used.count(first) <= 3
    assert len(in_process) == len(set(in_process)) < 3
    fresh = prepare(str(source), str(tmp_path / "fresh"), LAX)
    assert fresh.fingerprint == grown.fingerprint and fresh.num_quarantined > 0


def test_requests_of_a_task_and_of_a_rerun_do_not_grow_with_the_set(
    s3, tmp_path, in_process, monkeypatch
):
    monkeypatch.setattr(scan, "NUM_FIRST_ROWS", 2)
    source, out = f"{s3.address}/raw", f"{s3.address}/out"
    of_tasks, of_reruns = [], []

    def run(work, items):
        for item in items:
            with s3.requests() as made:
                result = work(item)
            of_tasks.append(Counter(method for method, *_ in made))
            yield result

    def grow(number):
        rows = range(20 * number, 20 * number + 20)
        table = pa.table({"image": map(color_image, rows), "text": map(str, rows)})
        file = f"{number}.parquet"
        pq.write_table(table, tmp_path / file, 5)
        copy_file(tmp_path / file, to_path(source) / file)

    for number in range(3):
        grow(number)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "map_tasks", run)
            prepare(source, out, LAX.model_copy(update={"rows_per_shard": 5}))
        with s3.requests() as made:
            prepare(source, out, LAX.model_copy(update={"rows_per_shard": 5}))
        of_reruns.append(len(made))
    assert len(of_tasks) == 12
    # It reads the source, and writes a shard, a record and the file that counts attempts.
    assert all(each["PUT"] <= 4 and each["GET"] <= 3 for each in of_tasks), of_tasks
    assert max(each.total() for each in of_tasks) <= 13, of_tasks
    assert max(of_reruns) == min(of_reruns) < 50, of_reruns
    grow(3)
    with s3.requests() as made:
        prepare(source, out, LAX.model_copy(update={"rows_per_shard": 5}))
    # The records of all chunks, whose columns several steps read.
    reads = [path for method, path, _ in made if method == "GET" and "/parts/index-" in path]
    assert 0 < len(reads) <= 12, reads


def test_files_are_read_again_after_an_interrupted_prepare(tmp_path, in_process, monkeypatch):
    """Some of the chunks of a file may have no record."""
    source = ALL["Parquet of bytes"](tmp_path / "raw")
    whole = prepare(str(source), str(tmp_path / "whole"), LAX)

    def run(work, items):
        yield from map(work, items[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "map_tasks", run)
        prepare(str(source), str(tmp_path / "out"), LAX)
    assert prepare(str(source), str(tmp_path / "out"), LAX).fingerprint == whole.fingerprint


def images_and_pairs(folder):
    """40 rows of a JSONL, some bad, and 40 pairs; both on a disk and on a store."""
    images(folder / "pairs", 40)
    rows = [{"id": n, "image": f"pairs/{n}.png", "text": f"color {n}"} for n in range(40)]
    rows[33] |= {"image": "pairs/gone.png"}
    rows[35] |= {"image": "pairs/gone.png", "text": " "}  # the caption is checked first
    rows[37] |= {"image": 7}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(40):
        (folder / "pairs" / f"{number}.txt").write_text(f"color {number}")
    for name in list_files(folder):
        copy_file(folder / name, to_path("memory://raw") / name)


@pytest.mark.parametrize("name", ["rows.jsonl", "pairs"])
def test_images_on_a_store_are_read_in_parallel(
    tmp_path, memory, in_process, store_requests, monkeypatch, name
):
    images_and_pairs(tmp_path / "raw")
    settings = LAX.model_copy(update={"rows_per_shard": 64, "vocab_size": 0})
    most_at_once = {}
    out = {}
    for label, address in (("disk", tmp_path), ("serial", "memory://"), ("parallel", "memory://")):
        with monkeypatch.context() as patch:
            if label == "serial":
                patch.setattr(row_builder, "READ_THREADS", 1)
                patch.setattr(requests, "MAX_PARALLEL", 1)
            store_requests.most_at_once = 0
            store_requests.awaited = 8 if label == "parallel" else 1
            manifest = prepare(f"{address}/raw/{name}", str(tmp_path / label), settings)
            most_at_once[label] = store_requests.most_at_once
        out[label] = (manifest.fingerprint, (tmp_path / label / "quarantine.jsonl").read_text())
    assert out["disk"] == out["serial"] == out["parallel"]
    # Serial: the row that is packed and the next one, which is read meanwhile.
    assert most_at_once["parallel"] >= 8 and most_at_once["serial"] <= 2, most_at_once


def test_files_of_a_store_are_deleted_in_parallel(memory, store_requests, monkeypatch):
    out = to_path(memory)
    most_at_once = []
    for most in (1, requests.MAX_PARALLEL):
        monkeypatch.setattr(requests, "MAX_PARALLEL", most)
        for number in range(16):
            (out / f"shards/{number}").write_bytes(b"x")
        store_requests.most_at_once, store_requests.awaited = 0, min(most, 4)
        pipeline._remove_files(out, lambda name: name != "shards/3", ["shards"])
        most_at_once.append(store_requests.most_at_once)
        assert list_names(out / "shards") == ["3"]
    assert most_at_once[0] == 1 and most_at_once[1] >= 4


def test_shards_are_larger_on_a_store_and_a_set_keeps_its_size(s3, tmp_path, in_process):
    source = str(jsonl(tmp_path / "raw"))
    by_storage = LAX.model_copy(update={"rows_per_shard": "auto"})

    def rows_per_shard(out, settings):
        return prepare(source, out, settings).settings["rows_per_shard"]

    assert rows_per_shard(f"{s3.address}/larger", by_storage) == 4096
    assert rows_per_shard(str(tmp_path / "smaller"), by_storage) == 512
    assert rows_per_shard(str(tmp_path / "own"), LAX) == 3
    assert rows_per_shard(str(tmp_path / "own"), by_storage) == 3


def test_failures_of_a_store_are_retried_or_end_the_prepare(s3, tmp_path, in_process):
    """They never quarantine rows."""
    raw, source, out = jsonl(tmp_path / "raw").parent, f"{s3.address}/raw", f"{s3.address}/out"
    for path in raw.iterdir():
        copy_file(path, to_path(source) / path.name)
    rows = f"{source}/rows.jsonl"
    for number, (method, name) in enumerate(
        [("GET", "raw/rows"), ("GET", "3.png"), ("PUT", "shards/")]
    ):
        s3.fail(method, name, ATTEMPTS - 1, status=400)
        assert prepare(rows, f"{out}{number}", LAX).num_rows == COUNT and s3.failures_left() == 0
    s3.fail("GET", "3.png", 10_000, status=400)
    with pytest.raises(
        ResourceError, match=r"prepare failed at rows\.jsonl from row 4: .*rerun the same command"
    ):
        prepare(rows, out, LAX)
    s3.fail("GET", "3.png", 0, status=400)
    assert prepare(rows, out, LAX).num_rows == COUNT
