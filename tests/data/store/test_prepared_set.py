"""Prepared sets: rows are read in any order by any process, and damage is detected."""

import errno
import json
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmray.data.store import shard_reader
from mmray.data.store.manifest import MANIFEST
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard, ShardTable, pack_rows
from mmray.data.store.shard_writer import open_shard
from mmray.data.store.stored_row import Row, hash_key
from mmray.errors import DataError
from mmray.storage.paths import list_names, to_path, write_atomic
from tests.made import image_media
from tests.made import write_set as make_set


def make_rows(count, split=None, start=0):
    rows = []
    for number in range(start, start + count):
        image = bytes([number % 251]) * (number + 1)
        row = Row(
            f"key-{number}",
            [image_media(image)],
            [f"caption {number}", "zwei"],
            number,
            split,
            "en",
            f"x.jsonl:{number}",
        )
        rows.append(row)
    return rows


def test_rows_are_read_in_the_requested_order(tmp_path):
    rows = make_rows(45)
    parts = (rows[:20], rows[20:21], rows[21:])
    prepared = PreparedSet.open(make_set(tmp_path, [(part, None, ()) for part in parts]))
    assert prepared.num_rows == 45
    order = np.random.default_rng(0).integers(0, 45, 200)
    assert prepared.read(order) == [rows[number] for number in order]
    assert prepared.keys() == [row.key for row in rows]
    assert prepared.keys(order) == [rows[number].key for number in order]
    assert prepared.read(np.array([], np.int64)) == []
    assert all(row.checksum_ok for row in prepared.read(np.arange(45)))
    for number in (-1, 45):
        with pytest.raises(IndexError, match="set of 45"):
            prepared.read(np.array([3, number]))


def test_each_split_has_its_rows(tmp_path):
    train, test = make_rows(12, "train"), make_rows(5, "test", start=12)
    path = make_set(
        tmp_path, [(train[:6], "train", ()), (test, "test", (0,)), (train[6:], "train", ())]
    )
    whole = PreparedSet.open(path)
    assert (whole.num_rows, whole.manifest.splits) == (16, {"train": 12, "test": 4})
    assert "test" in whole.manifest.splits and "val" not in whole.manifest.splits
    assert PreparedSet.open(path, "train").read(np.arange(12)) == train
    assert PreparedSet.open(path, "test").read(np.arange(4)) == test[1:]
    assert PreparedSet.open(path, "test").manifest == whole.manifest
    assert (
        len({PreparedSet.open(path, split).fingerprint for split in (None, "train", "test")}) == 3
    )
    with pytest.raises(
        DataError, match=r"no split `val`; it has train \(12 rows\), test \(4 rows\)"
    ):
        PreparedSet.open(path, "val")


def test_fingerprint_is_equal_for_equal_rows_only(tmp_path):
    rows = make_rows(9)
    changed = [*rows[:8], replace(rows[8], texts=["other"])]
    shards = [(rows, ()), (rows, ()), (rows[::-1], ()), (rows, (2,)), (changed, ())]
    sets = [
        make_set(tmp_path / str(n), [(each, None, dropped)])
        for n, (each, dropped) in enumerate(shards)
    ]
    prints = [PreparedSet.open(each).fingerprint for each in sets]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_pickled_set_keeps_the_rows_it_was_opened_with(tmp_path):
    rows = make_rows(30)
    prepared = PreparedSet.open(make_set(tmp_path, [(rows[:20], None, ())]))
    prepared.read(np.array([3]))
    data = pickle.dumps(prepared)
    make_set(tmp_path, [(rows[:20], None, ()), (rows[20:], None, ())])  # the set grew meanwhile
    again = pickle.loads(data)
    assert again.num_rows == 20 and again.read(np.array([19])) == rows[19:20]


def test_threads_share_a_set_with_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader, "MAX_OPEN", 2)
    rows = make_rows(40)
    prepared = PreparedSet.open(
        make_set(tmp_path, [(rows[start : start + 4], None, ()) for start in range(0, 40, 4)])
    )
    orders = [np.random.default_rng(seed).permutation(40) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        for order, got in zip(orders, pool.map(prepared.read, orders), strict=True):
            assert got == [rows[number] for number in order]


def test_list_of_shards_on_a_store_is_read_again_by_each_process(tmp_path, memory, monkeypatch):
    """Also if it cannot use its temporary folder; unless the set was changed meanwhile."""
    rows = make_rows(30)
    shards = [(rows[:17], "train", (0, 3, 9)), (rows[17:], "test", (2,))]
    prepared = PreparedSet.open(make_set(f"{memory}/listed", shards), "train")
    pickled = pickle.dumps(prepared)
    expected = [each for number, each in enumerate(rows[:17]) if number not in (0, 3, 9)]
    assert pickle.loads(pickled).read(np.arange(14)) == expected
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    assert pickle.loads(pickled).read(np.arange(14)) == expected
    [table] = [name for name in list_names(prepared.folder) if name.startswith("shards-")]
    write_atomic(prepared.folder / table, b"changed")
    with pytest.raises(DataError, match="was changed, or is damaged"):
        pickle.loads(pickled)


def test_opened_set_keeps_its_rows_when_it_grows(tmp_path):
    rows = make_rows(20)
    small = pickle.dumps(PreparedSet.open(make_set(tmp_path / "set", [(rows[:8], None, ())])))
    make_set(tmp_path / "set", [(rows[:8], None, ()), (rows[8:], None, ())])
    assert len(small) < 2000 and pickle.loads(small).num_rows == 8
    assert PreparedSet.open(str(tmp_path / "set")).num_rows == 20


def test_unusable_set_is_a_data_error_with_the_fix(tmp_path):
    with pytest.raises(DataError, match=r"mmray prepare SOURCE"):
        PreparedSet.open(str(tmp_path / "nothing"))
    (tmp_path / "half" / "parts").mkdir(parents=True)
    (tmp_path / "half" / "parts" / "chunk-00000.json").write_text("{}")
    with pytest.raises(DataError, match="is not complete"):
        PreparedSet.open(str(tmp_path / "half"))
    manifest = Path(make_set(tmp_path / "set", [(make_rows(2), None, ())])) / MANIFEST
    other = manifest.read_bytes().replace(b'"schema_version": 8', b'"schema_version": 6')
    damaged = [
        (data, "damaged") for data in (b"", b"{", b"[]", b"{}", b'{"schema_version": 8}', b"\xff")
    ]
    values = json.loads(manifest.read_bytes())
    damaged.append((manifest.read_bytes().replace(b'"shards-', b'"gone-'), "gone-.*"))
    damaged.append((manifest.read_bytes().replace(b'"sha256": "', b'"sha256": "0'), "sha256"))
    good = Shard("0.arrow", None, 2, 9, "digest")
    wrong = [{"file": "shards/../../x"}, {"dropped": b"\x20"}, {"dropped": b"\x80\0"}]
    for shard in (replace(good, **each) for each in wrong):
        file = ShardTable.from_shards([shard]).write(manifest.parent)
        entry = {"file": file.name, "sha256": file.sha256, "num_bytes": file.num_bytes}
        text = "damaged, or of another version of mmray"
        damaged.append((json.dumps(values | {"shards": entry}).encode(), text))
    damaged.append((json.dumps(values | {"source": 5}).encode(), "its source is 5"))
    for data, message in [(other, "schema version 6"), *damaged]:
        manifest.write_bytes(data)
        with pytest.raises(DataError, match=message):
            PreparedSet.open(str(tmp_path / "set"))


def test_table_of_shards_of_an_earlier_version_is_read():
    """Without labels, and with lists of dropped rows."""
    shard = Shard("0.arrow", None, 4, 9, "digest", pack_rows((1,), 4), (0, 5))
    table = ShardTable.from_shards([shard, replace(shard, dropped=b"")])
    batch = pa.ipc.open_file(table.data).get_batch(0)
    fields = [field for field in batch.schema if field.name not in ("labels", "dropped")]
    kind = pa.list_(pa.int64())
    schema = pa.schema([*fields[:-1], pa.field("dropped", kind, nullable=False), fields[-1]])

    def read(dropped):
        columns = [
            pa.array(dropped, kind) if name == "dropped" else batch[name] for name in schema.names
        ]
        stream = pa.BufferOutputStream()
        with pa.ipc.new_file(stream, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return ShardTable(stream.getvalue())

    older = read([[1], []])
    assert list(older) == list(table)
    assert older[0].offsets.tolist() == table[0].offsets.tolist() == [0, 5]
    assert older.dropped(0).tolist() == [1] and older[0].kept.tolist() == [0, 2, 3]
    assert older.num_kept.tolist() == [3, 4] and older[1].kept.tolist() == [0, 1, 2, 3]
    assert older.fingerprint(np.arange(2)) == table.fingerprint(np.arange(2))
    bits = pack_rows((2, 3), 4)
    assert older.with_dropped({0: bits})[0] == replace(shard, dropped=bits)
    with pytest.raises(IndexError):
        read([[4], []])


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_damage_in_a_shard_is_detected_and_never_crashes(tmp_path, kind):
    rows = make_rows(18)
    path = make_set(tmp_path if kind == "disk" else "memory://damaged", [(rows, None, ())])
    folder, shard, outcomes = to_path(path), "shards/0.arrow", set()
    good = (folder / shard).read_bytes()
    for position in range(0, len(good), 61 if kind == "disk" else 211):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        write_atomic(
            folder / shard, bytes(damaged)
        )  # a new file: readers that map the old one keep it
        for number in (0, 17):
            try:
                row = PreparedSet.open(path).read(np.array([number]))[0]
                outcomes.add(
                    "same" if row == rows[number] else "intact" if row.checksum_ok else "seen"
                )
                assert row.image == rows[number].image or not row.checksum_ok
            except (ValueError, OSError) as error:
                assert shard in str(error)
                outcomes.add("raised")
    assert {"raised", "seen", "same"} <= outcomes
    write_atomic(folder / shard, good[: len(good) // 2])
    with pytest.raises(ValueError, match=r"shards/0\.arrow"):
        PreparedSet.open(path).read(np.array([17]))
    (folder / shard).unlink()
    with pytest.raises(FileNotFoundError):
        PreparedSet.open(path).read(np.array([0]))


def test_disk_error_is_not_reported_as_damage(tmp_path, monkeypatch):
    prepared = PreparedSet.open(make_set(tmp_path, [(make_rows(18), None, ())]))

    def stale(path, mapped=False):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
        patch.setattr("mmray.data.store.shard_reader.open_input", stale)
        prepared.read(np.array([0]))
    assert prepared.read(np.array([0])) == make_rows(1)


@pytest.mark.parametrize("kind", ["disk", "store", "memory"])
def test_unfinished_shard_leaves_no_file(tmp_path, request, kind):
    addresses = {
        "disk": lambda: str(tmp_path),
        "store": lambda: request.getfixturevalue("s3").address,
    }
    folder = to_path(addresses.get(kind, lambda: "memory://unfinished")())
    with pytest.raises(RuntimeError, match="killed"), open_shard(folder, "a.arrow") as shard:
        for row in make_rows(20):
            shard.append(row)
        raise RuntimeError("killed")
    assert list_names(folder) == []


def test_hashed_keys_do_not_depend_on_the_process():
    assert hash_key("a") == 3405396810240292928
    assert hash_key("") != hash_key("a")
    assert all(-(2**63) <= hash_key(f"k{number}") < 2**63 for number in range(100))
    assert min(hash_key(f"k{number}") for number in range(100)) < 0
