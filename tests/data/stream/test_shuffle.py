"""Default shuffle blocks by storage and row size, and which sets are cached."""

from dataclasses import replace

import numpy as np
import pytest

from mmray.config import Data
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.shuffle import shuffle_block_and_window, with_local_cache
from mmray.errors import UsageError
from mmray.storage.storage import Storage
from mmray.train import worker_group
from mmray.train.resolve import resolve_run
from tests import made
from tests.data.store.test_prepared_set import make_rows, make_set
from tests.data.store.test_shards import memory, put  # noqa: F401 - a fixture
from tests.made import write_shard
from tests.train.runs import Silent, config


def with_row_bytes(prepared, row_bytes):
    """The set as if its rows had this size."""
    (shard,) = prepared.manifest.shards
    manifest = replace(prepared.manifest, shards=(replace(shard, num_bytes=row_bytes * shard.num_rows),))
    return PreparedSet(prepared.storage, manifest)


@pytest.fixture
def there(memory):  # noqa: F811
    return put(memory, [(make_rows(20), None, ())])


@pytest.fixture
def here(tmp_path):
    return PreparedSet.open(make_set(tmp_path / "disk", [(make_rows(20), None, ())]))


@pytest.mark.parametrize(
    ("row_bytes", "cached", "expected"),
    [
        (1_000_000, False, (8, 16)), (66_000, False, (8, 16)), (20_000, False, (24, 16)), (300, False, (32, 16)),
        (1_000_000, True, (8, 256)), (110_000, True, (40, 256)), (66_000, True, (64, 256)), (300, True, (64, 256)),
    ],
)  # fmt: skip
def test_block_size_follows_row_bytes_on_a_store_and_is_one_on_a_disk(there, here, row_bytes, cached, expected):
    data = Data(local_cache="/somewhere" if cached else None)
    assert shuffle_block_and_window(data, [with_row_bytes(there, row_bytes)], 64) == expected
    assert (
        shuffle_block_and_window(data, [with_row_bytes(here, row_bytes), with_row_bytes(there, row_bytes)], 64)
        == expected
    )
    assert shuffle_block_and_window(data, [with_row_bytes(here, row_bytes)], 64) == (1, 1)


def test_window_follows_global_batch_and_cache_size(there):
    rows = [with_row_bytes(there, 100_000)]
    assert shuffle_block_and_window(Data(local_cache="/c"), rows, 1000) == (40, 1000)
    assert shuffle_block_and_window(Data(local_cache="/c"), rows, 10**6) == (40, 1250)
    assert shuffle_block_and_window(Data(local_cache="/c", local_cache_gb=0.8), rows, 64) == (40, 50)
    assert shuffle_block_and_window(Data(), rows, 10**6) == (8, 16)


def test_explicit_shuffle_blocks_are_used(there, here):
    assert shuffle_block_and_window(Data(shuffle_blocks=1), [there], 64) == (1, 1)
    assert shuffle_block_and_window(Data(shuffle_blocks="1x9"), [there], 64) == (1, 1)
    assert shuffle_block_and_window(Data(shuffle_blocks="5x9"), [here], 64) == (5, 9)
    assert shuffle_block_and_window(Data(shuffle_blocks=5), [here], 64) == (5, 16)
    assert shuffle_block_and_window(Data(shuffle_blocks=5, shuffle=False), [there], 64) == (1, 1)


def with_refs(prepared, address, **ref):
    """The set as if its rows referred to images at an address."""
    rows = [replace(row, image=b"", ref={"file": "a", "offset": 0, "length": None} | ref) for row in make_rows(20)]
    entry = write_shard(rows, prepared.storage, prepared.manifest.shards[0].file, None)
    manifest = replace(prepared.manifest, shards=(entry,), settings={"index_only": True}, source={"address": address})
    return PreparedSet(prepared.storage, manifest)


def test_index_only_set_uses_blocks_if_its_images_are_contiguous_on_a_store(there, here, tmp_path):
    disk, store = str(tmp_path), "memory://raw"
    assert shuffle_block_and_window(Data(), [with_refs(here, store, length=66_000)], 64) == (8, 16)
    assert shuffle_block_and_window(Data(), [with_refs(here, store, length=20_000)], 64) == (24, 16)
    assert shuffle_block_and_window(Data(), [with_refs(here, disk, length=20_000)], 64) == (1, 1)
    assert shuffle_block_and_window(Data(), [with_refs(there, store, length=20_000)], 64) == (24, 16)
    assert shuffle_block_and_window(Data(), [with_refs(there, disk)], 64) == (32, 16)  # only the index is on the store
    assert shuffle_block_and_window(Data(shuffle_blocks=1), [with_refs(there, store, length=20_000)], 64) == (1, 1)


def test_single_file_images_get_a_full_shuffle(there, here):
    for prepared in (here, there):
        single = with_refs(prepared, "memory://raw")
        assert shuffle_block_and_window(Data(), [single], 64) == (1, 1)
        assert shuffle_block_and_window(Data(shuffle_blocks=16), [single], 64) == (16, 16)


def test_damaged_row_does_not_stop_the_size_estimate(there):
    indexed = with_refs(there, "memory://raw", length=66_000)
    shard = indexed.manifest.shards[0]
    data = bytearray(there.storage.read(shard.file))
    data[shard.offsets[0] : shard.offsets[1]] = bytes(int(shard.offsets[1] - shard.offsets[0]))
    there.storage.write(shard.file, bytes(data))
    assert shuffle_block_and_window(Data(), [indexed], 64) == (8, 16)


def test_cache_is_refused_for_index_only_sets_on_a_store(there, here, tmp_path):
    data = Data(local_cache=str(tmp_path / "cache"))
    for indexed in (with_refs(there, "memory://raw"), with_refs(here, "memory://raw"), with_refs(there, str(tmp_path))):
        with pytest.raises(UsageError, match=r"data\.local_cache cannot cache .* only refers"):
            with_local_cache(data, indexed, 16)
    on_disks = with_refs(here, str(tmp_path))
    assert with_local_cache(data, on_disks, 16) is on_disks and with_local_cache(Data(), there, 16) is there


def test_rows_read_are_cached_in_the_given_folder(there, tmp_path):
    kept = with_local_cache(Data(local_cache=str(tmp_path / "cache")), there, 16)
    assert kept.read(np.arange(20)) == make_rows(20)
    assert len([file for file in (tmp_path / "cache").iterdir() if file.is_file()]) == 2


@pytest.mark.parametrize(("cached", "window"), [(False, 16), (True, 256)])
def test_run_on_a_store_resolves_to_shuffle_blocks(memory, tmp_path, cached, window):  # noqa: F811
    made.make_set(tmp_path / "set", [made.row(number) for number in range(30)])
    store = Storage(f"{memory}/run")
    for name in Storage(str(tmp_path / "set")).list_files():
        store.write(name, (tmp_path / "set" / name).read_bytes())
    asked = config(store.address, tmp_path, "r")
    cache = str(tmp_path / "cache") if cached else None
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"local_cache": cache})})
    ready = resolve_run(asked, Silent())
    chunk, _ = ready.config.data.shuffle_shape
    assert ready.config.data.shuffle_shape == (64 if cached else 32, window)
    plan = worker_group.resume_point(ready, None, 2).plan
    assert (plan.chunk, plan.window, plan.num_rows) == (chunk, window, 30)
    assert len(ready.train_set.read(np.arange(30))) == 30 and (tmp_path / "cache").exists() == cached


def test_cache_for_sets_on_a_disk_is_reported_unused(tmp_path):
    made.make_set(tmp_path / "set", [made.row(number) for number in range(30)])
    asked, listener = config(tmp_path / "set", tmp_path, "r"), Silent()
    resolve_run(asked.model_copy(update={"data": asked.data.model_copy(update={"local_cache": "/c"})}), listener)
    assert listener.notes == [("cache", "data.local_cache has no effect: every set is on a local disk")]
