"""A source on an object store has the same chunks, rows, images, errors and prepared set as on a disk."""

import fsspec
import numpy as np
import pytest

from mmray.data.formats.detect import detect_source, open_source
from mmray.data.formats.rows import BadRow, parse_row
from mmray.data.images.read import read_image
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import ResourceError
from mmray.storage.storage import ATTEMPTS, Storage
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
    """(chunks without digests, rows) of a source; a row is its location, its fields and its images."""
    source = open_source(detect_source(address), Storage(out), {}, "a {}")
    chunks = list(source.scan(3, ()))
    items = [item for chunk in chunks for item in source.read(chunk)]
    return [(one.file, one.first_line, one.num_rows) for one in chunks], [
        (item.line, item.location, told(source.storage, item)) for item in items
    ]


def told(place, item):
    try:
        if isinstance(item.values, BadRow):
            raise item.values
        row = parse_row(item.values, item.location)
    except BadRow as bad:
        return bad.stage, bad.reason, bad.detail
    return row.key, row.texts, row.label, row.boxes, read_image(place, row.image)


@pytest.mark.parametrize("title", ALL)
def test_source_on_a_store_equals_source_on_a_disk(tmp_path, title):
    source, disk = ALL[title](tmp_path / "raw"), Storage(str(tmp_path / "raw"))
    store = Storage(f"memory://{tmp_path.name}/raw")
    try:
        for name in disk.list_files():
            store.write(name, disk.read(name))
        here = read(str(source), str(tmp_path))
        there = read(str(source).replace(disk.address, store.address, 1), f"memory://{tmp_path.name}")
    finally:
        fsspec.filesystem("memory").store.clear()
    assert there == here
    assert len(here[1]) >= 4 and any(isinstance(row[-1], bytes) for *_, row in here[1])


def test_prepare_from_bucket_to_bucket_resumes(s3, tmp_path, in_process):
    raw, here, out = Storage(str(tars(tmp_path / "raw"))), str(tmp_path / "out"), f"{s3.address}/out"
    source = f"{s3.address}/raw"
    for name in raw.list_files():
        Storage(source).write(name, raw.read(name))
    there = prepare(source, out, LAX)
    on_disk = prepare(raw.address, here, LAX)
    assert there.fingerprint == on_disk.fingerprint and there.num_rows == COUNT
    rows = np.arange(COUNT)
    assert PreparedSet.open(out).read(rows) == PreparedSet.open(here).read(rows)
    prepare(source, f"{s3.address}/index", LAX.model_copy(update={"index_only": True}))
    indexed = PreparedSet.open(f"{s3.address}/index").read(rows)
    assert [row.image for row in indexed] == [color_image(number) for number in range(COUNT)]
    in_process.clear()
    assert prepare(source, out, LAX) == there and in_process == []


def test_failures_of_a_store_are_retried_or_end_the_prepare(s3, tmp_path, in_process):
    """They never quarantine rows."""
    raw, source, out = jsonl(tmp_path / "raw").parent, f"{s3.address}/raw", f"{s3.address}/out"
    for path in raw.iterdir():
        Storage(source).write(path.name, path.read_bytes())
    rows = f"{source}/rows.jsonl"
    for number, (method, name) in enumerate([("GET", "raw/rows"), ("GET", "3.png"), ("PUT", "shards/")]):
        s3.fail(method, name, ATTEMPTS - 1, status=400)
        assert prepare(rows, f"{out}{number}", LAX).num_rows == COUNT and s3.failures_left() == 0
    s3.fail("GET", "3.png", 10_000, status=400)
    with pytest.raises(ResourceError, match=r"prepare failed at rows\.jsonl from row 4: .*rerun the same command"):
        prepare(rows, out, LAX)
    s3.fail("GET", "3.png", 0, status=400)
    assert prepare(rows, out, LAX).num_rows == COUNT
