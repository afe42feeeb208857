"""Default shuffle blocks by storage and row size, and which sets are cached."""

from dataclasses import replace

import numpy as np
import pytest

from mmray.config import Data
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media
from mmray.data.stream.order import BlockShuffle
from mmray.data.stream.shuffle import resolve_block_shuffle, with_local_cache
from mmray.errors import UsageError
from mmray.storage.paths import copy_file, list_files, to_path
from mmray.training.resolve import resolve_run
from mmray.training.workers.backend import resume_point
from tests import made
from tests.data.store.test_prepared_set import make_rows
from tests.data.store.test_shards import put
from tests.made import write_set as make_set
from tests.made import write_shard
from tests.training.runs import Silent, config

STORE = "memory://raw"


def with_row_bytes(prepared, row_bytes):
    """The set as if its rows had this size."""
    (shard,) = prepared.manifest.shards
    manifest = replace(
        prepared.manifest, shards=(replace(shard, num_bytes=row_bytes * shard.num_rows),)
    )
    return PreparedSet(prepared.folder, manifest)


def with_refs(prepared, address, length=None):
    """The set as if its rows referred to images at an address."""
    rows = [
        replace(row, media=[Media("image", b"", {"file": "a", "offset": 0, "length": length})])
        for row in make_rows(20)
    ]
    entry = write_shard(rows, prepared.folder, prepared.manifest.shards[0].file, None)
    manifest = replace(
        prepared.manifest,
        shards=(entry,),
        settings={"index_only": True},
        source={"address": address},
    )
    return PreparedSet(prepared.folder, manifest)


@pytest.fixture
def there(memory):
    return put(memory, [(make_rows(20), None, ())])


@pytest.fixture
def here(tmp_path):
    return PreparedSet.open(make_set(tmp_path / "disk", [(make_rows(20), None, ())]))


def resolved(data, sets, global_batch_size=64, workers=1):
    shuffle = resolve_block_shuffle(data, sets, global_batch_size, workers)
    return shuffle and str(shuffle)


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(1_000_000, "1x8x16"), (66_000, "1x8x16"), (20_000, "1x24x16"), (300, "1x32x16")],
)
def test_blocks_without_a_cache_follow_row_bytes(there, here, row_bytes, expected):
    on_store, on_disk = with_row_bytes(there, row_bytes), with_row_bytes(here, row_bytes)
    data = Data(local_cache=None)
    assert resolved(data, [on_store]) == resolved(data, [on_disk, on_store]) == expected
    assert resolved(data, [on_store], workers=8) == expected.replace("1x", "8x", 1)
    assert resolved(data, [on_disk]) is None


@pytest.mark.parametrize(
    ("row_bytes", "workers", "settings", "expected"),
    [
        # 8 GB of the default cache hold blocks of 32 to 64 MB
        (30_000, 1, {}, "8x1400x23"), (30_000, 8, {}, "40x1400x4"),
        (30_000, 64, {}, "320x1400x4"), (100_000, 8, {}, "24x640x5"), (1_000_000, 8, {}, "24x64x5"),
        (30_000, 8, {"local_cache_gb": 200.0}, "64x1400x29"),
        (30_000, 8, {"local_cache_gb": 1.0}, "8x1400x1"),
        (80, 8, {}, None),  # every node caches the set
        (30_000, 8, {"shuffle_blocks": 1}, None), (30_000, 8, {"shuffle_blocks": "1x1"}, None),
        (30_000, 8, {"shuffle_blocks": "5x9x2"}, "5x9x2"),
        (30_000, 8, {"shuffle_blocks": "5x9x2", "shuffle": False}, None),
    ],
)  # fmt: skip
def test_blocks_with_a_cache_follow_rows_workers_and_cache(
    there, row_bytes, workers, settings, expected
):
    (shard,) = with_row_bytes(there, row_bytes).manifest.shards
    shards = (replace(shard, num_rows=10**8, num_bytes=row_bytes * 10**8),)
    large = PreparedSet(there.folder, replace(there.manifest, shards=shards))
    data = Data(**settings)
    assert resolved(data, [large], 32_768, workers) == expected


def test_index_only_set_uses_blocks_if_its_images_are_contiguous_on_a_store(there, here, tmp_path):
    for prepared, address, length, expected in (
        (here, STORE, 66_000, "1x8x16"), (here, STORE, 20_000, "1x24x16"),
        (here, str(tmp_path), 20_000, None),
        # only the index is on the store
        (there, STORE, 20_000, "1x24x16"), (there, str(tmp_path), None, "1x32x16"),
        (here, STORE, None, None), (there, STORE, None, None),  # each image is a file
    ):  # fmt: skip
        indexed = with_refs(prepared, address, length)
        assert resolved(Data(), [indexed]) == expected
        assert resolved(Data(shuffle_blocks="2x16x4"), [indexed]) == "2x16x4"


def test_cache_is_for_sets_on_a_store_that_contain_their_images(there, here, tmp_path):
    data = Data(local_cache=str(tmp_path / "cache"))
    for indexed in (
        with_refs(there, STORE),
        with_refs(here, STORE),
        with_refs(there, str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=r"data\.local_cache cannot cache .* only refers"):
            with_local_cache(data, indexed, None)
        assert with_local_cache(Data(), indexed, None) is indexed
    on_disks = with_refs(here, str(tmp_path))
    blocks = BlockShuffle(1, 16, 1)
    assert with_local_cache(data, on_disks, None) is on_disks
    assert with_local_cache(Data(local_cache=None), there, blocks) is there
    there = put("memory://set", [(make_rows(20), None, ())])
    assert with_local_cache(data, there, blocks).read(np.arange(20)) == make_rows(20)
    assert len([file for file in (tmp_path / "cache").iterdir() if file.is_file()]) == 2


def test_run_on_a_store_resolves_to_a_shuffle(memory, tmp_path):
    made.make_set(tmp_path / "set", [made.row(number) for number in range(30)])
    store = to_path(f"{memory}/run")
    for name in list_files(tmp_path / "set"):
        copy_file(tmp_path / "set" / name, store / name)
    asked = config(str(store), tmp_path, "r")
    for cache, expected in ((None, BlockShuffle(2, 32, 16)), (str(tmp_path / "cache"), None)):
        data = asked.data.model_copy(update={"local_cache": cache})
        run = resolve_run(asked.model_copy(update={"data": data}), Silent())
        plan = resume_point(run, None).plan
        assert (plan.block_shuffle, plan.num_rows) == (expected, 30)
        assert len(run.train_set.read(np.arange(30))) == 30
    assert (tmp_path / "cache").exists()
