"""Prepare from bucket to bucket gives the set that a disk gives."""

import numpy as np

from mmray.config import Data
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.shuffle import shuffle_block_and_window
from mmray.storage.storage import Storage
from tests.data.formats import test_formats as formats
from tests.data.formats.test_formats import COUNT, LAX, colour_image, tars

in_process = formats.in_process


def put(s3, raw):
    """Upload the tars of a folder to the bucket."""
    place = Storage(f"{s3.address}/raw")
    for name in raw.list_files():
        if name.endswith(".tar"):
            place.write(name, raw.read(name))
    return place.address


def test_prepare_from_bucket_to_bucket_resumes(s3, tmp_path, in_process):
    raw, here, out = Storage(str(tars(tmp_path / "raw"))), str(tmp_path / "out"), Storage(f"{s3.address}/out")
    source = put(s3, raw)
    there = prepare(source, out.address, LAX)
    on_disk = prepare(raw.address, here, LAX)
    assert there.fingerprint == on_disk.fingerprint and there.num_rows == COUNT
    rows = np.arange(COUNT)
    assert PreparedSet.open(out.address).read(rows) == PreparedSet.open(here).read(rows)
    in_process.clear()
    assert prepare(source, out.address, LAX) == there and in_process == []


def test_index_only_set_of_a_bucket_is_read_in_chunks(s3, tmp_path):
    raw, out = Storage(str(tars(tmp_path / "raw"))), f"{s3.address}/index"
    prepare(put(s3, raw), out, LAX.model_copy(update={"index_only": True}))
    indexed = PreparedSet.open(out)
    assert [row.image for row in indexed.read(np.arange(COUNT))] == [colour_image(number) for number in range(COUNT)]
    assert shuffle_block_and_window(Data(), [indexed], 64) == (32, 16)
