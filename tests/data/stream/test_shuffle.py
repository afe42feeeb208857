"""Default shuffle blocks by storage and row size, and which sets are cached."""

from dataclasses import replace

import numpy as np
import pytest

from mmray.config import Data
from mmray.data.store.prepared_set import Media, PreparedSet
from mmray.data.stream.shuffle import shuffle_block_and_window, with_local_cache
from mmray.errors import UsageError
from mmray.storage.paths import copy_file, list_files, to_path
from mmray.training.backend import resume_point
from mmray.training.resolve import resolve_run
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


@pytest.mark.parametrize(
    ("row_bytes", "cached", "expected"),
    [
        (1_000_000, False, (8, 16)), (66_000, False, (8, 16)), (20_000, False, (24, 16)),
        (300, False, (32, 16)),
        (1_000_000, True, (8, 256)), (110_000, True, (40, 256)), (66_000, True, (64, 256)),
        (300, True, (64, 256)),
    ],
)  # fmt: skip
def test_block_size_follows_row_bytes_on_a_store_and_is_one_on_a_disk(
    there, here, row_bytes, cached, expected
):
    data = Data(local_cache="/somewhere" if cached else None)
    on_store, on_disk = with_row_bytes(there, row_bytes), with_row_bytes(here, row_bytes)
    assert shuffle_block_and_window(data, [on_store], 64) == expected
    assert shuffle_block_and_window(data, [on_disk, on_store], 64) == expected
    assert shuffle_block_and_window(data, [on_disk], 64) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "global_rows", "expected"),
    [
        ({"local_cache": "/c"}, 1000, (40, 1000)), ({"local_cache": "/c"}, 10**6, (40, 1250)),
        ({"local_cache": "/c", "local_cache_gb": 0.8}, 64, (40, 50)), ({}, 10**6, (8, 16)),
        ({"shuffle_blocks": 1}, 64, (1, 1)), ({"shuffle_blocks": "1x9"}, 64, (1, 1)),
        ({"shuffle_blocks": "5x9"}, 64, (5, 9)), ({"shuffle_blocks": 5}, 64, (5, 16)),
        ({"shuffle_blocks": 5, "shuffle": False}, 64, (1, 1)),
    ],
)  # fmt: skip
def test_window_follows_settings_global_batch_and_cache_size(
    there, settings, global_rows, expected
):
    assert (
        shuffle_block_and_window(Data(**settings), [with_row_bytes(there, 100_000)], global_rows)
        == expected
    )


def test_index_only_set_uses_blocks_if_its_images_are_contiguous_on_a_store(there, here, tmp_path):
    for prepared, address, length, expected in (
        (here, STORE, 66_000, (8, 16)), (here, STORE, 20_000, (24, 16)),
        (here, str(tmp_path), 20_000, (1, 1)),
        # only the index is on the store
        (there, STORE, 20_000, (24, 16)), (there, str(tmp_path), None, (32, 16)),
        (here, STORE, None, (1, 1)), (there, STORE, None, (1, 1)),  # each image is a file
    ):  # fmt: skip
        indexed = with_refs(prepared, address, length)
        assert shuffle_block_and_window(Data(), [indexed], 64) == expected
        assert shuffle_block_and_window(Data(shuffle_blocks=16), [indexed], 64) == (16, 16)


def test_cache_is_for_sets_on_a_store_that_contain_their_images(there, here, tmp_path):
    data = Data(local_cache=str(tmp_path / "cache"))
    for indexed in (
        with_refs(there, STORE),
        with_refs(here, STORE),
        with_refs(there, str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=r"data\.local_cache cannot cache .* only refers"):
            with_local_cache(data, indexed, 16)
    on_disks = with_refs(here, str(tmp_path))
    assert (
        with_local_cache(data, on_disks, 16) is on_disks
        and with_local_cache(Data(), there, 16) is there
    )
    there = put("memory://set", [(make_rows(20), None, ())])
    assert with_local_cache(data, there, 16).read(np.arange(20)) == make_rows(20)
    assert len([file for file in (tmp_path / "cache").iterdir() if file.is_file()]) == 2


def test_run_on_a_store_resolves_to_shuffle_blocks(memory, tmp_path):
    made.make_set(tmp_path / "set", [made.row(number) for number in range(30)])
    store = to_path(f"{memory}/run")
    for name in list_files(tmp_path / "set"):
        copy_file(tmp_path / "set" / name, store / name)
    asked = config(str(store), tmp_path, "r")
    data = asked.data.model_copy(update={"local_cache": str(tmp_path / "cache")})
    run = resolve_run(asked.model_copy(update={"data": data}), Silent())
    assert run.config.data.shuffle_shape == (64, 256)
    plan = resume_point(run, None, 2).plan
    assert (plan.shuffle_block, plan.blocks_per_window, plan.num_rows) == (64, 256, 30)
    assert len(run.train_set.read(np.arange(30))) == 30 and (tmp_path / "cache").exists()
