"""Shard reader on object stores: same rows as on a disk, in few large requests, with an optional
cache.
"""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmray.config import Data
from mmray.data.images.read import read_image, read_images
from mmray.data.rows import BadRow, ImageRef
from mmray.data.store import cache as shard_cache
from mmray.data.store.cache import AUTO, ShardCache
from mmray.data.store.manifest import Manifest, write_manifest
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.data.stream import shuffle
from mmray.data.stream.order import BlockShuffle, SamplePlan
from mmray.data.stream.shuffle import resolve_block_shuffle
from mmray.errors import UsageError
from mmray.storage import ranges
from mmray.storage.paths import to_path
from mmray.storage.ranges import RangeReader, coalesce_ranges
from tests.data.store.test_prepared_set import make_rows
from tests.made import image_media, write_shard
from tests.made import write_set as make_set

SPANS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=30,
)


def put(address, shards, name="set"):
    """Write a prepared set of shards (rows, split, dropped) and open it."""
    return PreparedSet.open(make_set(f"{address}/{name}", shards))


def random_rows(first, count, size=300):
    """Rows with random bytes as images."""
    data = np.random.default_rng(first).bytes(count * size)
    images = [data[number * size : (number + 1) * size] for number in range(count)]
    return [
        Row(f"row-{first + number}", [image_media(image)], ["a caption"])
        for number, image in enumerate(images)
    ]


def make_index_only_set(store, images, rows, size=300, per_tar=512):
    """A prepared set in `store` whose images are members of WebDataset tars at `images`."""
    shards = []
    for tar, first in enumerate(range(0, rows, per_tar)):
        here = random_rows(first, min(per_tar, rows - first), size)
        data = b"".join(bytes(512) + row.image + bytes(1024) for row in here)
        (images / f"{tar}.tar").write_bytes(data)
        for number, row in enumerate(here):
            ref = {"file": f"{tar}.tar", "offset": number * (size + 1536) + 512, "length": size}
            row.media[0].data, row.media[0].ref = b"", ref
        shards.append(write_shard(here, store, f"shards/{tar}.arrow", None))
    settings, source = {"index_only": True}, {"address": str(images)}
    manifest = Manifest(rows, rows, 0, {}, {}, "", None, source, settings, tuple(shards))
    write_manifest(store, manifest)
    return PreparedSet.open(str(store))


@settings(max_examples=60)
@given(SPANS, st.integers(0, 40), st.integers(1, 200))
def test_coalesced_ranges_cover_each_span_once_within_the_gap(spans, gap, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "MAX_GAP_BYTES", gap)
        patch.setattr(ranges, "MAX_REQUEST_BYTES", most)
        reads = coalesce_ranges(spans)
    assert sorted(number for read in reads for number in read.span_indices) == list(
        range(len(spans))
    )
    for read in reads:
        inside = sorted(spans[number] for number in read.span_indices)
        assert read.start == inside[0][0] and read.stop == max(stop for _, stop in inside)
        assert read.stop - read.start <= max(most, *(stop - start for start, stop in inside))
        reach = inside[0][1]
        for start, stop in inside:
            assert start - reach <= gap
            reach = max(reach, stop)


@pytest.mark.parametrize("cached", [False, True])
def test_rows_on_a_store_equal_rows_on_a_disk(memory, tmp_path, cached):
    rows = make_rows(150)
    shards = [
        (rows[:61], None, (0, 3, 9, 40)),
        (rows[61:62], None, ()),
        (rows[62:], None, tuple(range(5, 20))),
    ]
    there, here = put(memory, shards), PreparedSet.open(make_set(tmp_path / "disk", shards))
    if cached:
        there = there.with_cache(ShardCache(str(tmp_path / "cache"), 10**9), 10)
    for seed in range(4):
        order = np.random.default_rng(seed).integers(0, here.num_rows, 100)
        assert there.read(order) == here.read(order)
        assert there.keys(order) == here.keys(order)
    assert there.keys() == here.keys()
    assert pickle.loads(pickle.dumps(there)).read(np.array([130, 2])) == here.read(
        np.array([130, 2])
    )
    both = PreparedMixture([there, here], [1, 1]), PreparedMixture([here, here], [1, 1])
    one, other = ([row.image for row in each.read(np.arange(0, 260, 7))] for each in both)
    assert one == other
    with pytest.raises(IndexError):
        there.read(np.array([here.num_rows]))


BLOCK_ROWS = 128


def cost_of(s3, prepared, shuffle=None, blocks=2):
    """(requests, bytes read / bytes of the rows) per block, averaged over blocks of two ranks."""
    plan = SamplePlan(prepared.num_rows, 2 * BLOCK_ROWS, 2, 0, 100, block_shuffle=shuffle)
    with s3.requests() as made:
        for block in range(blocks):
            rows = prepared.read(plan.row_ids_at(plan.positions(*divmod(block, 2))))
            assert all(row.checksum_ok for row in rows) and len(rows) == BLOCK_ROWS
    reads = [asked for method, _, asked in made if method == "GET"]
    row_bytes = prepared.num_bytes / prepared.num_rows
    return len(reads) / blocks, sum(reads) / row_bytes / blocks / BLOCK_ROWS


def test_requests_per_block_by_shuffle_shape_and_cache(s3, tmp_path, monkeypatch):
    """8,192 rows in 16 shards; the coalescing gap is ten rows, like 1 MiB for rows of 100 KB."""
    monkeypatch.setattr(ranges, "MAX_GAP_BYTES", 5000)
    prepared = put(
        s3.address, [(random_rows(first, 512), None, ()) for first in range(0, 8192, 512)]
    )
    cached = prepared.with_cache(ShardCache(str(tmp_path), 10**9), 32)
    cost = {
        "full": cost_of(s3, prepared),
        "2x8x16": cost_of(s3, prepared, BlockShuffle(2, 8, 16)),
        "2x32x32, cached": cost_of(s3, cached, BlockShuffle(2, 32, 32), blocks=16),
    }
    print(
        "\n"
        + "\n".join(
            f"{name:>16}: {n:.1f} requests, {b:.1f} x the bytes" for name, (n, b) in cost.items()
        )
    )
    assert cost["full"][0] > 100 and cost["full"][1] > 6
    assert cost["2x8x16"][0] <= 16.5 and cost["2x8x16"][1] < 1.2
    assert cost["2x32x32, cached"][0] < 4.6 and cost["2x32x32, cached"][1] < 1.2


@pytest.mark.parametrize("index", ["store", "disk"])
def test_index_only_block_reads_tar_members_in_few_requests(s3, tmp_path, monkeypatch, index):
    monkeypatch.setattr(ranges, "MAX_GAP_BYTES", 5000)  # about three members
    monkeypatch.setattr(shuffle, "REQUEST_BYTES", 2000)  # as many rows as for images of 66 KB
    store = to_path(f"{s3.address}/index" if index == "store" else str(tmp_path / "index"))
    (store / "shards").mkdir(parents=True)
    prepared = make_index_only_set(store, to_path(f"{s3.address}/raw"), 4096)
    by_default = resolve_block_shuffle(Data(), [prepared], 64, 2)
    assert by_default == BlockShuffle(2, 8, 16)
    full, in_blocks = (cost_of(s3, prepared, each, blocks=1)[0] for each in (None, by_default))
    print(f"\nindex on a {index}: full shuffle {full:.1f} requests, in blocks {in_blocks:.1f}")
    assert full > 100 and in_blocks <= (33 if index == "store" else 16.5)
    with s3.requests() as made:  # the files are already open
        assert all(row.checksum_ok for row in prepared.read(np.arange(2000, 2008)))
    assert len(made) == (2 if index == "store" else 1)


def test_failed_requests_are_retried(s3):
    prepared = put(s3.address, [(random_rows(0, 40), None, ())])
    s3.fail("GET", "shards/0.arrow", 5)
    assert all(row.checksum_ok for row in prepared.read(np.arange(40)))
    store = to_path(f"{s3.address}/raw")
    (store / "a.jpg").write_bytes(b"an image")
    s3.fail("GET", "raw/a.jpg", 3)
    assert read_images(store, [ImageRef("a.jpg", "a.jpg")], RangeReader(store)) == [b"an image"]
    assert s3.failures_left() == 0


@pytest.fixture
def cache(tmp_path):
    return ShardCache(str(tmp_path / "cache"), 10**9)


def files_of(cache):
    return [file for file in cache.folder.iterdir() if file.is_file()]


def test_cache_replaces_the_store_and_refetches_damaged_entries(memory, cache):
    rows = make_rows(40)
    there = put(memory, [(rows, None, ())]).with_cache(cache, 16)
    assert there.read(np.arange(40)) == rows and len(files_of(cache)) == 3
    shard = there.folder / there.manifest.shards[0].file
    good = shard.read_bytes()
    shard.unlink()
    again = PreparedSet(there.folder, there.manifest).with_cache(cache, 16)
    assert again.read(np.arange(39, -1, -1)) == rows[::-1]
    damages = (lambda data: data[:-9], lambda data: b"", lambda data: data[:4] + b"\xff" + data[5:])
    for file, damage in zip(sorted(files_of(cache)), damages, strict=True):
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(FileNotFoundError):
        again.read(np.arange(40))
    shard.write_bytes(good)
    assert (
        PreparedSet(there.folder, there.manifest).with_cache(cache, 16).read(np.arange(40)) == rows
    )
    shard.unlink()
    assert (
        PreparedSet(there.folder, there.manifest).with_cache(cache, 16).read(np.arange(40)) == rows
    )
    other = put(memory, [(rows[::-1], None, ())]).with_cache(cache, 16)
    assert other.read(np.arange(40)) == rows[::-1], "another set at the same address"


def test_cache_evicts_least_recently_used_entries(tmp_path):
    cache, fetched = ShardCache(str(tmp_path), 10_000), []

    def get(name):
        return cache.get(name, 900, lambda: fetched.append(name) or bytes(900)).to_pybytes()

    for number in range(30):
        assert get(f"entry-{number}") == get("kept") == bytes(900)
        assert sum(file.stat().st_size for file in files_of(cache)) <= 10_000
    assert fetched.count("kept") == 1 and len(files_of(cache)) == 11
    get("entry-29"), get("entry-0")
    assert fetched.count("entry-29") == 1 and fetched.count("entry-0") == 2


def test_cache_is_in_a_folder_of_its_user_on_a_disk_that_is_large_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    cache = pickle.loads(pickle.dumps(ShardCache(AUTO, 10**9)))
    assert cache.get("one", 1, lambda: b"1") == b"1"
    assert cache.folder.parent == tmp_path and cache.folder.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(shard_cache.os, "getuid", lambda: 12345)
    other = tmp_path / "mmray-cache-12345"
    other.mkdir()
    with pytest.raises(UsageError, match="belongs to another user"):
        ShardCache(AUTO, 10**9).get("one", 1, lambda: b"1")
    too_much = ShardCache(str(tmp_path / "cache"), 10**18, used_bytes=10**18)
    with pytest.raises(UsageError, match=r"needs 1000000000.0 GB, and the disk has"):
        too_much.get("one", 1, lambda: b"1")


def test_concurrent_readers_fetch_an_entry_once(cache):
    fetched, ready = [], threading.Barrier(8)

    def fetch():
        fetched.append(1)
        return bytes(10_000)

    def get(_):
        ready.wait()
        return pickle.loads(pickle.dumps(cache)).get("entry", 10_000, fetch).to_pybytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(get, range(8))) == {bytes(10_000)}
    assert len(fetched) == 1


def test_full_cache_disk_warns_once(cache, monkeypatch, caplog):
    assert cache.get("one", 1, lambda: b"1") == b"1"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_cache.Path, "replace", full)
    assert [cache.get("two", 1, lambda: b"2") for _ in range(3)] == [b"2"] * 3
    assert caplog.text.count("No space left on device") == 1 and len(files_of(cache)) == 1


def test_referenced_images_are_read_in_few_requests_in_order(memory, monkeypatch):
    store, data = to_path(f"{memory}/raw"), np.random.default_rng(0).bytes(5000)
    for name in ("a.tar", "b.tar", "whole.jpg"):
        (store / name).write_bytes(name.encode() + data)
    refs = [ImageRef("", f"{'ab'[n % 2]}.tar", offset=n * 90, length=60 + n) for n in range(50)]
    refs = [refs[n] for n in np.random.default_rng(1).permutation(50)] + [
        ImageRef("", "whole.jpg")
    ] * 2
    made, read = [], RangeReader.read
    monkeypatch.setattr(RangeReader, "read", lambda *args: made.append(args) or read(*args))
    assert read_images(store, refs, RangeReader(store)) == [
        read_image(store, photo) for photo in refs
    ]
    assert len(made) == 2
    with pytest.raises(BadRow, match=r"there is no file gone\.jpg"):
        read_images(store, [*refs, ImageRef("", "gone.jpg")], RangeReader(store))
    with pytest.raises(ValueError, match=r"a\.tar ends at byte 5005"):
        read_images(store, [ImageRef("", "a.tar", offset=5000, length=100)], RangeReader(store))
