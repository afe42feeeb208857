"""Requests to a store with the cache of a node, and blocks that are fetched a window ahead."""

import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from mmray.config import Inputs
from mmray.data.store.cache import ShardCache
from mmray.data.store.manifest import Manifest
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import ShardTable
from mmray.data.stream.order import BlockShuffle, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.storage import ranges
from mmray.storage.paths import RemotePath
from tests.made import CAPTIONS, row, write_shard
from tests.polling import wait_until

INPUTS = Inputs(image_side=8, fit="squash", max_tokens=12)


class CountingStore:
    """Objects with the same content. As with pyarrow on S3, opening one is a HEAD request and
    reading a range a GET request.
    """

    def __init__(self, content):
        self.content = content
        self.clear()

    def clear(self):
        self.heads = self.gets = self.num_bytes = 0

    def open(self, path):
        self.heads += 1
        return self

    def read_at(self, size, offset):
        self.gets += 1
        self.num_bytes += size
        return self.content[offset : offset + size]


@pytest.fixture
def store(monkeypatch):
    store = CountingStore(b"")
    monkeypatch.setattr(ranges, "open_input", store.open)
    return store


def make_set(store, tmp_path, num_shards, rows_per_shard):
    """A set on the store whose shards have the same rows."""
    entry = write_shard([row(number) for number in range(rows_per_shard)], tmp_path, "0.arrow")
    store.content = (tmp_path / "0.arrow").read_bytes()
    shards = tuple(replace(entry, file=f"{number}.arrow") for number in range(num_shards))
    num_rows = num_shards * rows_per_shard
    table = ShardTable.from_shards(shards)
    manifest = Manifest(num_rows, num_rows, 0, {}, {}, "", None, {}, {}, table)
    return PreparedSet(RemotePath("s3://bucket", "set"), manifest)


def window(plan, nodes, node, number, every=1):
    """Positions of a node in the steps of a window of its lanes."""
    steps = plan.window_positions // plan.global_batch_size
    share = plan.global_batch_size // nodes
    starts = np.arange(number * steps, (number + 1) * steps, every) * plan.global_batch_size
    return [start + node * share + np.arange(share) for start in starts]


NUM_WINDOWS = 6


def test_warm_cache_of_a_node_makes_few_requests(store, tmp_path):
    """3,000 shards of 4,096 rows, blocks of 1,400 rows: the table in mmray/data/store/README.md."""
    prepared = make_set(store, tmp_path, 3000, 4096)
    for nodes in (1, 8, 64):
        shuffle = BlockShuffle(8 * nodes, rows_per_block=1400, blocks_per_window=4)
        plan = SamplePlan(prepared.num_rows, 512 * nodes, nodes, 0, 10**6, block_shuffle=shuffle)
        for node in {nodes - 1}:
            cache = ShardCache(str(tmp_path / f"{nodes}-{node}"), 10**9)
            cached = prepared.with_cache(cache, shuffle.rows_per_block)
            # Every 32nd step has rows of all blocks of the window.
            for step in window(plan, nodes, node, 0, 32):
                cached.fetch_blocks(plan.row_ids_at(step))
                cached.fetch_blocks(plan.row_ids_at(plan.one_window_later(step)))
            store.clear()
            for number in range(1, 1 + NUM_WINDOWS):
                for step in window(plan, nodes, node, number, 32):
                    assert len(cached.read(plan.row_ids_at(step[::64]))) == len(step[::64])
                    cached.fetch_blocks(plan.row_ids_at(plan.one_window_later(step)))
            num_rows = NUM_WINDOWS * plan.window_positions / nodes
            per_block = (store.heads + store.gets) / num_rows * 128
            share = store.num_bytes / num_rows / (prepared.num_bytes / prepared.num_rows)
            print(f"{nodes} nodes: {per_block:.2f} requests per 128 rows, {share:.2f} x the bytes")
            assert per_block <= 0.3 and share <= 1.2


def entries(cache):
    return sum(file.is_file() for file in cache.folder.iterdir())


@pytest.mark.parametrize("mixed", [False, True])
def test_next_window_is_fetched_while_rows_of_the_first_are_read(store, tmp_path, mixed):
    """Of a set, or a mixture of it with itself; then the store may fail."""
    cache = ShardCache(str(tmp_path / "cache"), 10**9)
    prepared = make_set(store, tmp_path, 20, 80).with_cache(cache, 80)
    sets = PreparedMixture([prepared, prepared], [1, 1]) if mixed else prepared
    reader = RowReader(sets, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    reader = pickle.loads(pickle.dumps(reader))
    shuffle = BlockShuffle(2, rows_per_block=80, blocks_per_window=2)
    parts = sets.components if mixed else ()
    num_rows = sum(part.per_epoch for part in parts) or prepared.num_rows
    plan = SamplePlan(num_rows, 32, 1, 0, 10**6, components=parts, block_shuffle=shuffle)
    (first, *_), second = (window(plan, 1, 0, number) for number in range(2))
    assert reader.read_block(plan, first)["valid"].all()
    for step in window(plan, 1, 0, 0)[1:]:
        reader.read_block(plan, step)
    later = {int(each) // 80 for each in plan.row_ids_at(np.concatenate(second)) % 1600}
    wait_until(lambda: entries(cache) >= len(later))
    before_window = threading.active_count()
    store.clear()
    for step in second:
        assert reader.read_block(plan, step)["valid"].all()
    del reader
    wait_until(lambda: threading.active_count() < before_window)


def test_first_rows_of_a_process_do_not_wait_for_their_blocks(store, tmp_path, monkeypatch):
    prepared = make_set(store, tmp_path, 20, 80).with_cache(
        ShardCache(str(tmp_path / "cache"), 10**9), 80
    )
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6)
    plan = SamplePlan(1600, 16, 1, 0, 10**6, block_shuffle=BlockShuffle(2, 80, 2))
    may_fetch = threading.Event()
    get = ShardCache.get
    monkeypatch.setattr(ShardCache, "get", lambda *args: may_fetch.wait(60) and get(*args))
    assert reader.read_block(plan, plan.positions(0, 0))["valid"].all()
    assert store.num_bytes < 16 * len(store.content) / 5
    may_fetch.set()
    assert reader.read_block(plan, plan.positions(50, 0))["valid"].all()
