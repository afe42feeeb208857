"""Index-only sets: the rows and blocks of a packed set without a copy of the images."""

import errno
from dataclasses import replace

import numpy as np
import pytest

from mmray.config import Inputs
from mmray.data.rows import BadRow
from mmray.data.store.manifest import MANIFEST, Manifest, write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError, UsageError
from mmray.storage.paths import open_input, to_path, write_atomic
from tests.data.formats import test_formats as formats
from tests.data.formats.test_formats import COUNT, color_image, prepared, text
from tests.data.test_sources_remote import ALL
from tests.made import write_shard

pytestmark = pytest.mark.usefixtures("in_process")
TOKENIZER = train_tokenizer([text(number) for number in range(COUNT)], 60)
PLAN = SamplePlan(COUNT, COUNT, 1, seed=0, steps=1, shuffle=False)


def blocks_of(source, tmp_path, **settings):
    """Blocks of two epochs from the packed and the index-only set."""
    blocks = []
    for out, how in (("packed", {}), ("index", {"index_only": True} | settings)):
        prepared(source, tmp_path / out, duplicates="keep", **how)
        reader = reader_of(tmp_path / out)
        num_rows = reader.prepared.num_rows
        blocks.append(
            reader.read_block(SamplePlan(num_rows, 4, 1, seed=3, steps=9), np.arange(2 * num_rows))
        )
    return blocks


def reader_of(out):
    return RowReader(
        PreparedSet.open(str(out)), Inputs(image_side=8, max_tokens=12), TOKENIZER, 10**6
    )


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize(
    "title", sorted(ALL.keys() - {"Parquet of bytes", "Hugging Face datasets"})
)
def test_index_only_set_streams_the_blocks_of_the_packed_set(tmp_path, title):
    source = ALL[title](tmp_path / "raw")
    for check in ("full", "header") if title in ("CSV", "WebDataset") else ("full",):
        packed, index = blocks_of(source, tmp_path / check, check=check)
        assert same(packed, index) and packed["valid"].all()
        assert len(packed["valid"]) == 2 * (3 if title == "a folder for each class" else COUNT)
        images = b"".join(
            path.read_bytes() for path in (tmp_path / check / "index" / "shards").iterdir()
        )
        assert not any(color_image(number) in images for number in range(COUNT))


def test_changed_or_missing_referenced_image_invalidates_only_its_row(tmp_path):
    source = formats.csv_source(tmp_path / "raw")
    prepared(source, tmp_path / "out", index_only=True)
    (tmp_path / "raw" / "2.png").write_bytes(color_image(200))
    (tmp_path / "raw" / "4.png").unlink()
    assert reader_of(tmp_path / "out").read_block(PLAN, np.arange(COUNT))["valid"].tolist() == [
        n not in (2, 4) for n in range(COUNT)
    ]


def test_disk_error_fails_the_stream_and_is_retried_by_prepare(tmp_path, monkeypatch):
    source = formats.csv_source(tmp_path / "raw")

    def stale(path, mapped=False):
        if path.name == "2.png":
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_input(path, mapped)

    with monkeypatch.context() as patch:
        patch.setattr("mmray.data.images.read.open_input", stale)
        assert prepared(source, tmp_path / "out", index_only=True)[2] == {
            "rows.csv:4": "unreadable"
        }
    assert prepared(source, tmp_path / "out", index_only=True)[0].num_rows == COUNT
    reader = reader_of(tmp_path / "out")
    monkeypatch.setattr("mmray.data.images.read.open_input", stale)
    with pytest.raises(OSError, match="Stale"):
        reader.read_block(PLAN, np.arange(COUNT))


def test_rows_with_inline_images_cannot_be_index_only(tmp_path):
    with pytest.raises(DataError, match="7 no-reference"):
        prepared(formats.parquet_bytes(tmp_path / "raw"), tmp_path / "out", index_only=True)


def test_check_full_finds_more_than_header(tmp_path):
    source = formats.csv_source(tmp_path / "raw")
    (tmp_path / "raw" / "1.png").write_bytes(color_image(1)[:-20])
    (tmp_path / "raw" / "2.png").write_bytes(b"<html>")
    found = {
        check: prepared(source, tmp_path / check, check=check)[2] for check in ("full", "header")
    }
    assert found == {
        "full": {"rows.csv:3": "truncated", "rows.csv:4": "format"},
        "header": {"rows.csv:4": "format"},
    }  # fmt: skip


def foreign_set(folder, source, **ref):
    """An index-only set that somebody else wrote: one row, which refers to a file of `source`."""
    folder.mkdir(exist_ok=True)
    reference = {"file": "a.png", "offset": 0, "length": None} | ref
    stored = Row("row", [Media("image", b"", reference)], ["text"])
    shard = write_shard([stored], folder, "0.arrow", None)
    settings, origin = {"index_only": True}, {"address": str(source)}
    manifest = Manifest(1, 1, 0, {}, {}, "", None, origin, settings, (shard,))
    write_manifest(folder, manifest)
    return str(folder)


@pytest.mark.parametrize("file", ["../../secret", "/etc/hostname", "http://host/x", "link"])
@pytest.mark.parametrize("length", [None, 5])
def test_references_outside_the_source_folder_are_refused(tmp_path, file, length):
    (tmp_path / "secret").write_bytes(b"secret")
    source = tmp_path / "set" / "source"
    source.mkdir(parents=True)
    (source / "link").symlink_to(tmp_path / "secret")
    address = foreign_set(tmp_path / "set" / "index", source, file=file, length=length)
    with pytest.raises(
        BadRow,
        match=r"read path: .*(not a path inside|symbolic link to .*secret, outside) the folder of",
    ):
        PreparedSet.open(address).read(np.array([0]))


@pytest.mark.parametrize("span", [(0, 5), (-1, 5), (0, -1), (0, 2**40)])
def test_invalid_byte_ranges_are_refused_on_disk_and_store(tmp_path, memory, span):
    """On a store as on a disk; (0, 5) is a range of a file outside the folder."""
    file, (offset, length) = "../secret" if span == (0, 5) else "a.png", span
    (tmp_path / "raw").mkdir()
    for source in (tmp_path / "raw", f"{memory}/raw"):
        for name in ("a.png", "../secret"):
            write_atomic(to_path(str(source)) / name, b"0123456789")
        address = foreign_set(tmp_path / "index", source, file=file, offset=offset, length=length)
        with pytest.raises(
            BadRow, match=r"read path: .*(not a path inside the folder|not a byte range of at most)"
        ):
            PreparedSet.open(address).read(np.array([0]))


def test_foreign_set_opens_no_connection_and_no_shard_outside(tmp_path):
    address = foreign_set(tmp_path / "a", "http://127.0.0.1:9/raw")
    with pytest.raises(
        UsageError, match=r"http://127.0.0.1:9/raw cannot be opened: use a local path"
    ):
        PreparedSet.open(address)
    prepared = PreparedSet.open(foreign_set(tmp_path / "b", tmp_path))
    shard = replace(prepared.shards[0], file="../a/0.arrow")
    write_manifest(prepared.folder, replace(prepared.manifest, shards=(shard,)))
    with pytest.raises(
        DataError, match=r"the shard '\.\./a/0\.arrow' is outside the folder of the set"
    ):
        PreparedSet.open(str(tmp_path / "b"))
    manifest = prepared.folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"shards-', b'"../a/shards-'))
    with pytest.raises(DataError, match=r"'\.\./a/shards-.*', is outside the folder"):
        PreparedSet.open(str(tmp_path / "b"))
